"""Two recordings of a layer, at two sizes and in two dtypes, joined into one.

A number, a dtype or a limit of a dtype that differs between them becomes a function of the call.
Where the two do not agree inside a submodule, that submodule is one opaque operation.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import nn

from fused_remat.layers.eligibility import parameters_of
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.tracing.isolation import call_with
from fused_remat.tracing.recorder import Recorded
from fused_remat.tracing.submodules import norm_function
from fused_remat.tracing.values import (
    STREAM,
    Limit,
    Mismatch,
    Op,
    Recording,
    Ref,
    Size,
    Span,
    leaves,
    map_tree,
    refs,
)

#: Values that are the same in all calls; another object may differ, or hold other tensors.
_VALUES = (
    int, float, complex, str, bytes, type(None), type(...), type, enum.Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, numpy.generic, types.BuiltinFunctionType,
    types.FunctionType, type(STREAM), Limit,
)  # fmt: skip


class Join:
    """Two recordings of a layer, of samples that differ in every size and in dtype.

    Args:
        known: by path, what a submodule computes: a `NormSpec`, the name of an activation function,
            or None.
        opaque: the paths of submodules that become one operation, and why.
    """

    def __init__(
        self,
        layer: nn.Module,
        one: Recorded,
        two: Recorded,
        known: Mapping[str, Any],
        opaque: Mapping[str, str],
    ) -> None:
        self.layer, self.known, self.opaque = layer, known, opaque
        self.one, self.inputs, self.out = one.recorder, one.inputs, one.result
        self.two, self.other_out = two.recorder, two.result
        self.sizes, self.other_sizes = one.sample.sizes, two.sample.sizes
        self.dtypes = one.sample.dtype, two.sample.dtype
        counts = range(1, len(self.sizes) + 1)
        self.products = [c for n in counts for c in itertools.combinations(self.sizes, n)]

    def joined(self) -> Recording:
        """Return both as one recording.

        Raises: Untraceable if the operations of the layer itself do not agree.
        """
        one, two, inputs = self.one, self.two, self.inputs
        self.ops: list[Op] = []
        #: By the number of a value in the first recording, that in the second.
        known = (*one.sources, *(n for n in inputs if n is not None))
        self.numbers: dict[int, int] = {i: i for i in known}
        self._span(one.root, two.root)
        producers = {n: op for op in self.ops for n in op.writes}
        shapes: list[Any] = [None] * len(one.values)
        dtypes: list[Any] = [t.dtype for t in one.values]
        for i, j in self.numbers.items():
            t, u = one.values[i], two.values[j]
            with contextlib.suppress(Mismatch):
                dtypes[i] = self._leaf(t.dtype, u.dtype)
                if t.dim() == u.dim():
                    sizes = zip(t.shape, u.shape, strict=True)
                    shapes[i] = tuple([self._size(a, b) for a, b in sizes])
        result = self._tree(self.out, self.other_out)
        live = {n for n in one.live if n in producers or n in inputs}
        return Recording(
            one.values, shapes, dtypes, self.ops, producers, one.sources, inputs, live, result,
            self.sizes, max(self.dtypes, key=lambda d: d.itemsize), one.fixed | two.fixed,
        )  # fmt: skip

    def _span(self, one: Span, two: Span) -> None:
        """Join the operations of two calls of a submodule."""
        trouble = one.trouble or two.trouble
        if trouble:
            raise Mismatch(trouble)
        if [_label(part) for part in one.inner] != [_label(part) for part in two.inner]:
            raise Mismatch("its operations depend on the size or on the dtype")
        for a, b in zip(one.inner, two.inner, strict=True):
            if isinstance(a, Span) and isinstance(b, Span):
                self._module(a, b)
            elif isinstance(a, Op) and isinstance(b, Op):
                self._op(a, b)

    def _module(self, a: Span, b: Span) -> None:
        """Join two calls of a submodule: as a known function, as its operations, or as one."""
        known = self.known[a.path]
        if known is not None and len(a.args) == 1 and not a.kwargs and a.outs[:1] != [None]:
            self._known(a, b, known)
            return
        count, numbers = len(self.ops), dict(self.numbers)
        try:
            if a.path in self.opaque:
                raise Mismatch(self.opaque[a.path])
            self._span(a, b)
        except Mismatch as reason:
            del self.ops[count:]
            self.numbers = numbers
            self._opaque(a, b, str(reason))

    def _known(self, a: Span, b: Span, known: Any) -> None:
        """Add a norm or an activation function as one operation."""
        args = self._tree(a.args, b.args)
        module = self.layer.get_submodule(a.path)
        own = {n: i for i, n in self.one.sources.items() if n.rpartition(".")[0] == a.path}
        params = [Ref(own[f"{a.path}.{n}"]) for n in parameters_of(module, recurse=False)]
        is_activation = isinstance(known, str)
        run = ACTIVATIONS[known].fwd if is_activation else norm_function(known)
        self._outs(a.outs, b.outs)
        name = "act" if is_activation else "norm"
        self.ops.append(Op(name, run, (*args, *params), {}, list(a.outs), a.path, info=known))

    def _op(self, a: Op, b: Op) -> None:
        if (a.p, len(a.outs)) != (b.p, len(b.outs)):
            raise Mismatch(f"the results of {a.name} differ")
        args, kwargs = self._tree(a.args, b.args), self._tree(a.kwargs, b.kwargs)
        self._outs(a.outs, b.outs)
        self.ops.append(replace(a, args=args, kwargs=kwargs))

    def _opaque(self, a: Span, b: Span, reason: str) -> None:
        """Add one operation that calls a submodule."""
        try:
            args, kwargs = self._tree(a.args, b.args), self._tree(a.kwargs, b.kwargs)
        except Mismatch:
            raise Mismatch(f"{a.path}: {reason}") from None
        prefix, module = f"{a.path}.", self.layer.get_submodule(a.path)
        held = {*parameters_of(module), *[n for n, _ in module.named_buffers()]}
        tensors = {}
        for i, name in self.one.sources.items():
            own = name.removeprefix(prefix)
            if own != name and own in held:
                tensors[own] = Ref(i)
            elif own != name and self.one.values[i].requires_grad:
                raise Mismatch(f"{a.path} has a tensor with a gradient that is no parameter")
        given = refs((args, kwargs))
        op = Op(
            f"module {a.path}", call_with, (tensors, args, kwargs), {},
            [n if n not in given else None for n in a.outs], a.path, path=a.path, info=reason,
            random=any(inner.random or inner.p for inner in a.ops()),
        )  # fmt: skip
        self._outs(a.outs, b.outs)
        self.ops.append(op)

    def _outs(self, one: list[int | None], two: list[int | None]) -> None:
        if [n is None for n in one] != [n is None for n in two]:
            raise Mismatch("the results differ")
        for i, j in zip(one, two, strict=True):
            if i is not None and j is not None:
                self.numbers.setdefault(i, j)

    def _tree(self, one: Any, two: Any) -> Any:
        """Return two trees of arguments as one."""
        a, b = leaves(one), leaves(two)
        if len(a) != len(b):
            raise Mismatch("the arguments of an operation differ")
        joined = iter([self._leaf(x, y) for x, y in zip(a, b, strict=True)])
        return map_tree(one, lambda _: next(joined))

    def _leaf(self, a: Any, b: Any) -> Any:
        """Return a leaf of the first recording and the same one of the second as one."""
        if isinstance(a, Ref) and isinstance(b, Ref):
            if self.numbers.get(a.index) != b.index:
                raise Mismatch("operations read different values")
            return a
        if type(a) is type(b) is int:
            return self._size(a, b)
        if isinstance(a, torch.dtype) and a != b:
            return STREAM
        if isinstance(a, float) and isinstance(b, float) and a != b:
            return self._float(a, b)
        if type(a) is not type(b) or (isinstance(a, (int, str, bool)) and a != b):
            raise Mismatch("an argument of an operation depends on the input's size or dtype")
        if not isinstance(a, _VALUES):
            raise Mismatch(f"it passes on an object ({type(a).__name__})")
        return a

    def _float(self, a: float, b: float) -> float | Limit:
        """Return two numbers that differ as a limit of the dtype, or as one read from a buffer."""
        for name in ("min", "max", "eps", "tiny"):
            low, high = (getattr(torch.finfo(d), name) for d in self.dtypes)
            if (abs(a), abs(b)) == (abs(low), abs(high)):
                return Limit(name, a / low)
        one, two = self.dtypes
        digits = max(1e-6, *(torch.finfo(d).eps for d in self.dtypes))
        if math.isclose(a, b, rel_tol=digits):
            return a if one.itemsize > two.itemsize else b  # the one with more digits
        if not (math.isnan(a) and math.isnan(b)):
            raise Mismatch("it computes a number that depends on the input's size or dtype")
        return a

    def _size(self, a: int, b: int) -> int | Size:
        """Return two numbers as one, or as a function of the sizes of a call."""
        if a == b:
            return a
        for names in self.products:
            p, q = (math.prod(s[n] for n in names) for s in (self.sizes, self.other_sizes))
            if a % p == 0 and b % q == 0 and a // p == b // q:
                return Size(a // p, names)
        for name in self.sizes:
            if a - self.sizes[name] == b - self.other_sizes[name]:
                return Size(1, (name,), a - self.sizes[name])
        raise Mismatch("it computes a number that no size of the call explains")


def _label(part: Op | Span) -> tuple[str, str]:
    return ("module", part.path) if isinstance(part, Span) else ("op", part.name)

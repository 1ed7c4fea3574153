"""Two recordings of a layer, at two sizes and in two dtypes, joined into one.

A number, a dtype or a limit of a dtype that differs between them becomes a function of the call.
Where the two do not agree inside a submodule, that submodule is one opaque operation.
"""

from __future__ import annotations

import contextlib
import enum
import math
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import nn
from torch.func import functional_call

from fused_remat.layers.eligibility import parameters_of
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.tracing.experts import KnownExperts
from fused_remat.tracing.functions import AdaptedLinear, norm_function
from fused_remat.tracing.isolation import replica
from fused_remat.tracing.recorder import Recorder
from fused_remat.tracing.results import Returned
from fused_remat.tracing.sizes import Size, product
from fused_remat.tracing.values import (
    STREAM,
    Limit,
    Mismatch,
    Op,
    Recording,
    Ref,
    Span,
    leaves,
    map_tree,
    refs,
)

#: Values that are the same in all calls; another object may differ, or hold other tensors.
_VALUES = (
    int, float, complex, str, bytes, type(None), type(...), type, enum.Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, numpy.generic, types.BuiltinFunctionType,
    types.FunctionType,
)  # fmt: skip


class Join:
    """Two recordings of a layer, of samples that differ in every size and in dtype."""

    def __init__(
        self,
        layer: nn.Module,
        one: Recorder,
        two: Recorder,
        known: Mapping[str, Any],  # the `known_function` of each submodule by path
        opaque: Mapping[str, str],  # paths of submodules that become one operation, and why
    ) -> None:
        self.layer, self.known, self.opaque = layer, known, opaque
        self.one, self.two = one, two
        self.choices = one.sample.sizes, two.sample.sizes
        self.dtypes = one.sample.dtype, two.sample.dtype

    def joined(self) -> Recording:
        """Return both as one, or raise Untraceable if the layer's own operations do not agree."""
        one, two, inputs = self.one, self.two, self.one.inputs
        self.ops: list[Op] = []
        self.outs = dict[str, list[int | None]]()
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
                    sizes: Any = zip(one.shape(i) or t.shape, t.shape, u.shape, strict=True)
                    shapes[i] = tuple([self._dimension(*each) for each in sizes])
        result = self._tree(one.result, two.result)
        live = {n for n in one.live if n in producers or n in inputs}
        return Recording(
            one.values, shapes, dtypes, self.ops, producers, one.sources, inputs, live, result,
            self.choices[0], max(self.dtypes, key=lambda d: d.itemsize), one.fixed | two.fixed,
            self.outs,
        )  # fmt: skip

    def _span(self, one: Span, two: Span) -> None:
        if trouble := one.trouble or two.trouble:
            raise Mismatch(trouble)
        if [_label(part) for part in one.inner] != [_label(part) for part in two.inner]:
            raise Mismatch("its operations depend on the size or on the dtype")
        for a, b in zip(one.inner, two.inner, strict=True):
            if isinstance(a, Span) and isinstance(b, Span):
                self._module(a, b)
            elif isinstance(a, Op) and isinstance(b, Op):
                self._op(a, b)

    def _module(self, a: Span, b: Span) -> None:
        known = None if a.function else self.known[a.path]
        if a.function is None:
            self.outs[a.path] = a.outs
        is_experts, given = isinstance(known, KnownExperts), (len(a.args), len(a.kwargs))
        takes = sum(given) == 3 and a.path not in self.opaque if is_experts else given == (1, 0)
        if known is not None and takes and a.outs[:1] != [None]:
            self._known(a, b, known)
            return
        count, numbers = len(self.ops), dict(self.numbers)
        try:
            if a.path in self.opaque and not a.function:
                raise Mismatch(self.opaque[a.path])
            self._span(a, b)
        except Mismatch as reason:
            del self.ops[count:]
            self.numbers = numbers
            self._opaque(a, b, str(reason))

    def _known(self, a: Span, b: Span, known: Any) -> None:
        args, numbers = self._tree(a.args, b.args), {n: i for i, n in self.one.sources.items()}
        if isinstance(known, KnownExperts):
            args = known.given(args, self._tree(a.kwargs, b.kwargs))
        params: Any = parameters_of(self.layer.get_submodule(a.path), recurse=False)
        run: Any
        if isinstance(known, AdaptedLinear):
            name, run, p, params = "dora", known.run, known.p, known.names
        elif isinstance(known, KnownExperts):
            name, run, p, params = "experts", known.run, None, known.names
        elif isinstance(known, str):
            name, run, p = "act", ACTIVATIONS[known].fwd, None
        else:
            name, run, p = "norm", norm_function(known), None
        own = [Ref(numbers[f"{a.path}.{n}"]) if n else None for n in params]
        self._outs(a.outs, b.outs)
        self.ops.append(Op(name, run, (*args, *own), {}, list(a.outs), a.path, p, info=known))

    def _op(self, a: Op, b: Op) -> None:
        if (a.p, len(a.outs)) != (b.p, len(b.outs)):
            raise Mismatch(f"the results of {a.name} differ")
        args, kwargs = self._tree(a.args, b.args), self._tree(a.kwargs, b.kwargs)
        self._outs(a.outs, b.outs)
        self.ops.append(replace(a, args=args, kwargs=kwargs))

    def _opaque(self, a: Span, b: Span, reason: str) -> None:
        try:
            args, kwargs = self._tree(a.args, b.args), self._tree(a.kwargs, b.kwargs)
        except Mismatch:
            raise Mismatch(f"{a.path}: {reason}") from None
        if a.function is not None:
            self._function(a, b, args, kwargs, reason)
            return
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
            f"module {a.path}", lambda module, *rest: functional_call(replica(module), *rest),
            (tensors, args, kwargs), {},
            [n if n not in given else None for n in a.outs], a.path, path=a.path, info=reason,
            random=a.random,
        )  # fmt: skip
        self._outs(a.outs, b.outs)
        self.ops.append(op)

    def _function(self, a: Span, b: Span, args: Any, kwargs: Any, reason: str) -> None:
        reads, writes = _values_in(a)
        function: Any = a.function
        given = {*refs((args, kwargs))}
        if a.fixed or reads - writes - given:
            raise Mismatch(reason)
        name = f"{a.path}.{function.__name__}".lstrip(".")
        op = Op(
            f"function {name}", function, args, kwargs,
            [n if n not in given else None for n in a.outs], a.path, path=a.path, info=reason,
            random=a.random, function=name,
        )  # fmt: skip
        self._outs(a.outs, b.outs)
        self.ops.append(op)

    def _outs(self, one: list[int | None], two: list[int | None]) -> None:
        if [n is None for n in one] != [n is None for n in two]:
            raise Mismatch("the results differ")
        for i, j in zip(one, two, strict=True):
            if i is not None and j is not None and self.numbers.setdefault(i, j) != j:
                raise Mismatch("the results differ")  # one is an argument

    def _tree(self, one: Any, two: Any) -> Any:
        a, b = leaves(one), leaves(two)
        if len(a) != len(b):
            raise Mismatch("the arguments of an operation differ")
        joined = iter([self._leaf(x, y) for x, y in zip(a, b, strict=True)])
        return map_tree(one, lambda _: next(joined))

    def _leaf(self, a: Any, b: Any) -> Any:
        if isinstance(a, Ref) and isinstance(b, Ref):
            if self.numbers.get(a.index) != b.index:
                raise Mismatch("operations read different values")
            return a
        if isinstance(a, Size) and isinstance(b, (int, float)):
            if a.of(self.choices[1]) != b:
                raise Mismatch("it computes a number that its formula does not explain")
            return a
        if type(a) is type(b) is int:
            return self._size(a, b)
        if isinstance(a, torch.dtype) and a != b:
            return STREAM
        if isinstance(a, float) and isinstance(b, float) and a != b:
            return self._float(a, b)
        if type(a) is not type(b) or (isinstance(a, (int, str, bool)) and a != b):
            raise Mismatch("an argument of an operation depends on the input's size or dtype")
        if isinstance(a, Returned):
            if a != b or a.made() is not None or b.made() is not None:
                raise Mismatch(f"it returns an object that it holds ({a.kind.__name__})")
            return a
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

    def _dimension(self, formula: Any, a: int, b: int) -> Any:
        """Return a size of a value; its formula is wrong after a loop over chunks."""
        try:
            return self._leaf(formula, b)
        except Mismatch:
            return self._size(a, b)

    def _size(self, a: int, b: int) -> int | Size:
        """Return a number that PyTorch or Python computed without a trace of its formula."""
        if a == b:
            return a
        space, (_, other) = self.one.space, self.choices
        known = space.known.items() if space is not None else ()
        same = (size for at, size in known if at[0] == a and size and size.of(other) == b)
        size = product(self.choices, (a, b)) or next(same, None)
        if size is None:
            raise Mismatch("it computes a number that no size of the call explains")
        return size


def _label(part: Op | Span) -> tuple[str, str]:
    if isinstance(part, Op):
        return "op", part.name
    return ("module", part.path) if part.function is None else ("function", part.function.__name__)


def _values_in(span: Span) -> tuple[set[int], set[int]]:
    """Return the values that operations in a call read, and those that they compute."""
    reads, writes = set[int](), set[int]()
    for part in span.inner:
        more = (part.reads, part.writes) if isinstance(part, Op) else _values_in(part)
        reads.update(more[0])
        writes.update(more[1])
    return reads, writes

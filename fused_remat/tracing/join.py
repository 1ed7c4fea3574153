"""Joins two recordings of a layer, at two sizes and in two dtypes.

A number, a dtype or a limit of a dtype that differs between them becomes a function of the call.
Where the two do not agree inside of a submodule, that submodule is one opaque operation.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import itertools
import math
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.layers.eligibility import parameters_of
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.tracing.apart import call_with, renumbered
from fused_remat.tracing.record import hollow, record
from fused_remat.tracing.values import (
    STREAM,
    Limit,
    Mismatch,
    Op,
    Recording,
    Ref,
    Sample,
    Size,
    Span,
    Unkept,
    leaves,
    map_tree,
    refs,
)


class Pair:
    """Two recordings of `forward`, a method of `layer`: of a first sample, and by `with_second`.

    The samples differ in every size, and in the dtype of what is in the residual stream's.

    Args:
        leaf: `leaf(module)` says what a submodule is as a whole: a `NormSpec`, the name of an
            activation, or None.
        numbers: attributes of modules that are another number in the second recording, so that what
            depends on them is found.
    """

    def __init__(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        first: Sample,
        leaf: Callable[[nn.Module], Any],
        numbers: Collection[str] = (),
    ) -> None:
        self.layer, self.forward, self.first, self.indices = layer, forward, first, numbers
        self.one, self.numbers, self.out = record(layer, forward, *first[2:], autocast=False)
        self.leaves = {path: leaf(module) for path, module in layer.named_modules() if path}
        live = [self.one.values[n] for n in self.one.live]
        #: Whether the layer computes in float32 where its input is in float64.
        self.narrow = first.dtype == torch.float64 and any(t.dtype == torch.float32 for t in live)

    def with_second(self, second: Sample) -> Pair:
        """Return the first recording with one of a second sample."""
        other = copy.copy(self)
        other._record(second)
        return other

    def _record(self, second: Sample) -> None:
        self.sizes, self.other = self.first.sizes, second.sizes
        self.dtypes = self.first.dtype, second.dtype
        with renumbered(self.layer, self.indices):
            self.two, _, self.other_out = record(
                self.layer, self.forward, *second[2:], autocast=True
            )
        self.two.values[:] = map(hollow, self.two.values)  # of which no number is read
        self.fixed = self.one.fixed | self.two.fixed

    def join(self, opaque: Mapping[str, str]) -> Recording:
        """Return the two as one. `opaque`: paths of submodules that are one operation, and why.

        Raises: Unreadable if the operations of the layer itself do not agree.
        """
        return _Join(self, opaque).joined()


class _Join:
    """Joins two recordings."""

    def __init__(self, pair: Pair, opaque: Mapping[str, str]) -> None:
        self.one, self.two, self.sizes, self.other = pair.one, pair.two, pair.sizes, pair.other
        self.from_pair, self.opaque = pair, opaque
        groups = range(1, len(self.sizes) + 1)
        self.products = [c for n in groups for c in itertools.combinations(self.sizes, n)]
        self.ops: list[Op] = []
        self.pair: dict[int, int] = {}  # the number in the second recording

    def joined(self) -> Recording:
        one, two, numbers = self.one, self.two, self.from_pair.numbers
        self.pair = {i: i for i in (*one.sources, *(n for n in numbers if n is not None))}
        self._span(one.root, two.root)
        producers = {n: op for op in self.ops for n in op.outs if n is not None}
        shapes: list[Any] = [None] * len(one.values)
        dtypes: list[Any] = [t.dtype for t in one.values]
        for i, j in self.pair.items():
            t, u = one.values[i], two.values[j]
            with contextlib.suppress(Mismatch):
                dtypes[i] = self.leaf(t.dtype, u.dtype)
                if t.dim() == u.dim():
                    sizes = zip(t.shape, u.shape, strict=True)
                    shapes[i] = tuple([self.size(a, b) for a, b in sizes])
        result = self.tree(self.from_pair.out, self.from_pair.other_out)
        live = {n for n in one.live if n in producers or n in numbers}
        return Recording(
            one.values, shapes, dtypes, self.ops, producers, one.sources, numbers, live, result,
            self.sizes, max(self.from_pair.dtypes, key=lambda d: d.itemsize),
            {*self.from_pair.fixed},
        )  # fmt: skip

    def _span(self, one: Span, two: Span) -> None:
        """Join the insides of two calls of a submodule."""
        trouble = one.trouble or two.trouble
        if trouble:
            raise Mismatch(trouble)
        if [_kind(part) for part in one.inner] != [_kind(part) for part in two.inner]:
            raise Mismatch("its operations depend on the size or on the dtype")
        for a, b in zip(one.inner, two.inner, strict=True):
            if isinstance(a, Span) and isinstance(b, Span):
                self._module(a, b)
            elif isinstance(a, Op) and isinstance(b, Op):
                self._op(a, b)

    def _module(self, a: Span, b: Span) -> None:
        """Join two calls of a submodule: as a norm or an activation, as what it runs, or as one."""
        leaf = self.from_pair.leaves[a.path]
        if leaf is not None and len(a.args) == 1 and not a.kwargs and a.outs[:1] != [None]:
            self._leaf(a, b, leaf)
            return
        before, known = len(self.ops), dict(self.pair)
        try:
            if a.path in self.opaque:
                raise Mismatch(self.opaque[a.path])
            self._span(a, b)
        except Mismatch as reason:
            del self.ops[before:]
            self.pair = known
            self._opaque(a, b, str(reason))

    def _leaf(self, a: Span, b: Span, leaf: Any) -> None:
        args = self.tree(a.args, b.args)
        module = self.from_pair.layer.get_submodule(a.path)
        own = {n: i for i, n in self.one.sources.items() if n.rpartition(".")[0] == a.path}
        params = [Ref(own[f"{a.path}.{n}"]) for n in parameters_of(module, recurse=False)]
        name = "act" if isinstance(leaf, str) else "norm"
        run = _activation(leaf) if isinstance(leaf, str) else norm_of(leaf)
        self._outs(a.outs, b.outs)
        self.ops.append(Op(name, run, (*args, *params), {}, list(a.outs), a.path, info=leaf))

    def _op(self, a: Op, b: Op) -> None:
        if (a.p, len(a.outs)) != (b.p, len(b.outs)):
            raise Mismatch(f"the results of {a.name} differ")
        args, kwargs = self.tree(a.args, b.args), self.tree(a.kwargs, b.kwargs)
        self._outs(a.outs, b.outs)
        self.ops.append(replace(a, args=args, kwargs=kwargs))

    def _opaque(self, a: Span, b: Span, reason: str) -> None:
        """One operation that calls a submodule."""
        try:
            args, kwargs = self.tree(a.args, b.args), self.tree(a.kwargs, b.kwargs)
        except Mismatch:
            raise Mismatch(f"{a.path}: {reason}") from None
        prefix, module = f"{a.path}.", self.from_pair.layer.get_submodule(a.path)
        held = {*parameters_of(module), *[n for n, _ in module.named_buffers()]}
        tensors = {
            name.removeprefix(prefix): Ref(i)
            for i, name in self.one.sources.items()
            if name.startswith(prefix) and name.removeprefix(prefix) in held
        }
        values = self.one.values
        others = [n for i, n in self.one.sources.items() if values[i].requires_grad]
        if any(n.startswith(prefix) and n.removeprefix(prefix) not in held for n in others):
            raise Mismatch(f"{a.path} has a tensor with a gradient that is no parameter")
        given = refs((args, kwargs))
        outs = [n if n not in given else None for n in a.outs]
        op = Op(
            f"module {a.path}", call_with, (tensors, args, kwargs), {},
            outs, a.path,
            path=a.path, info=reason, random=any(inner.random or inner.p for inner in a.ops()),
        )  # fmt: skip
        self._outs(a.outs, b.outs)
        self.ops.append(op)

    def _outs(self, mine: list[int | None], other: list[int | None]) -> None:
        if [n is None for n in mine] != [n is None for n in other]:
            raise Mismatch("the results differ")
        for i, j in zip(mine, other, strict=True):
            if i is not None and j is not None:
                self.pair.setdefault(i, j)

    def tree(self, one: Any, two: Any) -> Any:
        """Two trees of arguments as one."""
        a, b = leaves(one), leaves(two)
        if len(a) != len(b):
            raise Mismatch("the arguments of an operation differ")
        joined = iter([self.leaf(x, y) for x, y in zip(a, b, strict=True)])
        return map_tree(one, lambda _: next(joined))

    def leaf(self, a: Any, b: Any) -> Any:
        """A leaf of the first recording and the same one of the second, as one."""
        if isinstance(a, Ref) and isinstance(b, Ref):
            if self.pair.get(a.index) != b.index:
                raise Mismatch("operations read different values")
            return a
        if type(a) is type(b) is int:
            return self.size(a, b)
        if isinstance(a, torch.dtype) and a != b:
            return STREAM
        if isinstance(a, float) and isinstance(b, float) and a != b:
            for name in ("min", "max", "eps", "tiny"):
                low, high = (getattr(torch.finfo(d), name) for d in self.from_pair.dtypes)
                if (abs(a), abs(b)) == (abs(low), abs(high)):
                    return Limit(name, a / low)
            one, two = self.from_pair.dtypes
            digits = max(1e-6, *(torch.finfo(d).eps for d in (one, two)))
            if math.isclose(a, b, rel_tol=digits):  # read from a buffer: the one with more digits
                return a if one.itemsize > two.itemsize else b
            if not (a != a and b != b):
                raise Mismatch("it computes a number that depends on the input's size or dtype")
            return a
        if type(a) is not type(b) or (isinstance(a, (int, str, bool)) and a != b):
            raise Mismatch("an argument of an operation depends on the input's size or dtype")
        if isinstance(a, Unkept) and a != b:
            raise Mismatch(f"it returns a {a.kind.__name__} with other numbers")
        if not isinstance(a, _VALUES):
            raise Mismatch(f"it passes on an object ({type(a).__name__})")
        return a

    def size(self, a: int, b: int) -> int | Size:
        if a == b:
            return a
        for names in self.products:
            p, q = 1, 1
            for name in names:
                p, q = p * self.sizes[name], q * self.other[name]
            if a % p == 0 and b % q == 0 and a // p == b // q:
                return Size(a // p, names)
        for name in self.sizes:
            if a - self.sizes[name] == b - self.other[name]:
                return Size(1, (name,), a - self.sizes[name])
        raise Mismatch("it computes a number that no size of the call explains")


#: What is the same in all calls; an object may be another one, or hold other tensors.
_VALUES = (
    int, float, complex, str, bytes, type(None), type(...), type, enum.Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, numpy.generic, types.BuiltinFunctionType,
    types.FunctionType, type(STREAM), Limit, Unkept,
)  # fmt: skip


def _kind(part: Op | Span) -> tuple[str, str]:
    return ("module", part.path) if isinstance(part, Span) else ("op", part.name)


def _activation(name: str) -> Callable[..., Tensor]:
    return lambda x: ACTIVATIONS[name].fwd(x)


def norm_of(spec: NormSpec) -> Callable[..., Tensor]:
    """The norm of a submodule, of its input and its parameters."""

    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if spec.kind == "layer_norm":
            y = F.layer_norm(wide, x.shape[-1:], None, None, spec.eps)
        else:
            y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
        if weight is not None:
            y = y * (weight.to(wide.dtype) + spec.offset)
        y = y if bias is None else y + bias
        return y.to(x.dtype)

    return run

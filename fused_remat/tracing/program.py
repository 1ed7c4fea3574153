"""Recorded operations as a function on matrices (tokens, width), of a call of any size."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.steps.replay import At
from fused_remat.tracing.values import (
    SHAPES,
    STREAM,
    Limit,
    Op,
    Ref,
    Size,
    Unkept,
    leaves,
    map_tree,
    refs,
)

#: Operations that move elements or cast them, by their names without underscores.
_MOVES = {
    "view", "reshape", "view_as", "reshape_as", "transpose", "permute", "t", "contiguous", "to",
    "float", "double", "half", "bfloat16", "type", "type_as", "expand", "expand_as", "squeeze",
    "unsqueeze", "flatten", "unflatten", "getitem", "get", "chunk", "split", "tensor_split",
    "unbind", "select", "narrow", "cat", "concat", "concatenate", "stack", "movedim", "moveaxis",
    "swapaxes", "swapdims", "repeat", "repeat_interleave", "clone", "copy", "setitem", "roll",
    "flip", "pad", "index_select", "view_as_complex", "view_as_real", "dropout", "table",
}  # fmt: skip
#: With those of which the result is a polynomial of what they read, or a quotient of two: what
#: holds for random values holds for all.
ALGEBRA = _MOVES | {
    "add", "radd", "iadd", "sub", "subtract", "rsub", "isub", "mul", "rmul", "imul", "multiply",
    "div", "truediv", "rtruediv", "itruediv", "true_divide", "neg", "matmul", "rmatmul", "bmm",
    "mm", "linear", "addmm", "baddbmm", "einsum", "sum", "mean", "cumsum", "square", "addcmul",
    "lerp", "masked_fill", "where", "outer", "complex", "real", "imag", "tril", "triu", "norm",
    *SHAPES,
}  # fmt: skip


class Opaque(RuntimeError):
    """An operation cannot be read; the submodule at `path` is to be replayed as a whole."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


#: The submodules of a layer by their paths.
Modules = Callable[[str], nn.Module]


@dataclass(frozen=True)
class Layout:
    """How the elements of a recorded value are those of a matrix (tokens, width).

    Attributes:
        factors: for each dimension, the sizes whose product it is, from the slowest to the fastest:
            numbers, or names of sizes of a call.
        tokens: the places, among all factors, of those that count tokens: the batch first.
        names: of the sizes of a call that count tokens.
    """

    factors: tuple[tuple[int | str, ...], ...]
    tokens: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def flat(self) -> tuple[int | str, ...]:
        return tuple(itertools.chain(*self.factors))

    @property
    def features(self) -> tuple[int, ...]:
        """The sizes that make the width, in order."""
        flat = enumerate(self.flat)
        return tuple([n for i, n in flat if i not in self.tokens and n != 1])  # type: ignore[misc]

    @property
    def width(self) -> int:
        return math.prod(self.features)

    @property
    def _order(self) -> list[int]:
        return [*self.tokens, *[i for i in range(len(self.flat)) if i not in self.tokens]]

    def matrix(self, value: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """A value as a matrix (tokens, width)."""
        flat = [sizes[n] if isinstance(n, str) else n for n in self.flat]
        count = math.prod([flat[i] for i in self.tokens])
        return value.reshape(flat).permute(self._order).reshape(count, self.width)

    def value(self, matrix: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """The value that a matrix (tokens, width) is."""
        flat = [sizes[n] if isinstance(n, str) else n for n in self.flat]
        order = self._order
        inverse = [order.index(i) for i in range(len(order))]
        shape, start = [], 0
        for dim in self.factors:
            shape.append(math.prod(flat[start : start + len(dim)]))
            start += len(dim)
        return matrix.reshape([flat[i] for i in order]).permute(inverse).reshape(shape)


def layout_of(shape: Sequence[Any] | None, names: Sequence[str], tokens: int) -> Layout | None:
    """The layout of a value of a recorded shape; None if it does not have the call's tokens.

    `names`: those of the sizes of a call that count tokens: "B", and "S" or "M". `tokens`: of a
    sequence, where their number is the same in all calls and thus not among the names.
    """
    if shape is None:
        return None
    dims: list[tuple[int | str, ...]] = []
    for n in shape:
        if isinstance(n, Size):
            one_factor = n.factor == 1 or n.names == ("B",)
            if n.offset or not one_factor:
                return None
            dims.append((*n.names, *((n.factor,) if n.factor > 1 else ())))
        else:
            dims.append((n,))
    flat = [*itertools.chain(*dims)]
    if sorted(n for n in flat if isinstance(n, str)) != sorted(names):
        return None
    places = [flat.index(name) for name in names]
    if "S" not in names and "M" not in names:
        left = tokens
        for i, n in enumerate(flat):
            if left > 1 and isinstance(n, int) and n > 1:
                if left % n:
                    return None
                places.append(i)
                left //= n
        if left > 1:
            return None
    return Layout(tuple(dims), tuple(places), tuple(names))


@dataclass(frozen=True, eq=False)
class Program:
    """Recorded operations as a function of some values.

    Attributes:
        ops: in order.
        sources: numbers and layouts of the activations that it reads.
        params: numbers of the other values that it reads.
        target, layout: the value that it computes, and its layout.
        pick: columns of the result that are kept, None for all.
    """

    ops: tuple[Op, ...]
    sources: tuple[tuple[int, Layout], ...]
    params: tuple[int, ...]
    target: int
    layout: Layout
    pick: tuple[int, ...] | None = None

    @functools.cached_property
    def _unread(self) -> list[list[int]]:
        return unread_after(self.ops, (self.target,))

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(op.random or op.p for op in self.ops)

    @property
    def only_moves(self) -> bool:
        """Whether each number of the result is one that it reads, and always the same one."""
        return not self.params and all(op.name.strip("_") in _MOVES for op in self.ops)

    @property
    def is_algebra(self) -> bool:
        """Whether what holds for random values that it reads holds for all."""
        return all(op.name.strip("_") in ALGEBRA for op in self.ops)

    def run(
        self,
        modules: Modules,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        at: At,
        xs: Sequence[Tensor],
        tensors: Sequence[Tensor | None],
    ) -> Tensor:
        """The result as a matrix, for the tokens `at`, of the activations as matrices."""
        sizes = {**sizes, "B": at.batch}
        if len(self.layout.names) > 1 or self.layout.names == ("S",):
            sizes[self.layout.names[-1]] = at.tokens
        values: dict[int, Any] = dict(zip(self.params, tensors, strict=True))
        for (number, layout), x in zip(self.sources, xs, strict=True):
            values[number] = layout.value(x, sizes)
        for op, unread in zip(self.ops, self._unread, strict=True):
            try:
                run_op(op, values, modules, sizes, dtype)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise Opaque(op.inside, f"{op.name} cannot be run by itself: {error}") from error
            for number in unread:
                del values[number]
        y = self.layout.matrix(values[self.target], sizes)
        return y if self.pick is None else y[:, list(self.pick)]


def given_to(
    leaf: Any, values: Mapping[int, Any], sizes: Mapping[str, int], dtype: torch.dtype
) -> Any:
    """What a leaf of a recording is in a call with these values, sizes and stream's dtype."""
    if isinstance(leaf, Ref):
        return values[leaf.index]
    if isinstance(leaf, Size):
        return leaf.of(sizes)
    if isinstance(leaf, Limit):
        return leaf.sign * getattr(torch.finfo(dtype), leaf.name)
    if isinstance(leaf, Unkept):
        return leaf.make()
    return dtype if leaf is STREAM else leaf


def unread_after(ops: Sequence[Op], needed: Iterable[int]) -> list[list[int]]:
    """For each operation, the values that no later one reads, but those `needed` at the end."""
    seen, found = {*needed}, []
    for op in reversed(ops):
        touched = {*refs((op.args, op.kwargs)), *(n for n in op.outs if n is not None)}
        found.append([*(touched - seen)])
        seen |= touched
    return found[::-1]


def run_op(
    op: Op, values: dict[int, Any], modules: Modules, sizes: Mapping[str, int], dtype: torch.dtype
) -> None:
    """Run an operation on `values`, and add what it makes."""

    def given(leaf: Any) -> Any:
        if isinstance(leaf, Limit):  # of the dtype that autocast gave to what is compared with it
            of = [values[n].dtype for n in refs(op.args[:1]) if values[n].is_floating_point()]
            return given_to(leaf, values, sizes, of[0] if of else dtype)
        return given_to(leaf, values, sizes, dtype)

    args, kwargs = map_tree(op.args, given), map_tree(op.kwargs, given)
    if op.path is not None:
        made = op.run(modules(op.path), *args, **kwargs)
    elif op.p:
        made = F.dropout(args[0], op.p)
    else:
        made = op.run(*args, **kwargs)
    for number, leaf in zip(op.outs, leaves(made), strict=True):
        if number is not None:
            values[number] = leaf

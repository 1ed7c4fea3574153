"""A layer as the graph of a block, and recorded operations as functions of matrices."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.graph.graph import Graph
from fused_remat.spec import PackedSpec
from fused_remat.steps.linear import Linear
from fused_remat.steps.replay import At
from fused_remat.tracing.sizes import JOINT, LENGTHS, Size, is_joint, size_of
from fused_remat.tracing.values import (
    ALGEBRA,
    MOVES,
    STREAM,
    Limit,
    Op,
    Opaque,
    Ref,
    leaves,
    map_tree,
    ops_for,
    refs,
)


class Context(NamedTuple):
    """A call in which recorded operations run."""

    modules: Callable[[str], nn.Module]  # the submodules of the layer by their paths
    sizes: Mapping[str, int]
    dtype: torch.dtype  # of the residual stream
    device: torch.device
    mode: Callable[[], Any] = contextlib.nullcontext  # makes a context in which they run


@dataclass(frozen=True)
class Layout:
    """An arrangement of a matrix (tokens, width) in the dimensions of a recorded value."""

    #: For each dimension, the numbers or sizes of a call whose product it is, the slowest first.
    factors: tuple[tuple[int | str, ...], ...]
    tokens: tuple[int, ...]  # indices of the factors that count tokens, the batch first
    names: tuple[str, ...]  # of the sizes of a call that count tokens

    @property
    def flat(self) -> tuple[int | str, ...]:
        return tuple(itertools.chain(*self.factors))

    @property
    def features(self) -> tuple[int, ...]:
        """The sizes whose product is the width, in order."""
        flat = enumerate(self.flat)
        return tuple([n for i, n in flat if i not in self.tokens and n != 1])  # type: ignore[misc]

    @property
    def width(self) -> int:
        return math.prod(self.features)

    @property
    def is_last(self) -> bool:
        """Whether the width is the last dimension, and that alone."""
        last = len(self.flat) - 1
        others = [n for i, n in enumerate(self.flat) if i not in (*self.tokens, last)]
        is_one_factor = len(self.factors[-1]) == 1 and last not in self.tokens
        return is_one_factor and all(n == 1 for n in others)

    @property
    def _order(self) -> list[int]:
        return [*self.tokens, *[i for i in range(len(self.flat)) if i not in self.tokens]]

    def matrix(
        self, value: Tensor, sizes: Mapping[str, int], lead: Sequence[int] = (-1,)
    ) -> Tensor:
        """Return a value as a matrix (tokens, width), or with `lead` as the sizes of tokens."""
        flat = [size_of(n, sizes) for n in self.flat]
        return value.reshape(flat).permute(self._order).reshape(*lead, self.width)

    def value(self, matrix: Tensor, sizes: Mapping[str, int]) -> Tensor:
        """Return the value that a matrix (tokens, width) represents."""
        flat, order = [size_of(n, sizes) for n in self.flat], self._order
        inverse, rest = [order.index(i) for i in range(len(order))], iter(flat)
        shape = [math.prod(itertools.islice(rest, len(dim))) for dim in self.factors]
        return matrix.reshape([flat[i] for i in order]).permute(inverse).reshape(shape)


def layout_of(shape: Sequence[Any] | None, names: Sequence[str], tokens: int) -> Layout | None:
    """Return the layout of a value of a recorded shape, or None if it lacks the call's tokens."""
    if shape is None:
        return None
    dims: list[tuple[int | str, ...]] = []
    for n in shape:
        if is_joint(n):
            dims.append((JOINT,))
        elif isinstance(n, Size):
            if n.offset or n.formula or (n.factor > 1 and n.names != ("B",)):
                return None
            dims.append((*n.names, *((n.factor,) if n.factor > 1 else ())))
        else:
            dims.append((n,))
    flat = [*itertools.chain(*dims)]
    if sorted(n for n in flat if isinstance(n, str)) != sorted(names):
        return None
    indices = [flat.index(name) for name in names]
    if not {*LENGTHS} & {*names}:  # a sequence of any call has so many `tokens`
        for i, n in enumerate(flat):
            if tokens > 1 and isinstance(n, int) and n > 1:
                if tokens % n:
                    return None
                indices.append(i)
                tokens //= n
        if tokens > 1:
            return None
    return Layout(tuple(dims), tuple(indices), tuple(names))


def layout_of_heads(shape: Sequence[Any], at: int, tokens: int) -> Layout | None:
    """Return the layout of heads (B, H, S, E) or of windows (B * windows, H, n, E), or None.

    Windows may also be a dimension before that of tokens, which has the index `at`.
    """
    batch, *others = shape
    if not isinstance(batch, Size) or batch != Size(batch.factor, ("B",)) or len(shape) < 4:
        return None
    windows = (batch.factor,) * (batch.factor > 1)
    counted = [*others[1:-2], shape[at]]
    if not all(isinstance(n, int) for n in others) or math.prod((*windows, *counted)) != tokens:
        return None
    dims = (("B", *windows), *[(n,) for n in others])
    first, end = len(windows), len(windows) + len(shape)
    indices = (*range(first + 1), *range(first + 2, end - 2), end + at)
    return Layout(dims, indices, ("B",))


#: The elements of a value that has as many for each sequence, whatever its length: a large number.
OF_BATCH = 1 << 62


class Operations:
    """Operations in the order in which they run, which compute values `outs` from `roots`."""

    def __init__(self, ops: Sequence[Op], outs: Iterable[int]) -> None:
        self.ops, self.outs = ops, (*outs,)
        self.roots = {n for op in ops for n in op.reads} - {n for op in ops for n in op.writes}
        seen = {*self.outs}
        self._unread = list[set[int]]()  # after each, values that no later one reads
        for op in reversed(ops):
            self._unread.insert(0, {*op.reads, *op.writes} - seen)
            seen |= self._unread[0]

    def run(self, values: dict[int, Any], call: Context) -> None:
        """Add the results to `values`, without those that nothing reads later."""
        with call.mode():
            for op, unread in zip(self.ops, self._unread, strict=True):
                try:
                    run_op(op, values, call)
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError as error:
                    text = f"{op.name} cannot be run by itself: {error}"
                    raise Opaque(op.inside, text) from error
                for number in unread:
                    del values[number]


@dataclass(frozen=True, eq=False)
class Program:
    """Recorded operations as a function of some values."""

    ops: tuple[Op, ...]
    sources: tuple[tuple[int, Layout], ...]  # the activations that it reads
    params: tuple[int, ...]  # the other values that it reads
    target: int
    layout: Layout
    #: Spans of the result's columns, in the order in which they are returned; None for all.
    pick: tuple[tuple[int, int], ...] | None = None

    @functools.cached_property
    def _sequence(self) -> Operations:
        return Operations(self.ops, (self.target,))

    @property
    def draws(self) -> bool:
        return any(op.random or op.p for op in self.ops)

    @property
    def only_moves(self) -> bool:
        """Whether each number of the result is always the same one of those that it reads."""
        return not self.params and all(op.kind in MOVES for op in self.ops)

    @property
    def is_algebra(self) -> bool:
        """Whether what holds for random inputs holds for all inputs."""
        return all(op.kind in ALGEBRA for op in self.ops)

    def run(
        self, call: Context, at: At, xs: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> Tensor:
        """Return the result as a matrix, for the tokens `at`, of the activations as matrices."""
        sizes, values = self.given(call, at, xs, tensors)
        self._sequence.run(values, call._replace(sizes=sizes))
        y = self.layout.matrix(values[self.target], sizes)
        return y if self.pick is None else torch.cat([y[:, a:b] for a, b in self.pick], 1)

    def given(
        self, call: Context, at: At, xs: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> tuple[dict[str, int], dict[int, Any]]:
        """Return the sizes of a call, and the values that the operations read."""
        sizes = {**call.sizes, "B": at.batch}
        if len(self.layout.names) > 1 or self.layout.names == ("S",):
            sizes[self.layout.names[-1]] = at.tokens
        values: dict[int, Any] = dict(zip(self.params, tensors, strict=True))
        for (number, layout), x in zip(self.sources, xs, strict=True):
            values[number] = layout.value(x, sizes)
        return sizes, values


def leaf_value(leaf: Any, values: Any, call: Context) -> Any:
    if isinstance(leaf, Ref):
        return values[leaf.index]
    if isinstance(leaf, Size):
        return leaf.of(call.sizes)
    if isinstance(leaf, Limit):
        return leaf.sign * getattr(torch.finfo(call.dtype), leaf.name)
    return call.dtype if leaf is STREAM else leaf


def run_op(op: Op, values: dict[int, Any], call: Context) -> None:
    """Add the results of an operation to `values`."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Limit):  # of the dtype that autocast gave to what is compared with it
            of = [values[n].dtype for n in refs(op.args[:1]) if values[n].is_floating_point()]
            return leaf_value(leaf, values, call._replace(dtype=[*of, call.dtype][0]))
        return leaf_value(leaf, values, call)

    if op.is_flat:
        args: Any = [values[a.index] if isinstance(a, Ref) else a for a in op.args]
        kwargs = op.kwargs
    else:
        args, kwargs = map_tree(op.args, value), map_tree(op.kwargs, value)
    if op.module is not None:
        result = op.run(call.modules(op.module), *args, **kwargs)
    elif op.p and op.name == "dropout":
        result = F.dropout(args[0], op.p)
    else:
        result = op.run(*args, **kwargs)
    for number, leaf in zip(op.outs, leaves(result), strict=True):
        if number is not None:
            values[number] = leaf


class ReplayedSubmodule(NamedTuple):
    """A submodule, or a long chain of operations, that is replayed; and why it was not traced."""

    name: str
    why: str


#: By number, the shape and the dtype of an activation.
Shapes = dict[int, tuple[tuple[Any, ...], Any]]


@dataclass(eq=False)
class TracedBlock:
    """A layer as the graph of a block."""

    graph: Graph
    before: list[Op]  # run at every call before the block
    values: dict[str, int]  # that the block reads other than its inputs, by its names
    transposed: set[str]  # those of these names that are the transpose of the value
    programs: dict[str, Program]  # the functions of replays
    inputs: dict[str, tuple[int, Layout]]
    out: tuple[int, Layout]  # the result that the block computes
    result: Any  # of the layer, with `Ref`s
    arguments: list[int | None]  # by leaf; None for those that are no tensors
    sources: dict[int, str]  # parameters, buffers and attributes of the layer
    stand_ins: Shapes  # activations of which `before` reads the shape alone
    replayed: tuple[ReplayedSubmodule, ...]
    fixed: tuple[str, ...]  # names of the layer's tensors whose values decide what the block is
    #: By the number of a mask, the value that replaces scores of keys that it hides. A query that
    #: sees no key then has no gradient; it would have one where the mask is added.
    fills: dict[int, float]
    #: Elements of the differentiable results of `before`: 0 for a view, `OF_BATCH` if the batch
    #: decides it, infinite if lengths do.
    elements: dict[int, float]
    #: Formats of quantized weights by name.
    formats: Mapping[str, PackedSpec]
    #: Routers whose logits the block returns, too, by path, and the layouts of these.
    records: Mapping[str, Layout]
    #: Further results, which the block returns after those logits, and their layouts.
    streams: tuple[tuple[int, Layout], ...] = ()

    def __post_init__(self) -> None:
        self._producers = {n: op for op in self.before for n in op.writes}
        results = {self.out[0], *dict(self.streams)}
        others = [n for n in refs(self.result) if n not in results]
        self._read = [*self.values.values(), *others, *self.fills]
        #: By number, the operations that compute a value, if they can run again.
        self.chains = {n: Operations(self._chain(n), (n,)) for n in self._read}
        self._plans: dict[Any, tuple[Operations, Operations]] = {}
        self._together: dict[frozenset[int], Operations] = {}

    def plan(self, live: frozenset[int], large: int) -> tuple[Operations, Operations]:
        """Return `before` in two parts, for a call in which `live` values need gradients.

        The first computes differentiable values that are `large`, or computed by way of such: it
        runs again in backward. The second, after it, computes all others.
        """
        if (live, large) not in self._plans:
            reached = {*live}
            for op in self.before if live else ():
                if not reached.isdisjoint(op.reads):
                    reached.update(n for n in op.outs if n in self.elements)
            costly = dict.fromkeys(n for n in self._read if n in reached and self._most(n) >= large)
            needed = {*self._read, *(number for number, _ in self.inputs.values())}
            rest = Operations(self._ops(self._read, costly), needed)
            self._plans[live, large] = Operations(self._ops(costly), costly), rest
        return self._plans[live, large]

    def together(self, numbers: frozenset[int]) -> Operations:
        """Return the operations that compute several values; cached."""
        if numbers not in self._together:
            self._together[numbers] = Operations(self._ops(numbers), sorted(numbers))
        return self._together[numbers]

    def is_of_batch(self, operations: Operations) -> bool:
        """Return whether results are as large for any length of the sequences."""
        written = [n for op in operations.ops for n in op.writes]
        return all(self.elements.get(n, 0) <= OF_BATCH for n in written)

    def _most(self, number: int) -> float:
        """Return the most elements of a value in a chain, or 0 for one that runs submodules."""
        ops = self.chains[number].ops
        written = [n for op in ops for n in op.writes if not any(op.path for op in ops)]
        return max((self.elements.get(n, 0) for n in written), default=0)

    def _ops(self, numbers: Any, known: Any = ()) -> list[Op]:
        """Return the operations before the block that compute values from those `known`."""
        ops, _ = ops_for(numbers, self._producers, known)
        return [op for op in self.before if op in ops]

    def _chain(self, number: int) -> list[Op]:
        ops = self._ops([number])
        read = {number, *(n for op in ops for n in op.reads)}
        fails = any(op.random for op in ops) or not read.isdisjoint(self.stand_ins)
        return [] if fails else ops

    @property
    def draws(self) -> bool:
        return self.graph.uses_seed or any(p.draws for p in self.programs.values())

    @property
    def mixes_dtypes(self) -> bool:
        """Whether adapters compute in a dtype of their own."""
        layers = [node for node in self.graph.nodes if isinstance(node, Linear)]
        return any(update.dtype is not None for node in layers for update in node.updates)

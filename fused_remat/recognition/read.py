"""Reads a recording as the graph of a block: its steps are those that `graph.build` makes.

Every activation is read backwards from the output. What is a norm, a linear layer, attention, a
sum, an activation of an MLP or dropout becomes that step. What lies between such steps is one
`Replay`, run as it was recorded; so is a submodule that cannot be read. What does not depend on the
layer's activations (masks, tables, a modulation) is computed at every call, before the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_remat.graph.graph import Graph
from fused_remat.recognition.record import (
    STREAM,
    Limit,
    Op,
    Recording,
    Ref,
    Size,
    Unreadable,
    leaves,
    map_tree,
    refs,
)
from fused_remat.spec import AttentionSpec, NormSpec
from fused_remat.steps.activation import ACTIVATIONS, MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.linear import Linear
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm
from fused_remat.steps.replay import At, Replay
from fused_remat.steps.residual import Add, DrawMask

#: The first site of the dropouts of a block that was read.
SITE = 1 << 12
_ADD = ("add", "__add__", "__radd__", "add_", "__iadd__")
_MUL = ("mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__")
_DIV = ("div", "__truediv__", "true_divide", "div_", "__itruediv__", "divide")
_MATMUL = ("matmul", "__matmul__", "bmm", "mm")
_CASTS = ("to", "float", "type_as", "type", "contiguous", "double")
_RANDOM_INSIDE = "it draws random numbers outside of dropout"


class Opaque(Exception):
    """An operation cannot be read; the submodule at `path` is to be replayed as a whole."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


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
        return tuple([n for i, n in enumerate(self.flat) if i not in self.tokens])  # type: ignore[misc]

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

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(op.random or op.p for op in self.ops)

    def run(
        self,
        layer: nn.Module,
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
        for op in self.ops:
            run_op(op, values, layer, sizes, dtype)
        y = self.layout.matrix(values[self.target], sizes)
        return y if self.pick is None else y[:, list(self.pick)]


def run_op(
    op: Op, values: dict[int, Any], layer: nn.Module, sizes: Mapping[str, int], dtype: torch.dtype
) -> None:
    """Run an operation on `values`, and add what it makes."""

    def given(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return values[leaf.index]
        if isinstance(leaf, Size):
            return leaf.of(sizes)
        if isinstance(leaf, Limit):
            return leaf.sign * getattr(torch.finfo(dtype), leaf.name)
        return dtype if leaf is STREAM else leaf

    args, kwargs = map_tree(op.args, given), map_tree(op.kwargs, given)
    if op.path is not None:
        made = op.run(layer.get_submodule(op.path), *args, **kwargs)
    elif op.p:
        made = torch.nn.functional.dropout(args[0], op.p)
    else:
        made = op.run(*args, **kwargs)
    for number, leaf in zip(op.outs, leaves(made), strict=True):
        if number is not None:
            values[number] = leaf


class Piece(NamedTuple):
    """A submodule, or a chain of operations, that is replayed: its name, and why."""

    name: str
    why: str


@dataclass(eq=False)
class Reading:
    """A layer as the graph of a block.

    Attributes:
        graph: the block.
        before: the operations that are run at every call before the block.
        values: numbers of the values that the block reads besides its inputs, by its names.
        transposed: those of these names that are the transpose of the value.
        programs: the functions of its replays.
        inputs: number and layout of each input of the graph.
        out: the number of the result that the block computes, and its layout.
        result: the layer's result, with `Ref`s.
        given: the numbers of the tensors among the leaves of the arguments.
        sources: parameters, buffers and attributes of the layer by number.
        stand_ins: shapes and dtypes of activations of which `before` reads the shape alone.
        pieces: submodules that are replayed as a whole.
    """

    graph: Graph
    before: list[Op]
    values: dict[str, int]
    transposed: set[str]
    programs: dict[str, Program]
    inputs: dict[str, tuple[int, Layout]]
    out: tuple[int, Layout]
    result: Any
    given: list[int | None]
    sources: dict[int, str]
    stand_ins: dict[int, tuple[tuple[Any, ...], Any]]
    pieces: tuple[Piece, ...]


def read(
    recording: Recording,
    layer: nn.Module,
    x: int,
    memory: int | None,
    bounds: int | None,
    kind: str,
    tokens: int,
    drops: bool = True,
) -> Reading:
    """The block of a recording of `layer`.

    Args:
        x, memory: the number of the residual stream's input, and of another activation that the
            layer reads.
        bounds: the number of the bounds of sequences of variable length, of which the recording has
            one sequence.
        kind: the graph's.
        tokens: of a sequence in the first recording.
        drops: whether dropout acts; else it does nothing, whatever its probability.

    Raises: Opaque for a submodule that is to be replayed as a whole; Unreadable if there is no
        block.
    """
    return _Reader(recording, layer, x, memory, bounds, tokens, drops).reading(kind)


@dataclass(eq=False)
class _Reader:
    recording: Recording
    layer: nn.Module
    x: int
    memory: int | None
    bounds: int | None
    tokens: int
    drops: bool = True
    nodes: dict[str, Node] = field(default_factory=dict)
    made: dict[int, str] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    programs: dict[str, Program] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    sites: int = SITE

    def __post_init__(self) -> None:
        attends = [op for op in self.recording.ops if op.name == "scaled_dot_product_attention"]
        #: Values that attention reads or makes: their third dimension counts the tokens.
        self.heads = {n for op in attends for n in (*refs(op.args[:3]), *op.outs)}

    def reading(self, kind: str) -> Reading:
        recording = self.recording
        self.inputs = {"input": self.x, **({} if self.memory is None else {"memory": self.memory})}
        layouts = {}
        for name, number in self.inputs.items():
            layout = self.layout(number)
            if layout is None:
                raise Unreadable(f"{name} is not made of tokens")
            layouts[name] = number, layout
            self.made[number] = name
        live = [n for n in refs(recording.result) if n in recording.live]
        if not live:
            raise Unreadable("its result does not depend on its input")
        target = live[0]
        for n in live[1:]:
            if self._is_scores(n):
                recording.result = map_tree(
                    recording.result, lambda leaf, n=n: None if leaf == Ref(n) else leaf
                )
            elif n != target and n not in self.inputs.values():
                raise Unreadable("it has a second result that depends on its input")
        layout = self.layout(target)
        if layout is None or self.build(target) in self.inputs:
            raise Unreadable("its result is not made of tokens")
        last = self.nodes.pop(self.made[target])
        self.nodes["output"] = replace(last, name="output")
        if isinstance(last, Replay):
            self.programs["output"] = self.programs.pop(last.function)
            self.nodes["output"] = replace(last, name="output", function="output")
        nodes = _merged([*self.nodes.values()])
        nodes = _with_roles(nodes)
        params = dict.fromkeys(p for node in nodes for p in node.params if p)
        graph = Graph(kind, tuple(nodes), tuple(params), tuple(self.inputs))
        needed = [n for name, n in self.values.items() if name in params]
        needed += [n for n in refs(recording.result) if n not in live]
        before, stand_ins = self._before(needed)
        return Reading(
            graph, before, {n: i for n, i in self.values.items() if n in params}, self.transposed,
            self.programs, layouts, (target, layout), recording.result, recording.inputs,
            recording.sources, stand_ins, tuple(self.pieces),
        )  # fmt: skip

    def _is_scores(self, number: int) -> bool:
        """Whether a value has a number for each query and key: a block makes no such result."""
        shape = self.recording.shapes[number] or ()
        names = [n for s in shape if isinstance(s, Size) for n in s.names if n in ("S", "M")]
        return len(names) == 2

    def _before(
        self, needed: Iterable[int]
    ) -> tuple[list[Op], dict[int, tuple[tuple[Any, ...], Any]]]:
        """The operations that make the values `needed`, which read no activation."""
        recording, wanted, stand_ins = self.recording, set[Op](), {}
        todo = [*needed]
        while todo:
            number = todo.pop()
            if number in recording.live:
                shape = recording.shapes[number]
                if shape is None:
                    raise Unreadable("it reads the shape of an activation that no size explains")
                stand_ins[number] = shape, recording.dtypes[number]
                continue
            op = recording.producers.get(number)
            if op is not None and op not in wanted:
                if op.random:
                    self._check_noise(op)
                wanted.add(op)
                todo += refs((op.args, op.kwargs))
        return [op for op in recording.ops if op in wanted], stand_ins

    def _check_noise(self, op: Op) -> None:
        """Noise for every token would be kept; noise for every sequence (drop path) is small."""
        for number in op.outs:
            shape = () if number is None else self.recording.shapes[number]
            sizes = [n for n in shape or () if isinstance(n, Size) or n == self.tokens > 1]
            if shape is None or any(n != Size(1, ("B",)) for n in sizes):
                raise Unreadable(_RANDOM_INSIDE)

    # --- values

    def layout(self, number: int) -> Layout | None:
        """The layout of an activation."""
        shape = self.recording.shapes[number]
        if number in self.heads and shape is not None and len(shape) == 4:
            sizes, (batch, heads, rows, width) = self.recording.sizes, shape
            if "S" not in sizes and (batch, rows) == (Size(1, ("B",)), self.tokens):
                return Layout((("B",), (heads,), (rows,), (width,)), (0, 2), ("B",))
        sizes = self.recording.sizes
        batch = [name for name in ("B",) if name in sizes]
        found = layout_of(shape, [*batch, "S"] if "S" in sizes else batch, self.tokens)
        if found is None and "M" in sizes:
            found = layout_of(shape, [*batch, "M"], self.tokens)
        return found

    def live(self, value: Any) -> bool:
        return isinstance(value, Ref) and value.index in self.recording.live

    def producer(self, number: int) -> Op | None:
        return self.recording.producers.get(number)

    def param(self, number: int, transposed: bool = False) -> str:
        """The block's name of a value that does not depend on the activations."""
        name = self.recording.sources.get(number, f"value{number}")
        if transposed:
            name = f"{name}.T" if number in self.recording.sources else f"{name}T"
            self.transposed.add(name)
        self.values[name] = number
        return name

    def unique(self, name: str) -> str:
        name = name or "step"
        taken = {"input", "memory", "output", *self.nodes}
        found = name
        for i in itertools.count(2):
            if found not in taken:
                return found
            found = f"{name}_{i}"
        raise AssertionError

    def add(self, node: Node) -> str:
        self.nodes[node.name] = node
        return node.name

    # --- steps

    def build(self, number: int) -> str:
        """The name of the activation that is a value, with the steps that make it."""
        if number not in self.made:
            step = self.step(number)
            self.made[number] = self._replay(number) if step is None else step()
        return self.made[number]

    def step(self, number: int) -> Callable[[], str] | None:
        """What makes the step of a value; None if it is no step but a replay."""
        op = self.producer(number)
        if op is None or self.layout(number) is None:
            return None
        if op.path is not None:
            return lambda: self._replay(number)
        reader = _STEPS.get(op.name)
        return None if reader is None else reader(self, number, op)

    def _linear(self, number: int, op: Op) -> Callable[[], str] | None:
        """F.linear, addmm, or a product with a matrix that does not depend on the activations."""
        args = [*op.args, *op.kwargs.values()]
        transposed = op.name != "linear"
        if op.name == "addmm":
            bias, x, weight = args[:3]
        else:
            (x, weight), bias = args[:2], args[2] if len(args) > 2 else None
        if not self.live(x) or self.live(weight) or self.live(bias) or len(args) > 3:
            return None
        mine, source = self.layout(number), self.layout(x.index)
        matrix = isinstance(weight, Ref) and self.recording.values[weight.index].dim() == 2
        if not (mine and source and matrix and _last(mine) and _last(source)):
            return None

        def build() -> str:
            read, inner = self.build(x.index), weight.index
            made = self.producer(inner)
            is_t = made is not None and made.name in ("t", "__get__", "transpose", "swapaxes")
            flipped = transposed
            if transposed and is_t and self._is_transpose(inner, refs(made.args)[0]):  # type: ignore[union-attr]
                inner, flipped = refs(made.args)[0], False  # type: ignore[union-attr]
            w = self.param(inner, flipped)
            b = self.param(bias.index) if isinstance(bias, Ref) else ""
            name = self.recording.sources.get(inner, "")
            name = name.removesuffix(".weight") if name.endswith(".weight") else op.inside
            return self.add(Linear(name=self.unique(name), x=read, weights=(w,), biases=(b,)))

        return build

    def _is_transpose(self, number: int, other: int) -> bool:
        a, b = self.recording.values[number], self.recording.values[other]
        return a.dim() == b.dim() == 2 and a.shape == b.t().shape and bool((a == b.t()).all())

    def _norm(self, number: int, op: Op) -> Callable[[], str] | None:
        spec, x, weight, bias = _norm_of(op)
        mine = self.layout(number)
        if spec is None or not self.live(x) or self.live(weight) or self.live(bias):
            return None
        if mine != self.layout(x.index) or mine is None or not _last(mine):
            return None

        def build() -> str:
            read = self.build(x.index)
            w, b = (self.param(t.index) if isinstance(t, Ref) else "" for t in (weight, bias))
            return self.add(
                Norm(name=self.unique(op.inside or "norm"), x=read, weight=w, bias=b, spec=spec)
            )

        return build

    def _sum(self, number: int, op: Op) -> Callable[[], str] | None:
        a, b, *more = [*op.args, *op.kwargs.values()]
        if more or not (self.live(a) and self.live(b)):
            return None
        layouts = [self.layout(n) for n in (a.index, b.index, number)]
        if layouts[2] is None or not _last(layouts[2]) or len(set(layouts)) > 1:
            return None

        def build() -> str:
            x, residual = self.build(a.index), self.build(b.index)
            if x == residual:
                return self._replay(number)
            if residual not in self.inputs and (x in self.inputs or self._is_before(x, residual)):
                x, residual = residual, x
            return self.add(Add(name=self.unique("mid"), x=x, residual=residual))

        return build

    def _is_before(self, x: str, y: str) -> bool:
        """Whether the activation y is made of x."""
        todo, seen = [y], set[str]()
        while todo:
            name = todo.pop()
            if name == x:
                return True
            if name in self.nodes and name not in seen:
                seen.add(name)
                todo += self.nodes[name].inputs
        return False

    def _dropout(self, number: int, op: Op) -> Callable[[], str] | None:
        if not (op.p and self.drops):
            return None

        def build() -> str:
            x = self.build(op.args[0].index)
            return self.add(
                Add(name=self.unique(f"{op.inside}_dropped"), x=x, mask=self._mask(op, x))
            )

        return build

    def _mask(self, op: Op, x: str) -> str:
        self.sites += 1
        assert op.p is not None
        return self.add(
            DrawMask(name=self.unique(f"{op.inside}.mask"), site=self.sites, p=op.p, like=x, of=x)
        )

    def _act(self, number: int, op: Op) -> Callable[[], str] | None:
        act, x = _activation_of(op), op.args[0]
        if act is None or not self.live(x) or self.layout(x.index) != self.layout(number):
            return None
        return lambda: self.add(
            MLPActivation(name=self.unique(op.inside or "act"), up=self.build(x.index), act=act)
        )

    def _product(self, number: int, op: Op) -> Callable[[], str] | None:
        """act(gate) * up."""
        a, b, *more = [*op.args, *op.kwargs.values()]
        if more or not (self.live(a) and self.live(b)):
            return None
        mine = self.layout(number)
        for one, up in ((a, b), (b, a)):
            made = self.producer(self._plain(one.index))
            act = None if made is None else _activation_of(made)
            if made is None or act is None or not self.live(made.args[0]):
                continue
            gate = made.args[0].index
            if mine == self.layout(gate) == self.layout(up.index):

                def build(gate: int = gate, up: int = up.index, act: str = act) -> str:
                    read = self.build(gate), self.build(up)
                    name = self.unique(f"{op.inside}.act" if op.inside else "act")
                    return self.add(MLPActivation(name=name, gate=read[0], up=read[1], act=act))

                return build
        return None

    def _plain(self, number: int) -> int:
        """The value of which `number` is the same, behind casts and dropout that is off."""
        op = self.producer(number)
        while op is not None and (
            op.name in _CASTS or (op.name == "dropout" and not (op.p and self.drops))
        ):
            number = op.args[0].index
            op = self.producer(number)
        return number

    # --- attention

    def _attention(self, number: int, op: Op) -> Callable[[], str] | None:
        names = (
            "query",
            "key",
            "value",
            "attn_mask",
            "dropout_p",
            "is_causal",
            "scale",
            "enable_gqa",
        )
        given: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
        given |= {"scale": None, **dict(zip(names, op.args, strict=False)), **op.kwargs}
        q, k, v, mask = (given[name] for name in names[:4])
        if self.live(mask) or not all(map(self.live, (q, k, v))):
            return None
        return self._attention_step(
            number, op, (q.index, k.index, v.index), mask, given["scale"], 0.0,
            float(given["dropout_p"]), bool(given["is_causal"]),
        )  # fmt: skip

    def _attention_step(
        self,
        number: int,
        op: Op,
        heads: tuple[int, int, int],
        mask: Any,
        scale: float | None,
        softcap: float,
        p: float,
        causal: bool,
    ) -> Callable[[], str] | None:
        """Attention of three values (B, H, S, E), or of keys (B, H, E, S)."""
        layouts = [self.layout(n) for n in (*heads, number)]
        features = [[n for n in x.features if n > 1] for x in layouts if x is not None]
        if None in layouts or any(len(f) > 2 for f in features):
            return None
        counts = [len(f) for f in features]
        dims = len(self.recording.shapes[number] or ())
        if len(set(counts)) > 1 or (counts[0] == 1 and dims > 3):
            return None
        sizes = [(1, 1, *f)[-2:] for f in features]
        (q_heads, width), (kv_heads, k_width), (v_heads, _), _ = sizes
        if kv_heads != v_heads or width != k_width or q_heads % kv_heads:
            return None
        is_mask = isinstance(mask, Ref)
        if is_mask and self.recording.values[mask.index].dim() not in (2, 4):
            return None

        def build() -> str:
            q, k, v = (self.build(n) for n in heads)
            k, v, shared = self._unrepeated(k, v, kv_heads)
            q, k, v = self._side_by_side(q, k, v)
            cross = self.recording.sizes.get("M") is not None and "M" in layouts[1].names  # type: ignore[union-attr]
            spec = AttentionSpec(
                num_heads=q_heads, num_kv_heads=kv_heads // shared, head_dim=width,
                scale=width**-0.5 if scale is None else float(scale), softcap=softcap, dropout=p if self.drops else 0.0,
                window=(-1, 0 if causal else -1), align="start" if cross else "end",
                masks=("mask",) * is_mask + ("cu_seqlens",) * (self.bounds is not None),
            )  # fmt: skip
            self.sites += 1
            name = self.unique(op.inside or "attention")
            read = self.param(mask.index) if is_mask else ""
            bounds = "" if self.bounds is None else self.param(self.bounds)
            return self.add(
                Attention(
                    name=name, q=q, k=k, v=v, spec=spec, site=self.sites, mask=read, cu_q=bounds, cu_k=bounds,
                    role="attention",
                )
            )  # fmt: skip

        return build

    def _unrepeated(self, k: str, v: str, heads: int) -> tuple[str, str, int]:
        """Keys and values of which each head is there once, and how often each was repeated."""
        counts = [self._repeats(name, heads) for name in (k, v)]
        shared = math.gcd(*counts)
        if shared == 1:
            return k, v, 1
        return self._picked(k, heads, shared), self._picked(v, heads, shared), shared

    def _repeats(self, name: str, heads: int) -> int:
        """How often a replay repeats each head, one after the other."""
        program = self.programs.get(name)
        if program is None:
            return 1
        y = self._sample(program)[0].view(-1, heads, program.layout.width // heads)
        for count in range(heads, 1, -1):
            groups = y.unflatten(1, (-1, count)) if heads % count == 0 else None
            if groups is not None and bool((groups == groups[:, :, :1]).all()):
                return count
        return 1

    def _picked(self, name: str, heads: int, shared: int) -> str:
        """A replay without the repetitions of its heads; or what it repeats."""
        program, node = self.programs[name], self.nodes[name]
        assert isinstance(node, Replay)
        width = program.layout.width // heads
        pick = tuple([h * width + e for h in range(0, heads, shared) for e in range(width)])
        program = replace(program, pick=pick)
        if len(node.xs) == 1:
            y, (x,), _ = self._sample(program)
            if x.shape == y.shape and torch.equal(x, y):
                del self.nodes[name], self.programs[name]
                return node.xs[0]
        self.programs[name] = program
        self.nodes[name] = replace(node, columns=len(pick))
        return name

    def _side_by_side(self, q: str, k: str, v: str) -> tuple[str, str, str]:
        """One activation for all three, where they are its columns, in order and all of them."""
        sources, start = set(), 0
        for name in (q, k, v):
            program, node = self.programs.get(name), self.nodes.get(name)
            if program is None or not isinstance(node, Replay) or len(node.xs) != 1:
                return q, k, v
            y, (x,), _ = self._sample(program)
            if not torch.equal(y, x[:, start : start + y.shape[1]]):
                return q, k, v
            sources.add((node.xs[0], x.shape[1]))
            start += y.shape[1]
        if len(sources) != 1 or sources != {(next(iter(sources))[0], start)}:
            return q, k, v
        for name in {q, k, v}:
            if not any(name in node.inputs for node in self.nodes.values()):
                del self.nodes[name], self.programs[name]
        whole = next(iter(sources))[0]
        return whole, whole, whole

    def _softmax_attention(self, number: int, op: Op) -> Callable[[], str] | None:
        """matmul(softmax(matmul(q, k) and what is done to the scores), v)."""
        if len(op.args) != 2 or not all(map(self.live, op.args)):
            return None
        p, n, after = 0.0, op.args[0].index, True
        chain: list[Op] = []
        scores: Op | None = None
        while scores is None:
            made = self.producer(n)
            if made is None or made.path is not None:
                return None
            read = [r for r in refs((made.args, made.kwargs)) if r in self.recording.live]
            if made.name == "softmax" and after:
                if (made.kwargs.get("dim", (*made.args, None)[1])) not in (-1, 3):
                    return None
                after = False
            elif made.name in _MATMUL and not after and len(read) == 2:
                scores = made
                continue
            elif made.name == "baddbmm" and not after and len(read) == 2:
                scores = made
                chain.append(made)
                continue
            elif made.name == "dropout" and after:
                p = made.p or 0.0
            elif not (after and made.name in (*_CASTS, "view", "reshape", "nan_to_num")):
                if after or len(read) != 1:
                    return None
                chain.append(made)
            if len(read) != 1:
                return None
            n = read[0]
        chain.reverse()
        found = self._scores(scores, chain)
        if found is None:
            return None
        scale, softcap, causal, mask = found
        q, k = [r for r in refs((scores.args, scores.kwargs)) if r in self.recording.live]
        heads = (q, k, op.args[1].index)
        return self._attention_step(number, op, heads, mask, scale, softcap, p, causal)

    def _scores(self, product: Op, chain: list[Op]) -> tuple[float, float, bool, Any] | None:
        """Scale, softcap, whether causal, and the mask, of what is done to the scores q @ k."""
        capped = [i for i, op in enumerate(chain) if op.name == "tanh"]
        if len(capped) > 1:
            return None
        first = product.outs[0]
        assert first is not None
        recorded = self.recording.values[first]
        target = first
        for op in chain[-1:]:
            target = op.outs[0]  # type: ignore[assignment]
        base = torch.zeros_like(recorded)

        def after(value: Tensor, ops: list[Op], start: int) -> Tensor:
            values: dict[int, Any] = _Values(self.recording.values)
            values[start] = value
            for op in ops:
                if op is product:  # baddbmm: its first argument is added
                    beta, alpha = op.kwargs.get("beta", 1), op.kwargs.get("alpha", 1)
                    bias = values[op.args[0].index]
                    values[start] = beta * bias + alpha * value
                else:
                    run_op(op, values, self.layer, self.recording.sizes, torch.float32)
            return values[ops[-1].outs[0]] if ops else value  # type: ignore[index]

        softcap = 0.0
        try:
            if capped:
                i = capped[0]
                before = after(base + 1e-3, chain[:i], first) - after(base, chain[:i], first)
                end = chain[i].outs[0]
                one = chain[i + 1 :]
                linear = [o for o in one if o.name in (*_MUL, *_DIV)]
                assert end is not None
                factor = after(base + 1.0, linear[:1], end) - after(base, linear[:1], end)
                softcap = float(factor.double().max())
                scale = float(before.double().max()) / 1e-3 * softcap
            else:
                found = after(base + 1.0, chain, first) - after(base, chain, first)
                scale = float(found.double().abs().max())
            constant = after(base, chain, first)
        except Exception:
            return None
        if not chain or not bool((constant != 0).any()):
            return scale, softcap, False, None
        mask = self._mask_value(product, chain, first, target)
        rows, keys = constant.shape[-2:]
        ones = torch.ones(rows, keys, dtype=torch.bool, device=constant.device)
        upper = ones.triu(1) if rows == keys else None
        independent = not any(r in self._given_numbers() for r in self._roots(mask))
        if upper is not None and independent and constant.dim() >= 2:
            excluded = constant <= -1e4
            if torch.equal(excluded, upper.expand_as(excluded)) and not bool(
                (constant[~excluded] != 0).any()
            ):
                return scale, softcap, True, None
        return scale, softcap, False, mask

    def _given_numbers(self) -> set[int]:
        return {n for n in self.recording.inputs if n is not None}

    def _roots(self, value: Ref) -> set[int]:
        """The values without a producer that a value is made of."""
        todo, seen, roots = [value.index], set[int](), set[int]()
        while todo:
            n = todo.pop()
            if n in seen:
                continue
            seen.add(n)
            op = self.producer(n)
            if op is None:
                roots.add(n)
            else:
                todo += refs((op.args, op.kwargs))
        return roots

    def _mask_value(self, product: Op, chain: list[Op], first: int, target: int) -> Ref:
        """What is added to the scores, as a value of its own: the chain, of scores of zero."""
        recording = self.recording
        shape = recording.shapes[first]
        numbers = {}

        def fresh(of: int) -> int:
            recording.values.append(recording.values[of])
            recording.shapes.append(recording.shapes[of])
            recording.dtypes.append(recording.dtypes[of])
            return len(recording.values) - 1

        numbers[first] = fresh(first)
        dtype = recording.dtypes[first]
        device = recording.values[first].device

        def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        ops = [Op("zeros", zeros, tuple(shape or ()), {"dtype": dtype}, [numbers[first]], "")]
        for op in chain:
            if op is product:
                beta = op.kwargs.get("beta", 1)
                new = fresh(first)
                args = Ref(numbers[first]), op.args[0], beta
                ops.append(Op("add", _plus, args, {}, [new], ""))
                numbers[first] = new
                continue
            outs = []
            args = map_tree((op.args, op.kwargs), lambda a: _renamed(a, numbers))
            for n in op.outs:
                if n is not None:
                    numbers[n] = fresh(n)
                outs.append(None if n is None else numbers[n])
            ops.append(replace(op, args=args[0], kwargs=args[1], outs=outs))
        for op in ops:
            recording.ops.append(op)
            for n in op.outs:
                if n is not None:
                    recording.producers[n] = op
        return Ref(numbers[target])

    # --- replays

    def _replay(self, number: int) -> str:
        """A value as a replay of the operations that make it, up to the next steps."""
        op, layout = self.producer(number), self.layout(number)
        assert op is not None
        if layout is None:
            raise Opaque(op.inside, f"the result of {op.name} is not made of tokens")
        ops, sources, params = self._region(number)
        opaque = op.path is not None
        mine = layout.names
        sources.sort(key=lambda n: getattr(self.layout(n), "names", ()) != mine)
        names = [self.build(n) for n in sources]
        layouts = [self.layout(n) for n in sources]
        program = Program(
            tuple(ops), tuple(zip(sources, layouts, strict=True)), tuple(params), number, layout  # type: ignore[arg-type]
        )  # fmt: skip
        if len(names) == 1 and not opaque:
            y, (x,), _ = self._sample(program)
            if x.shape == y.shape and torch.equal(x, y):
                return names[0]
        if opaque:
            self.pieces.append(Piece(str(op.path), str(op.info)))
        inside = op.path if opaque else f"{op.inside}.{op.name.strip('_')}".lstrip(".")
        name = self.unique(str(inside))
        if len(set(names)) < len(names):
            raise Opaque(op.inside, "one activation is read in two layouts")
        tensors = tuple([self.param(n) for n in params])
        shapes = {n: self.recording.shapes[n] for n in params}
        batched, whole = [], any(o.random or o.p for o in ops)
        for tensor, n in zip(tensors, params, strict=True):
            shape = shapes[n]
            if shape is None:
                raise Opaque(op.inside, "no size explains the shape of a value that it reads")
            if any(isinstance(s, Size) and "B" in s.names for s in shape):
                batched.append(tensor)
                whole = whole or shape[0] != Size(1, ("B",))
        what = name if opaque else " → ".join(dict.fromkeys(o.name.strip("_") for o in ops))
        node = Replay(
            name=name, xs=tuple(names), tensors=tensors, function=name, what=what,
            columns=layout.width, batched=() if whole else tuple(batched), per_batch=whole,
            needed_for=self._reads(program, names, tensors, opaque or program.draws),
            tokenwise=not (opaque or whole) and self._tokenwise(program, shapes),
        )  # fmt: skip
        self.programs[name] = program
        return self.add(node)

    def _region(self, target: int) -> tuple[list[Op], list[int], list[int]]:
        """The operations up to the next steps; the activations and other values that they read."""
        live = self.recording.live
        ops, sources, params, seen = set[Op](), list[int](), list[int](), set[int]()
        todo = [target]
        while todo:
            n = todo.pop()
            if n in seen:
                continue
            seen.add(n)
            op = self.producer(n)
            if n not in live:
                params.append(n)
            elif n in self.inputs.values() or (n != target and self.step(n) is not None):
                sources.append(n)
                if not self.recording.values[n].is_floating_point():
                    made = self.producer(target)
                    raise Opaque(made.inside if made else "", "it reads indices of tokens")
            else:
                assert op is not None
                if op.path is not None and n != target:
                    raise Opaque(op.inside.rpartition(".")[0], f"a result of {op.path} is no token")
                ops.add(op)
                todo += refs((op.args, op.kwargs))
        return [op for op in self.recording.ops if op in ops], sources[::-1], params[::-1]

    def _sample(
        self, program: Program, at: At | None = None, seed: int = 0
    ) -> tuple[Tensor, list[Tensor], list[Any]]:
        """A program on random activations, with gradients: its result, and what it read."""
        sizes = self.recording.sizes
        device = self.recording.values[self.x].device
        generator, dtype = torch.Generator(device).manual_seed(seed), self.recording.exact
        xs = []
        for _, layout in program.sources:
            rows = math.prod(sizes[n] for n in layout.names)
            rows *= self.tokens if layout.names == ("B",) and "S" not in sizes else 1
            shape = rows, layout.width
            x = torch.randn(shape, generator=generator, dtype=dtype, device=device)
            xs.append(x.requires_grad_())
        tensors = []
        for n in program.params:
            t = self.recording.values[n].detach()
            t = t.to(dtype) if t.is_floating_point() else t
            tensors.append(t.requires_grad_(t.is_floating_point()))
        return self._run(program, at or self._at(program), xs, tensors), xs, tensors

    def _at(self, program: Program) -> At:
        sizes, names = self.recording.sizes, program.layout.names
        tokens = sizes[names[-1]] if names[-1:] not in ((), ("B",)) else self.tokens
        return At(sizes.get("B", 1), tokens, 0)

    def _run(self, program: Program, at: At, xs: list[Tensor], tensors: list[Any]) -> Tensor:
        with torch.enable_grad():
            sizes, dtype = self.recording.sizes, self.recording.exact
            return program.run(self.layer, sizes, dtype, at, xs, tensors)

    def _tokenwise(self, program: Program, shapes: Mapping[int, Any]) -> bool:
        """Whether each token's result is that of the token alone."""
        if program.layout.names[-1:] != ("S",) or any(
            l != program.layout.names for l in [s.names for _, s in program.sources]
        ):
            return False
        for shape in shapes.values():
            if any(isinstance(n, Size) for n in shape):
                return False
        try:
            y, xs, tensors = self._sample(program)
            order = torch.randperm(y.shape[0], generator=torch.Generator().manual_seed(0))
            order = order.to(y.device)
            mixed = self._run(program, At(1, y.shape[0], 0), [x[order] for x in xs], tensors)
        except Exception:
            return False
        slack = 64 * torch.finfo(y.dtype).eps
        return torch.allclose(mixed, y[order], rtol=slack, atol=slack)

    def _reads(
        self, program: Program, names: list[str], tensors: tuple[str, ...], all_of: bool
    ) -> tuple[tuple[str, ...], ...]:
        """For each input, the names whose gradients depend on its value."""
        everything = (*names, *tensors)
        if all_of:
            return (everything,) * len(names)
        y, xs, given = self._sample(program)
        weight = torch.randn(
            y.shape,
            generator=torch.Generator(y.device).manual_seed(1),
            dtype=y.dtype,
            device=y.device,
        )
        of = [t for t in (*xs, *given) if t is not None and t.requires_grad]
        labels = [n for n, t in zip(everything, (*xs, *given), strict=True) if t.requires_grad]
        if not y.requires_grad:
            return ((),) * len(names)
        grads = torch.autograd.grad(y, of, weight, allow_unused=True)
        found = []
        for i, x in enumerate(xs):
            zero = torch.zeros_like(x).requires_grad_()
            mine = [*xs[:i], zero, *xs[i + 1 :]]
            z = self._run(program, self._at(program), mine, given)
            at_zero = [t for t in (*mine, *given) if t is not None and t.requires_grad]
            others = torch.autograd.grad(z, at_zero, weight, allow_unused=True)
            pairs = zip(labels, grads, others, strict=True)
            found.append(tuple([n for n, g, h in pairs if not _same(g, h)]))
        return tuple(found)


class _Values(dict[int, Any]):
    """Recorded values, with others in the places of some."""

    def __init__(self, recorded: list[Tensor]) -> None:
        super().__init__()
        self.recorded = recorded

    def __missing__(self, number: int) -> Tensor:
        return self.recorded[number]


def _plus(scores: Tensor, bias: Tensor, beta: float) -> Tensor:
    return scores + beta * bias


def _renamed(leaf: Any, numbers: Mapping[int, int]) -> Any:
    return Ref(numbers[leaf.index]) if isinstance(leaf, Ref) and leaf.index in numbers else leaf


def _same(g: Tensor | None, h: Tensor | None) -> bool:
    if g is None or h is None:
        return g is h
    return torch.equal(g, h)


def _last(layout: Layout) -> bool:
    """Whether the width is the last dimension."""
    return (
        len(layout.features) == 1
        and len(layout.factors[-1]) == 1
        and isinstance(layout.factors[-1][0], int)
        and len(layout.flat) - 1 not in layout.tokens
    )


def _norm_of(op: Op) -> tuple[NormSpec | None, Any, Any, Any]:
    """The spec, input, weight and bias of a norm."""
    given = [*op.args, None, None, None, None]
    if op.name == "norm":
        return op.info, given[0], given[1], given[2]
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    if op.name == "rms_norm":
        names = ("input", "normalized_shape", "weight", "eps")
    found = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    if len(found["normalized_shape"]) != 1:
        return None, None, None, None
    eps = found.get("eps", 1e-5)
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    spec = NormSpec(kind=op.name, eps=float(eps))
    return spec, found["input"], found.get("weight"), found.get("bias")


def _activation_of(op: Op) -> str | None:
    """The row of `ACTIVATIONS` that an operation computes."""
    if op.name == "act":
        return str(op.info)
    if op.name == "gelu":
        tanh = "tanh" in (*op.args, *op.kwargs.values())
        return "gelu_tanh" if tanh else "gelu"
    return op.name.rstrip("_") if op.name.rstrip("_") in ACTIVATIONS else None


_STEPS: dict[str, Callable[[_Reader, int, Op], Callable[[], str] | None]] = {
    "linear": _Reader._linear,
    "addmm": _Reader._linear,
    "norm": _Reader._norm,
    "layer_norm": _Reader._norm,
    "rms_norm": _Reader._norm,
    "dropout": _Reader._dropout,
    "act": _Reader._act,
    "scaled_dot_product_attention": _Reader._attention,
    **dict.fromkeys(_ADD, _Reader._sum),
    **dict.fromkeys(_MUL, _Reader._product),
    **dict.fromkeys(_MATMUL, lambda r, n, op: r._linear(n, op) or r._softmax_attention(n, op)),
    **dict.fromkeys((*ACTIVATIONS, "relu_", "silu_", "tanh_"), _Reader._act),
}


# --- from what was read to the graph


def _merged(nodes: list[Node]) -> list[Node]:
    """Linear layers with the dropout and the sum that follow them, where nothing else reads them."""
    readers: dict[str, int] = {}
    for node in nodes:
        for name in (*node.inputs, *node.masks):
            readers[name] = readers.get(name, 0) + 1
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        made = by_name.get(node.x) if isinstance(node, Add) else None
        if made is None or not isinstance(node, Add) or readers[made.name] > 1:
            continue
        plain_drop = isinstance(made, Add) and not made.residual and not node.mask
        if plain_drop and node.residual:
            node = replace(node, x=made.x, mask=made.mask)
            by_name[node.name] = node
            del by_name[made.name]
            made = by_name.get(node.x)
            if made is None or readers[made.name] > 2:
                continue
        if isinstance(made, Linear) and made.plain and node.residual:
            by_name[node.name] = replace(
                made, name=node.name, residual=node.residual, mask=node.mask
            )
            mask = by_name.get(node.mask)
            if isinstance(mask, DrawMask):  # it no longer has the layer's result to be like
                by_name[mask.name] = replace(mask, like=made.weight, of=made.x)
            del by_name[made.name]
    return _ordered(by_name)


def _ordered(by_name: Mapping[str, Node]) -> list[Node]:
    """Each node after those that it reads; the output last."""
    done: dict[str, Node] = {}

    def place(node: Node) -> None:
        if node.name in done:
            return
        likes = (node.like, node.of) if isinstance(node, DrawMask) else ()
        for name in (*node.inputs, *node.masks, *likes):
            if name in by_name:
                place(by_name[name])
        done[node.name] = node

    place(by_name["output"])
    return [*done.values()]


def _with_roles(nodes: list[Node]) -> list[Node]:
    """The nodes with the roles by which presets keep them (`graph.build`)."""
    roles: dict[str, str] = {}
    by_name = {node.name: node for node in nodes}
    residuals = {getattr(node, "residual", "") for node in nodes}
    for node in nodes:
        if isinstance(node, Attention):
            for name in node.inputs:
                made = by_name.get(name)
                reads = made.needs(made.inputs) if isinstance(made, Replay) else ()
                roles.setdefault(reads[0] if reads and reads[0] in by_name else name, "heads")
        if isinstance(node, MLPActivation):
            roles.update(dict.fromkeys(filter(None, (node.gate, node.up)), "hidden"))
    for node in nodes:
        if node.name == "output":
            continue
        if getattr(node, "residual", ""):
            roles[node.name] = "stream"
            norms = [n for n in nodes if node.name in n.inputs]
            if node.name not in residuals and all(isinstance(n, Norm) for n in norms):
                roles[node.name] = "normed"
    for node in nodes:
        made = by_name.get(node.x) if isinstance(node, Norm) else None
        if isinstance(made, Linear) and not made.residual:
            roles[made.name] = "normed"
    return [
        replace(node, role=roles[node.name]) if node.name in roles and not node.role else node
        for node in nodes
    ]

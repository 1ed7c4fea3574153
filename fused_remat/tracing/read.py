"""Reads a recording as the graph of a block: its steps are those that `graph.build` makes.

Every activation is read backwards from the output. What is a norm, a linear layer, attention, a
sum, an activation of an MLP or dropout becomes that step. What lies between such steps is one
`Replay`, run as it was recorded; so is a submodule that cannot be read. What does not depend on the
layer's activations (masks, tables, a modulation) is computed at every call, before the block.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.graph.graph import Graph
from fused_remat.layers.eligibility import parameters_of
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import ACTIVATIONS, MLPActivation
from fused_remat.steps.linear import Linear
from fused_remat.steps.low_rank import LowRank
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm
from fused_remat.steps.replay import At, Replay
from fused_remat.steps.residual import Add, DrawMask
from fused_remat.tracing import attend
from fused_remat.tracing.program import Layout, Opaque, Program, layout_of
from fused_remat.tracing.reading import Piece, Reading, Shapes
from fused_remat.tracing.samples import activation_of
from fused_remat.tracing.simplify import simplified
from fused_remat.tracing.values import (
    SHAPES,
    STREAM,
    Op,
    Recording,
    Ref,
    Size,
    Unreadable,
    map_tree,
    refs,
)

#: Names that mean something else in a block.
_RESERVED = ("input", "memory", "output", "seed")
#: The first site of the dropouts of a block that was read.
SITE = 1 << 12
_ADD = ("add", "__add__", "__radd__", "add_", "__iadd__")
_SQUARE = ("square", "pow", "__pow__")
_MUL = ("mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__")
_CASTS = ("to", "float", "type_as", "type", "contiguous", "double")
_TRANSPOSES = ("t", "__get__", "transpose", "swapaxes")


#: A replay of more operations than this, or of one of these, is a piece and named in reports.
_FEW = 24
_HEAVY = (
    "matmul", "__matmul__", "bmm", "mm", "einsum", "baddbmm", "linear", "conv1d", "conv2d",
    "grouped_mm", "_grouped_mm", "softmax", "topk", "scatter", "index_add",
)  # fmt: skip
#: Operations whose results are parts of what they read, side by side.
_SPLITS = ("chunk", "split", "tensor_split", "unbind")
#: Operations by which a piece chooses: another bit in what they read may change the choice.
_CHOICES = ("topk", "sort", "argsort", "argmax", "argmin", "one_hot", "gt", "ge", "lt", "le", "eq")


@dataclass(eq=False)
class Reader:
    """Reads one recording of `layer`.

    Attributes:
        x, memory: the number of the residual stream's input, and of another activation that the
            layer reads.
        bounds: the number of the bounds of sequences of variable length, of which the recording has
            one sequence.
        tokens: of a sequence in the recording.
        dtype: of the stream in the call.
        names: of the arguments, by their leaves.
        drops: whether dropout acts.
        mixes: whether adapters compute in dtypes of their own; not in a proof.
        numbered: the names of values that are no tensors of the layer.
        nodes, programs, picks: the steps so far, and the functions of replays, by name; replays
            that are columns of another activation.
    """

    recording: Recording
    layer: nn.Module
    x: int
    memory: int | None
    bounds: int | None
    tokens: int
    dtype: torch.dtype
    names: Sequence[str]
    drops: bool = True
    mixes: bool = True
    nodes: dict[str, Node] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    picks: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    made: dict[int, str] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    pieces: dict[str, Piece] = field(default_factory=dict)
    fills: dict[int, float] = field(default_factory=dict)
    numbered: dict[int, str] = field(default_factory=dict)
    sites: int = SITE

    def __post_init__(self) -> None:
        ops = self.recording.ops
        attends = [op for op in ops if op.name == "scaled_dot_product_attention"]
        #: Values that attention reads or makes: their third dimension counts the tokens.
        self.heads = {n for op in attends for n in (*refs(op.args[:3]), *op.outs)}
        self.uses = [n for op in ops for n in refs((op.args, op.kwargs))]
        #: Values of which others are parts, side by side.
        self.split = {n for op in ops if op.name in _SPLITS for n in refs(op.args[:1])}
        self.inputs = {"input": self.x} | ({} if self.memory is None else {"memory": self.memory})

    def reading(self, kind: str) -> Reading:
        """The block, as a graph of a kind.

        Raises: Opaque for a submodule that is to be replayed as a whole; Unreadable if there is no
            block.
        """
        recording, layouts = self.recording, {}
        for name, number in self.inputs.items():
            layout = self.layout(number)
            if layout is None:
                raise Unreadable(f"{name} is not made of tokens")
            layouts[name] = number, layout
            self.made[number], self.widths[name] = name, layout.width
        target, layout = self._target()
        name = self.build(target)
        if name in self.inputs:
            raise Unreadable("its result is its input")
        last = replace(self.nodes.pop(name), name="output")
        if isinstance(last, Replay):
            last = replace(last, function="output")
            self.programs["output"] = self.programs.pop(name)
        self.nodes["output"] = last
        nodes = simplified(self.nodes, self.picks)
        params = dict.fromkeys(p for node in nodes for p in node.params if p)
        graph = Graph(kind, tuple(nodes), tuple(params), tuple(self.inputs))
        values = {name: n for name, n in self.values.items() if name in params}
        others = [n for n in refs(recording.result) if n not in recording.live]
        before, stand_ins = self._before([*values.values(), *others])
        return Reading(
            graph, before, values, self.transposed, self.programs, layouts, (target, layout),
            recording.result, recording.inputs, recording.sources, stand_ins,
            tuple(self.pieces.values()), tuple(sorted(recording.fixed)), self.fills,
            self._elements(before),
        )  # fmt: skip

    def _elements(self, before: list[Op]) -> dict[int, float]:
        """`Reading.elements`."""
        recording, found = self.recording, dict[int, float]()
        roots = [
            recording.values[n] for n in (*recording.sources, *recording.inputs) if n is not None
        ]
        memory = {t.untyped_storage().data_ptr() for t in roots}
        for number in [n for op in before for n in op.outs if n is not None]:
            value, shape = recording.values[number], recording.shapes[number]
            if value.is_floating_point():
                follows = shape is None or any(isinstance(n, Size) for n in shape)
                is_view = value.untyped_storage().data_ptr() in memory
                found[number] = 0 if is_view else math.inf if follows else value.numel()
        return found

    def _target(self) -> tuple[int, Layout]:
        """The one result that the block computes; attention's scores are no result of a block."""
        recording = self.recording
        live = dict.fromkeys(n for n in refs(recording.result) if n in recording.live)
        scores = [n for n in live if self._is_scores(n)]
        if scores and not type(self.layer).__module__.startswith("transformers."):  # drops them
            raise Unreadable("it returns the scores of attention")
        recording.result = map_tree(
            recording.result, lambda a: None if isinstance(a, Ref) and a.index in scores else a
        )
        targets = [n for n in live if n not in scores and n not in self.inputs.values()]
        if len(targets) != 1:
            raise Unreadable(f"it has {len(targets)} results that depend on its input")
        layout = self.layout(targets[0])
        if layout is None:
            raise Unreadable("its result is not made of its input's tokens")
        return targets[0], layout

    def _is_scores(self, number: int) -> bool:
        """Whether a value has a number for each query and key."""
        shape = self.recording.shapes[number] or ()
        names = [n for s in shape if isinstance(s, Size) for n in s.names if n in ("S", "M")]
        square = (
            [n for n in shape[-2:] if n == self.tokens] if "S" not in self.recording.sizes else []
        )
        return len(names) == 2 or (len(shape) == 4 and len(square) == 2)

    def _before(self, needed: Iterable[int]) -> tuple[list[Op], Shapes]:
        """The operations that make the values `needed`, which read no activation."""
        recording, wanted, stand_ins = self.recording, set[Op](), Shapes()
        todo = [*needed]
        while todo:
            number = todo.pop()
            op = recording.producers.get(number)
            if number in recording.live:
                shape = recording.shapes[number]
                if shape is None:
                    raise Unreadable("it reads the shape of an activation that no size explains")
                stand_ins[number] = shape, recording.dtypes[number]
            elif op is not None and op not in wanted:
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
                raise Unreadable("it draws random numbers for every token, outside of dropout")

    # --- values

    def layout(self, number: int) -> Layout | None:
        """The layout of an activation; None if it does not have the call's tokens."""
        shape, sizes = self.recording.shapes[number], self.recording.sizes
        batch = ["B"] if "B" in sizes else []
        if "S" in sizes:
            found = layout_of(shape, [*batch, "S"], self.tokens)
            return found or ("M" in sizes and layout_of(shape, [*batch, "M"], self.tokens)) or None
        four = shape if number in self.heads and shape is not None and len(shape) == 4 else (0,) * 4
        if (four[0], four[2]) == (Size(1, ("B",)), self.tokens):
            shape = four
            return Layout((("B",), *[(n,) for n in shape[1:]]), (0, 2), ("B",))
        return layout_of(shape, batch, self.tokens)

    def live(self, value: Any) -> bool:
        """Whether a leaf of an operation's arguments is an activation."""
        return isinstance(value, Ref) and value.index in self.recording.live

    def producer(self, number: int) -> Op | None:
        return self.recording.producers.get(number)

    def roots(self, number: int) -> set[int]:
        """The values without a producer that a value is made of."""
        todo, seen, found = [number], set[int](), set[int]()
        while todo:
            n = todo.pop()
            op = self.producer(n)
            if op is None:
                found.add(n)
            elif n not in seen:
                todo += refs((op.args, op.kwargs))
            seen.add(n)
        return found

    def fix(self, *numbers: int) -> None:
        """The values of buffers and attributes, of which these are made, decide what is read."""
        sources, params = self.recording.sources, {*parameters_of(self.layer)}
        names = {sources[n] for number in numbers for n in self.roots(number) if n in sources}
        self.recording.fixed |= names - params

    def new_value(
        self,
        name: str,
        run: Callable[..., Tensor],
        args: Any,
        made: Tensor | None = None,
        of: int | None = None,
        **kwargs: Any,
    ) -> int:
        """A value that an operation of ours makes before the block; its shape is that of `made`,
        with the sizes of the first argument's, or that of the value `of`."""
        recording, number = self.recording, len(self.recording.values)
        op = Op(name, run, tuple(args), kwargs, [number], "")
        if made is not None:
            sizes = {n.of(recording.sizes): n for n in args[1] if isinstance(n, Size)}
            recording.values.append(made)
            recording.shapes.append(tuple([sizes.get(n, n) for n in made.shape]))
            recording.dtypes.append(recording.dtypes[args[0].index])
        else:
            assert of is not None
            for row in (recording.values, recording.shapes, recording.dtypes):
                row.append(row[of])  # type: ignore[arg-type]
        recording.ops.append(op)
        recording.producers[number] = op
        return number

    def param(self, number: int, transposed: bool = False) -> str:
        """The block's name of a value that is no activation."""
        own = self.recording.sources.get(number)
        name = own or self.numbered.get(number) or self._name_of(number)
        if own is None:
            self.numbered[number] = name
        if transposed:
            name = f"{name}T" if own is None else f"{name}.T"
            self.transposed.add(name)
        self.values[name] = number
        return name

    def _name_of(self, number: int) -> str:
        """Return a name for a value made before the block: that of the first argument, or else the
        first of the layer's tensors, that it is made of. It has no dot, as those of weights have.
        """
        recording, roots = self.recording, self.roots(number)
        leaf = {n: name for n, name in zip(recording.inputs, self.names, strict=True)}
        given = [leaf[n] for n in sorted(roots) if n in leaf and n not in recording.live]
        held = [recording.sources[n] for n in sorted(roots) if n in recording.sources]
        name = re.sub(r"\W", "_", [*given, *held, "value"][0])
        taken = {*self.numbered.values(), *self.values, *self.nodes, *_RESERVED}
        return name if name not in taken else _numbered(name, taken)

    # --- steps

    def unique(self, name: str) -> str:
        """`name`, with a number if another step has it."""
        name, taken = name or "step", {*self.nodes, *self.numbered.values(), *_RESERVED}
        return name if name not in taken else _numbered(name, taken)

    def add(self, node: Node) -> str:
        self.nodes[node.name] = node
        return node.name

    def remove(self, *names: str) -> None:
        """Remove steps that no step reads."""
        for name in dict.fromkeys(names):
            if not any(name in node.inputs for node in self.nodes.values()):
                self.nodes.pop(name, None)
                self.programs.pop(name, None)
                self.picks.pop(name, None)

    def site(self) -> int:
        """A dropout site of its own."""
        self.sites += 1
        return self.sites

    def width(self, name: str) -> int:
        """The width of an activation."""
        return self.widths[name]

    def build(self, number: int) -> str:
        """The name of the activation that is a value, with the steps that make it."""
        if number not in self.made:
            step, layout = self.step(number), self.layout(number)
            self.made[number] = self._replay(number) if step is None else step()
            if layout is not None:
                self.widths.setdefault(self.made[number], layout.width)
        return self.made[number]

    def step(self, number: int) -> Callable[[], str] | None:
        """What makes the step of a value; None if it is no step but a replay."""
        op = self.producer(number)
        if op is None or self.layout(number) is None or not self._is_of_stream(number):
            return None
        if op.path is not None:
            return lambda: self._replay(number)
        reader = _STEPS.get(op.name)
        made = None if reader is None else reader(self, number, op)
        if made is None and op.name in _HEAVY and number in self.split:
            return lambda: self._replay(number)  # once for all parts, and not for each
        return made

    def _is_of_stream(self, number: int) -> bool:
        """Whether a value has the stream's dtype: the only one that steps compute in."""
        return self.recording.dtypes[number] is STREAM

    def _linear(self, number: int, op: Op) -> Callable[[], str] | None:
        """F.linear, addmm, or a product with a matrix that is no activation."""
        args = [*op.args, *op.kwargs.values()]
        bias, x, weight = args[:3] if op.name == "addmm" else ([*args, None][2], *args[:2])
        if not self.live(x) or self.live(weight) or self.live(bias) or len(args) > 3:
            return None
        matrix = isinstance(weight, Ref) and self.recording.values[weight.index].dim() == 2
        if not (matrix and _is_last(self.layout(number)) and _is_last(self.layout(x.index))):
            return None

        def build() -> str:
            read, inner, flipped = self.build(x.index), weight.index, op.name != "linear"
            made = self.producer(inner)
            source = refs(made.args)[0] if made is not None and made.name in _TRANSPOSES else None
            if flipped and source is not None and self._is_transpose(inner, source):
                inner, flipped = source, False
            w = self.param(inner, flipped)
            b = self.param(bias.index) if isinstance(bias, Ref) else ""
            name = self.recording.sources.get(inner, "")
            name = name.removesuffix(".weight") if name.endswith(".weight") else op.inside
            return self.add(Linear(name=self.unique(name), x=read, weights=(w,), biases=(b,)))

        return build

    def _is_transpose(self, number: int, other: int) -> bool:
        a, b = self.recording.values[number], self.recording.values[other]
        return a.dim() == b.dim() == 2 and a.shape == b.t().shape and torch.equal(a, b.t())

    def _norm(self, number: int, op: Op) -> Callable[[], str] | None:
        spec, x, weight, bias = _norm_of(op, self.dtype)
        mine = self.layout(number)
        if spec is None or not self.live(x) or self.live(weight) or self.live(bias):
            return None
        if not _is_last(mine) or mine != self.layout(x.index):
            return None

        def build() -> str:
            read = self.build(x.index)
            w, b = (self.param(t.index) if isinstance(t, Ref) else "" for t in (weight, bias))
            name = self.unique(op.inside or "norm")
            return self.add(Norm(name=name, x=read, weight=w, bias=b, spec=spec))

        return build

    def _sum(self, number: int, op: Op) -> Callable[[], str] | None:
        """A sum of activations as wide as the stream, or a low-rank update of a linear layer."""
        update = self._update(op)
        if update is not None:
            return lambda: self._updated(*update)
        terms = self._terms(number)
        return None if terms is None else lambda: self._sum_of(number, terms)

    def _update(self, op: Op) -> Any:
        """The arguments of `_updated` for base(x) + scale * B(A(dropout(x))); None for others."""
        given = [*op.args, *op.kwargs.values()]
        if len(given) != 2 or not all(map(self.live, given)):
            return None
        for base, other in (given, given[::-1]):
            scale, n = 1.0, self._plain(other.index)
            made = self.producer(n)
            if made is not None and made.name in _MUL and isinstance(made.args[1], (int, float)):
                scale, n = float(made.args[1]), self._plain(made.args[0].index)
            up, down = self._layer(n), None
            if up is not None:
                down = self._layer(self._plain(up[0]))
            if up is None or down is None or up[2] is not None or down[2] is not None:
                continue
            p, x = 0.0, self._plain(down[0])
            drops = self.producer(x)
            if drops is not None and drops.name == "dropout" and drops.p:
                p, x = drops.p, self._plain(drops.args[0].index)
            layer = self._base(self._plain(base.index))
            if layer is not None and self._plain(layer) == x:
                return base.index, down[1], up[1], scale, p, op
        return None

    def _layer(self, number: int) -> tuple[int, int, int | None] | None:
        """The numbers of x, weight and bias of a value that `F.linear` makes."""
        op = self.producer(number)
        if op is None or op.name != "linear" or self._linear(number, op) is None:
            return None
        x, weight, bias = [*op.args, *op.kwargs.values(), None][:3]
        return x.index, weight.index, bias.index if isinstance(bias, Ref) else None

    def _base(self, number: int) -> int | None:
        """What a linear layer, with or without updates, reads."""
        layer, op = self._layer(number), self.producer(number)
        if layer is not None:
            return layer[0]
        update = self._update(op) if op is not None and op.name in _ADD else None
        return None if update is None else self._base(self._plain(update[0]))

    def _updated(self, base: int, a: int, b: int, scale: float, p: float, op: Op) -> str:
        """A linear layer with one more low-rank update."""
        name = self.build(base)
        node = self.nodes[name]
        assert isinstance(node, Linear)
        low, mask = f"{name}.low{len(node.updates)}", ""
        if p and self.drops:
            mask = self.add(
                DrawMask(
                    name=self.unique(f"{low}.mask"), site=self.site(), p=p, like=node.x, of=node.x
                )
            )
        own, beside = (self._dtype(n) for n in (a, self.values[node.weight]))
        dtype = own if self.mixes and own != beside else None
        update = LowRank(
            a=self.param(a), b=self.param(b), low=low, scale=scale, mask=mask, dtype=dtype
        )
        self.nodes[name] = replace(node, updates=(*node.updates, update))
        return name

    def _dtype(self, number: int) -> torch.dtype | None:
        """The dtype of a parameter of the layer."""
        name = self.recording.sources.get(number, "")
        found = parameters_of(self.layer).get(name)
        return None if found is None else found.dtype

    def _terms(self, number: int) -> list[int] | None:
        """The terms of a sum no wider than the stream, and of those that nothing else reads."""
        op = self.producer(number)
        if op is None or op.name not in _ADD or op.path is not None or self._update(op):
            return None
        given, mine = [*op.args, *op.kwargs.values()], self.layout(number)
        if len(given) != 2 or not all(map(self.live, given)) or not _is_last(mine):
            return None
        a, b = (given[0].index, given[1].index)
        if a == b or self.layout(a) != mine or self.layout(b) != mine:
            return None
        if mine is None or mine.width > self.widths["input"]:  # within an activation
            return None
        found = []
        for term in (a, b):
            inner = self._terms(term) if self.uses.count(term) == 1 else None
            found += inner or [term]
        return found

    def _sum_of(self, number: int, terms: list[int]) -> str:
        """The terms are added to the residual stream one after the other, as blocks do."""
        names = [self.build(term) for term in terms]
        if len(set(names)) < len(names):
            return self._replay(number)
        stream = next(
            (n for n in names if n in self.inputs or any(self._is_before(n, o) for o in names)),
            names[0],
        )
        for name in [n for n in names if n != stream]:
            stream = self.add(Add(name=self.unique("mid"), x=name, residual=stream))
            self.widths[stream] = self.widths[name]
        return stream

    def _is_before(self, x: str, y: str) -> bool:
        """Whether the activation y is made of another, x."""
        todo, seen = [y], set[str]()
        while todo:
            name = todo.pop()
            if name == x != y:
                return True
            if name in self.nodes and name not in seen:
                seen.add(name)
                todo += self.nodes[name].inputs
        return False

    def _dropout(self, number: int, op: Op) -> Callable[[], str] | None:
        if not (op.p and self.drops):
            return None
        p = op.p

        def build() -> str:
            x = self.build(op.args[0].index)
            mask = DrawMask(
                name=self.unique(f"{op.inside or 'dropout'}.mask"),
                site=self.site(),
                p=p,
                like=x,
                of=x,
            )
            name = self.unique(f"{op.inside or 'dropout'}.dropped")
            return self.add(Add(name=name, x=x, mask=self.add(mask)))

        return build

    def _activation(self, op: Op | None) -> tuple[str, Any] | None:
        """Return the entry of `ACTIVATIONS` that an operation computes, and its input, or None."""
        if op is None or not isinstance(next(iter(op.args), None), Ref):
            return None
        if op.name in _SQUARE and (op.name == "square" or op.args[1:] == (2,)):
            inner = self._activation(self.producer(op.args[0].index))
            return ("relu2", inner[1]) if inner is not None and inner[0] == "relu" else None
        act = _activation_of(op)
        return None if act is None else (act, op.args[0])

    def _act(self, number: int, op: Op) -> Callable[[], str] | None:
        found = self._activation(op)
        if found is None:
            return None
        act, x = found
        if not self.live(x) or self.layout(x.index) != self.layout(number):
            return None
        name = op.inside or "act"
        return lambda: self.add(
            MLPActivation(up=self.build(x.index), name=self.unique(name), act=act)
        )

    def _product(self, number: int, op: Op) -> Callable[[], str] | None:
        """act(gate) * up."""
        given, mine = [*op.args, *op.kwargs.values()], self.layout(number)
        if len(given) != 2 or not all(map(self.live, given)):
            return None
        for one, up in (given, given[::-1]):
            found = self._activation(self.producer(self._plain(one.index)))
            if found is None:
                continue
            act, gate = found
            if self.live(gate) and mine == self.layout(gate.index) == self.layout(up.index):

                def build(gate: int = gate.index, up: int = up.index, act: Any = act) -> str:
                    read = self.build(gate), self.build(up)
                    name = self.unique(f"{op.inside}.act".lstrip("."))
                    return self.add(MLPActivation(name=name, gate=read[0], up=read[1], act=act))

                return build
        return None

    def _plain(self, number: int) -> int:
        """The value that `number` is, behind casts and dropout that is off."""
        op = self.producer(number)
        while op is not None and (
            op.name in _CASTS or (op.name == "dropout" and not (op.p and self.drops))
        ):
            number = op.args[0].index
            op = self.producer(number)
        return number

    # --- replays

    def _replay(self, number: int) -> str:
        """A value as a replay of the operations that make it, up to the next steps."""
        op, layout = self.producer(number), self.layout(number)
        assert op is not None
        if layout is None:
            raise Opaque(op.inside, f"the result of {op.name} is not made of tokens")
        ops, sources, params = self._region(number)
        sources.sort(key=lambda n: getattr(self.layout(n), "names", ()) != layout.names)
        layouts = [known for n in sources if (known := self.layout(n)) is not None]
        names = [self.build(n) for n in sources]
        pairs = tuple(zip(sources, layouts, strict=True))
        program = Program(tuple(ops), pairs, tuple(params), number, layout)
        opaque = op.path is not None
        made = None
        if len(names) == 1 and program.only_moves:
            made = self.sample(program)
            if made[0].shape == made[1][0].shape and torch.equal(made[0], made[1][0]):
                return names[0]
        if len(set(names)) < len(names):
            raise Opaque(op.inside, "it reads one activation in two layouts")
        act = None if params or opaque or layouts != [layout] else self._activation_by(program)
        if act is not None:
            name = self.unique(f"{_common([o.inside for o in ops])}.act".lstrip("."))
            return self.add(MLPActivation(name=name, up=names[0], act=act))
        whole, batched, shapes = program.draws or self._mixes_batch(program), list[int](), []
        for n in params:
            shape = self.recording.shapes[n]
            if shape is None:
                raise Opaque(op.inside, "no size explains the shape of a value that it reads")
            shapes.append(shape)
            if any(isinstance(s, Size) and "B" in s.names for s in shape):
                batched.append(n)
                whole = whole or shape[0] != Size(1, ("B",))
        where = str(op.path) if opaque else _common([o.inside for o in ops])
        is_piece = opaque or len(ops) > _FEW or any(o.name in _HEAVY for o in ops)
        name = self.unique(
            where or "forward" if is_piece else f"{where}.{op.name.strip('_')}".lstrip(".")
        )
        if is_piece:
            heavy = dict.fromkeys(o.name.strip("_") for o in ops if o.name in _HEAVY)
            runs = ", ".join(heavy) or f"{len(ops)} operations"
            why = str(op.info) if opaque else f"it runs {runs}"
            self.pieces[where] = Piece(where or "forward", why)
        tensors = tuple([self.param(n) for n in params])
        chooses = opaque or any(o.name.strip("_") in _CHOICES for o in ops)
        node = Replay(
            name=name, xs=tuple(names), tensors=tensors, function=name,
            what=name if is_piece else " → ".join(dict.fromkeys(o.name.strip("_") for o in ops)),
            columns=layout.width, per_batch=whole,
            batched=() if whole else tuple([self.param(n) for n in batched]),
            needed_for=self._needed_for(program, (*names, *tensors)),
            chooses=chooses, stages=self._stages(ops, params),
            tokenwise=not (opaque or whole) and self._is_tokenwise(program, shapes),
        )  # fmt: skip
        self.programs[name] = program
        self.add(node)
        if made is not None:
            self.note_pick(name, made[0], made[1])
        return name

    def _activation_by(self, program: Program) -> str | None:
        """Return the entry of `ACTIVATIONS` that operations on one activation compute, by trial."""
        if program.draws or not self._is_of_stream(program.target):
            return None
        _, (like,), _ = self.sample(program)
        return activation_of(lambda x: self.run(program, [x], []), like)

    def _stages(self, ops: list[Op], params: list[int]) -> tuple[tuple[str, ...], ...]:
        """The names of values, by the operations that read them last, from the last one."""
        last = {n: i for i, op in enumerate(ops) for n in refs((op.args, op.kwargs)) if n in params}
        found: dict[int, list[str]] = {}
        for number in sorted(last, key=last.__getitem__, reverse=True):
            found.setdefault(last[number], []).append(self.param(number))
        return tuple(map(tuple, found.values()))

    def note_pick(self, name: str, y: Tensor, xs: list[Tensor]) -> None:
        """Note that a replay is columns side by side of what it reads, if it is."""
        self.widths[name] = y.shape[1]
        node = self.nodes.get(name)
        if len(xs) != 1 or not isinstance(node, Replay):
            return
        same = (xs[0] == y[:, :1]).all(0).nonzero()
        first = int(same[0]) if len(same) else 0
        if torch.equal(xs[0][:, first : first + y.shape[1]], y):
            self.picks[name] = node.xs[0], first, first + y.shape[1]

    def _region(self, target: int) -> tuple[list[Op], list[int], list[int]]:
        """The operations up to the next steps; the activations and other values that they read."""
        live, ops = self.recording.live, set[Op]()
        sources, params, seen, todo = list[int](), list[int](), set[int](), [target]
        while todo:
            n = todo.pop()
            if n in seen:
                continue
            seen.add(n)
            op = self.producer(n)
            if n not in live:
                shaped = op is not None and op.name in SHAPES and not live.isdisjoint(refs(op.args))
                if op is None or not shaped:
                    params.append(n)
                    continue
                ops.add(op)  # like an activation, whose dtype autocast decides
                todo += refs((op.args, op.kwargs))
            elif n in self.inputs.values() or (n != target and self.step(n) is not None):
                sources.append(n)
                if not self.recording.values[n].is_floating_point():
                    made = self.producer(target)
                    raise Opaque(made.inside if made else "", "it reads indices of tokens")
            else:
                assert op is not None
                if op.path is not None and n != target:
                    parent = op.inside.rpartition(".")[0]
                    raise Opaque(parent, f"a result of {op.path} is not made of tokens")
                ops.add(op)
                todo += refs((op.args, op.kwargs))
        return [op for op in self.recording.ops if op in ops], sources[::-1], params[::-1]

    def sample(self, program: Program, seed: int = 0) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """A program on random activations, with gradients: its result, and what it read."""
        sizes, device = self.recording.sizes, self.recording.values[self.x].device
        generator, dtype = torch.Generator(device).manual_seed(seed), self.recording.exact
        xs = []
        for _, layout in program.sources:
            rows = math.prod(sizes[n] for n in layout.names)
            rows *= 1 if {"S", "M"} & {*layout.names} else self.tokens
            shape = rows, layout.width
            x = torch.randn(shape, generator=generator, dtype=dtype, device=device)
            xs.append(x.requires_grad_())
        tensors = [self.recording.values[n].detach() for n in program.params]
        tensors = [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in tensors]
        return self.run(program, xs, tensors), xs, tensors

    def run(
        self, program: Program, xs: list[Tensor], tensors: list[Tensor], at: At | None = None
    ) -> Tensor:
        """A program with the recording's sizes."""
        sizes, names = self.recording.sizes, program.layout.names
        last = names[-1] if names else ""
        tokens = sizes[last] if last in ("S", "M") else self.tokens
        at = at or At(sizes.get("B", 1), tokens, 0)
        modules, dtype = self.layer.get_submodule, self.recording.exact
        return program.run(modules, sizes, dtype, at, xs, tensors)

    def _is_tokenwise(self, program: Program, shapes: list[tuple[Any, ...]]) -> bool:
        """Whether each token's result is that of the token alone: found by mixing the tokens."""
        names = program.layout.names
        if names[-1:] != ("S",) or any(layout.names != names for _, layout in program.sources):
            return False
        if any(isinstance(n, Size) for shape in shapes for n in shape):
            return False
        if not self._keeps(program, names):
            return False
        y, xs, tensors = self.sample(program)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).to(y.device)
        try:
            mixed = self.run(program, [x[order] for x in xs], tensors, At(1, len(y), 0))
        except RuntimeError:  # a number that follows from the batch
            return False
        slack = 64 * torch.finfo(y.dtype).eps
        return torch.allclose(mixed, y[order], rtol=slack, atol=slack)

    def _mixes_batch(self, program: Program) -> bool:
        return not self._keeps(program, program.layout.names[:-1])

    def _keeps(self, program: Program, names: Sequence[str]) -> bool:
        """Whether all that a program computes of its activations has a dimension for each of the
        sizes `names`; what lacks one mixes them, though a limit may hide it (`clamp`)."""
        if program.is_algebra:
            return True
        made = [n for op in program.ops for n in op.outs if n in self.recording.live]
        shapes = [self.recording.shapes[n] for n in made if n is not None]
        found = [
            [n for s in shape or () if isinstance(s, Size) for n in s.names] for shape in shapes
        ]
        return all(set(names).issubset(mine) for mine in found)

    def _needed_for(self, program: Program, names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """For each activation, the names whose gradients depend on its value: found by trying."""
        if program.draws or not program.is_algebra:
            return (names,) * len(program.sources)
        _, xs, tensors = self.sample(program)
        tensors = [_moved(t) for t in tensors]  # a coefficient that is 0 may become another
        y = self.run(program, xs, tensors)
        if not y.requires_grad:
            return ((),) * len(xs)
        generator = torch.Generator(y.device).manual_seed(1)
        dy = torch.randn(y.shape, generator=generator, dtype=y.dtype, device=y.device)
        labels = [n for n, t in zip(names, (*xs, *tensors), strict=True) if t.requires_grad]

        def grads(y: Tensor, xs: list[Tensor]) -> tuple[Tensor | None, ...]:
            wanted = [t for t in (*xs, *tensors) if t.requires_grad]
            return torch.autograd.grad(y, wanted, dy, allow_unused=True)

        expected, found = grads(y, xs), []
        for i, x in enumerate(xs):
            mine = [*xs[:i], torch.zeros_like(x).requires_grad_(), *xs[i + 1 :]]
            others = grads(self.run(program, mine, tensors), mine)
            pairs = zip(labels, expected, others, strict=True)
            found.append(tuple([n for n, g, h in pairs if not _is_same(g, h)]))
        return tuple(found)


def _numbered(name: str, taken: Collection[str]) -> str:
    """Return `name` with the first number that makes it another than those taken."""
    return next(n for i in itertools.count(2) if (n := f"{name}_{i}") not in taken)


def _common(paths: list[str]) -> str:
    """The innermost submodule that has all the paths."""
    parts = [path.split(".") for path in paths]
    same = itertools.takewhile(lambda names: len(set(names)) == 1, zip(*parts, strict=False))
    return ".".join([names[0] for names in same])


def _moved(t: Tensor) -> Tensor:
    """Other numbers near those of `t`."""
    if not t.requires_grad:
        return t
    step = torch.sin(1.0 + torch.arange(t.numel()).to(t)).view(t.shape)
    return (t.detach() + 0.1 * step).requires_grad_()


def _is_same(g: Tensor | None, h: Tensor | None) -> bool:
    return g is h if g is None or h is None else torch.equal(g, h)


def _is_last(layout: Layout | None) -> bool:
    """Whether the width is the last dimension, and that alone."""
    if layout is None or len(layout.factors[-1]) != 1:
        return False
    last = len(layout.flat) - 1
    others = [n for i, n in enumerate(layout.flat) if i not in (*layout.tokens, last)]
    return last not in layout.tokens and all(n == 1 for n in others)


def _norm_of(op: Op, dtype: torch.dtype) -> tuple[NormSpec | None, Any, Any, Any]:
    """The spec, input, weight and bias of a norm; None for the spec if it is not over the width."""
    if op.name == "norm":
        x, weight, bias = (*op.args, None, None)[:3]
        return op.info, x, weight, bias
    affine = ("weight", "bias") if op.name == "layer_norm" else ("weight",)
    names = ("input", "normalized_shape", *affine, "eps")
    given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
    eps = given.get("eps", 1e-5 if op.name == "layer_norm" else None)
    least = torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # that of ATen
    spec = NormSpec(kind=op.name, eps=least if eps is None else float(eps))
    over_width = len(given["normalized_shape"]) == 1
    return spec if over_width else None, given["input"], given.get("weight"), given.get("bias")


def _activation_of(op: Op) -> str | None:
    """The row of `ACTIVATIONS` that an operation computes."""
    if op.name == "act":
        return str(op.info)
    if op.name == "gelu":
        return "gelu_tanh" if "tanh" in (*op.args, *op.kwargs.values()) else "gelu"
    name = op.name.rstrip("_")
    return name if name in ACTIVATIONS else None


def _matmul(r: Reader, number: int, op: Op) -> Callable[[], str] | None:
    return r._linear(number, op) or attend.from_softmax(r, number, op)


#: By the name of an operation: what returns the function that makes its step, None for no step.
_STEPS: Mapping[str, Callable[[Reader, int, Op], Callable[[], str] | None]] = {
    "linear": Reader._linear,
    "addmm": Reader._linear,
    "norm": Reader._norm,
    "layer_norm": Reader._norm,
    "rms_norm": Reader._norm,
    "dropout": Reader._dropout,
    "act": Reader._act,
    "scaled_dot_product_attention": attend.from_call,
    **dict.fromkeys(_ADD, Reader._sum),
    **dict.fromkeys(_MUL, Reader._product),
    **dict.fromkeys(attend.MATMUL, _matmul),
    **dict.fromkeys((*ACTIVATIONS, *_SQUARE, "relu_", "silu_", "tanh_"), Reader._act),
}

"""A tracer that turns a recording into the graph of a block, with the steps of `graph.build`.

Every activation is traced backwards from the output. A norm, a linear layer, attention, a sum, an
activation function of an MLP and dropout become that step (`steps.py`, `attention.py`). The
operations between such steps become one `Replay`, which runs as it was recorded; so does a
submodule that cannot be traced (`replays.py`). Values that do not depend on the layer's activations
(masks, tables, a modulation) are computed at every call, before the block.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.graph.graph import Graph
from fused_remat.layers.eligibility import parameters_of
from fused_remat.steps.node import Node
from fused_remat.steps.replay import Replay
from fused_remat.tracing.block import ReplayedSubmodule, Shapes, TracedBlock
from fused_remat.tracing.program import Layout, Program, layout_of
from fused_remat.tracing.replays import HEAVY, replay
from fused_remat.tracing.simplify import simplified
from fused_remat.tracing.steps import STEPS, Build
from fused_remat.tracing.values import (
    STREAM,
    Op,
    Recording,
    Ref,
    Size,
    Untraceable,
    map_tree,
    ops_for,
    refs,
)

#: Names that mean something else in a block.
_RESERVED = ("input", "memory", "output", "seed")
#: First site of the dropouts of a traced block.
SITE = 1 << 12
#: Operations whose results are parts of their input, next to each other.
_SPLITS = ("chunk", "split", "tensor_split", "unbind")


@dataclass(eq=False)
class Tracer:
    """The state of tracing one recording of `layer`.

    Attributes:
        x, memory: the number of the residual stream's input, and of another activation that the
            layer reads.
        bounds: the number of the bounds of sequences of variable length, of which the recording has
            one sequence.
        tokens: of a sequence in the recording.
        dtype: of the stream in the call.
        names: of the arguments, by their leaves.
        drops: whether dropout acts.
        mixes_dtypes: whether adapters compute in dtypes of their own; not in a proof.
        nodes, programs: the steps so far, and the functions of replays, by name.
        picks: by the name of a replay that is columns of another activation, that activation, and
            the first and last of the columns.
        built: by number, the name of the activation that a value is.
        widths: of activations by name.
        values, transposed, replayed, fills: as in `TracedBlock`.
        value_names: the names of values that are no tensors of the layer.
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
    mixes_dtypes: bool = True
    nodes: dict[str, Node] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    picks: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    built: dict[int, str] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    transposed: set[str] = field(default_factory=set)
    replayed: dict[str, ReplayedSubmodule] = field(default_factory=dict)
    fills: dict[int, float] = field(default_factory=dict)
    value_names: dict[int, str] = field(default_factory=dict)
    sites: int = SITE

    def __post_init__(self) -> None:
        ops = self.recording.ops
        attentions = [op for op in ops if op.name == "scaled_dot_product_attention"]
        #: Values that attention reads or computes: their third dimension counts the tokens.
        self.heads = {n for op in attentions for n in (*refs(op.args[:3]), *op.outs)}
        self.uses = [n for op in ops for n in op.reads]
        #: Values that are split into parts.
        self.split = {n for op in ops if op.name in _SPLITS for n in refs(op.args[:1])}
        self.inputs = {"input": self.x} | ({} if self.memory is None else {"memory": self.memory})

    def trace(self, kind: str) -> TracedBlock:
        """Return the block, as a graph of a kind.

        Raises: Opaque for a submodule that has to be replayed as one; Untraceable if there is no
            block.
        """
        recording, layouts = self.recording, {}
        for name, number in self.inputs.items():
            layout = self.layout(number)
            if layout is None:
                raise Untraceable(f"{name} has no dimension of tokens")
            layouts[name] = number, layout
            self.built[number], self.widths[name] = name, layout.width
        target, layout = self._target()
        name = self.build(target)
        if name in self.inputs:
            raise Untraceable("its result is its input")
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
        return TracedBlock(
            graph, before, values, self.transposed, self.programs, layouts, (target, layout),
            recording.result, recording.inputs, recording.sources, stand_ins,
            tuple(self.replayed.values()), tuple(sorted(recording.fixed)), self.fills,
            self._elements(before),
        )  # fmt: skip

    def _elements(self, before: list[Op]) -> dict[int, float]:
        recording, elements = self.recording, dict[int, float]()
        roots = (n for n in (*recording.sources, *recording.inputs) if n is not None)
        memory = {recording.values[n].untyped_storage().data_ptr() for n in roots}
        for number in [n for op in before for n in op.writes]:
            value, shape = recording.values[number], recording.shapes[number]
            if value.is_floating_point():
                follows = shape is None or any(isinstance(n, Size) for n in shape)
                is_view = value.untyped_storage().data_ptr() in memory
                elements[number] = 0 if is_view else math.inf if follows else value.numel()
        return elements

    def _target(self) -> tuple[int, Layout]:
        """Return the one result that the block computes, which is not attention's scores."""
        recording = self.recording
        live = dict.fromkeys(n for n in refs(recording.result) if n in recording.live)
        scores = [n for n in live if self._is_scores(n)]
        if scores and not type(self.layer).__module__.startswith("transformers."):  # drops them
            raise Untraceable("it returns the scores of attention")
        recording.result = map_tree(
            recording.result, lambda a: None if isinstance(a, Ref) and a.index in scores else a
        )
        targets = [n for n in live if n not in scores and n not in self.inputs.values()]
        if len(targets) != 1:
            raise Untraceable(f"it has {len(targets)} results that depend on its input")
        layout = self.layout(targets[0])
        if layout is None:
            raise Untraceable("its result does not have its input's tokens")
        return targets[0], layout

    def _is_scores(self, number: int) -> bool:
        """Return whether a value has a number for each query and key."""
        shape = self.recording.shapes[number] or ()
        names = [n for s in shape if isinstance(s, Size) for n in s.names if n in ("S", "M")]
        if len(names) == 2 or "S" in self.recording.sizes:
            return len(names) == 2
        return len(shape) == 4 and all(n == self.tokens for n in shape[-2:])

    def _before(self, needed: Iterable[int]) -> tuple[list[Op], Shapes]:
        """Return the operations that compute values from no activation, and stand-ins for those."""
        recording, stand_ins, needed = self.recording, Shapes(), [*needed]
        ops, _ = ops_for(needed, recording.producers, recording.live)
        for op in ops:
            if op.random:
                self._check_noise(op)
        for number in {*needed, *(n for op in ops for n in op.reads)} & recording.live:
            shape = recording.shapes[number]
            if shape is None:
                raise Untraceable("it reads the shape of an activation that no size explains")
            stand_ins[number] = shape, recording.dtypes[number]
        return [op for op in recording.ops if op in ops], stand_ins

    def _check_noise(self, op: Op) -> None:
        """Raise Untraceable for noise per token; noise per sequence (drop path) is small."""
        for number in op.outs:
            shape = () if number is None else self.recording.shapes[number]
            sizes = [n for n in shape or () if isinstance(n, Size) or n == self.tokens > 1]
            if shape is None or any(n != Size(1, ("B",)) for n in sizes):
                raise Untraceable("it draws random numbers for every token, outside of dropout")

    # Values.

    def layout(self, number: int) -> Layout | None:
        """Return the layout of an activation, or None if it lacks the call's tokens."""
        shape, sizes = self.recording.shapes[number], self.recording.sizes
        batch = ["B"] if "B" in sizes else []
        if "S" in sizes:
            layout = layout_of(shape, [*batch, "S"], self.tokens)
            if layout is None and "M" in sizes:
                layout = layout_of(shape, [*batch, "M"], self.tokens)
            return layout
        four = shape if number in self.heads and shape is not None and len(shape) == 4 else (0,) * 4
        if (four[0], four[2]) == (Size(1, ("B",)), self.tokens):
            return Layout((("B",), *[(n,) for n in four[1:]]), (0, 2), ("B",))
        return layout_of(shape, batch, self.tokens)

    def live(self, value: Any) -> bool:
        """Return whether a leaf of an operation's arguments is an activation."""
        return isinstance(value, Ref) and value.index in self.recording.live

    def producer(self, number: int) -> Op | None:
        """Return the operation that computes a value."""
        return self.recording.producers.get(number)

    def roots(self, number: int) -> set[int]:
        """Return the values without a producer that a value is computed from."""
        return ops_for([number], self.recording.producers)[1]

    def fix(self, *numbers: int) -> None:
        """Note that the trace depends on the values of buffers and attributes behind these."""
        sources, params = self.recording.sources, {*parameters_of(self.layer)}
        names = {sources[n] for number in numbers for n in self.roots(number) if n in sources}
        self.recording.fixed |= names - params

    def new_value(
        self,
        name: str,
        run: Callable[..., Tensor],
        args: Any,
        result: Tensor | None = None,
        like: int | None = None,
        **kwargs: Any,
    ) -> int:
        """Add a value that an additional operation computes before the block.

        Its shape is that of `result`, with the sizes of the first argument's, or that of the value
        `like`.
        """
        recording, number = self.recording, len(self.recording.values)
        op = Op(name, run, tuple(args), kwargs, [number], "")
        if result is not None:
            sizes = {n.of(recording.sizes): n for n in args[1] if isinstance(n, Size)}
            recording.values.append(result)
            recording.shapes.append(tuple([sizes.get(n, n) for n in result.shape]))
            recording.dtypes.append(recording.dtypes[args[0].index])
        else:
            assert like is not None
            recording.values.append(recording.values[like])
            recording.shapes.append(recording.shapes[like])
            recording.dtypes.append(recording.dtypes[like])
        recording.ops.append(op)
        recording.producers[number] = op
        return number

    def param(self, number: int, transposed: bool = False) -> str:
        """Return the block's name of a value that is no activation."""
        own = self.recording.sources.get(number)
        name = own or self.value_names.get(number) or self._name_of(number)
        if own is None:
            self.value_names[number] = name
        if transposed:
            name = f"{name}T" if own is None else f"{name}.T"
            self.transposed.add(name)
        self.values[name] = number
        return name

    def _name_of(self, number: int) -> str:
        """Return a name for a value computed before the block.

        It is that of the first argument, or else the first tensor of the layer, from which the
        value is computed, without a dot, as names of weights have.
        """
        recording, roots = self.recording, sorted(self.roots(number))
        names = dict(zip(recording.inputs, self.names, strict=True))
        arguments = [names[n] for n in roots if n in names and n not in recording.live]
        tensors = [recording.sources[n] for n in roots if n in recording.sources]
        name = re.sub(r"\W", "_", [*arguments, *tensors, "value"][0])
        return _numbered(name, {*self.value_names.values(), *self.values, *self.nodes, *_RESERVED})

    # Steps.

    def unique(self, name: str) -> str:
        """Return `name`, with a number if another step has it."""
        taken = {*self.nodes, *self.value_names.values(), *_RESERVED}
        return _numbered(name or "step", taken)

    def add(self, node: Node) -> str:
        """Add a step and return its name."""
        self.nodes[node.name] = node
        return node.name

    def remove(self, *names: str) -> None:
        """Remove those of these steps that no step reads."""
        for name in dict.fromkeys(names):
            if not any(name in node.inputs for node in self.nodes.values()):
                self.nodes.pop(name, None)
                self.programs.pop(name, None)
                self.picks.pop(name, None)

    def site(self) -> int:
        """Return a new dropout site."""
        self.sites += 1
        return self.sites

    def build(self, number: int) -> str:
        """Add the steps that compute a value, and return the name of that activation."""
        if number not in self.built:
            step, layout = self.step(number), self.layout(number)
            self.built[number] = replay(self, number) if step is None else step()
            if layout is not None:
                self.widths.setdefault(self.built[number], layout.width)
        return self.built[number]

    def step(self, number: int) -> Build | None:
        """Return a function that adds the step of a value, or None if it belongs to a replay."""
        op = self.producer(number)
        if op is None or self.layout(number) is None or not self.is_of_stream(number):
            return None
        if op.path is not None:
            return lambda: replay(self, number)
        rule = STEPS.get(op.kind)
        build = None if rule is None else rule(self, number, op)
        if build is None and op.name in HEAVY and number in self.split:
            return lambda: replay(self, number)  # once for all parts, and not for each
        return build

    def is_of_stream(self, number: int) -> bool:
        """Return whether a value has the stream's dtype, the only one in which steps compute."""
        return self.recording.dtypes[number] is STREAM

    def source(self, number: int) -> int:
        """Return the value that `number` is, behind casts and dropout that is off."""
        op = self.producer(number)
        while op is not None and (
            op.name in _CASTS or (op.name == "dropout" and not (op.p and self.drops))
        ):
            number = op.args[0].index
            op = self.producer(number)
        return number


_CASTS = ("to", "float", "type_as", "type", "contiguous", "double")


def _numbered(name: str, taken: Collection[str]) -> str:
    """Return `name`, with the first number that makes it unique if it is taken."""
    numbered = (f"{name}_{i}" for i in itertools.count(2))
    return name if name not in taken else next(n for n in numbered if n not in taken)

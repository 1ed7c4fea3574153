"""A tracer that turns a recording into the graph of a block, with the steps of `graph.build`.

Every activation is traced backwards from the output. A norm, a linear layer, attention, a sum, an
activation function of an MLP and dropout become that step (`steps.py`, `attention.py`). The
operations between such steps become one `Replay`, which runs as it was recorded; so does a
submodule that cannot be traced (`replays.py`). Values that do not depend on the layer's activations
(masks, tables, a modulation) are computed at every call, before the block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from fused_remat.graph.graph import Graph
from fused_remat.steps.replay import Replay
from fused_remat.tracing.block import Shapes, TracedBlock
from fused_remat.tracing.builder import Build, Builder
from fused_remat.tracing.program import Layout
from fused_remat.tracing.replays import HEAVY, replay
from fused_remat.tracing.simplify import simplified
from fused_remat.tracing.steps import STEPS
from fused_remat.tracing.values import Op, Ref, Size, Untraceable, map_tree, ops_for, refs

#: Operations whose results are parts of their input, next to each other.
_SPLITS = ("chunk", "split", "tensor_split", "unbind")


class Tracer(Builder):
    """A tracer of one recording."""

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
        if build is None and op.name in HEAVY and self._is_split(number):
            return lambda: replay(self, number)  # once for all parts, and not for each
        return build

    def _is_split(self, number: int) -> bool:
        ops = self.recording.ops
        return any(op.name in _SPLITS and number in refs(op.args[:1]) for op in ops)

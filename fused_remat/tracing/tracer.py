"""A tracer that turns a recording into the graph of a block, with the steps of `graph.build`.

Every activation is traced backwards from the output: by a rule to a step (`steps.py`), else to a
`Replay` of the operations since the steps before it (`replays.py`). Values that do not depend on
activations (masks, tables, a modulation) are computed at every call, before the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace

from fused_remat.graph.graph import Graph
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.linear import Linear
from fused_remat.steps.node import Node
from fused_remat.steps.norm import HeadNorm, Norm
from fused_remat.steps.replay import Reorder, Replay
from fused_remat.steps.residual import Add, DrawMask
from fused_remat.steps.rotary import Rotary
from fused_remat.steps.streams import Concat, Join
from fused_remat.tracing.builder import Build, Builder
from fused_remat.tracing.heads import norms_of_heads
from fused_remat.tracing.modulation import joined
from fused_remat.tracing.program import OF_BATCH, Layout, Shapes, TracedBlock
from fused_remat.tracing.quantized import check_reads
from fused_remat.tracing.replays import HEAVY, columns_of, reorders, replay
from fused_remat.tracing.sizes import Size
from fused_remat.tracing.steps import STEPS
from fused_remat.tracing.streams import split_streams
from fused_remat.tracing.values import Op, Ref, Untraceable, map_tree, ops_for, refs

#: Operations whose results are parts of their input, next to each other.
_SPLITS = ("chunk", "split", "tensor_split", "unbind")


class Tracer(Builder):
    """A tracer of one recording."""

    def trace(self) -> TracedBlock:
        """Return the block, or raise Opaque for a submodule to replay, or Untraceable."""
        recording, layouts = self.recording, {}
        for name, number in self.inputs.items():
            layout = self.layout(number)
            if layout is None:
                raise Untraceable(f"{name} has no dimension of tokens")
            layouts[name] = number, layout
            self.built[number], self.widths[name] = name, layout.width
        (target, layout), *streams = self._targets()
        name = self.build(target)
        if name in self.inputs:
            raise Untraceable("its result is its input")
        sides = tuple([self._side(n) for n in (*self.records.values(), *dict(streams))])
        last = replace(self.nodes.pop(name), name="output")
        if isinstance(last, Replay):
            last = replace(last, function="output")
            self.programs["output"] = self.programs.pop(name)
        self.nodes["output"] = last
        norms_of_heads(self)
        split_streams(self)
        _split_linears(self)
        _join_sums(self)
        _reorder(self)
        nodes = _with_roles(_ordered(self.nodes, sides))
        check_reads(self, nodes)
        params = dict.fromkeys(p for node in nodes for p in node.params if p)
        read = {"input", *(name for node in nodes for name in node.inputs)}
        layouts = {name: layout for name, layout in layouts.items() if name in read}
        kind = f"read_{type(self.layer).__name__}"
        graph = Graph(kind, tuple(nodes), tuple(params), tuple(layouts), side_outputs=sides)
        values = {name: n for name, n in self.values.items() if name in params}
        others = [n for n in refs(recording.result) if n not in recording.live]
        before, stand_ins = self._before([*values.values(), *others])
        replayed = {part.name: part for part in self.replayed.values()}
        called = {getattr(node, "function", "") for node in nodes}
        programs = {name: run for name, run in self.programs.items() if name in called}
        return TracedBlock(
            graph, before, values, self.transposed, programs, layouts, (target, layout),
            recording.result, recording.inputs, recording.sources, stand_ins,
            (*replayed.values(),), tuple(sorted(recording.fixed)), self.fills,
            self._elements(before), self.formats,
            {p: of for p, n in self.records.items() if (of := self.layout(n)) is not None},
            tuple(streams),
        )  # fmt: skip

    def _side(self, number: int) -> str:
        """Add the steps that compute a value that the layer also returns, in its own dtype."""
        name = self.build(number)
        node = self.nodes.get(name)
        if node is None or name == self.built.get(self._targets()[0][0]):
            raise Untraceable("it also returns its input or its result a second time")
        if isinstance(node, Replay) and not self.is_of_stream(number):
            self.nodes[name] = replace(node, widens=True)
        return name

    def _elements(self, before: list[Op]) -> dict[int, float]:
        recording, elements = self.recording, dict[int, float]()
        roots = (n for n in (*recording.sources, *recording.inputs) if n is not None)
        memory = {recording.values[n].untyped_storage().data_ptr() for n in roots}
        for number in [n for op in before for n in op.writes]:
            value, shape = recording.values[number], recording.shapes[number]
            if value.is_floating_point():
                is_view = value.untyped_storage().data_ptr() in memory
                sizes = [n for n in shape or () if isinstance(n, Size)]
                by_length = shape is None or any(n.formula or n.names != ("B",) for n in sizes)
                most = math.inf if by_length else OF_BATCH if sizes else value.numel()
                elements[number] = 0 if is_view else most
        return elements

    def _targets(self) -> list[tuple[int, Layout]]:
        """Return the layer's results, with their layouts: that with the input's tokens first."""
        recording = self.recording
        live = dict.fromkeys(n for n in refs(recording.result) if n in recording.live)
        scores = [n for n in live if self._is_scores(n)]
        if scores and not type(self.layer).__module__.startswith("transformers."):  # drops them
            raise Untraceable("it returns the scores of attention")
        recording.result = map_tree(
            recording.result, lambda a: None if isinstance(a, Ref) and a.index in scores else a
        )
        targets = [n for n in live if n not in scores and n not in self.inputs.values()]
        layouts = [(n, layout) for n in targets if (layout := self.layout(n)) is not None]
        own = self.layout(self.inputs["input"])
        layouts.sort(key=lambda target: target[1].names != getattr(own, "names", ()))
        names = [layout.names for _, layout in layouts]
        if not targets or len({*names}) < len(targets) or len(layouts) < len(targets):
            raise Untraceable(
                f"it has {len(targets)} results that depend on its input"
                if len(targets) != 1
                else "its result does not have its input's tokens"
            )
        if len(layouts) > 1 and names[0] != getattr(own, "names", ()):
            raise Untraceable("none of its results has its input's tokens")
        return layouts

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
        for number in [n for op in ops if op.random for n in op.writes]:
            shape = recording.shapes[number]
            sizes = [n for n in shape or () if isinstance(n, Size) or n == self.tokens > 1]
            if shape is None or any(n != Size(1, ("B",)) for n in sizes):  # not of drop path
                raise Untraceable("it draws random numbers for every token, outside of dropout")
        for number in {*needed, *(n for op in ops for n in op.reads)} & recording.live:
            shape = recording.shapes[number]
            if shape is None:
                raise Untraceable("it reads the shape of an activation that no size explains")
            stand_ins[number] = shape, recording.dtypes[number]
        return [op for op in recording.ops if op in ops], stand_ins

    def build(self, number: int) -> str:
        if number not in self.built:
            step, layout = self.step(number), self.layout(number)
            self.built[number] = replay(self, number) if step is None else step()
            if layout is not None:
                self.widths.setdefault(self.built[number], layout.width)
        return self.built[number]

    def step(self, number: int) -> Build | None:
        op = self.producer(number)
        if op is None or self.layout(number) is None or not self.is_of_stream(number):
            return None
        rule = STEPS.get(op.kind) if op.path is None else None
        build = None if rule is None else rule(self, number, op)
        users = (user for user in self.recording.ops if user.name in _SPLITS)
        is_split = op.name in HEAVY and any(number in refs(user.args[:1]) for user in users)
        if op.path is not None or (build is None and is_split):
            return lambda: replay(self, number)  # once for all parts, and not for each
        return build


def _reorder(t: Builder) -> None:
    """Let replays that return tokens in another order be steps that know the order."""
    for name, node in t.nodes.items():
        if type(node) is Replay and reorders(t, node):
            t.nodes[name] = Reorder(**{f.name: getattr(node, f.name) for f in fields(node)})


def _split_linears(t: Builder) -> None:
    """Split linear layers of which others read columns alone, such as a packed gate."""
    nodes = t.nodes
    for name, node in [*nodes.items()]:
        if not isinstance(node, Linear) or node.part is not None:
            continue
        if not replace(node, updates=(), packed=()).plain or any(u.magnitude for u in node.updates):
            continue
        users = [n for n in nodes.values() if name in n.inputs]
        spans = [span for user in users if (span := _span_of(t, user)) is not None]
        ends = sorted({0, *itertools.chain(*spans)})
        if not users or len(spans) < len(users) or sorted(spans) != [*itertools.pairwise(ends)]:
            continue
        for user, span in zip(users, spans, strict=True):
            part = (*span, ends[-1])
            updates = [replace(u, low=f"{u.low}.{user.name}", part=part) for u in node.updates]
            nodes[user.name] = replace(node, name=user.name, part=part, updates=tuple(updates))
        del nodes[name]


def _span_of(t: Builder, node: Node) -> tuple[int, int] | None:
    """Return the first column and the end of adjacent ones that a replay picks, or None."""
    columns = columns_of(t, t.programs[node.name]) if isinstance(node, Replay) else None
    if not columns or columns != [*range(columns[0], columns[-1] + 1)]:
        return None
    return columns[0], columns[-1] + 1


def _join_sums(t: Builder) -> None:
    """Join dropout with the sum after it, and both with the linear layer before."""
    nodes, count = t.nodes, t.use_counts()
    for node in [*nodes.values()]:
        if not isinstance(node, Add) or not node.residual:
            continue
        x = nodes.get(node.x)
        is_plain = type(node) is Add and not node.mask
        if isinstance(x, Add) and not x.residual and count[x.name] == 1 and is_plain:
            node = nodes[node.name] = replace(node, x=x.x, mask=x.mask)
            del nodes[x.name]
            x = nodes.get(node.x)
        if isinstance(x, Linear) and x.plain and count[x.name] == 1:
            nodes[node.name] = joined(x, node)
            mask = nodes.get(node.mask)
            if isinstance(mask, DrawMask):  # the layer's result, which it was like, is gone
                nodes[mask.name] = replace(mask, like=x.weight, of=x.x)
            del nodes[x.name]


def _ordered(nodes: Mapping[str, Node], sides: Sequence[str]) -> list[Node]:
    """Return the nodes that the output and side outputs depend on, each after its inputs.

    The steps of a sum's residual come before those of the branch that is added to it: backward then
    finishes the branch before it rebuilds anything for the residual.
    """
    done: dict[str, Node] = {}
    read = {name for node in nodes.values() for name in node.inputs}
    nodes = {**nodes, **{stat: node for node in nodes.values() for stat in node.stats}}

    def visit(node: Node) -> None:
        if node.name in done:
            return
        likes = (node.like, node.of) if isinstance(node, DrawMask) else ()
        for name in (getattr(node, "residual", ""), *node.inputs, *likes, *node.masks):
            if name in nodes:
                visit(nodes[name])
        done[node.name] = node

    for name in (*[name for name in sides if name not in read], "output"):
        visit(nodes[name])
    return [*done.values()]


def _heads(nodes: Mapping[str, Node], name: str) -> list[str]:
    """Return the activations to keep instead of heads that are cheap to compute from them."""
    node = nodes.get(name)
    if type(node) is Norm and isinstance(nodes.get(node.x), Linear):
        return [node.x]  # queries or keys that are normed across heads
    if isinstance(node, Rotary) and isinstance(nodes[node.x], (Join, Concat, Norm)):
        return _heads(nodes, node.x)
    if isinstance(node, (Join, Concat)):
        return [source for x in node.inputs for source in _heads(nodes, x)]
    needs = node.needs(node.inputs) if isinstance(node, (HeadNorm, Replay, Rotary)) else ()
    return [needs[0] if len(needs) == 1 and needs[0] in nodes else name]


def _with_roles(nodes: list[Node]) -> list[Node]:
    """Return the nodes with the roles by which presets keep them (`graph.build`)."""
    roles: dict[str, str] = {}
    by_name = {node.name: node for node in nodes}
    residuals = {getattr(node, "residual", "") for node in nodes}
    for name in (x for node in nodes if isinstance(node, Attention) for x in node.inputs):
        roles.update(dict.fromkeys(_heads(by_name, name), "heads"))
    for node in nodes:
        if isinstance(node, MLPActivation):
            for name in filter(None, (node.gate, node.up)):
                roles.setdefault(name, "hidden")
        x = by_name.get(node.x) if isinstance(node, Norm) and node.stats else None
        if x is not None and x.name not in residuals and roles.get(x.name) != "heads":
            residual = getattr(x, "residual", "")
            if (residual and x.name != "output") or (
                not residual and isinstance(x, (Linear, Replay))
            ):
                roles[x.name] = "normed"
        ends_in_norm = isinstance(node, Add) and isinstance(by_name.get(node.x), Norm)
        if getattr(node, "residual", "") and node.name != "output" and not ends_in_norm:
            roles.setdefault(node.name, "stream")
    return [
        replace(node, role=roles[node.name]) if node.name in roles and not node.role else node
        for node in nodes
    ]

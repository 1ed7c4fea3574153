"""The schedule of a block: what is kept, and the steps of forward and backward, in order.

Backward is driven by demand. Each node, the last one first, requires the activations that it reads.
Those that were kept are available; others are rebuilt from their own inputs, once, and freed after
their last use. None of this depends on a value, so a schedule is made once and cached, and
`execution.executor` only runs its steps. The predicted memory is read from the same schedule.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from fused_remat.graph.fusions import Draft, fuse
from fused_remat.graph.graph import Graph, sizes
from fused_remat.steps.node import Node, Shapes
from fused_remat.steps.rotary import Rotary


@dataclass(frozen=True)
class Step:
    """One step of a schedule. `node` is None where the steps of all tiles run."""

    kind: str  # "compute", "backward" or "tiles"
    node: Node | None
    needs_grad: frozenset[str]  # backward only: what the node gives gradients of
    free: tuple[str, ...]  # names used here for the last time

    def __str__(self) -> str:
        return f"{self.kind} {self.node.label}" if self.node is not None else self.kind


@dataclass(frozen=True, eq=False)
class Schedule:
    """The steps of one graph, for what is kept and which gradients are needed."""

    kept: tuple[str, ...]  # without inputs and output, in graph order
    kept_group: tuple[str, ...]  # those of `kept` that tiles do not compute
    kept_tile: tuple[str, ...]
    kept_inputs: tuple[str, ...]
    keeps_output: bool
    passed: frozenset[str]  # those of `kept` that are side outputs, and that backward does not read
    saved_params: tuple[str, ...]  # whose values backward reads again
    forward: tuple[Step, ...]  # of a group of sequences; at "tiles" those of its tiles run
    backward: tuple[Step, ...]
    tile_forward: tuple[Step, ...]  # of a tile of tokens; empty without tiles
    tile_backward: tuple[Step, ...]
    tile_gives: tuple[str, ...]  # activations of the group of which tiles compute gradients

    @property
    def saved(self) -> tuple[str, ...]:
        """Activations that backward reads, without inputs and output."""
        return tuple([name for name in self.kept if name not in self.passed])

    def steps(self, which: str) -> list[Step]:
        """Return the steps of forward or backward in order, including those that run per tile."""
        outer = self.forward if which == "forward" else self.backward
        inner = self.tile_forward if which == "forward" else self.tile_backward
        return [s for step in outer for s in (inner if step.kind == "tiles" else (step,))]

    @functools.cached_property
    def group_forward(self) -> tuple[Step, ...]:
        """Steps of a group before its tiles."""
        return self.forward[:-1] if self.tile_forward else self.forward

    @functools.cached_property
    def around_tiles(self) -> tuple[tuple[Step, ...], tuple[str, ...], tuple[Step, ...]]:
        """Steps of backward before tiles, the names freed after these, and the steps after them."""
        kinds = [step.kind for step in self.backward]
        at = kinds.index("tiles") if "tiles" in kinds else len(kinds)
        free = self.backward[at].free if at < len(kinds) else ()
        return self.backward[:at], free, self.backward[at + 1 :]


def _with_frees(steps: list[Draft], hold: Collection[str]) -> tuple[Step, ...]:
    """Return steps that free each name after its last use, except the names in `hold`."""
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        last.update(dict.fromkeys(step.touched, i))
    frees: dict[int, list[str]] = {}
    for name, i in last.items():
        if name not in hold:
            frees.setdefault(i, []).append(name)
    made: set[str] = set()
    result = []
    for i, step in enumerate(steps):
        free, node = tuple(frees.get(i, ())), step.node
        if step.kind == "compute" and node is not None:
            if isinstance(node, Rotary) and node.x in free and node.x in made:
                node = replace(node, in_place=True)  # over what nothing else reads or keeps
            made.add(node.name)
        result.append(Step(step.kind, node, step.needs_grad, free))
    return tuple(result)


def needs_by_node(
    graph: Graph, needs_grad: frozenset[str], dead: frozenset[str]
) -> dict[str, frozenset[str]]:
    """Return, for each node that backward runs, the inputs and params it gives gradients of.

    `dead`: outputs that have no gradient.
    """
    reached = set(needs_grad.intersection(graph.inputs))
    result: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        needed = needs_grad.intersection(node.params).union(reached.intersection(node.inputs))
        if needed:
            reached.add(node.name)
            result[node.name] = needed
    live = {"output", *graph.side_outputs} - dead
    for node in reversed(graph.nodes if dead else ()):
        if live.isdisjoint(node.makes):
            result.pop(node.name, None)
        else:
            live.update(node.inputs)
    return result


class _Demand:
    """The steps of backward; what a step reads and `have` lacks is rebuilt before it."""

    def __init__(self, graph: Graph, have: Iterable[str]) -> None:
        self.graph, self.have = graph, set(have)
        self.touched: set[str] = set()
        self.rebuilt: list[Node] = []
        self.steps: list[Draft] = []

    def ask(self, name: str) -> None:
        self.touched.add(name)
        if name in self.have:
            return
        node = self.graph.producer[name]
        for read in node.reads:
            self.ask(read)
        self.steps.append(_compute(node))
        self.rebuilt.append(node)
        self.have.update(node.makes)

    def backward(self, node: Node, needs_grad: frozenset[str]) -> None:
        asked = node.needs(needs_grad)
        for name in asked:
            self.ask(name)
        # Of what has just been rebuilt.
        asked += tuple([name for name in node.transients if name in self.have])
        self.steps.append(Draft("backward", node, needs_grad, asked))


def _split(graph: Graph, tiled: bool) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return the nodes up to the last that needs entire sequences, and the others, for tiles."""
    if not tiled:
        return graph.nodes, ()
    first, source = graph.inputs[0], graph.source
    whole = [n.per_sequence or source[n.name] != first for n in graph.nodes]
    last = max((i for i, is_whole in enumerate(whole) if is_whole), default=-1)
    return graph.nodes[: last + 1], graph.nodes[last + 1 :]


@functools.lru_cache(maxsize=4096)
def schedule(
    graph: Graph,
    save: frozenset[str],
    needs_grad: frozenset[str],
    tiled: bool,
    fusions: frozenset[str] = frozenset(),
    dead: frozenset[str] = frozenset(),
) -> Schedule:
    """Return the schedule of `graph` where `save` is kept and gradients of `needs_grad` are needed.

    `fusions`: those of `graph.fusions` that the backend has. `dead`: outputs without a gradient.
    """
    group_nodes, tile_nodes = _split(graph, tiled)
    by_node = needs_by_node(graph, needs_grad, dead)
    may_keep, side = {*save, *graph.side_outputs}, frozenset(graph.side_outputs)
    for node in graph.nodes:
        if not node.stats_follow or node.name in may_keep:
            may_keep.update(node.stats)
    group_names = {*graph.inputs} | {n for node in group_nodes for n in (node.name, *node.stats)}

    tile = _Demand(graph, may_keep | group_names)
    for node in reversed(tile_nodes):
        if node.name in by_node:
            tile.backward(node, by_node[node.name])
    outside = tuple(sorted(tile.touched & group_names))  # what tiles ask the group for

    group = _Demand(graph, may_keep | {*graph.inputs})
    if tile.steps:
        for name in outside:
            group.ask(name)
        group.steps.append(Draft("tiles", None, frozenset(), outside))
    for node in reversed(group_nodes):
        if node.name in by_node:
            group.backward(node, by_node[node.name])

    touched = tile.touched | group.touched
    order = [n for node in graph.nodes for n in (node.name, *node.stats)]
    held_back = side | (may_keep & touched) - {"output"}
    kept = tuple(n for n in order if n in held_back)
    reread = {p for node in tile.rebuilt + group.rebuilt for p in node.params}
    for name, needed in by_node.items():
        reread.update(graph.producer[name].rereads(needed))

    tile_reads = tuple(sorted({r for n in tile_nodes for r in n.reads} & group_names))
    group_fwd = list(map(_compute, group_nodes))
    if tile_nodes:
        group_fwd.append(Draft("tiles", None, frozenset(), tile_reads))
    tile_fwd = list(map(_compute, tile_nodes))
    held, tile_held = {*kept, "output"}, {*kept, "output", *group_names}
    gives = {n for node in tile_nodes for n in by_node.get(node.name, ()) if n in group_names}
    return Schedule(
        kept=kept,
        kept_group=tuple(n for n in kept if n in group_names),
        kept_tile=tuple(n for n in kept if n not in group_names),
        kept_inputs=tuple(n for n in graph.inputs if n in touched),
        keeps_output="output" in may_keep and "output" in touched,
        passed=side - touched,
        saved_params=tuple(p for p in graph.params if p in reread),
        forward=_with_frees(fuse(group_fwd, fusions, held), held),
        backward=_with_frees(fuse(group.steps, fusions, side), ()),
        tile_forward=_with_frees(fuse(tile_fwd, fusions, tile_held), tile_held),
        tile_backward=_with_frees(fuse(tile.steps, fusions, group_names | side), group_names),
        tile_gives=tuple(sorted(gives)),
    )


def _compute(node: Node) -> Draft:
    return Draft("compute", node, frozenset(), (*node.reads, *node.makes))


def kept_bytes(
    graph: Graph,
    save: frozenset[str],
    needs_grad: frozenset[str],
    shapes: Shapes,
    input_dtypes: Mapping[str, torch.dtype],
) -> dict[str, int]:
    """Return the bytes that one call keeps, by name: inputs, activations, statistics and the seed.

    Attention masks and rotary tables are the caller's own tensors and are not counted.
    """
    plan = schedule(graph, save, needs_grad, tiled=False)
    first, widths, lengths = graph.inputs[0], graph.widths(shapes), graph.lengths(shapes)
    batch, dtypes = sizes(shapes[first])[0], graph.dtypes(input_dtypes[first])
    result = {n: math.prod(shapes[n]) * input_dtypes[n].itemsize for n in plan.kept_inputs}
    for name in plan.saved + (("output",) if plan.keeps_output else ()):
        result[name] = batch * lengths[name] * widths[name] * dtypes[name].itemsize
    if "seed" in plan.saved_params:
        result["seed"] = 8
    return result

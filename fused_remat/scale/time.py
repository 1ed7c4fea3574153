"""Time of a rank's layer, step by step of its graph, and what it sends to other ranks.

The steps are those of the layer's schedule under a policy, so the rebuilds of a preset count, with
their collectives. A step takes its FLOPs over a rate or its bytes over the bandwidth, whichever is
longer, as in `Calibration.analytic`; a collective takes its bytes over the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fused_remat.planner.calibration import Example, Seconds, work_of
from fused_remat.scale.costs import Costs
from fused_remat.scale.layer import sizes_of
from fused_remat.scale.layout import Layout
from fused_remat.steps.collective import CollectiveStep

#: Kinds of steps (`Work.kind`).
KINDS = ("products", "attention", "pointwise", "tensor parallel")


@dataclass(frozen=True)
class Work:
    """One step of a layer on one device."""

    which: str  # the pass
    kind: str  # one of `KINDS`
    rebuilt: bool  # whether backward repeats a computation of forward
    flops: float  # of products
    sent: float  # bytes that the device sends within its tensor-parallel group
    collective: str  # "all-gather", "reduce-scatter", "all-reduce", or ""
    seconds: float  # estimated


def link_of(costs: Costs, layout: Layout, group: str) -> float:
    """Return the bytes per second that a device sends in a ring of a group.

    Tensor-parallel ranks are neighbors. In a data group that spans nodes, the ranks of one node
    share what the node sends, each over its own network device.
    """
    mesh = layout.mesh
    if group == "tensor":
        spans = mesh.tensor > costs.node
        beside = 1
    else:
        spans = mesh.devices > costs.node
        beside = max(1, costs.node // mesh.tensor)
    link = costs.link.value
    return min(link, costs.network.value * beside) if spans else link


def works(example: Example, save: Iterable[str], costs: Costs, layout: Layout) -> Iterator[Work]:
    """Yield all steps of both passes of a rank's layer that keeps `save`."""
    bytes_of = sizes_of(example, save)
    link, ranks = link_of(costs, layout, "tensor"), layout.mesh.tensor
    for which, step, flops, moved in work_of(example, save):
        node, backward = step.node, step.kind == "backward"
        collective, sent = "", 0.0
        if isinstance(node, CollectiveStep):
            collective = node.communication[backward]
            # In a ring, for a matrix of so many bytes when gathered.
            times, matrix = {"": 0, "all-reduce": 2}, max(bytes_of[node.name], bytes_of[node.x])
            sent = times.get(collective, 1) * matrix * (ranks - 1) / ranks
            kind, seconds = KINDS[3], sent / link
        else:
            kind, rate = "products" if flops else "pointwise", costs.products
            if flops and node is not None and node.per_sequence:
                kind = "attention"
                rate = costs.attention_backward if backward else costs.attention_forward
            seconds = max(flops / rate.value, moved / costs.bandwidth.value)
        rebuilt = which == "backward" and not backward
        seconds += costs.overhead.value if collective or kind != KINDS[3] else 0.0
        yield Work(which, kind, rebuilt, flops, sent, collective, seconds)


def pricer(costs: Costs, layout: Layout) -> Callable[[Example, Iterable[str]], Seconds]:
    """Return the costs that the planner takes: the seconds of `works` by pass."""

    def seconds(example: Example, save: Iterable[str]) -> Seconds:
        totals = dict.fromkeys(Seconds._fields, 0.0)
        for w in works(example, save, costs, layout):
            totals[w.which] += w.seconds
        return Seconds(**totals)

    return seconds

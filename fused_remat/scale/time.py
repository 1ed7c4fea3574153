"""How long a rank's layer takes, step by step of its graph, and what it says to other ranks.

The steps are those of `graph.schedule.schedule` for what the policy keeps: so a preset's rebuilds,
and the collectives in them, are counted and not assumed. A step takes its FLOPs over the rate of
products (or of attention) or its bytes over the bandwidth, whichever is longer, as in
`Calibration.analytic`; a collective what it sends, over the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fused_remat.graph.schedule import Step, schedule
from fused_remat.planner.calibration import Example, Seconds, Sizer, steps_of
from fused_remat.scale.costs import Costs
from fused_remat.scale.layout import Layout
from fused_remat.steps.collective import CollectiveStep

#: What a step is mostly: of `Work.kind`.
KINDS = ("products", "attention", "pointwise", "tensor parallel")


@dataclass(frozen=True)
class Work:
    """One step of a layer on one device.

    Attributes:
        which, step: the pass, and the step as `explain` names it ("compute qkv").
        kind: one of `KINDS`.
        rebuilt: whether backward computes again what forward has.
        flops: of products.
        sent: bytes that the device sends to others of its tensor-parallel group.
        collective: "all-gather", "reduce-scatter", "all-reduce", or "".
        seconds: estimated.
    """

    which: str
    step: str
    kind: str
    rebuilt: bool
    flops: float
    sent: float
    collective: str
    seconds: float


def collective_of(step: Step) -> str:
    """What a step says to the other ranks of a tensor-parallel group; "" for nothing."""
    return (
        step.node.communication[step.kind == "backward"]
        if isinstance(step.node, CollectiveStep)
        else ""
    )


def sent_by(collective: str, nbytes: int, ranks: int) -> float:
    """Bytes that a device sends in a ring, of a matrix that is `nbytes` where it is whole.

    >>> sent_by("all-gather", 800, 8), sent_by("all-reduce", 800, 8), sent_by("", 800, 8)
    (700.0, 1400.0, 0.0)
    """
    times = {"": 0, "all-reduce": 2}.get(collective, 1)
    return times * nbytes * (ranks - 1) / ranks


def link_of(costs: Costs, layout: Layout, group: str) -> float:
    """Bytes per second that a device sends in a ring of the "tensor" or the "data" group.

    Tensor-parallel ranks are neighbours. Of a data group that spans nodes, those ranks that are in
    one node share what it sends to the next, each over the network device of its own.
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
    """Every step of both passes of a rank's layer that keeps `save`."""
    call = example.keeping(save)
    plan = schedule(call.graph, call.save, call.needs_grad, tiled=False)
    sizer = Sizer(call, example.shapes, example.input.dtype)
    bytes_of = sizes_of(example, save)
    link = link_of(costs, layout, "tensor")
    for which in ("forward", "backward"):
        for step in steps_of(plan, which):
            node = step.node
            assert node is not None
            flops, moved = sizer.work(step)
            collective, sent = collective_of(step), 0.0
            if isinstance(node, CollectiveStep):
                whole = max(bytes_of[node.name], bytes_of[node.x])
                sent = sent_by(collective, whole, layout.mesh.tensor)
                kind, seconds = "tensor parallel", sent / link
            else:
                kind = _kind(node.per_sequence, flops)
                rate = _rate(costs, kind, step)
                seconds = max(flops / rate, moved / costs.bandwidth.value)
            rebuilt = which == "backward" and step.kind == "compute"
            seconds += costs.overhead.value if collective or kind != KINDS[3] else 0.0
            yield Work(which, str(step), kind, rebuilt, flops, sent, collective, seconds)


def sizes_of(example: Example, save: Iterable[str] = ()) -> dict[str, int]:
    """Bytes of every input, activation and statistic of a rank's call."""
    graph, shapes = example.keeping(save).graph, example.shapes
    widths, lengths = graph.widths(shapes), graph.lengths(shapes)
    dtypes, batch = graph.dtypes(example.input.dtype), shapes[graph.inputs[0]][0]
    return {
        name: batch * lengths[name] * width * dtypes[name].itemsize
        for name, width in widths.items()
    }


def _kind(per_sequence: bool, flops: float) -> str:
    if not flops:
        return "pointwise"
    return "attention" if per_sequence else "products"


def _rate(costs: Costs, kind: str, step: Step) -> float:
    if kind != "attention":
        return costs.products.value
    backward = step.kind == "backward"
    return (costs.attention_backward if backward else costs.attention_forward).value


def pricer(costs: Costs, layout: Layout) -> Callable[[Example, Iterable[str]], Seconds]:
    """`works` as the planner takes costs: seconds by pass and step."""

    def seconds(example: Example, save: Iterable[str]) -> Seconds:
        return {(w.which, w.step): w.seconds for w in works(example, save, costs, layout)}

    return seconds

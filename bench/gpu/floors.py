"""The least time of a layer's step by kind of work, counted from its graph.

Each step of the graph takes its FLOPs at the rate of a large product, or its bytes at that of a
large copy, whichever is longer, both as the same run measures them. Steps count alone, and a pass
over memory twice forward's bytes in backward: what a kernel reads once or fuses into another's pass
can take less than is said here of "norms" and "pointwise". No attention kernel comes near the rate
of a large product.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from bench.measure.case import Subject
from bench.measure.contest import UNITS, Work
from fused_remat.execution.observe import OBSERVERS, BlockRun
from fused_remat.graph.schedule import schedule
from fused_remat.planner.calibration import Example, Sizer, steps_of
from fused_remat.policies import EXACT_PRESETS, kept_names
from fused_remat.steps.norm import Norm


@dataclass(frozen=True, kw_only=True)
class Part(Work):
    """The work of a step of a layer's forward or backward.

    Attributes:
        kind: "products", "attention", "norms" or "pointwise".
        rebuilt: backward computes again what forward has.
    """

    kind: str
    backward: bool
    rebuilt: bool


def example_of(subject: Subject) -> Example:
    """The block's call in a forward of our layer on the subject's module."""
    found: list[BlockRun] = []
    OBSERVERS.append(found.append)
    try:
        subject.fused(subject.module, "full", subject.backend)(subject.x)
    finally:
        OBSERVERS.remove(found.append)
    (call,) = found
    tensors = tuple(None if t is None else t.detach() for t in call.tensors)
    return Example(call.call, tensors, call.functions)


def parts(example: Example, save: Iterable[str]) -> Iterator[Part]:
    """Every step of both passes of the layer that keeps `save`."""
    call = example.keeping(save)
    plan = schedule(call.graph, call.save, call.needs_grad, tiled=False)
    sizer = Sizer(call, example.shapes, example.input.dtype)
    for which in ("forward", "backward"):
        for step in steps_of(plan, which):
            node = step.node
            assert node is not None
            flops, moved = sizer.work(step)
            if node.per_sequence:
                kind = "attention"
            elif flops:
                kind = "products"
            else:
                kind = "norms" if isinstance(node, Norm) else "pointwise"
            backward = which == "backward"
            rebuilt = backward and step.kind == "compute"
            yield Part(flops, moved, kind=kind, backward=backward, rebuilt=rebuilt)


def parts_of(way: str, example: Example) -> list[Part]:
    """The steps of a way: a preset, "eager", or "checkpoint" (non-reentrant).

    The stock layer rebuilds nothing. Checkpointing replays forward up to its last product, whose
    input is the last thing that backward asks for in a pre-norm layer.
    """
    graph = example.call.graph
    if way in EXACT_PRESETS:
        return list(parts(example, kept_names(way, graph)))
    own = [part for part in parts(example, kept_names("none", graph)) if not part.rebuilt]
    if way == "eager":
        return own
    if way != "checkpoint":
        raise ValueError(f"nothing is known of what {way!r} computes again")
    forward = [part for part in own if not part.backward]
    last = max(i for i, part in enumerate(forward) if part.kind == "products")
    return own + forward[:last]


def least(way: str, example: Example, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of a way's step by kind of work; {} where a ceiling is not known."""
    if set(UNITS) - set(ceilings):
        return {}
    found: dict[str, float] = {}
    for part in parts_of(way, example):
        found[part.kind] = found.get(part.kind, 0.0) + 1e6 * (part.floor(ceilings) or 0.0)
    return found

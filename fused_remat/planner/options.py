"""The options of a call: which sets of names are worth keeping, and what each takes and costs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from fused_remat.blocks.nodes import Node
from fused_remat.blocks.program import Graph, kept_bytes, programs
from fused_remat.memory import AllocationTrace
from fused_remat.planner.calibration import Example, Seconds
from fused_remat.planner.chain import Option
from fused_remat.policies import RUNGS, Policy, kept_names

#: How many names are searched in all subsets; of longer graphs, the steps that cost most.
_SEARCHED = 10

#: Seconds of every step, when these names are kept.
Costs = Callable[[Example, Iterable[str]], Seconds]


def kept_by_name(example: Example, save: Iterable[str]) -> dict[str, int]:
    """Bytes that a call keeps, by name; the graph's prediction."""
    call, graph = example.keeping(save), example.call.graph
    inputs = zip(graph.inputs, example.tensors[: len(graph.inputs)], strict=True)
    given = {name: t.element_size() for name, t in inputs if t is not None}
    itemsize = given[graph.inputs[0]]
    return dict(kept_bytes(graph, call.save, call.wants, example.shapes, itemsize, given))


def options_of(
    example: Example,
    costs: Costs,
    names: tuple[str, ...],
    policies: Sequence[str | Policy] | None = None,
) -> tuple[Option, ...]:
    """Those of all sets of names that no other beats in both bytes and time; first the base.

    Args:
        names: that the layer's policy takes; a call's graph may have more (adapters').
        policies: only these, all of them; none of them in a segment.
    """
    graph = example.call.graph
    if policies is None:
        sets = _effective(example, _subsets(graph, names, example))
        found = _undominated([_costed(example, costs, save) for save in sets])
    else:
        named = [kept_names(p, graph.kind, names) for p in policies]
        sets = _effective(example, named)
        found = [_costed(example, costs, save) for save in sets]
    base = _costed(example, costs, frozenset())
    rest = sorted((o for o in found if o.save), key=lambda o: (o.kept, o.seconds, o.save))
    return _with_peaks(example, [base, *rest])


def options_for(
    example: Example, costs: Costs, saves: Iterable[tuple[str, ...]]
) -> tuple[Option, ...]:
    """One for each of `saves`: for calls of one layer, which all have the same."""
    return _with_peaks(example, [_costed(example, costs, frozenset(save)) for save in saves])


def _subsets(graph: Graph, names: tuple[str, ...], example: Example) -> Iterable[frozenset[str]]:
    searched = names
    if len(names) > _SEARCHED:
        widths = graph.widths(example.shapes)

        def flops(node: Node) -> int:
            return node.flops(widths, example.shapes, 1)

        ranked = sorted(names, key=lambda name: -flops(graph.producer[name]))
        searched = tuple(sorted(ranked[:_SEARCHED]))
    for count in range(len(searched) + 1):
        yield from map(frozenset, itertools.combinations(searched, count))
    for rung in RUNGS:
        yield kept_names(rung, graph.kind, names)


def _effective(example: Example, sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Without the names that backward would not ask for, and duplicates."""
    graph, wants = example.call.graph, example.call.wants
    seen: dict[frozenset[str], None] = {}
    for save in sets:
        plan = programs(graph, save, wants, tiled=False)
        kept = {*plan.kept, *(("output",) if plan.keeps_output else ())}
        seen.setdefault(save & kept)
    return list(seen)


def _costed(example: Example, costs: Costs, save: frozenset[str]) -> Option:
    """Without the peaks, which are measured of what is left."""
    kept = sum(kept_by_name(example, save).values())
    seconds = sum(t for (which, _), t in costs(example, save).items() if which == "backward")
    return Option(tuple(sorted(save)), kept, forward=0, backward=0, seconds=seconds)


def _undominated(options: list[Option]) -> list[Option]:
    left: list[Option] = []
    for option in sorted(options, key=lambda o: (o.kept, o.seconds, o.save)):
        if not left or option.seconds < left[-1].seconds:
            left.append(option)
    return left


def _with_peaks(example: Example, options: list[Option]) -> tuple[Option, ...]:
    """Each run once on the device, for the most that its passes take."""
    example.run(options[0].save)
    with AllocationTrace(example.input.device, collect=False) as trace:
        for i, option in enumerate(options):
            trace.mark((i, "forward"))
            example.run(option.save, lambda i=i: trace.mark((i, "backward")))  # type: ignore[misc]
            trace.mark(None)
    above = {span.label: span.peak - span.start for span in trace.spans}
    return tuple(
        dataclasses.replace(option, forward=above[i, "forward"], backward=above[i, "backward"])
        for i, option in enumerate(options)
    )


def forward_seconds(example: Example, costs: Costs) -> float:
    """Seconds of one forward."""
    return sum(t for (which, _), t in costs(example, ()).items() if which == "forward")

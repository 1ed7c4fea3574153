"""The options of a call: which sets of names are worth keeping, and the memory and time of each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from fused_remat.graph.schedule import schedule
from fused_remat.planner.calibration import Example, Seconds
from fused_remat.planner.chain import Option
from fused_remat.policies import EXACT_PRESETS, Policy, kept_names
from fused_remat.report.allocations import AllocationTrace

_SEARCHED = 10  # names of which all subsets are searched

#: Time of a call that keeps these names.
Costs = Callable[[Example, Iterable[str]], Seconds]


def costed_options(
    example: Example,
    costs: Costs,
    names: tuple[str, ...],
    policies: Iterable[str | Policy] | None = None,
) -> list[Option]:
    """Return the base, which keeps no names, then the sets that no other beats in bytes and time.

    Their peaks are missing: `options_for` runs the call, and "meta" tensors cannot.

    Args:
        names: names that the layer's policy accepts; a call's graph may have more (adapters).
        policies: use exactly these instead, without their segments.
    """
    graph, best = example.call.graph, list[Option]()
    if policies is None:
        sets = _subsets(example, names)
    else:
        sets = (kept_names(policy, graph, names) for policy in policies)
    costed = [_costed(example, costs, save) for save in _effective(example, sets)]
    for option in sorted(costed, key=attrgetter("kept", "seconds", "save")):
        if policies is not None or not best or option.seconds < best[-1].seconds:
            best.append(option)
    return [_costed(example, costs, frozenset()), *(option for option in best if option.save)]


def options_for(
    example: Example, costs: Costs, saves: Iterable[tuple[str, ...]]
) -> tuple[Option, ...]:
    """Return an option for each of `saves`, with the peaks of its passes: each is run once."""
    options = [_costed(example, costs, frozenset(save)) for save in saves]
    example.run(options[0].save)
    with AllocationTrace(example.input.device, collect=False) as trace:
        for i, option in enumerate(options):
            trace.mark((i, "forward"))
            example.run(option.save, functools.partial(trace.mark, (i, "backward")))
            trace.mark(None)
    above = {span.label: span.peak - span.start for span in trace.spans}
    return tuple(
        dataclasses.replace(option, forward=above[i, "forward"], backward=above[i, "backward"])
        for i, option in enumerate(options)
    )


def with_offload(
    example: Example, options: tuple[Option, ...], link: tuple[float, float], forward: float
) -> tuple[Option, ...]:
    """Return the options, then those that offload the input, or everything kept but statistics.

    A copy runs while one equal layer computes, so the layers share the link; what takes longer
    counts. Options that another one beats in bytes and time are dropped. Peaks of these options do
    not include copies in flight. `forward`: seconds of one forward.
    """
    moving = []
    for option in options:
        by_name = kept_by_name(example, option.save)
        for names in ({"input"}, {"input", *option.save}):
            moved = sum(n for name, n in by_name.items() if name in names)
            hidden = zip(link, (forward, option.seconds), strict=True)
            waits = sum(max(0.0, moved / rate - seconds) for rate, seconds in hidden)
            more = dataclasses.replace(
                option,
                offload=tuple(sorted(names)),
                moved=moved,
                kept=option.kept - moved,
                seconds=option.seconds + waits,
            )
            if not any(o.kept <= more.kept and o.seconds <= more.seconds for o in options):
                moving.append(more)
    return (*options, *sorted(moving, key=lambda option: (option.moved, option.kept)))


def kept_by_name(example: Example, save: Iterable[str]) -> dict[str, int]:
    """Return the bytes that a call keeps for backward, by name, as its graph predicts."""
    return example.keeping(save).kept_bytes(example.tensors)


def _subsets(example: Example, names: tuple[str, ...]) -> Iterator[frozenset[str]]:
    """Yield all subsets of the names, or of those whose steps have most FLOPs; and the presets."""
    graph, searched = example.call.graph, names
    if len(names) > _SEARCHED:
        widths, shapes = graph.widths(example.shapes), example.shapes
        flops = {name: graph.producer[name].flops(widths, shapes, 1) for name in names}
        searched = tuple(sorted(sorted(names, key=lambda name: -flops[name])[:_SEARCHED]))
    for count in range(len(searched) + 1):
        yield from map(frozenset, itertools.combinations(searched, count))
    for preset in EXACT_PRESETS:
        yield kept_names(preset, graph, names)


def _effective(example: Example, sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Return the sets without names that backward does not need, and without duplicates."""
    seen: dict[frozenset[str], None] = {}
    for save in sets:
        plan = schedule(example.call.graph, save, example.call.needs_grad, tiled=False)
        seen.setdefault(save & {*plan.kept, *(("output",) if plan.keeps_output else ())})
    return list(seen)


def _costed(example: Example, costs: Costs, save: frozenset[str]) -> Option:
    """Return the option with its bytes and time, without its peaks."""
    graph, kept = example.call.graph, sum(kept_by_name(example, save).values())
    presets = (name for name in EXACT_PRESETS if kept_names(name, graph) == save)
    seconds = costs(example, save).backward
    return Option(tuple(sorted(save)), kept, 0, 0, seconds, preset=next(presets, ""))

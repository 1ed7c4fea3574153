"""Choices for a chain by simple rules, to compare the exact search with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isqrt

from fused_remat.planner.chain import Chain, Choice, peak
from fused_remat.planner.steps import shared


def greedy(chain: Chain, budget: int | None) -> Choice | None:
    """Start from the base options and repeat the change that fits and saves most time per byte.

    If the base options do not fit, start from segments of 2 calls, of 3, and so on; None if none
    fit. A change is a new option of a call or of all calls of a shared layer, or a new `save` of
    the replayed calls in a segment, which keeps no more bytes from forward to backward. Changes
    without more bytes come first, in order of time saved.
    """
    longest = max(last - first for first, last in _runs(chain))
    cuts = ([s for run in _runs(chain) for s in _cut(run, n)] for n in range(1, longest + 1))
    begins = (Choice((0,) * len(chain.calls), tuple(cut)) for cut in cuts)
    choice = next((begin for begin in begins if _fits(chain, begin, budget)), None)
    while choice is not None and (better := _improved(chain, choice, budget)) is not None:
        choice = better
    return choice


def uniform(chain: Chain, budget: int | None) -> Choice | None:
    """Every k-th call, from the first, has its base option; the others have their fastest.

    The largest k that fits, which begins with no base options at all; None if all base options do
    not fit. All calls of a shared layer follow its first.
    """
    n, units, fastest = len(chain.calls), _units(chain), dict[int, int]()
    for calls in units:
        options = [dict.fromkeys(calls, o) for o in range(len(chain.calls[calls[0]].options))]
        fastest |= min(options, key=functools.partial(_cost, chain))
    for k in range(n + 1, 0, -1):
        base = {i: 0 for calls in units if calls[0] % k == 0 and k <= n for i in calls}
        choice = _with(Choice((0,) * n), fastest | base)
        if _fits(chain, choice, budget):
            return choice
    return None


def sqrt(chain: Chain, budget: int | None) -> Choice | None:
    """Cut every run of n linked calls into segments of ceil(√n), with their fastest `save`.

    Calls outside segments, and those without a common `save`, have their base option. None if this
    does not fit.

    Source: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arXiv 1604.06174).
    """
    options: dict[int, int] = {}
    segments: list[tuple[int, int]] = []
    for run in _runs(chain):
        for segment in _cut(run, isqrt(run[1] - run[0] - 1) + 1):
            fastest = min(_saves(chain, segment), key=lambda o: _cost(chain, o), default=None)
            if fastest:
                options |= fastest
                segments.append(segment)
    choice = Choice(tuple(options.get(i, 0) for i in range(len(chain.calls))), tuple(segments))
    return choice if _fits(chain, choice, budget) else None


def _fits(chain: Chain, choice: Choice, budget: int | None) -> bool:
    return budget is None or peak(chain, choice) <= budget


def _with(choice: Choice, options: Mapping[int, int]) -> Choice:
    """Return the choice with these options of some calls."""
    return replace(choice, options=tuple(options.get(i, o) for i, o in enumerate(choice.options)))


def _units(chain: Chain) -> list[list[int]]:
    """Return the calls of each layer."""
    several = shared(chain)
    return list({c.layer: several.get(c.layer, [i]) for i, c in enumerate(chain.calls)}.values())


def _cost(chain: Chain, options: Mapping[int, int]) -> tuple[float, int]:
    """Return the seconds and bytes of some calls with these options."""
    chosen = [chain.calls[i].options[o] for i, o in options.items()]
    return sum(option.seconds for option in chosen), sum(option.kept for option in chosen)


def _runs(chain: Chain) -> list[tuple[int, int]]:
    """Return the longest runs of calls that could be one segment, including single calls."""
    alone = {i for calls in shared(chain).values() for i in calls}
    firsts = [
        i
        for i, call in enumerate(chain.calls)
        if not call.linked or i == 0 or not alone.isdisjoint((i - 1, i))
    ]
    return list(itertools.pairwise([*firsts, len(chain.calls)]))


def _cut(run: tuple[int, int], length: int) -> Iterator[tuple[int, int]]:
    """Yield a run cut into segments of equal length, without segments of a single call."""
    for first in range(run[0], run[1], length):
        last = min(first + length, run[1])
        if last - first > 1:
            yield first, last


def _saves(chain: Chain, segment: tuple[int, int]) -> Iterator[dict[int, int]]:
    """Yield options for all calls of a segment but the last, for each `save` that all have."""
    tables = {
        i: {o.save: at for at, o in enumerate(chain.calls[i].options) if not o.offload}
        for i in range(segment[0], segment[1] - 1)
    }
    for save in tables[segment[0]]:
        if all(save in table for table in tables.values()):
            yield {i: table[save] for i, table in tables.items()}


def _changes(chain: Chain, choice: Choice) -> Iterator[tuple[int, float, dict[int, int]]]:
    """Yield every single change: additional bytes kept, seconds saved, and the new options."""
    inside = {i for segment in choice.segments for i in range(*segment)}
    moves = [
        ({i: o for i in calls}, False)
        for calls in _units(chain)
        for o in range(len(chain.calls[calls[0]].options))
        if inside.isdisjoint(calls)
    ]
    moves += [(options, True) for segment in choice.segments for options in _saves(chain, segment)]
    for options, replayed in moves:
        now = _cost(chain, {i: choice.options[i] for i in options})
        then = _cost(chain, options)
        yield 0 if replayed else then[1] - now[1], now[0] - then[0], options


def _improved(chain: Chain, choice: Choice, budget: int | None) -> Choice | None:
    """Return the choice after the best change that saves time and fits, or None."""
    changes = [change for change in _changes(chain, choice) if change[1] > 0]
    free = sorted((c for c in changes if c[0] <= 0), key=lambda c: -c[1])
    paid = sorted((c for c in changes if c[0] > 0), key=lambda c: -c[1] / c[0])
    tried = (_with(choice, options) for _, _, options in free + paid)
    return next((better for better in tried if _fits(chain, better, budget)), None)

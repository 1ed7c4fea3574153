"""The fastest choice for a chain within a budget of bytes: exact, and as simpler rules choose.

The exact search is over an option for each call, and any disjoint segments: runs of two calls or
more, all but the first linked, none of a layer that is called more than once. All calls of a
segment but the last have options of one `save`; the last keeps to its base.

It goes along the chain with labels: bytes kept so far, time so far, most bytes at a time so far.
Whatever can follow a label can follow one that keeps no more and is no slower, so only labels that
no other one beats go on. They are few where bytes come in multiples of a few sizes.

Source: Pareto labels, as for shortest paths with resource constraints (Desrochers and Soumis 1988).
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from fused_remat.planner import chain as chains
from fused_remat.planner.chain import Chain, Choice, Event, peak
from fused_remat.planner.options import BudgetError
from fused_remat.planner.rules import greedy, sqrt, uniform
from fused_remat.planner.steps import NEVER, Numbers, Step, shared, start, steps
from fused_remat.policies import Policy
from fused_remat.report.report import human

ALL = -NEVER  # more bytes, or ticks, than any
MOST_SHARED = 4096  # combinations of the options of shared layers that are searched one by one


class _Graph:
    """The steps of a chain, with what is the least that can follow them.

    Attributes:
        ends: the steps by the boundary that they end at; `shared` layers have a given option.
        least: by boundary, bytes above those kept that any path from there needs at some time.
        rest: by boundary, least time of the steps from there.
    """

    def __init__(self, calls: int, found: list[Step], start: int, given: dict[int, int]) -> None:
        n, self.start = calls, start
        self.ends: list[list[Step]] = [[] for _ in range(n + 1)]
        self.least, self.rest = [ALL] * n + [NEVER], [ALL] * n + [0]
        for step in reversed(found):
            if given.get(step.first, step.ways[0].options[0]) != step.ways[0].options[0]:
                continue
            self.ends[step.last].append(step)
            after = max(step.ways[0].need, step.grows + self.least[step.last])
            self.least[step.first] = min(self.least[step.first], after)
            time = step.ways[-1].ticks + self.rest[step.last]
            self.rest[step.first] = min(self.rest[step.first], time)

    @property
    def peak(self) -> int:
        """The least that the peak of a path can be, above what rests."""
        return max(self.start, self.least[0])


class _Labels(NamedTuple):
    """Paths to one boundary: kept, ticks, peak; their last step, its way, and the label before."""

    kept: Numbers
    ticks: Numbers
    peak: Numbers
    step: Numbers
    way: Numbers
    before: Numbers


def _take(step: Step, index: int, labels: _Labels, room: int) -> _Labels:
    """Every label goes the fastest way of a step that it has room for."""
    way = np.searchsorted(step.needs, room - labels.kept, side="right") - 1
    before = np.flatnonzero(way >= 0)
    way, kept = way[before], labels.kept[before]
    return _Labels(
        kept + step.grows,
        labels.ticks[before] + step.ticks[way],
        np.maximum(labels.peak[before], kept + step.needs[way]),
        np.full(len(before), index),
        way,
        before,
    )


def _pareto(labels: _Labels) -> _Labels:
    """Without labels that keep no less than one that is faster, or as fast with no less peak."""
    order = np.lexsort((labels.peak, labels.ticks, labels.kept))
    order = order[labels.ticks[order] <= np.minimum.accumulate(labels.ticks[order])]
    time, most = labels.ticks[order], labels.peak[order]
    # Runs of one time are left; lowering each run under the one before, one pass does for all.
    run = np.cumsum(np.diff(time, prepend=time[:1]) != 0)
    lowered = most - run * (np.ptp(most) + 1 if len(most) else 1)
    first = np.diff(np.minimum.accumulate(lowered), prepend=ALL) < 0
    return _Labels(*(column[order[first]] for column in labels))


def _search(graph: _Graph, room: int, limit: int) -> tuple[int, int, Choice] | None:
    """The fastest path within `room`, and of no more ticks than `limit`: ticks, peak, choice."""
    if graph.peak > room:
        return None
    zero = np.zeros(1, dtype=np.int64)
    found = [_Labels(zero, zero, zero + graph.start, zero, zero, zero)]
    for end in range(1, len(graph.ends)):
        taken = [_take(s, i, found[s.first], room) for i, s in enumerate(graph.ends[end])]
        labels = _Labels(*map(np.concatenate, zip(*taken, strict=True)))
        fit = labels.kept + graph.least[end] <= room
        fit &= labels.ticks + graph.rest[end] <= limit
        found.append(_pareto(_Labels(*(column[fit] for column in labels))))
    if not len(found[-1].kept):
        return None
    best = int(np.lexsort((found[-1].peak, found[-1].ticks))[0])
    return int(found[-1].ticks[best]), int(found[-1].peak[best]), _path(graph, found, best)


def _path(graph: _Graph, found: list[_Labels], label: int) -> Choice:
    """The choice that a label stands for, from its last step to its first."""
    options: list[int] = []
    segments: list[tuple[int, int]] = []
    end = len(found) - 1
    while end > 0:
        labels = found[end]
        step = graph.ends[end][labels.step[label]]
        options[:0] = step.ways[labels.way[label]].options
        if step.last - step.first > 1:
            segments.insert(0, (step.first, step.last))
        end, label = step.first, int(labels.before[label])
    return Choice(tuple(options), tuple(segments))


def _graphs(chain: Chain) -> list[_Graph]:
    """One for every choice for the shared layers, from that which may be the fastest."""
    found, begin = steps(chain), start(chain)
    graphs = [_Graph(len(chain.calls), found, begin, given) for given in _given(chain)]
    return sorted(graphs, key=lambda graph: graph.rest[0])


def _given(chain: Chain) -> Iterator[dict[int, int]]:
    """Options for all calls of shared layers; if these are too many, those of one `save`."""
    groups = list(shared(chain).values())
    saves = [[o.save for o in chain.calls[calls[0]].options] for calls in groups]
    picks: Iterable[tuple[int, ...]] = itertools.product(*(range(len(mine)) for mine in saves))
    if np.prod([len(mine) for mine in saves], dtype=float) > MOST_SHARED:
        common = [save for save in saves[0] if all(save in mine for mine in saves)]
        equal = [tuple(mine.index(save) for mine in saves) for save in common]
        picks = dict.fromkeys([(0,) * len(groups), *equal])
    for pick in picks:
        yield {i: o for calls, o in zip(groups, pick, strict=True) for i in calls}


def _fastest(chain: Chain, graphs: list[_Graph], budget: int | None) -> Choice | None:
    """The best path of all graphs: the fastest, and of these that of the least peak."""
    room = ALL if budget is None else min(budget - chain.rests, ALL)
    limit = min(graph.rest[0] for graph in graphs) if budget is None else ALL
    best: tuple[int, int, Choice] | None = None
    for graph in graphs:
        found = _search(graph, room, limit)
        if found is not None and (best is None or found[:2] < best[:2]):
            best, limit = found, found[0]
    return None if best is None else best[2]


def optimal(chain: Chain, budget: int | None) -> Choice | None:
    """The fastest choice whose peak is within a budget; among equally fast ones of the least peak.

    None if there is none; a budget of None is no limit. Exact, but for chains whose shared layers
    have more than `MOST_SHARED` combinations of options: there they have equal `save`.

    Raises: ValueError when the calls of one layer have different options, or when a call's moment
        has other calls alive than those before it.

    >>> from fused_remat.planner.chain import Call, Moment, Option
    >>> options = Option((), 2, 1, 3, 1.0), Option(("query",), 3, 1, 3, 0.25)
    >>> calls = tuple(Call(f"layers.{i}", "", options, 2.0, 1, linked=i > 0) for i in range(2))
    >>> chain = Chain(calls, (Moment(-1, False, 4, 4, 2),), {"parameters": 10}, 20.0)
    >>> optimal(chain, 15)
    Choice(options=(0, 1), segments=())
    >>> optimal(chain, 13)
    Choice(options=(1, 0), segments=((0, 2),))
    """
    return _fastest(chain, _graphs(chain), budget)


def least_peak(chain: Chain) -> Choice:
    """The fastest of the choices with the least peak; raises as `optimal` does."""
    graphs = _graphs(chain)
    choice = _fastest(chain, graphs, chain.rests + min(graph.peak for graph in graphs))
    assert choice is not None  # some path has this peak
    return choice


def frontier(chain: Chain, points: int = 24) -> list[Choice]:
    """Optimal choices, from the least peak to the fastest, at budgets evenly between their peaks.

    In order of peak; those that the next budget does not change are there once. Raises as
    `optimal` does.
    """
    graphs = _graphs(chain)
    low, high = chain.rests + min(graph.peak for graph in graphs), _fastest(chain, graphs, None)
    assert high is not None  # without a limit there is a choice
    span = peak(chain, high) - low
    budgets = [low + span * i // max(points - 1, 1) for i in range(points)]
    found = [choice for b in budgets if (choice := _fastest(chain, graphs, b)) is not None]
    return list({peak(chain, choice): choice for choice in found}.values())


def _sqrt(chain: Chain, budget: int | None) -> Choice | None:
    choice = sqrt(chain)
    return choice if budget is None or peak(chain, choice) <= budget else None


METHODS: dict[str, Callable[[Chain, int | None], Choice | None]] = {
    "optimal": optimal,
    "greedy": greedy,
    "uniform": uniform,
    "sqrt": _sqrt,
}


#: Shell patterns of layer names to policies; the first that matches counts.
Policies = Mapping[str, str | Policy]


def choose(chain: Chain, limit: int | None, method: str, policies: Policies) -> Choice:
    """What `method` chooses within `limit` bytes; `policies` are for "manual".

    Raises: BudgetError if its peak is above.
    """
    if method == "manual":
        choice = _manual(chain, policies)
        if limit is not None and chains.peak(chain, choice) > limit:
            raise _too_small(chain, choice, limit, method)
        return choice
    ways = chains.ways(chain)
    found = [c for way in ways if (c := METHODS[method](way, limit)) is not None]
    if not found:
        assert limit is not None
        tried = [METHODS[method](w, None) if method == "sqrt" else least_peak(w) for w in ways]
        # "sqrt" has one choice, within whatever budget
        known = [choice for choice in tried if choice is not None]
        least = min(known, key=lambda choice: chains.peak(chain, choice))
        raise _too_small(chain, least, limit, method)
    return min(found, key=lambda c: (chains.seconds(chain, c), chains.peak(chain, c)))


def frontier_of(chain: Chain) -> list[Choice]:
    """Choices of which none is beaten in peak and time, in order of peak."""
    found = [choice for way in chains.ways(chain) for choice in frontier(way)]
    best: list[Choice] = []
    for choice in sorted(found, key=lambda c: (chains.peak(chain, c), chains.seconds(chain, c))):
        if not best or chains.seconds(chain, choice) < chains.seconds(chain, best[-1]):
            best.append(choice)
    return best if len(chains.ways(chain)) > 1 else found


def policy_for(layer: str, policies: Policies) -> str | Policy:
    """The policy for a layer; raises ValueError if no pattern matches."""
    for pattern, policy in policies.items():
        if fnmatch.fnmatchcase(layer, pattern):
            return policy
    raise ValueError(f"no pattern of policies= matches {layer!r}: {', '.join(map(repr, policies))}")


def _manual(chain: Chain, policies: Policies) -> Choice:
    """The policies as a choice; a segment ends where the next begins, or where none is."""
    options, places = [], []
    for call in chain.calls:
        policy = policy_for(call.layer, policies)
        places.append(None if isinstance(policy, str) else policy.segment)
        options.append(len(call.options) - 1)  # the base, and the policy where it is another
    segments: list[tuple[int, int]] = []
    for i, place in enumerate(places):
        inside = place == "inner" and i > 0 and chain.calls[i].linked and places[i - 1] is not None
        if inside and segments and segments[-1][1] == i:
            segments[-1] = (segments[-1][0], i + 1)
        elif place is not None:
            segments.append((i, i + 1))
    return Choice(tuple(options), tuple(s for s in segments if s[1] - s[0] > 1))


def parts_of(chain: Chain, choice: Choice) -> dict[str, int]:
    """What the peak is made of, in bytes: "kept" is of the layers, "at work" all the rest."""
    return parts_at(chain, max(chains.timeline(chain, choice), key=lambda event: event.peak))


def parts_at(chain: Chain, event: Event) -> dict[str, int]:
    """The same of the most that one stretch of a step takes."""
    parts = dict(chain.resting)
    if event.aside:
        parts["in transit"] = event.aside
    if not parts.get("gradients"):
        parts["gradients"] = event.gradients
    parts["kept"] = event.kept
    parts["at work"] = event.peak - sum(parts.values())
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _too_small(chain: Chain, choice: Choice, limit: int, method: str) -> BudgetError:
    """With the least peak there could be: of `choice`, the method's own or that of "optimal"."""
    parts = dict(sorted(parts_of(chain, choice).items(), key=lambda part: -part[1]))
    top = max(chains.timeline(chain, choice), key=lambda event: event.peak)
    where = "outside the layers" if top.call < 0 else f"of {chain.calls[top.call].layer!r}"
    when = "the optimizer's step" if top.what == "update" else f"{top.what} {where}"
    made = ", ".join(f"{name} {human(nbytes)}" for name, nbytes in parts.items())
    what = {"manual": "the policies have", "sqrt": "its segments have"}.get(method)
    if what is None:
        what = "'optimal' has" if top.peak <= limit else "the least possible is"
    return BudgetError(
        f"no {method!r} plan has a peak within {human(limit)} ({limit} bytes): {what} "
        f"{human(top.peak)} ({top.peak} bytes), in {when}: {made}",
        limit,
        top.peak,
        parts,
    )

"""The fastest choice for a chain within a budget of bytes: exact, or by a simpler rule.

The exact search covers an option for each call and all disjoint segments: runs of two or more
calls, all but the first linked, without layers that are called more than once. All calls of a
segment but the last have options with one `save`; the last one has its base.

It moves along the chain with labels: bytes kept, time, and most bytes at any moment so far. A label
that keeps no less than another and is no faster can be dropped, since whatever follows the one can
follow the other. Few labels remain where bytes come in multiples of a few sizes.

Source: Pareto labels, as for shortest paths with resource constraints (Desrochers and Soumis 1988).
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fused_remat.planner import chain as chains
from fused_remat.planner.chain import Chain, Choice, Event, peak
from fused_remat.planner.rules import greedy, sqrt, uniform
from fused_remat.planner.steps import NEVER, Numbers, Step, levels, shared, steps
from fused_remat.policies import Policy
from fused_remat.report.units import human

ALL = -NEVER  # more bytes, or ticks, than any choice has
POINTS = 24  # of the frontier, per level of offload
MOST_SHARED = 4096  # combinations of options of shared layers that are searched one by one

#: Shell patterns of layer names to policies; the first pattern that matches counts.
Policies = Mapping[str, str | Policy]


class BudgetError(ValueError):
    """A budget that no plan of a method meets.

    Attributes:
        budget: the budget in bytes.
        least: the least peak that any method can reach, in bytes; for "sqrt" and "manual", theirs.
        parts: what that peak consists of, in bytes, the largest part first.
    """

    def __init__(self, message: str, budget: int, least: int, parts: dict[str, int]) -> None:
        super().__init__(message)
        self.budget, self.least, self.parts = budget, least, parts


def choose(chain: Chain, limit: int | None, method: str, policies: Policies) -> Choice:
    """Return the choice of `method` within `limit` bytes; `policies` are for "manual".

    Raises: BudgetError if its peak is above the limit.
    """
    if method == "manual":
        choice = _manual(chain, policies)
        if limit is not None and peak(chain, choice) > limit:
            raise _too_small(chain, choice, limit, method)
        return choice
    variants = chains.offload_levels(chain)
    choices = [c for level in variants if (c := METHODS[method](level, limit)) is not None]
    if choices:
        return min(choices, key=lambda c: (chains.seconds(chain, c), peak(chain, c)))
    assert limit is not None
    # "sqrt" has a single choice, whatever the budget.
    single = (sqrt(level, None) for level in variants)
    least = [c for c in single if c] if method == "sqrt" else [*map(least_peak, variants)]
    raise _too_small(chain, min(least, key=lambda c: peak(chain, c)), limit, method)


def choose_chain(
    measured: Sequence[Chain], limit: int | None, method: str, policies: Policies
) -> tuple[Chain, Choice, Chain | None]:
    """Return the fastest of the chains with its choice, and the other one, if there are two.

    Raises: as `choose`, with the least peak of all.
    """
    found, errors = list[tuple[Chain, Choice]](), list[BudgetError]()
    for chain in measured:
        try:
            found.append((chain, choose(chain, limit, method, policies)))
        except BudgetError as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda error: error.least)
    chain, choice = min(found, key=lambda pair: (chains.seconds(*pair), peak(*pair)))
    return chain, choice, next((c for c in measured if c is not chain), None)


def frontier(chain: Chain) -> list[Choice]:
    """Return optimal choices by peak, at equally spaced budgets from the least possible one."""
    choices: list[Choice] = []
    for level in chains.offload_levels(chain):
        graphs = _graphs(level)
        low, high = level.rests + min(graph.peak for graph in graphs), _fastest(level, graphs, None)
        assert high is not None  # without a limit there is a choice
        span = peak(level, high) - low
        budgets = (low + span * i // (POINTS - 1) for i in range(POINTS))
        choices += filter(None, (_fastest(level, graphs, budget) for budget in budgets))
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (peak(chain, c), chains.seconds(chain, c))):
        if not best or chains.seconds(chain, choice) < chains.seconds(chain, best[-1]):
            best.append(choice)
    return best


def optimal(chain: Chain, budget: int | None) -> Choice | None:
    """Return the fastest choice with a peak within the budget, of the least peak among equals.

    None if nothing fits. A budget of None is no limit. Exact, except where shared layers
    have more than `MOST_SHARED` combinations of options; then all of them have the same `save`.
    """
    return _fastest(chain, _graphs(chain), budget)


def least_peak(chain: Chain) -> Choice:
    """Return the fastest of the choices with the least peak."""
    graphs = _graphs(chain)
    choice = _fastest(chain, graphs, chain.rests + min(graph.peak for graph in graphs))
    assert choice is not None  # some path has this peak
    return choice


METHODS: dict[str, Callable[[Chain, int | None], Choice | None]] = {
    "optimal": optimal,
    "greedy": greedy,
    "uniform": uniform,
    "sqrt": sqrt,
}


def policy_for(layer: str, policies: Policies) -> str | Policy:
    """Return the policy for a layer. Raises: ValueError if no pattern matches."""
    for pattern, policy in policies.items():
        if fnmatch.fnmatchcase(layer, pattern):
            return policy
    known = ", ".join(map(repr, policies)) or "none"
    raise ValueError(f"no pattern of policies= matches {layer!r}; patterns: {known}")


def _manual(chain: Chain, policies: Policies) -> Choice:
    """Return the policies as a choice."""
    # The last option is the policy's own; the base if that is the only one.
    options = tuple(len(call.options) - 1 for call in chain.calls)
    segments: list[tuple[int, int]] = []
    for i, call in enumerate(chain.calls):
        position = getattr(policy_for(call.layer, policies), "segment", None)
        if position == "inner" and call.linked and segments and segments[-1][1] == i:
            segments[-1] = (segments[-1][0], i + 1)
        elif position is not None:
            segments.append((i, i + 1))
    return Choice(options, tuple(s for s in segments if s[1] - s[0] > 1))


def parts_at(chain: Chain, event: Event) -> dict[str, int]:
    """Return the parts of the most bytes in one span of the step."""
    parts = dict(chain.resting)
    if event.aside:
        parts["in transit"] = event.aside
    if not parts.get("gradients"):
        parts["gradients"] = event.gradients
    parts["kept"] = event.kept
    parts["at work"] = event.peak - sum(parts.values())
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _too_small(chain: Chain, choice: Choice, limit: int, method: str) -> BudgetError:
    """Return the error with the least possible peak: that of `choice`."""
    top = max(chains.timeline(chain, choice), key=lambda event: event.peak)
    parts = dict(sorted(parts_at(chain, top).items(), key=lambda part: -part[1]))
    layer = chain.calls[top.call].layer or "the model" if top.call >= 0 else "other modules"
    when = "the optimizer's step" if top.what == "update" else f"{top.what} of {layer}"
    shown = ", ".join(f"{name} {human(nbytes)}" for name, nbytes in parts.items())
    what = {"manual": "the peak of the policies is", "sqrt": "the peak of its segments is"}.get(
        method, "the peak of 'optimal' is" if top.peak <= limit else "the least possible peak is"
    )
    return BudgetError(
        f"no {method!r} plan has a peak within {human(limit)} ({limit} bytes): {what} "
        f"{human(top.peak)} ({top.peak} bytes), in {when}: {shown}",
        limit, top.peak, parts,
    )  # fmt: skip


class _Graph:
    """The steps of a chain with `fixed` options of some calls, and lower bounds of what follows."""

    def __init__(self, chain: Chain, every: list[Step], fixed: dict[int, int]) -> None:
        n = len(chain.calls)
        self.start = max(levels(chain).between(0), chain.update)  # bytes that no choice changes
        self.ends: list[list[Step]] = [[] for _ in range(n + 1)]  # by the boundary where they end
        # By boundary, bytes above those kept and time that every path from there needs at least.
        self.least, self.rest = [ALL] * n + [NEVER], [ALL] * n + [0]
        for step in reversed(every):
            if fixed.get(step.first, step.ways[0].options[0]) != step.ways[0].options[0]:
                continue
            self.ends[step.last].append(step)
            after = max(step.ways[0].need, step.grows + self.least[step.last])
            self.least[step.first] = min(self.least[step.first], after)
            time = step.ways[-1].ticks + self.rest[step.last]
            self.rest[step.first] = min(self.rest[step.first], time)

    @property
    def peak(self) -> int:
        """A lower bound of the peak of any path, above the resting bytes."""
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
    """Return the labels after a step: each takes the fastest way that it has room for."""
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
    """Return the labels without those that another one beats in bytes kept, time and peak."""
    order = np.lexsort((labels.peak, labels.ticks, labels.kept))
    order = order[labels.ticks[order] <= np.minimum.accumulate(labels.ticks[order])]
    time, most = labels.ticks[order], labels.peak[order]
    # The remaining labels form runs of equal time. Lowering each run below the one before lets a
    # single pass find the labels of every run whose peak is a new minimum.
    run = np.cumsum(np.diff(time, prepend=time[:1]) != 0)
    lowered = most - run * (np.ptp(most) + 1 if len(most) else 1)
    first = np.diff(np.minimum.accumulate(lowered), prepend=ALL) < 0
    return _Labels(*(column[order[first]] for column in labels))


def _search(graph: _Graph, room: int, limit: int) -> tuple[int, int, Choice] | None:
    """Return ticks, peak and choice of the fastest path within `room` bytes and `limit` ticks."""
    if graph.peak > room:
        return None
    zero = np.zeros(1, dtype=np.int64)
    reached = [_Labels(zero, zero, zero + graph.start, zero, zero, zero)]
    for end in range(1, len(graph.ends)):
        taken = [_take(s, i, reached[s.first], room) for i, s in enumerate(graph.ends[end])]
        labels = _Labels(*map(np.concatenate, zip(*taken, strict=True)))
        fit = labels.kept + graph.least[end] <= room
        fit &= labels.ticks + graph.rest[end] <= limit
        reached.append(_pareto(_Labels(*(column[fit] for column in labels))))
    last = reached[-1]
    if not len(last.kept):
        return None
    best = int(np.lexsort((last.peak, last.ticks))[0])
    return int(last.ticks[best]), int(last.peak[best]), _path(graph, reached, best)


def _path(graph: _Graph, reached: list[_Labels], label: int) -> Choice:
    """Return the choice of a label, from its last step to its first."""
    options: list[int] = []
    segments: list[tuple[int, int]] = []
    end = len(reached) - 1
    while end > 0:
        labels = reached[end]
        step = graph.ends[end][labels.step[label]]
        options[:0] = step.ways[labels.way[label]].options
        if step.last - step.first > 1:
            segments.insert(0, (step.first, step.last))
        end, label = step.first, int(labels.before[label])
    return Choice(tuple(options), tuple(segments))


def _graphs(chain: Chain) -> list[_Graph]:
    """Return a graph for every choice of the shared layers' options, by their least time.

    If there are too many, the options of all shared layers have a common `save`.
    """
    groups = list(shared(chain).values())
    saves = [[o.save for o in chain.calls[calls[0]].options] for calls in groups]
    picks: Iterable[tuple[int, ...]] = itertools.product(*(range(len(own)) for own in saves))
    if np.prod([len(own) for own in saves], dtype=float) > MOST_SHARED:
        common = [save for save in saves[0] if all(save in own for own in saves)]
        picks = [tuple(own.index(save) for own in saves) for save in common]
    every = steps(chain)
    graphs = [
        _Graph(chain, every, {i: o for calls, o in zip(groups, pick, strict=True) for i in calls})
        for pick in picks
    ]
    return sorted(graphs, key=lambda graph: graph.rest[0])


def _fastest(chain: Chain, graphs: list[_Graph], budget: int | None) -> Choice | None:
    """Return the fastest path of all graphs; among equally fast ones, that of the least peak."""
    room = ALL if budget is None else min(budget - chain.rests, ALL)
    limit = min(graph.rest[0] for graph in graphs) if budget is None else ALL
    best: tuple[int, int, Choice] | None = None
    for graph in graphs:
        path = _search(graph, room, limit)
        if path is not None and (best is None or path[:2] < best[:2]):
            best, limit = path, path[0]
    return None if best is None else best[2]

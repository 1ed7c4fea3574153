"""A chain as a graph whose paths are its choices.

A step of a path is one call with an option, or one segment. If the calls before it keep x bytes
more than measured, the step needs at most x + need bytes, and x + grows are kept after it. Neither
number depends on the budget, so the steps are computed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import le
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fused_remat.planner.chain import Chain

Numbers = NDArray[np.int64]

TICKS = 1e15  # per second: sums of whole numbers do not depend on their order, so ties are exact
NEVER = -(1 << 60)  # bytes of a moment that does not exist


class Way(NamedTuple):
    """One way to take a step: bytes above those kept before it, time, and options."""

    need: int
    ticks: int
    options: tuple[int, ...]


class Step(NamedTuple):
    """The calls [first, last) as one step: a segment if there are two or more.

    Each of its ways needs more bytes and less time than the one before; all grow by the same.
    """

    first: int
    last: int
    grows: int
    ways: tuple[Way, ...]
    needs: Numbers
    ticks: Numbers


@dataclass(frozen=True)
class Levels:
    """Most bytes of the measured moments, above the resting ones.

    Attributes:
        forward, backward: by call.
        replay: bytes at the beginning of the backward, by call.
        before, after: outside the calls, in forward and in backward, by the number of calls alive.
    """

    forward: list[int]
    backward: list[int]
    replay: list[int]
    before: list[int]
    after: list[int]

    def between(self, alive: int) -> int:
        return max(self.before[alive], self.after[alive])


def steps(chain: Chain) -> list[Step]:
    """All steps in order of their last call; shared layers have one option a step, no segments."""
    bounds, tied = levels(chain), {i for calls in shared(chain).values() for i in calls}
    found: list[Step] = []
    for i in range(len(chain.calls)):
        found += _alone(chain, bounds, i, i in tied)
        found += _segments(chain, bounds, i, tied)
    return sorted(found, key=lambda step: step.last)


def start(chain: Chain) -> int:
    """Return the most bytes of the moments that no choice changes, above the resting ones."""
    return max(levels(chain).between(0), chain.update)


def levels(chain: Chain) -> Levels:
    """Return the moments, sorted by the steps that they bound.

    Raises: ValueError if the calls alive in a call's moment are not those before it (and, in
        backward, itself): the memory of such a moment does not follow from the path so far.
    """
    n = len(chain.calls)
    found = Levels(*([NEVER] * (n + outside) for outside in (0, 0, 0, 1, 1)))
    for m in chain.moments:
        if m.call < 0:
            bound, at = (found.after if m.backward else found.before), m.alive
        elif m.alive == m.call + m.backward:
            bound, at = (found.backward if m.backward else found.forward), m.call
        else:
            raise ValueError(
                f"call {m.call} has a moment with {m.alive} calls alive; expected "
                f"{m.call + m.backward}"
            )
        bound[at] = max(bound[at], m.peak)
        if m.call >= 0 and m.backward and found.replay[at] == NEVER:
            found.replay[at] = m.level
    return found


def shared(chain: Chain) -> dict[str, list[int]]:
    """Return the calls of every layer that is called more than once.

    Raises: ValueError if the calls of one layer have different options.
    """
    times = Counter(call.layer for call in chain.calls)
    calls: dict[str, list[int]] = {}
    for i, call in enumerate(chain.calls):
        if times[call.layer] > 1:
            calls.setdefault(call.layer, []).append(i)
    for layer, indices in calls.items():
        if len({tuple(o.save for o in chain.calls[i].options) for i in indices}) > 1:
            raise ValueError(f"the calls of layer {layer!r} have different options")
    return calls


def ticks(seconds: float) -> int:
    """Return the seconds as an integer number of `TICKS`."""
    return round(seconds * TICKS)


def _alone(chain: Chain, bounds: Levels, i: int, tied: bool) -> Iterator[Step]:
    """Call i by itself: one step for all options that keep equally many bytes."""
    base = chain.calls[i].base
    ways: dict[tuple[int, int], list[Way]] = {}
    for o, option in enumerate(chain.calls[i].options):
        grows = option.kept - base.kept
        need = max(
            bounds.forward[i] + option.forward - base.forward,
            bounds.backward[i] + option.backward - base.backward + grows,
            bounds.between(i + 1) + grows,
        )
        way = Way(need, ticks(option.seconds) - ticks(base.seconds), (o,))
        ways.setdefault((grows, o if tied else -1), []).append(way)
    for (grows, _), equal in ways.items():
        yield _step(i, i + 1, grows, equal)


class _Replay(NamedTuple):
    """The replayed calls of a segment, all with one `save`: bytes above those kept before it, time.

    Attributes:
        kept: bytes that they keep more than before the replay.
        backward: most bytes in their backwards and in between.
        replay: most bytes in their replay, including all inputs of the chain so far.
    """

    kept: int
    backward: int
    replay: int
    ticks: int
    options: tuple[int, ...]


def _segments(chain: Chain, bounds: Levels, first: int, tied: set[int]) -> Iterator[Step]:
    """Yield the segments that begin at a call, as steps."""
    inputs = [0, *np.cumsum([call.input for call in chain.calls]).tolist()]
    replays = {o.save: [_Replay(0, NEVER, NEVER, 0, ())] for o in chain.calls[first].options
               if not o.offload}  # fmt: skip
    forward = bounds.forward[first]
    for end in range(first + 1, len(chain.calls)):
        if not chain.calls[end].linked or not tied.isdisjoint((first, end)):
            return
        # Call `end` is the last one of the segment, and call `end - 1` the last one replayed.
        replays = {
            save: more
            for save, before in replays.items()
            if (more := _extended(chain, bounds, end - 1, inputs[end], save, before))
        }
        dropped = inputs[end] - inputs[first + 1]
        forward = max(forward, bounds.before[end] - dropped, bounds.forward[end] - dropped)
        grows = inputs[first + 1] - inputs[end + 1]
        common = max(forward, bounds.between(end + 1) + grows)
        ways = [
            Way(
                max(
                    common,
                    path.backward,
                    path.kept + bounds.backward[end],
                    path.replay + bounds.replay[end] - inputs[end + 1],
                ),
                path.ticks,
                (*path.options, 0),
            )
            for paths in replays.values()
            for path in paths
        ]
        if ways:
            yield _step(first, end + 1, grows, ways)


def _extended(
    chain: Chain, bounds: Levels, i: int, inputs: int, save: tuple[str, ...], before: list[_Replay]
) -> list[_Replay]:
    """Return the paths extended by call i, replayed with any option that has this `save`."""
    base, found = chain.calls[i].base, []
    for o, option in enumerate(chain.calls[i].options):
        if option.save != save or option.offload:
            continue
        more = ticks(chain.calls[i].forward_seconds) + ticks(option.seconds) - ticks(base.seconds)
        for path in before:
            kept = path.kept + option.kept - base.kept
            own = max(bounds.backward[i] + option.backward - base.backward, bounds.after[i + 1])
            backward = max(path.backward, kept + own)
            replay = max(path.replay, path.kept + option.forward + inputs)
            found.append(_Replay(kept, backward, replay, path.ticks + more, (*path.options, o)))
    return _undominated(found)


def _undominated(paths: list[_Replay]) -> list[_Replay]:
    """Return the paths that no other path beats in every respect."""
    best: list[_Replay] = []
    for path in sorted(paths):
        if not any(all(map(le, other[:4], path[:4])) for other in best):
            best.append(path)
    return best


def _step(first: int, last: int, grows: int, ways: list[Way]) -> Step:
    """Return a step with those ways that no other way beats in both bytes and time."""
    best: list[Way] = []
    for way in sorted(ways):
        if not best or way.ticks < best[-1].ticks:
            best.append(way)
    needs, times = (np.array([way[i] for way in best], dtype=np.int64) for i in (0, 1))
    return Step(first, last, grows, tuple(best), needs, times)

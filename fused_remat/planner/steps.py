"""A chain as a graph whose paths are its choices.

A step of a path is one call with an option, or one segment. If the calls before it keep x bytes
more than measured, the step needs at most x + need bytes, and x + grows are kept after it. Neither
number depends on the budget, so the steps are computed once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    """Most bytes of the measured moments, above the resting ones."""

    forward: list[int]  # by call
    backward: list[int]  # by call
    replay: list[int]  # bytes at the beginning of the backward, by call
    before: list[int]  # outside the calls in forward, by the number of calls alive
    after: list[int]  # the same in backward

    def between(self, alive: int) -> int:
        return max(self.before[alive], self.after[alive])


def steps(chain: Chain) -> list[Step]:
    """Return the steps by their last call; shared layers have one option a step, no segments."""
    bounds, tied = levels(chain), {i for calls in shared(chain).values() for i in calls}
    result: list[Step] = []
    for i in range(len(chain.calls)):
        result += _alone(chain, bounds, i, i in tied)
        result += _segments(chain, bounds, i, tied)
    return sorted(result, key=lambda step: step.last)


def levels(chain: Chain) -> Levels:
    """Return the moments, sorted by the steps that they bound."""
    n = len(chain.calls)
    result = Levels(*([NEVER] * (n + outside) for outside in (0, 0, 0, 1, 1)))
    for m in chain.moments:
        if m.call < 0:
            bound, at = (result.after if m.backward else result.before), m.alive
        else:
            assert m.alive == m.call + m.backward, "its memory follows from the path so far"
            bound, at = (result.backward if m.backward else result.forward), m.call
        bound[at] = max(bound[at], m.peak)
        if m.call >= 0 and m.backward and result.replay[at] == NEVER:
            result.replay[at] = m.level
    return result


def shared(chain: Chain) -> dict[str, list[int]]:
    """Return the calls of every layer that is called more than once; they have equal options."""
    calls: dict[str, list[int]] = {}
    for i, call in enumerate(chain.calls):
        calls.setdefault(call.layer, []).append(i)
    return {layer: indices for layer, indices in calls.items() if len(indices) > 1}


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS)


def _alone(chain: Chain, bounds: Levels, i: int, tied: bool) -> Iterator[Step]:
    """Yield call i by itself: one step for all options that keep equally many bytes."""
    base = chain.calls[i].base
    ways: dict[tuple[int, int], list[Way]] = {}
    for o, option in enumerate(chain.calls[i].options):
        grows = option.kept - base.kept
        need = max(
            bounds.forward[i] + option.forward - base.forward,
            bounds.backward[i] + option.backward - base.backward + grows,
            bounds.between(i + 1) + grows,
        )
        way = Way(need, _ticks(option.seconds) - _ticks(base.seconds), (o,))
        ways.setdefault((grows, o if tied else -1), []).append(way)
    for (grows, _), equal in ways.items():
        yield _step(i, i + 1, grows, equal)


class _Replay(NamedTuple):
    """The replayed calls of a segment with one `save`, in bytes above those kept before it."""

    kept: int  # above what they kept before the replay
    backward: int  # most bytes in their backwards and in between
    replay: int  # most bytes in their replay, including all inputs of the chain so far
    ticks: int
    options: tuple[int, ...]


def _segments(chain: Chain, bounds: Levels, first: int, tied: set[int]) -> Iterator[Step]:
    """Yield the segments that begin at a call, as steps."""
    inputs = [0, *np.cumsum([call.input for call in chain.calls]).tolist()]
    replays = {o.save: _Replay(0, NEVER, NEVER, 0, ()) for o in chain.calls[first].options}
    forward = bounds.forward[first]
    for end in range(first + 1, len(chain.calls)):
        if not chain.calls[end].linked or not tied.isdisjoint((first, end)):
            return
        # Call `end` is the last one of the segment, and call `end - 1` the last one replayed.
        replays = dict(_extended(chain, bounds, end - 1, inputs[end], replays))
        dropped = inputs[end] - inputs[first + 1]
        forward = max(forward, bounds.before[end] - dropped, bounds.forward[end] - dropped)
        grows = inputs[first + 1] - inputs[end + 1]
        common = max(forward, bounds.between(end + 1) + grows)
        ways = []
        for path in replays.values():
            replay = path.replay + bounds.replay[end] - inputs[end + 1]
            need = max(common, path.backward, path.kept + bounds.backward[end], replay)
            ways.append(Way(need, path.ticks, (*path.options, 0)))
        if ways:
            yield _step(first, end + 1, grows, ways)


def _extended(
    chain: Chain, bounds: Levels, i: int, inputs: int, replays: dict[tuple[str, ...], _Replay]
) -> Iterator[tuple[tuple[str, ...], _Replay]]:
    """Yield the paths, by `save`, extended by the option of call i with the same `save`."""
    base = chain.calls[i].base
    for o, option in enumerate(chain.calls[i].options):
        if option.save not in replays or option.offload:
            continue
        path = replays[option.save]
        more = (
            _ticks(chain.calls[i].forward_seconds) + _ticks(option.seconds) - _ticks(base.seconds)
        )
        kept = path.kept + option.kept - base.kept
        own = max(bounds.backward[i] + option.backward - base.backward, bounds.after[i + 1])
        yield (
            option.save,
            _Replay(
                kept,
                max(path.backward, kept + own),
                max(path.replay, path.kept + option.forward + inputs),
                path.ticks + more,
                (*path.options, o),
            ),
        )


def _step(first: int, last: int, grows: int, ways: list[Way]) -> Step:
    """Return a step with those ways that no other way beats in both bytes and time."""
    best: list[Way] = []
    for way in sorted(ways):
        if not best or way.ticks < best[-1].ticks:
            best.append(way)
    needs, times = (np.array([way[i] for way in best], dtype=np.int64) for i in (0, 1))
    return Step(first, last, grows, tuple(best), needs, times)

"""A training step as numbers: what each layer may keep, and what that does to memory and time.

A step was measured once, with every layer keeping its inputs alone (its first option). Any other
choice shifts those levels by what it keeps more or less, between forward and backward of the layer;
what happens outside the layers is as it was measured. No torch here: `solve.py` searches these
numbers, a Plan keeps them, tests make their own.

Memory at one moment is what all layers before it keep, and what its own layer takes:

    peak = max over moments m of  peak_m + sum(kept_j - base_j for j alive in m) + own_m

A segment is a run of calls of which only the first keeps its first input; all keep what the base
keeps besides. When backward reaches its last call, those before it are run forward again, and
keep from then on what their options say; the last has its input by then, and rebuilds the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Option:
    """What one call of a layer may keep. A call's first option is what was measured in the step.

    Attributes:
        save: the names, as in `Policy(save=...)`; sorted.
        kept: bytes kept from forward to backward: inputs, names, statistics, seed.
        forward: most bytes at a time in forward, above those at its beginning.
        backward: the same of backward, at whose beginning what is kept is there already.
        seconds: time of backward, its rebuilds in it, of packing in forward, and of copies between
            device and host that nothing hides.
        offload: the names that wait on the host, as in `Policy(offload=...)`; sorted. Such options
            are not in segments.
        moved: bytes that wait there, and are not in `kept`; a call's options never move less than
            those before them.
        preset: the preset that keeps these names in the call's block, "" if none does.
    """

    save: tuple[str, ...]
    kept: int
    forward: int
    backward: int
    seconds: float
    offload: tuple[str, ...] = ()
    moved: int = 0
    preset: str = ""


@dataclass(frozen=True)
class Call:
    """One call of a layer.

    Attributes:
        layer: its qualified name; calls of equal name are one layer's, and have one option.
        kind: of its block ("encoder_prenorm"), for tables.
        options: at least one; the first, which keeps nothing that is not kept by all, is the base.
        forward_seconds: of one forward.
        input: bytes of its first input, which is in every option's `kept` but where offloaded.
        linked: whether its first input is the output of the call before, and held by nobody else.
    """

    layer: str
    kind: str
    options: tuple[Option, ...]
    forward_seconds: float
    input: int
    linked: bool

    @property
    def base(self) -> Option:
        return self.options[0]


@dataclass(frozen=True)
class Moment:
    """A stretch of the measured step: in one call's forward or backward, or in none (call -1).

    Attributes:
        call, backward: which.
        level: bytes at its beginning, above what rests.
        peak: the most bytes in it, above what rests.
        alive: how many calls, from the first, keep their activations in it; a call counts in its
            own backward and not in its own forward.
        gradients: bytes of parameters whose gradients are there at its end; they are in the levels.
    """

    call: int
    backward: bool
    level: int
    peak: int
    alive: int
    gradients: int = 0


@dataclass(frozen=True)
class Choice:
    """An option for every call, by index, and disjoint runs [first, last) of calls as segments.

    A segment has at least two calls; all but the first are linked.
    """

    options: tuple[int, ...]
    segments: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Chain:
    """A measured step.

    Attributes:
        calls: in order of their forward.
        moments: in order of time.
        resting: bytes that are there all the time, by what they are ("parameters", ...).
        seconds: of the step that was measured, every call with its first option.
        update: most bytes at a time in the optimizer's step, above what rests.
        kept: bytes kept between forward and backward in that step, in all of the model.
    """

    calls: tuple[Call, ...]
    moments: tuple[Moment, ...]
    resting: Mapping[str, int]
    seconds: float
    update: int = 0
    kept: int = 0

    @property
    def rests(self) -> int:
        return sum(self.resting.values())


@dataclass(frozen=True)
class Event:
    """A stretch of the predicted step, in bytes; what rests is in them.

    Attributes:
        call: the call's index, -1 outside.
        what: "forward", "replay" (of a call in a segment), "backward" or "update".
        level, peak: at its beginning, and at most.
        gradients: of them, those of parameters, at its end.
        kept: of them, what layers keep, and what was kept again by replays.
        aside: of them, what is set aside for copies between device and host.
    """

    call: int
    what: str
    level: int
    peak: int
    gradients: int
    kept: int
    aside: int = 0


def kept(chain: Chain, choice: Choice) -> tuple[int, ...]:
    """Bytes that each call keeps from forward to backward."""
    own = [call.options[o].kept for call, o in zip(chain.calls, choice.options, strict=True)]
    for first, last in choice.segments:
        for i in range(first, last):
            own[i] = chain.calls[i].base.kept - (chain.calls[i].input if i > first else 0)
    return tuple(own)


def kept_in_all(chain: Chain, choice: Choice) -> int:
    """Bytes kept from forward to backward, in all of the model."""
    base = sum(call.base.kept for call in chain.calls)
    return chain.kept + sum(kept(chain, choice)) - base


def ways(chain: Chain) -> tuple[Chain, ...]:
    """The chain without the options that offload; with those that move inputs; with all.

    What is in transit then rests. What a method chooses in any of them is a choice of `chain`.
    """
    moving = [option for call in chain.calls for option in call.options if option.offload]
    inputs = [option.moved for option in moving if option.offload == ("input",)]
    levels = sorted({0, max(inputs, default=0), max((o.moved for o in moving), default=0)})
    return tuple(_moving_at_most(chain, level) for level in levels)


def _moving_at_most(chain: Chain, level: int) -> Chain:
    calls = tuple(
        replace(call, options=tuple(o for o in call.options if o.moved <= level))
        for call in chain.calls
    )
    resting = {**chain.resting, "in transit": 2 * level} if level else chain.resting
    return replace(chain, calls=calls, resting=resting)


def _aside(chain: Chain, choice: Choice) -> int:
    """What copies between device and host read or write: of one call, and of the next one."""
    chosen = zip(chain.calls, choice.options, strict=True)
    return 2 * max((call.options[o].moved for call, o in chosen), default=0)


def timeline(chain: Chain, choice: Choice) -> Iterator[Event]:
    """The step as it would be with `choice`."""
    aside = _aside(chain, choice)
    for event in _timeline(chain, choice):
        yield (
            replace(event, level=event.level + aside, peak=event.peak + aside, aside=aside)
            if aside
            else event
        )


def _timeline(chain: Chain, choice: Choice) -> Iterator[Event]:
    """The same without what is set aside."""
    shift, total = [0], [0]
    for call, bytes_kept in zip(chain.calls, kept(chain, choice), strict=True):
        shift.append(shift[-1] + bytes_kept - call.base.kept)
        total.append(total[-1] + bytes_kept)
    of = {i: segment for segment in choice.segments for i in range(*segment)}
    waiting = set(choice.segments)  # for their replay
    for m in chain.moments:
        at, held = chain.rests + shift[m.alive], total[m.alive]
        what, more, again = "backward" if m.backward else "forward", 0, 0
        if m.call >= 0:
            call, segment = chain.calls[m.call], of.get(m.call)
            mine = call.options[choice.options[m.call]]
            if not m.backward:
                more = 0 if segment else mine.forward - call.base.forward
            else:
                if segment is not None and m.call == segment[1] - 1:
                    if segment in waiting:
                        waiting.remove(segment)
                        yield from _replay(chain, choice, segment, at + m.level, m.gradients, held)
                    mine = call.base
                again = _replayed(chain, choice, segment, m.call)
                more = mine.backward - call.base.backward
        elif m.backward and m.alive < of.get(m.alive - 1, (0, 0))[1]:
            # Between the backwards of a segment, what was replayed for those to come is there.
            again = _replayed(chain, choice, of[m.alive - 1], m.alive - 1)
        at, held = at + again, held + again
        yield Event(m.call, what, at + m.level, at + m.peak + more, m.gradients, held)
    ready = max((m.gradients for m in chain.moments), default=0)
    yield Event(-1, "update", chain.rests, chain.rests + chain.update, ready, 0)


def _more(chain: Chain, choice: Choice, i: int) -> int:
    """What a call keeps once it was replayed, above what it keeps in a segment until then."""
    call = chain.calls[i]
    return call.options[choice.options[i]].kept - call.base.kept


def _replay(
    chain: Chain, choice: Choice, segment: tuple[int, int], level: int, gradients: int, held: int
) -> Iterator[Event]:
    """All calls of a segment but its last run forward again; each makes the input of the next."""
    for i in range(segment[0], segment[1] - 1):
        call = chain.calls[i]
        top = level + call.options[choice.options[i]].forward
        yield Event(i, "replay", level, top, gradients, held)
        more = _more(chain, choice, i) + chain.calls[i + 1].input
        level, held = level + more, held + more


def _replayed(chain: Chain, choice: Choice, segment: tuple[int, int] | None, i: int) -> int:
    """What the replay of call i's segment has made and is there still in the backward of i."""
    if segment is None:
        return 0
    mine = _more(chain, choice, i) if i < segment[1] - 1 else 0
    before = range(segment[0], i)
    return mine + sum(_more(chain, choice, j) + chain.calls[j + 1].input for j in before)


def peak(chain: Chain, choice: Choice) -> int:
    """The most bytes at a time in the whole step, with what rests."""
    return max(event.peak for event in timeline(chain, choice))


def seconds(chain: Chain, choice: Choice) -> float:
    """Time of the whole step."""
    terms = [chain.seconds]
    of = {i: segment for segment in choice.segments for i in range(*segment)}
    for i, call in enumerate(chain.calls):
        mine = call.options[choice.options[i]]
        if i not in of:
            terms += [mine.seconds, -call.base.seconds]
        elif i != of[i][1] - 1:
            terms += [call.forward_seconds, mine.seconds, -call.base.seconds]
    return math.fsum(terms)  # equal sets of terms, equal sums

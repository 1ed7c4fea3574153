"""A training step as plain numbers: the options of every layer, and their memory and time.

One step was measured with every layer keeping its inputs alone (its first option, the base).
Another choice shifts the measured levels by what a layer keeps more or less, from the layer's
forward to its backward; what happens outside the layers stays as measured:

    peak = max over moments m of  peak_m + sum(kept_j - base_j for j alive in m) + own_m

A segment is a run of calls of which only the first keeps its first input; each keeps whatever else
its base keeps. When backward reaches the last call, the calls before it run forward again and then
keep what their options name. The last call has its input by then, and rebuilds the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Option:
    """What one call of a layer may keep. The first option of a call was measured in the step.

    Attributes:
        save: names as in `Policy(save=...)`, sorted.
        kept: bytes kept from forward to backward: inputs, names, statistics, seed.
        forward, backward: most bytes during the pass, above those at its beginning. What is kept
            is allocated before backward begins.
        seconds: time of backward with its rebuilds, and of copies between device and host that no
            computation hides.
        offload: names that wait on the host, as in `Policy(offload=...)`, sorted. Options that
            offload are not part of segments.
        moved: bytes that wait on the host, which `kept` does not include; it never decreases along
            the options of a call.
        preset: the preset that keeps these names in the call's block, or ""; "checkpointed" or
            "plain" for the only option of a call that is no block.
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
class LayerOptions:
    """One call of a layer.

    Attributes:
        layer: the layer's qualified name; all calls of one layer have the same option.
        kind: kind of its block ("encoder_prenorm"), or the layer's class, for tables.
        options: at least one; the first, the base, keeps only what every option keeps.
        forward_seconds: time of one forward.
        input: bytes of its first input, which `kept` of every option includes unless offloaded.
        linked: whether its first input is the output of the preceding call and nothing else holds
            that tensor.
        reason: why it is no block, and has a single option; "" if it is one.
    """

    layer: str
    kind: str
    options: tuple[Option, ...]
    forward_seconds: float
    input: int
    linked: bool
    reason: str = ""

    @property
    def base(self) -> Option:
        return self.options[0]


@dataclass(frozen=True)
class Moment:
    """A span of the measured step: within one call's forward or backward, or outside (call -1).

    Attributes:
        call, backward: index of the call, and whether it is in backward.
        level, peak: bytes at the beginning and at most, above the resting bytes.
        alive: number of calls, from the first, whose activations are kept during it; a call counts
            in its own backward but not in its own forward.
        gradients: bytes of parameters whose gradients exist at its end; the levels include them.
    """

    call: int
    backward: bool
    level: int
    peak: int
    alive: int
    gradients: int = 0


@dataclass(frozen=True)
class Choice:
    """The index of an option for every call, and disjoint segments [first, last) of calls.

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
        resting: bytes allocated during the entire step, by what they hold ("parameters", ...).
        seconds: time of the measured step, in which every call has its first option.
        update: most bytes during the optimizer's step, above the resting bytes.
        kept: bytes kept between forward and backward in that step, in the entire model.
    """

    calls: tuple[LayerOptions, ...]
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
    """A span of the predicted step, in bytes that include the resting ones.

    Attributes:
        call: index of the call, -1 outside the calls.
        what: "forward", "replay" (of a call in a segment), "backward" or "update".
        level, peak: bytes at the beginning and at most.
        gradients: the part that gradients of parameters take, at its end.
        kept: the part that layers keep, including what replays keep again.
        aside: the part reserved for copies between device and host.
    """

    call: int
    what: str
    level: int
    peak: int
    gradients: int
    kept: int
    aside: int = 0


def kept(chain: Chain, choice: Choice) -> tuple[int, ...]:
    """Return the bytes that each call keeps from forward to backward."""
    own = [call.options[o].kept for call, o in zip(chain.calls, choice.options, strict=True)]
    for first, last in choice.segments:
        for i in range(first, last):
            own[i] = chain.calls[i].base.kept - (chain.calls[i].input if i > first else 0)
    return tuple(own)


def kept_in_all(chain: Chain, choice: Choice) -> int:
    """Return the bytes kept from forward to backward in the entire model."""
    base = sum(call.base.kept for call in chain.calls)
    return chain.kept + sum(kept(chain, choice)) - base


def offload_levels(chain: Chain) -> tuple[Chain, ...]:
    """Return the chain without options that offload, with those that offload inputs, and with all.

    Space for the copies in transit counts as resting bytes. A choice in any of these chains is a
    choice in `chain`.
    """
    moving = [option for call in chain.calls for option in call.options if option.offload]
    inputs = [option.moved for option in moving if option.offload == ("input",)]
    levels = sorted({0, max(inputs, default=0), max((o.moved for o in moving), default=0)})
    chains = []
    for level in levels:
        calls = tuple(
            replace(call, options=tuple(o for o in call.options if o.moved <= level))
            for call in chain.calls
        )
        resting = {**chain.resting, "in transit": 2 * level} if level else chain.resting
        chains.append(replace(chain, calls=calls, resting=resting))
    return tuple(chains)


def timeline(chain: Chain, choice: Choice) -> Iterator[Event]:
    """Yield the predicted step with `choice`, span by span."""
    chosen = zip(chain.calls, choice.options, strict=True)
    # The buffers of two copies at a time: of one call, and of the next.
    aside = 2 * max((call.options[o].moved for call, o in chosen), default=0)
    for e in _timeline(chain, choice):
        yield replace(e, level=e.level + aside, peak=e.peak + aside, aside=aside) if aside else e


def _timeline(chain: Chain, choice: Choice) -> Iterator[Event]:
    """Yield the same without the space for copies."""
    shift, total = [0], [0]
    for call, bytes_kept in zip(chain.calls, kept(chain, choice), strict=True):
        shift.append(shift[-1] + bytes_kept - call.base.kept)
        total.append(total[-1] + bytes_kept)
    of = {i: segment for segment in choice.segments for i in range(*segment)}
    waiting = set(choice.segments)  # segments that have not been replayed yet
    for m in chain.moments:
        at, held = chain.rests + shift[m.alive], total[m.alive]
        what, more, again = "backward" if m.backward else "forward", 0, 0
        if m.call >= 0:
            call, segment = chain.calls[m.call], of.get(m.call)
            option = call.options[choice.options[m.call]]
            if not m.backward:
                more = 0 if segment else option.forward - call.base.forward
            else:
                if segment is not None and m.call == segment[1] - 1:
                    if segment in waiting:
                        waiting.remove(segment)
                        yield from _replay(chain, choice, segment, at + m.level, m.gradients, held)
                    option = call.base
                again = _replayed(chain, choice, segment, m.call)
                more = option.backward - call.base.backward
        elif m.backward and m.alive < of.get(m.alive - 1, (0, 0))[1]:
            # Between the backwards of a segment, what replays computed for the others is allocated.
            again = _replayed(chain, choice, of[m.alive - 1], m.alive - 1)
        at, held = at + again, held + again
        yield Event(m.call, what, at + m.level, at + m.peak + more, m.gradients, held)
    ready = max((m.gradients for m in chain.moments), default=0)
    yield Event(-1, "update", chain.rests, chain.rests + chain.update, ready, 0)


def _more(chain: Chain, choice: Choice, i: int) -> int:
    """Return the bytes that a replayed call keeps above those it kept before the replay."""
    call = chain.calls[i]
    return call.options[choice.options[i]].kept - call.base.kept


def _replay(
    chain: Chain, choice: Choice, segment: tuple[int, int], level: int, gradients: int, held: int
) -> Iterator[Event]:
    """All calls of a segment but the last run forward again; each makes the next one's input."""
    for i in range(segment[0], segment[1] - 1):
        call = chain.calls[i]
        top = level + call.options[choice.options[i]].forward
        yield Event(i, "replay", level, top, gradients, held)
        more = _more(chain, choice, i) + chain.calls[i + 1].input
        level, held = level + more, held + more


def _replayed(chain: Chain, choice: Choice, segment: tuple[int, int] | None, i: int) -> int:
    """Return the bytes of the replay of call i's segment that live in the backward of call i."""
    if segment is None:
        return 0
    option = _more(chain, choice, i) if i < segment[1] - 1 else 0
    before = range(segment[0], i)
    return option + sum(_more(chain, choice, j) + chain.calls[j + 1].input for j in before)


def peak(chain: Chain, choice: Choice) -> int:
    """Return the most bytes during the entire step, including the resting ones."""
    return max(event.peak for event in timeline(chain, choice))


def seconds(chain: Chain, choice: Choice) -> float:
    """Return the time of the entire step; the optimizer's is not part of it."""
    terms = [chain.seconds]
    of = {i: segment for segment in choice.segments for i in range(*segment)}
    for i, call in enumerate(chain.calls):
        option = call.options[choice.options[i]]
        if i not in of:
            terms += [option.seconds, -call.base.seconds]
        elif i != of[i][1] - 1:
            terms += [call.forward_seconds, option.seconds, -call.base.seconds]
    return math.fsum(terms)  # exact, so equal terms in another order give an equal sum

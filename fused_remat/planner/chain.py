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
    """A set of names that a call may keep. The first option of a call was measured in the step.

    The options of a call without offload differ in `save`.
    """

    save: tuple[str, ...]  # names as in `Policy(save=...)`, sorted
    kept: int  # bytes from forward to backward: inputs, names, statistics, seed
    # Most bytes during the pass, above those at its beginning, when what is kept is allocated.
    forward: int
    backward: int
    seconds: float  # backward with its rebuilds, and copies to and from the host that nothing hides
    offload: tuple[str, ...] = ()  # names that wait on the host, sorted; not in segments
    moved: int = 0  # bytes on the host, not part of `kept`; never decreases along the options
    preset: str = ""  # that keeps these names, or what a call that is no block runs as


@dataclass(frozen=True)
class LayerOptions:
    """One call of a layer, with at least one option."""

    layer: str  # qualified name; all calls of one layer have the same option
    kind: str  # of its block ("encoder_prenorm"), or the layer's class, for tables
    options: tuple[Option, ...]  # the first, the base, keeps only what every option keeps
    forward_seconds: float
    input: int  # bytes of its first input, which `kept` of every option includes unless offloaded
    linked: bool  # its first input is the preceding call's output, and nothing else holds it
    reason: str = ""  # why it is no block, and has a single option
    long: tuple[str, ...] = ()  # attentions over long sequences (`policies.long_attentions`)

    @property
    def base(self) -> Option:
        return self.options[0]


@dataclass(frozen=True)
class Moment:
    """A span of the measured step: within one call's forward or backward, or outside (call -1)."""

    call: int
    backward: bool
    level: int  # bytes at the beginning, above the resting bytes
    peak: int  # most bytes, above the resting bytes
    alive: int  # calls, from the first, that keep activations; a call counts in its own backward
    gradients: int = 0  # bytes of existing gradients of parameters; the levels include them


@dataclass(frozen=True)
class Choice:
    """The index of an option for every call, and disjoint segments [first, last) of calls.

    A segment has at least two calls; all but the first are linked.
    """

    options: tuple[int, ...]
    segments: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Chain:
    """A measured step, in which every call has its first option."""

    calls: tuple[LayerOptions, ...]  # in order of their forward
    moments: tuple[Moment, ...]  # in order of time
    resting: Mapping[str, int]  # bytes of the entire step, by what they hold ("parameters", ...)
    seconds: float
    update: int = 0  # most bytes during the optimizer's step, above the resting bytes
    kept: int = 0  # bytes between forward and backward, in the entire model
    grad_in_forward: bool = False  # whether the loss computes its gradients in forward

    @property
    def rests(self) -> int:
        return sum(self.resting.values())


@dataclass(frozen=True)
class Event:
    """A span of the predicted step, in bytes that include the resting ones."""

    call: int  # -1 outside the calls
    what: str  # "forward", "replay" (of a call in a segment), "backward" or "update"
    level: int  # at the beginning
    peak: int
    gradients: int  # part of gradients of parameters, at its end
    kept: int  # part of what layers keep, including what replays keep again
    aside: int = 0  # part reserved for copies between device and host


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
    calls = chain.calls
    options = [call.options[o] for call, o in zip(calls, choice.options, strict=True)]
    aside = 2 * max((o.moved for o in options), default=0)  # copies of one call and of the next
    shift, total = [0], [0]
    for call, nbytes in zip(calls, kept(chain, choice), strict=True):
        shift.append(shift[-1] + nbytes - call.base.kept)
        total.append(total[-1] + nbytes)
    of = {i: segment for segment in choice.segments for i in range(*segment)}
    waiting = set(choice.segments)  # segments that have not been replayed yet
    for m in chain.moments:
        level, most = chain.rests + aside + shift[m.alive] + m.level, m.peak - m.level
        event = Event(m.call, "forward", level, level + most, m.gradients, total[m.alive], aside)
        if not m.backward:
            if m.call >= 0 and m.call not in of:
                more = options[m.call].forward - calls[m.call].base.forward
                event = replace(event, peak=event.peak + more)
            yield event
            continue
        i = m.call if m.call >= 0 else m.alive - 1
        segment, is_last, again = of.get(i), i in of and i == of[i][1] - 1, 0
        if m.call >= 0 and is_last and segment in waiting:
            waiting.remove(segment)
            yield from _replay(chain, options, segment, event)
        if segment and not (m.call < 0 and is_last):
            # What replays computed for the other calls of the segment is allocated until then.
            again = sum(_replayed(chain, options, j) for j in range(segment[0], i))
            again += 0 if is_last else options[i].kept - calls[i].base.kept
        if m.call >= 0 and not is_last:
            most += options[i].backward - calls[i].base.backward
        level += again
        yield Event(m.call, "backward", level, level + most, m.gradients, event.kept + again, aside)
    ready = max((m.gradients for m in chain.moments), default=0)
    rests = chain.rests + aside
    yield Event(-1, "update", rests, rests + chain.update, ready, 0, aside)


def _replayed(chain: Chain, options: list[Option], i: int) -> int:
    """Return the bytes after a replayed call above those before: its own, and the next input."""
    return options[i].kept - chain.calls[i].base.kept + chain.calls[i + 1].input


def _replay(
    chain: Chain, options: list[Option], segment: tuple[int, int], begin: Event
) -> Iterator[Event]:
    """Yield the forwards of all calls of a segment but the last, from the moment `begin`."""
    level, held = begin.level, begin.kept
    for i in range(segment[0], segment[1] - 1):
        top = level + options[i].forward
        yield replace(begin, call=i, what="replay", level=level, peak=top, kept=held)
        more = _replayed(chain, options, i)
        level, held = level + more, held + more


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

"""A method's choice in a measured step, or the error that says why there is none."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from fused_remat.planner import chain as chains
from fused_remat.planner.budget import BudgetError
from fused_remat.planner.chain import Chain, Choice, Event
from fused_remat.planner.solve import METHODS, frontier, least_peak
from fused_remat.policies import Policy
from fused_remat.report.report import human

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

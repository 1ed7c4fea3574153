"""What a block keeps between forward and backward: a preset, or a `Policy` of names.

A preset is an entry of `PRESETS`, which lists the roles of the activations that it keeps. Names are
those of the block's graph, such as "qkv". Every policy also keeps statistics (a norm's mean and
rstd, attention's logsumexp with a kept `attn`) and the dropout seed if backward needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

#: Preset -> roles (`graph.build`) of the activations that it keeps in addition to the block's
#: inputs. Of several entries, the first applies that names any activation of the block. A role that
#: the block does not have adds nothing; "last normed" is the last activation of the role "normed".
#:
#: Backward of a norm after a branch reads its input ("normed"). From "fast" on, presets keep what
#: attention reads ("heads"): rotated heads, since rotating back reads nothing; or the projection,
#: where heads are normed and backward of that norm reads it. Of a mixture of experts, "balanced"
#: keeps the weights of each token's experts ("routing"), "fast" also their pre-activations
#: ("experts"); every preset keeps which experts were chosen.
PRESETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "full": ((),),
    "lean": (("last normed",), ("attention",)),
    "balanced": (("attention", "stream", "last normed", "routing"),),
    "fast": (("attention", "stream", "normed", "heads", "routing", "experts"),),
    "none": (("attention", "stream", "normed", "heads", "routing", "experts", "hidden"),),
}

#: Preset -> kind of block -> names kept: a user's own entries, which precede `PRESETS`.
EXACT_PRESETS: dict[str, dict[str, frozenset[str]]] = {name: {} for name in PRESETS}

#: Tokens of a sequence from which "lean" is recommended over "full" (docs/performance.md).
LONG_SEQUENCE = 8192
ADVICE = (
    f'advice: on sequences of {LONG_SEQUENCE:,} tokens or more, prefer "lean" to "full" where '
    "memory allows: for twice as many bytes, backward does not compute attention again"
)

#: The places of a block in a segment (`fused_remat.autograd.segments`).
SEGMENT_PLACES = ("first", "inner")


@dataclass(frozen=True, init=False)
class Policy:
    """The activations that a block keeps; backward rebuilds all others.

    Args:
        save: names of activations that are kept, such as `{"attn", "qkv"}`. The empty set is the
            preset "full".
        segment: the block's place in a segment of consecutive blocks, or None. "first" keeps its
            input, "inner" nothing. When backward reaches the segment, its forward runs again, and
            from then on the names in `save` are kept (`fused_remat.autograd.segments`). `plan`
            makes segments. In eager mode only.
        offload: names from `save`, or "input" for the block's first input, that are moved to the
            host's pinned memory until backward (`autograd.offload`). In a segment only "input" of
            the first block. On a CPU nothing is moved.

    Raises:
        TypeError: if `save` or `offload` is no iterable of strings.
        ValueError: for an unknown `segment`, or a name in `offload` that is not kept from forward
            to backward; and, when a block takes the policy, for a name that the block does not
            have. The message lists the valid values.

    >>> from fused_remat import FusedRematLayer, Policy
    >>> layer = FusedRematLayer(64, 4, 256, policy=Policy(save={"attn", "qkv"}))
    >>> sorted(layer.policy.save)
    ['attn', 'qkv']
    >>> Policy(save={"qkv"}, offload={"qkv", "input"})
    Policy(save={'qkv'}, offload={'input', 'qkv'})
    """

    save: frozenset[str]
    segment: str | None = None
    offload: frozenset[str] = frozenset()

    def __init__(
        self, save: Iterable[str] = (), segment: str | None = None, offload: Iterable[str] = ()
    ) -> None:
        names = _names("save", save)
        _check_formats(names)
        if isinstance(save, Mapping) and save:
            _removed(f"Policy(save={save!r})")
        if segment not in (None, *SEGMENT_PLACES):
            places = ", ".join(map(repr, SEGMENT_PLACES))
            raise ValueError(f"Policy(segment=...) must be {places} or None, got {segment!r}")
        object.__setattr__(self, "save", names)
        object.__setattr__(self, "segment", segment)
        object.__setattr__(self, "offload", _offloaded(offload, names, segment))

    def __repr__(self) -> str:
        shown = [f"save={{{', '.join(map(repr, sorted(self.save)))}}}"] if self.save else []
        if self.segment is not None:
            shown.append(f"segment={self.segment!r}")
        if self.offload:
            shown.append(f"offload={{{', '.join(map(repr, sorted(self.offload)))}}}")
        return f"Policy({', '.join(shown)})"


def _names(what: str, names: Iterable[str]) -> frozenset[str]:
    """Return the names in an argument of `Policy`."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"Policy({what}=...) must be a set of names, got {names!r}")
    names = tuple(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"Policy({what}=...) must contain names (str), got {name!r}")
    return frozenset(names)


def _check_formats(names: Iterable[str]) -> None:
    for name in names:
        if ":" in name:
            _removed(f"the name {name!r}")


def _removed(what: str) -> NoReturn:
    """Raise ValueError for `what`, a policy with a storage format."""
    raise ValueError(
        f"unknown policy: {what} was removed, with all formats of 8 bits; use the exact preset "
        '"balanced" or "fast", or Policy(save=...) with names alone'
    )


def _offloaded(offload: Iterable[str], kept: Iterable[str], segment: str | None) -> frozenset[str]:
    """Return `Policy.offload` of a policy that keeps `kept`."""
    names = _names("offload", offload)
    valid = {"input", *kept} if segment is None else {"input"} if segment == "first" else set()
    unknown = sorted(names - valid)
    if unknown:
        where = "" if segment is None else f" with segment={segment!r}"
        keeps = ", ".join(map(repr, sorted(valid))) or "nothing"
        raise ValueError(
            f"Policy(offload=...) names {', '.join(map(repr, unknown))}, which the policy does not "
            f"keep from forward to backward{where}; it keeps: {keeps}"
        )
    return names


def kept_names(
    policy: str | Policy, graph: Any, valid: Iterable[str] | None = None
) -> frozenset[str]:
    """Return the names that `policy` keeps in a block of `graph`; of `valid` alone, unless None.

    Raises:
        ValueError: for an unknown preset, or a name that the block does not have. The message lists
            the valid ones.
        TypeError: if `policy` is neither a string nor a Policy.
    """
    names = tuple(graph.names if valid is None else valid)
    if isinstance(policy, str):
        if policy in ("balanced8", "fast8") and policy not in EXACT_PRESETS:
            _removed(f"the preset {policy!r}")
        if policy not in EXACT_PRESETS:
            raise ValueError(
                f"unknown policy {policy!r}; valid presets: {', '.join(EXACT_PRESETS)}"
            )
        kept = EXACT_PRESETS[policy].get(graph.kind)
        if kept is None:
            entries, roles = PRESETS.get(policy, ()), graph.roles
            named = (frozenset(n for role in e for n in roles.get(role, ())) for e in entries)
            kept = next(filter(None, named), frozenset())
        _check_formats(kept)
        return frozenset(kept).intersection(names)
    if not isinstance(policy, Policy):
        known = ", ".join(EXACT_PRESETS)
        raise TypeError(f"policy must be a preset ({known}) or a Policy, got {policy!r}")
    unknown = sorted(policy.save.difference(names))
    if unknown:
        _check_formats(unknown)  # of a policy that was pickled before
        raise ValueError(
            f"unknown activation {', '.join(map(repr, unknown))} in Policy for {graph.kind}; "
            f"valid names: {', '.join(names)}"
        )
    return policy.save


def long_attentions(graph: Any, tokens: int) -> frozenset[str]:
    """Return the attentions over long sequences that "lean" keeps; `tokens` are of a sequence.

    Not those within a window or within packed documents, which cost less.
    """
    if tokens < LONG_SEQUENCE:
        return frozenset()
    long = [
        node.name
        for node in graph.nodes
        if node.role == "attention" and not node.cu_q
        if node.spec.window[0] < 0 or node.spec.window[0] >= LONG_SEQUENCE
    ]
    return kept_names("lean", graph).intersection(long)


def advice(policy: str | Policy, graph: Any, tokens: int) -> str:
    """Return `ADVICE` where `policy` repeats an attention that "lean" would keep, otherwise ""."""
    long = long_attentions(graph, tokens)
    return ADVICE if long and not long <= kept_names(policy, graph) else ""


def offload_of(policy: str | Policy) -> frozenset[str]:
    """Return the names that a policy offloads. A preset offloads none."""
    return frozenset() if isinstance(policy, str) else policy.offload

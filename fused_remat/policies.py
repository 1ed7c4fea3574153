"""What a block keeps between forward and backward: a preset, or a `Policy` of names and formats.

A preset is a row of `PRESETS`, which lists the roles of the activations that it keeps. Names are
those of the block's graph: "qkv" for an activation that is kept as it is, "qkv:int8" for one in a
storage format (`fused_remat.formats.FORMATS`). Every policy also keeps statistics (a norm's mean
and rstd, attention's logsumexp beside a kept `attn`) and the dropout seed if backward needs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fused_remat.formats import FORMATS, NATIVE, split_name

#: Preset -> roles (`graph.build`) of the activations that it keeps besides the block's inputs. Of
#: several rows, the first applies that names any activation of the block. A role that the block
#: does not have adds nothing; "last normed" is the last activation of the role "normed".
#:
#: Backward of a norm after a branch reads its input ("normed"). From "fast" on, presets keep what
#: attention reads ("heads"): rotated heads, since rotating back reads nothing; or the projection,
#: where heads are normed and backward of that norm reads it. Only what attention, norms of heads
#: and activations read is kept in 8 bits; what weight gradients and other norms read is not.
PRESETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "full": ((),),
    "lean": (("last normed",), ("attention",)),
    "balanced": (("attention", "stream", "last normed"),),
    "fast": (("attention", "stream", "normed", "heads"),),
    "none": (("attention", "stream", "normed", "heads", "hidden"),),
    "balanced8": (("attention", "last normed", "heads:int8", "hidden:int8"),),
    "fast8": (("attention", "stream", "normed", "heads:int8", "hidden:int8"),),
}

#: Preset -> kind of block -> names kept: a user's own rows, which take precedence over `PRESETS`.
#: Presets with 8-bit formats are in `LOSSY_PRESETS`: they apply only if they are named.
EXACT_PRESETS: dict[str, dict[str, frozenset[str]]] = {}
LOSSY_PRESETS: dict[str, dict[str, frozenset[str]]] = {}
for _name, _rows in PRESETS.items():
    _lossy = any(":" in role for row in _rows for role in row)
    (LOSSY_PRESETS if _lossy else EXACT_PRESETS)[_name] = {}
#: Every preset by name.
ALL_PRESETS = EXACT_PRESETS | LOSSY_PRESETS


#: The places of a block in a segment (`fused_remat.autograd.segments`).
SEGMENT_PLACES = ("first", "inner")


@dataclass(frozen=True, init=False)
class Policy:
    """The activations that a block keeps; backward rebuilds all others.

    Args:
        save: names of activations that are kept as they are, such as `{"attn", "qkv"}`; or a
            mapping of names to formats, "native" or a row of `fused_remat.formats.FORMATS`. A name
            may include its format, as "qkv:int8". The empty set is the preset "full".
        segment: the block's place in a segment of consecutive blocks, or None. "first" keeps its
            input, "inner" nothing. When backward reaches the segment, its forward runs again, and
            from then on the names in `save` are kept (`fused_remat.autograd.segments`). `plan`
            makes segments. In eager mode only.
        offload: names from `save`, without formats, or "input" for the block's first input, that
            are moved to the host's pinned memory until backward (`autograd.offload`). In a segment
            only "input" of the first block. On a CPU nothing is moved.

    Raises:
        TypeError: if `save` or `offload` is no iterable of strings, or a format is no string.
        ValueError: for an unknown `segment` or format, a name in two formats, a name in `offload`
            that is not kept from forward to backward; and, when a block takes the policy, for a
            name that the block does not have, or a format that does not hold what backward needs.
            The message lists the valid values.

    Attributes:
        save: the names; those with a format other than "native" include it, as "qkv:int8".

    >>> from fused_remat import FusedRematLayer, Policy
    >>> layer = FusedRematLayer(64, 4, 256, policy=Policy(save={"attn", "qkv"}))
    >>> sorted(layer.policy.save)
    ['attn', 'qkv']
    >>> policy = Policy(save={"attn": "native", "qkv": "int8"})
    >>> sorted(policy.save), policy.formats
    (['attn', 'qkv:int8'], {'attn': 'native', 'qkv': 'int8'})
    >>> Policy(save={"qkv": "int8"}, offload={"qkv", "input"})
    Policy(save={'qkv': 'int8'}, offload={'input', 'qkv'})
    """

    save: frozenset[str]
    segment: str | None = None
    offload: frozenset[str] = frozenset()

    def __init__(
        self,
        save: Iterable[str] | Mapping[str, str] = (),
        segment: str | None = None,
        offload: Iterable[str] = (),
    ) -> None:
        for what, given in (("save", save), ("offload", offload)):
            if isinstance(given, str) or not isinstance(given, Iterable):
                raise TypeError(f"Policy({what}=...) must be a set of names, got {given!r}")
        names = _written(save)
        if segment not in (None, *SEGMENT_PLACES):
            places = ", ".join(map(repr, SEGMENT_PLACES))
            raise ValueError(f"Policy(segment=...) must be {places} or None, got {segment!r}")
        object.__setattr__(self, "save", names)
        object.__setattr__(self, "segment", segment)
        object.__setattr__(self, "offload", _offloaded(offload, self.formats, segment))

    @property
    def formats(self) -> dict[str, str]:
        """The format of each name."""
        return dict(sorted(map(split_name, self.save)))

    def __repr__(self) -> str:
        names = [repr(name) for name in sorted(self.save)]
        if any(stored != NATIVE for stored in self.formats.values()):
            names = [f"{name!r}: {stored!r}" for name, stored in self.formats.items()]
        shown = [f"save={{{', '.join(names)}}}"] if names else []
        if self.segment is not None:
            shown.append(f"segment={self.segment!r}")
        if self.offload:
            shown.append(f"offload={{{', '.join(map(repr, sorted(self.offload)))}}}")
        return f"Policy({', '.join(shown)})"


def _written(save: Iterable[str] | Mapping[str, str]) -> frozenset[str]:
    """Names as in `Policy.save`."""
    pairs: list[tuple[str, str]] = []
    for name in save:
        stored = save[name] if isinstance(save, Mapping) else NATIVE
        if not isinstance(name, str) or not isinstance(stored, str):
            what = f"{name!r}: {stored!r}" if isinstance(save, Mapping) else repr(name)
            takes = "names and formats" if isinstance(save, Mapping) else "names"
            raise TypeError(f"Policy(save=...) must contain {takes} (str), got {what}")
        base, colon, written = name.partition(":")
        pairs += [(base, written)] if colon else []
        pairs += [(base, stored)] if isinstance(save, Mapping) or not colon else []
    formats: dict[str, str] = {}
    for base, stored in pairs:
        _check_format(base, stored)
        if formats.setdefault(base, stored) != stored:
            both = f"{formats[base]!r} and {stored!r}"
            raise ValueError(f"Policy(save=...) has {base!r} in two formats: {both}")
    return frozenset(n if stored == NATIVE else f"{n}:{stored}" for n, stored in formats.items())


def _offloaded(offload: Iterable[str], kept: Iterable[str], segment: str | None) -> frozenset[str]:
    """Names as in `Policy.offload`, of a policy that keeps `kept`."""
    names = tuple(offload)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"Policy(offload=...) must contain names (str), got {name!r}")
    valid = {"input", *kept} if segment is None else {"input"} if segment == "first" else set()
    unknown = sorted(set(names) - valid)
    if unknown:
        where = "" if segment is None else f" with segment={segment!r}"
        keeps = ", ".join(map(repr, sorted(valid))) or "nothing"
        raise ValueError(
            f"Policy(offload=...) names {', '.join(map(repr, unknown))}, which the policy does not "
            f"keep from forward to backward{where}; it keeps: {keeps}"
        )
    return frozenset(names)


def _check_format(name: str, stored: str) -> None:
    if stored not in (NATIVE, *FORMATS):
        valid = ", ".join((NATIVE, *FORMATS))
        raise ValueError(f"unknown format {stored!r} for {name!r}; valid formats: {valid}")


class KeepableGraph(Protocol):
    """What presets need of a graph: its kind, the names that may be kept, and their roles."""

    @property
    def kind(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def roles(self) -> Mapping[str, tuple[str, ...]]: ...


def kept_names(
    policy: str | Policy, graph: KeepableGraph, valid: Iterable[str] | None = None
) -> frozenset[str]:
    """The names that `policy` keeps in a block, as in `Policy.save`; only of `valid`, if given.

    Raises:
        ValueError: for an unknown preset, or a name that the block does not have. The message lists
            the valid ones.
        TypeError: if `policy` is neither a string nor a Policy.
    """
    names = tuple(graph.names if valid is None else valid)
    if isinstance(policy, str):
        if policy not in ALL_PRESETS:
            raise ValueError(f"unknown policy {policy!r}; valid presets: {', '.join(ALL_PRESETS)}")
        row = ALL_PRESETS[policy].get(graph.kind)
        kept = _by_roles(PRESETS.get(policy, ()), graph.roles) if row is None else row
        return frozenset(name for name in kept if split_name(name)[0] in names)
    if not isinstance(policy, Policy):
        known = ", ".join(ALL_PRESETS)
        raise TypeError(f"policy must be a preset ({known}) or a Policy, got {policy!r}")
    for name, stored in policy.formats.items():  # an unpickled policy may have an unknown one
        _check_format(name, stored)
    unknown = sorted(set(policy.formats).difference(names))
    if unknown:
        raise ValueError(
            f"unknown activation {', '.join(map(repr, unknown))} in Policy for {graph.kind}; "
            f"valid names: {', '.join(names)}"
        )
    return policy.save


def _by_roles(
    rows: tuple[tuple[str, ...], ...], roles: Mapping[str, tuple[str, ...]]
) -> frozenset[str]:
    """The names that the first row with any name gives, as in `Policy.save`."""
    for row in rows:
        kept = []
        for role, colon, stored in [entry.partition(":") for entry in row]:
            kept += [f"{name}{colon}{stored}" for name in roles.get(role, ())]
        if kept:
            return frozenset(kept)
    return frozenset()


def draws(policy: str | Policy) -> bool:
    """Whether a format of the policy draws random numbers."""
    return not isinstance(policy, str) and any(
        FORMATS[stored].seeded for stored in policy.formats.values() if stored != NATIVE
    )


def offload_of(policy: str | Policy) -> frozenset[str]:
    """The names that a policy offloads, without formats. A preset offloads none."""
    return frozenset() if isinstance(policy, str) else policy.offload


def is_offloaded(name: str, offload: Collection[str]) -> bool:
    """Whether `offload` has the activation of a kept name, which may be one of codes or scales."""
    return split_name(name)[0] in offload

"""What a block keeps between forward and backward: a preset, or any set of names and formats.

Data only. A preset ("preset") is one row of `PRESETS`: the roles of the activations that it keeps.
The names are those that the block's graph declares, as "qkv" where one is kept as it is, and
"qkv:int8" where it is kept in one of `fused_remat.formats.FORMATS`. Statistics (norm means and
rstd, attention's logsumexp beside a kept `attn`) and the dropout seed are kept whenever backward
needs them, in every policy.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fused_remat.formats import FORMATS, NATIVE, split_name

#: Preset -> the roles (`graph.build`) of the activations that it keeps besides the block's inputs;
#: of several rows, the first of which the block has anything. A role that a block does not have
#: adds nothing; "last normed" is the last of "normed".
#:
#: Backward of a norm after a branch asks for what it norms ("normed"). From "fast" on, what
#: attention reads is kept ("heads"): rotated heads, since rotating back asks for nothing; where
#: heads are normed first, the projection, which backward of that norm asks for. In 8 bits is what
#: only attention, norms of heads and activations read; what a weight gradient or a norm of the
#: stream reads is kept as it is.
PRESETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "full": ((),),
    "lean": (("last normed",), ("attention",)),
    "balanced": (("attention", "stream", "last normed"),),
    "fast": (("attention", "stream", "normed", "heads"),),
    "none": (("attention", "stream", "normed", "heads", "hidden"),),
    "balanced8": (("attention", "last normed", "heads:int8", "hidden:int8"),),
    "fast8": (("attention", "stream", "normed", "heads:int8", "hidden:int8"),),
}

#: Preset -> kind of block -> names kept: a user's own rows, which win over `PRESETS`. The presets
#: that keep anything in 8 bits are apart, in `LOSSY_PRESETS`: they are chosen by name only.
EXACT_PRESETS: dict[str, dict[str, frozenset[str]]] = {}
LOSSY_PRESETS: dict[str, dict[str, frozenset[str]]] = {}
for _name, _rows in PRESETS.items():
    _lossy = any(":" in role for row in _rows for role in row)
    (LOSSY_PRESETS if _lossy else EXACT_PRESETS)[_name] = {}
#: Every preset by name.
ALL_PRESETS = EXACT_PRESETS | LOSSY_PRESETS


def __getattr__(name: str) -> dict[str, dict[str, frozenset[str]]]:
    """Names of an earlier version, for one more."""
    now = {"RUNGS": "EXACT_PRESETS", "LOSSY_RUNGS": "LOSSY_PRESETS", "ALL_RUNGS": "ALL_PRESETS"}
    if name not in now:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        f"{__name__}.{name} is now {__name__}.{now[name]}", DeprecationWarning, stacklevel=2
    )
    return globals()[now[name]]  # type: ignore[no-any-return]


#: Where in a segment a block is (`fused_remat.autograd.segments`).
SEGMENT_PLACES = ("first", "inner")


@dataclass(frozen=True, init=False)
class Policy:
    """The set of activations that a block keeps; every other one is rebuilt in backward.

    Args:
        save: names of activations, such as `{"attn", "qkv"}`, kept as they are; or a mapping of
            names to formats, "native" or a row of `fused_remat.formats.FORMATS`; a name with a
            format may also be written "qkv:int8". The empty set is the preset "full".
        segment: the block's place in a segment of blocks that follow each other directly, or None.
            "first" keeps its input, "inner" not even that; when backward reaches the segment it is
            run forward again, and only from then on are the names of `save` kept
            (`fused_remat.autograd.segments`). `plan` makes segments; in eager mode only.
        offload: those of the names in `save`, without formats, and "input", that on a CUDA device
            wait for backward in the host's pinned memory (`autograd.offload`); "input" is the
            block's first input, which every policy keeps. In a segment only the first's "input".
            On a CPU, whose memory that is, nothing moves.

    Raises:
        TypeError: `save` or `offload` is a string or not an iterable of strings, or a format is no
            string.
        ValueError: another `segment`, or a format that is none; one name in two formats; a name in
            `offload` that the policy does not keep from forward to backward; (when a
            block takes the policy) a name that the block does not have, or a format that does not
            hold what backward asks for. The message lists the valid ones.

    Attributes:
        save: the names; with the format where that is not "native", as "qkv:int8".

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
        if isinstance(save, str) or not isinstance(save, Iterable):
            raise TypeError(f"Policy(save=...) takes a set of names, got {save!r}")
        names = _written(save)
        if segment not in (None, *SEGMENT_PLACES):
            raise ValueError(
                f"Policy(segment=...) takes {', '.join(map(repr, SEGMENT_PLACES))} or None, "
                f"got {segment!r}"
            )
        object.__setattr__(self, "save", names)
        object.__setattr__(self, "segment", segment)
        object.__setattr__(self, "offload", _offloaded(offload, self.formats, segment))

    @property
    def formats(self) -> dict[str, str]:
        """The format of every name kept."""
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
    """Names as `Policy.save` has them.

    Raises: TypeError, ValueError as `Policy` does.
    """
    pairs: list[tuple[str, str]] = []
    for name in save:
        stored = save[name] if isinstance(save, Mapping) else NATIVE
        if not isinstance(name, str) or not isinstance(stored, str):
            what = f"{name!r}: {stored!r}" if isinstance(save, Mapping) else repr(name)
            takes = "names and formats" if isinstance(save, Mapping) else "names"
            raise TypeError(f"Policy(save=...) takes {takes} (str), got {what}")
        base, colon, written = name.partition(":")
        pairs += [(base, written)] if colon else []
        pairs += [(base, stored)] if isinstance(save, Mapping) or not colon else []
    formats: dict[str, str] = {}
    for base, stored in pairs:
        _check_format(base, stored)
        if formats.setdefault(base, stored) != stored:
            raise ValueError(f"{base!r} is named in two formats: {formats[base]!r}, {stored!r}")
    return frozenset(n if stored == NATIVE else f"{n}:{stored}" for n, stored in formats.items())


def _offloaded(offload: Iterable[str], kept: Iterable[str], segment: str | None) -> frozenset[str]:
    """Names as `Policy.offload` has them, of a policy that keeps `kept` besides the input.

    Raises: TypeError, ValueError as `Policy` does.
    """
    if isinstance(offload, str) or not isinstance(offload, Iterable):
        raise TypeError(f"Policy(offload=...) takes a set of names, got {offload!r}")
    names = tuple(offload)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"Policy(offload=...) takes names (str), got {name!r}")
    valid = {"input", *kept} if segment is None else {"input"} if segment == "first" else set()
    unknown = sorted(set(names) - valid)
    if unknown:
        where = "" if segment is None else f" in a block that is {segment!r} in its segment"
        raise ValueError(
            f"Policy(offload=...) names {', '.join(map(repr, unknown))}, which the policy does not "
            f"keep from forward to backward{where}; it keeps: "
            f"{', '.join(map(repr, sorted(valid))) or 'nothing'}"
        )
    return frozenset(names)


def _check_format(name: str, stored: str) -> None:
    """Raises: ValueError if `stored`, the format of `name`, is none."""
    if stored not in (NATIVE, *FORMATS):
        valid = ", ".join((NATIVE, *FORMATS))
        raise ValueError(f"unknown format {stored!r} of {name!r}; valid formats: {valid}")


class Kinded(Protocol):
    """What presets ask of a graph: its kind, the names that may be kept, and their roles."""

    @property
    def kind(self) -> str: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def roles(self) -> Mapping[str, tuple[str, ...]]: ...


def kept_names(
    policy: str | Policy, graph: Kinded, valid: Iterable[str] | None = None
) -> frozenset[str]:
    """The names that `policy` keeps in a block, as `Policy.save`; of `valid`, if it is given.

    Raises:
        ValueError: an unknown preset, or a name that the block does not have; the message lists
            the valid ones.
        TypeError: `policy` is neither a string nor a Policy.

    >>> from fused_remat.graph.build import block_graph
    >>> from fused_remat.spec import nn_layer_spec
    >>> sorted(kept_names("balanced", block_graph(nn_layer_spec(True, 4, 16, "gelu"))))
    ['attn', 'mid']
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
    for name, stored in policy.formats.items():  # unpickled, it may name one that is not there
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
    """The names that the first row with any gives, as `Policy.save` has them."""
    kept: frozenset[str] = frozenset()
    for row in rows:
        asked = [role.partition(":")[::2] for role in row]
        kept = frozenset(
            f"{name}:{stored}" if stored else name
            for role, stored in asked
            for name in roles.get(role, ())
        )
        if kept:
            break
    return kept


def draws(policy: str | Policy) -> bool:
    """Whether a format of the policy draws random numbers.

    >>> draws("fast8"), draws(Policy(save={"up": "int8_stochastic"}))
    (False, True)
    """
    return not isinstance(policy, str) and any(
        FORMATS[stored].seeded for stored in policy.formats.values() if stored != NATIVE
    )


def offload_of(policy: str | Policy) -> frozenset[str]:
    """The names that a policy offloads, without formats; a preset offloads none.

    >>> offload_of("fast"), offload_of(Policy(offload={"input"}))
    (frozenset(), frozenset({'input'}))
    """
    return frozenset() if isinstance(policy, str) else policy.offload


def is_offloaded(name: str, offload: Collection[str]) -> bool:
    """Whether what is kept under `name` moves with those in `offload`: its codes and scales, too.

    >>> [is_offloaded(name, {"qkv"}) for name in ("qkv", "qkv:int8", "qkv:int8.scale", "attn")]
    [True, True, True, False]
    """
    return split_name(name)[0] in offload

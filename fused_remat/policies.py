"""What a block keeps between forward and backward: a rung, or any set of names and formats.

Data only. A rung is one row of `RUNGS` or `LOSSY_RUNGS`; the names are the activations that the
block's graph declares (`fused_remat.blocks`), as "qkv" where one is kept as it is, and "qkv:int8"
where it is kept in one of `fused_remat.formats.FORMATS`. Statistics (norm means and rstd,
attention's logsumexp beside a kept `attn`) and the dropout seed are kept whenever backward needs
them, in every policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fused_remat.formats import FORMATS, NATIVE, split_name

#: Both attentions of a decoder, with what each reads.
_DECODER_FAST = frozenset({"attn", "qkv", "cross", "query", "kv"})

#: rung -> block -> names kept besides the block's inputs; nothing where the block has no row.
#: Of a rotary block, the rungs above "balanced" keep what attention reads, `rotated`: rotating back
#: asks for nothing, so `qkv` is not wanted again. Where heads are normed first, backward asks for
#: `qkv` itself, and `rotated` is one pass over it: keeping `qkv` alone costs the same bytes and
#: rebuilds no product.
RUNGS: dict[str, dict[str, frozenset[str]]] = {
    "full": {
        "encoder_prenorm": frozenset(),
        "encoder_postnorm": frozenset(),
        "decoder_prenorm": frozenset(),
        "decoder_postnorm": frozenset(),
        "attention_block": frozenset(),
        "rotary_attention_block": frozenset(),
        "qk_norm_attention_block": frozenset(),
        "attention": frozenset(),
    },
    "lean": {
        "encoder_prenorm": frozenset({"attn"}),
        "encoder_postnorm": frozenset({"sum2"}),
        "decoder_prenorm": frozenset({"attn", "cross"}),
        "decoder_postnorm": frozenset({"sum3"}),
        "attention_block": frozenset({"attn"}),
        "rotary_attention_block": frozenset({"attn"}),
        "qk_norm_attention_block": frozenset({"attn"}),
        "attention": frozenset({"output"}),
    },
    "balanced": {
        "encoder_prenorm": frozenset({"attn", "mid"}),
        "encoder_postnorm": frozenset({"attn", "sum2"}),
        "decoder_prenorm": frozenset({"attn", "cross", "mid1", "mid2"}),
        "decoder_postnorm": frozenset({"attn", "cross", "sum3"}),
        "attention_block": frozenset({"attn"}),
        "rotary_attention_block": frozenset({"attn"}),
        "qk_norm_attention_block": frozenset({"attn"}),
        "attention": frozenset({"output"}),
    },
    "fast": {
        "encoder_prenorm": frozenset({"attn", "mid", "qkv"}),
        "encoder_postnorm": frozenset({"attn", "sum1", "sum2", "qkv"}),
        "decoder_prenorm": _DECODER_FAST | {"mid1", "mid2"},
        "decoder_postnorm": _DECODER_FAST | {"sum1", "sum2", "sum3"},
        "attention_block": frozenset({"attn", "qkv"}),
        "rotary_attention_block": frozenset({"attn", "rotated"}),
        "qk_norm_attention_block": frozenset({"attn", "qkv"}),
        "attention": frozenset({"output"}),
    },
    "none": {
        "encoder_prenorm": frozenset({"attn", "mid", "qkv", "up"}),
        "encoder_postnorm": frozenset({"attn", "sum1", "sum2", "qkv", "up"}),
        "decoder_prenorm": _DECODER_FAST | {"mid1", "mid2", "up"},
        "decoder_postnorm": _DECODER_FAST | {"sum1", "sum2", "sum3", "up"},
        "attention_block": frozenset({"attn", "qkv"}),
        "rotary_attention_block": frozenset({"attn", "rotated"}),
        "qk_norm_attention_block": frozenset({"attn", "qkv"}),
        "attention": frozenset({"output"}),
        "mlp": frozenset({"up"}),
        "mlp_block": frozenset({"up"}),
        "gated_mlp": frozenset({"gate", "up"}),
        "gated_mlp_block": frozenset({"gate", "up"}),
    },
}


#: What attention reads of a block, by how its heads are made: the step to keep from "fast" on.
_HEADS = {"": "qkv", "rotary_": "rotated", "qk_norm_": "qkv"}
#: rung -> placement of the norms -> names kept of a transformer block, and whether also its heads.
#: Backward of a norm after a half asks for that half's sum: "down", as a post-norm block's "sum2".
_TRANSFORMERS: dict[str, dict[str, tuple[set[str], bool]]] = {
    "full": {"prenorm": (set(), False), "postnorm": (set(), False), "sandwich": (set(), False)},
    "lean": {
        "prenorm": ({"attn"}, False),
        "postnorm": ({"sum2"}, False),
        "sandwich": ({"down"}, False),
    },
    "balanced": {
        "prenorm": ({"attn", "mid"}, False),
        "postnorm": ({"attn", "sum2"}, False),
        "sandwich": ({"attn", "down"}, False),
    },
    "fast": {
        "prenorm": ({"attn", "mid"}, True),
        "postnorm": ({"attn", "sum1", "sum2"}, True),
        "sandwich": ({"attn", "proj", "down"}, True),
    },
    "none": {
        "prenorm": ({"attn", "mid", "gate", "up"}, True),
        "postnorm": ({"attn", "sum1", "sum2", "gate", "up"}, True),
        "sandwich": ({"attn", "proj", "down", "gate", "up"}, True),
    },
}
for _rung, _placements in _TRANSFORMERS.items():
    for _prefix, _read in _HEADS.items():
        for _placement, (_names, _keeps_heads) in _placements.items():
            _kept = _names | ({_read} if _keeps_heads else set())
            RUNGS[_rung][f"{_prefix}transformer_{_placement}"] = frozenset(_kept)


#: What only attention, norms of heads and activations read: kept in 8 bits by the lossy rungs. What
#: a weight gradient or a norm reads (attn, mid, sum1, ...) stays as it is.
_IN_8_BITS = frozenset({"qkv", "rotated", "query", "kv", "gate", "up"})
#: Lossy rung -> the exact one whose other names it keeps, and those of them that it does not.
_BESIDE_8_BITS: dict[str, tuple[str, frozenset[str]]] = {
    "balanced8": ("balanced", frozenset({"mid", "mid1", "mid2"})),
    "fast8": ("fast", frozenset()),
}


def _lossy(block: str, exact: str, dropped: frozenset[str]) -> frozenset[str]:
    native = RUNGS[exact].get(block, frozenset()) - dropped - _IN_8_BITS
    return native | {f"{name}:int8" for name in RUNGS["none"][block] & _IN_8_BITS}


#: Lossy rung -> block -> names kept, as in `RUNGS`. "fast8" rebuilds no product, "balanced8" the
#: one that ends attention. Forward is that of every other policy. Chosen by name only.
LOSSY_RUNGS: dict[str, dict[str, frozenset[str]]] = {
    rung: {block: _lossy(block, *beside) for block in RUNGS["none"]}
    for rung, beside in _BESIDE_8_BITS.items()
}
#: Every rung by name.
ALL_RUNGS = RUNGS | LOSSY_RUNGS

#: Where in a segment a block is (`fused_remat.segments`).
SEGMENT_PLACES = ("first", "inner")


@dataclass(frozen=True, init=False)
class Policy:
    """The set of activations that a block keeps; every other one is rebuilt in backward.

    Args:
        save: names of activations, such as `{"attn", "qkv"}`, kept as they are; or a mapping of
            names to formats, "native" or a row of `fused_remat.formats.FORMATS`; a name with a
            format may also be written "qkv:int8". The empty set is the rung "full".
        segment: the block's place in a segment of blocks that follow each other directly, or None.
            "first" keeps its input, "inner" not even that; when backward reaches the segment it is
            run forward again, and only from then on are the names of `save` kept
            (`fused_remat.segments`). `plan` makes segments; in eager mode only.
        offload: those of the names in `save`, without formats, and "input", that on a CUDA device
            wait for backward in the host's pinned memory (`fused_remat.offload`); "input" is the
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


def kept_names(policy: str | Policy, block: str, valid: Iterable[str]) -> frozenset[str]:
    """The names that `policy` keeps in `block`, whose activations are `valid`, as `Policy.save`.

    Raises:
        ValueError: an unknown rung, or a name that the block does not have; the message lists
            the valid ones.
        TypeError: `policy` is neither a string nor a Policy.

    >>> sorted(kept_names("balanced", "encoder_prenorm", ["attn", "mid"]))
    ['attn', 'mid']
    """
    if isinstance(policy, str):
        if policy not in ALL_RUNGS:
            raise ValueError(f"unknown policy {policy!r}; valid rungs: {', '.join(ALL_RUNGS)}")
        valid = frozenset(valid)  # "gate": of gated ones
        names = ALL_RUNGS[policy].get(block, frozenset())
        return frozenset(name for name in names if split_name(name)[0] in valid)
    if not isinstance(policy, Policy):
        known = ", ".join(ALL_RUNGS)
        raise TypeError(f"policy must be a rung ({known}) or a Policy, got {policy!r}")
    valid = tuple(valid)
    for name, stored in policy.formats.items():  # unpickled, it may name one that is not there
        _check_format(name, stored)
    unknown = sorted(set(policy.formats).difference(valid))
    if unknown:
        raise ValueError(
            f"unknown activation {', '.join(map(repr, unknown))} in Policy for {block}; "
            f"valid names: {', '.join(valid)}"
        )
    return policy.save


def draws(policy: str | Policy) -> bool:
    """Whether a format of the policy draws random numbers.

    >>> draws("fast8"), draws(Policy(save={"up": "int8_stochastic"}))
    (False, True)
    """
    return not isinstance(policy, str) and any(
        FORMATS[stored].seeded for stored in policy.formats.values() if stored != NATIVE
    )


def offload_of(policy: str | Policy) -> frozenset[str]:
    """The names that a policy offloads, without formats; a rung offloads none.

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

"""What a block keeps between forward and backward: five rungs, or any set of names.

Data only. A rung is one row of `RUNGS`; the names are the activations that the block's graph
declares (`fused_remat.blocks`). Statistics (norm means and rstd, attention's logsumexp beside a
kept `attn`) and the dropout seed are kept whenever backward needs them, in every policy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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


#: Where in a segment a block is (`fused_remat.segments`).
SEGMENT_PLACES = ("first", "inner")


@dataclass(frozen=True, init=False)
class Policy:
    """The set of activations that a block keeps; every other one is rebuilt in backward.

    Args:
        save: names of activations, such as `{"attn", "qkv"}`. The empty set is the rung "full".
        segment: the block's place in a segment of blocks that follow each other directly, or None.
            "first" keeps its input, "inner" not even that; when backward reaches the segment it is
            run forward again, and only from then on are the names of `save` kept
            (`fused_remat.segments`). `plan` makes segments; in eager mode only.

    Raises:
        TypeError: `save` is a string or not an iterable of strings.
        ValueError: another `segment`; (when a block takes the policy) a name that the block does
            not have; the message lists the valid ones.

    >>> from fused_remat import FusedRematLayer, Policy
    >>> layer = FusedRematLayer(64, 4, 256, policy=Policy(save={"attn", "qkv"}))
    >>> sorted(layer.policy.save)
    ['attn', 'qkv']
    """

    save: frozenset[str]
    segment: str | None = None

    def __init__(self, save: Iterable[str] = (), segment: str | None = None) -> None:
        if isinstance(save, str) or not isinstance(save, Iterable):
            raise TypeError(f"Policy(save=...) takes a set of names, got {save!r}")
        names = frozenset(save)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"Policy(save=...) takes names (str), got {name!r}")
        if segment not in (None, *SEGMENT_PLACES):
            raise ValueError(
                f"Policy(segment=...) takes {', '.join(map(repr, SEGMENT_PLACES))} or None, "
                f"got {segment!r}"
            )
        object.__setattr__(self, "save", names)
        object.__setattr__(self, "segment", segment)

    def __repr__(self) -> str:
        shown = [f"save={{{', '.join(map(repr, sorted(self.save)))}}}"] if self.save else []
        if self.segment is not None:
            shown.append(f"segment={self.segment!r}")
        return f"Policy({', '.join(shown)})"


def kept_names(policy: str | Policy, block: str, valid: Iterable[str]) -> frozenset[str]:
    """The names that `policy` keeps in `block`, whose activations are `valid`.

    Raises:
        ValueError: an unknown rung, or a name that the block does not have; the message lists
            the valid ones.
        TypeError: `policy` is neither a string nor a Policy.

    >>> sorted(kept_names("balanced", "encoder_prenorm", ["attn", "mid"]))
    ['attn', 'mid']
    """
    if isinstance(policy, str):
        if policy not in RUNGS:
            raise ValueError(f"unknown policy {policy!r}; valid rungs: {', '.join(RUNGS)}")
        return RUNGS[policy].get(block, frozenset()).intersection(valid)  # "gate": of gated ones
    if not isinstance(policy, Policy):
        raise TypeError(f"policy must be a rung ({', '.join(RUNGS)}) or a Policy, got {policy!r}")
    valid = tuple(valid)
    unknown = sorted(policy.save.difference(valid))
    if unknown:
        raise ValueError(
            f"unknown activation {', '.join(map(repr, unknown))} in Policy for {block}; "
            f"valid names: {', '.join(valid)}"
        )
    return policy.save

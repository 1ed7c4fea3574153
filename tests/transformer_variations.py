"""Every variation of the transformer block that its op has, each pair of them, as its options."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from block_inputs import Block, normal
from reference import ACTIVATIONS
from torch import Tensor

BATCH, SEQ = 2, 7
BLOCK = Block(head_dim=6)

#: What a block may be, and all that it may be: the first of each is Llama's.
FACTORS: dict[str, tuple[Any, ...]] = {
    "split": (True, False),
    "gated": (True, False),
    "placement": ("pre", "post", "sandwich"),
    "norm": ("rms_norm", "layer_norm"),
    "norm_offset": (0.0, 1.0),
    "kv_heads": (2, 4, 1),
    "bias": ("", "qkv", "all"),
    "qk_norm": (False, True),
    "rope": ("whole", "partial", "interleaved batched", ""),
    "activation": tuple(ACTIVATIONS),
    "keys": ("all", "window", "bool mask", "float mask", "left padding", "right padding",
             "lengths", "packed"),
    "is_causal": (True, False),
    "softcap": (0.0, 2.0),
    "lora": (False, True),
    "dropout_p": (0.0, 0.3),
    "tokens": (512, 8),
}  # fmt: skip
LLAMA = {name: values[0] for name, values in FACTORS.items()}


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Combinations in which every two values of different factors meet at least once.

    >>> len(list(pairwise({"a": (0, 1), "b": (0, 1), "c": (0, 1)})))
    4
    """
    draw, names = random.Random(seed), list(factors)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def met(chosen: dict[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
        return left.intersection(itertools.combinations(chosen.items(), 2))

    while left:
        (a, i), (b, j) = min(left)
        tries = [{n: draw.randrange(len(factors[n])) for n in names} | {a: i, b: j}
                 for _ in range(50)]  # fmt: skip
        best = max(tries, key=lambda chosen: len(met(chosen)))
        left -= met(best)
        yield {name: factors[name][k] for name, k in best.items()}


def block(v: Mapping[str, Any]) -> Block:
    """Sizes and weights of a variation."""
    same = {
        name: v[name] for name in ("split", "gated", "placement", "norm", "kv_heads", "qk_norm")
    }
    return Block(**same, head_dim=6, bias=v["bias"] == "all", qkv_bias=v["bias"] == "qkv")


def tables(
    kind: str, seq: int = SEQ, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor] | None:
    """cos and sin; "whole": of all of a head, else of a part of it; "batched": (B, S, R/2)."""
    if not kind:
        return None
    lead = (BATCH, seq) if "batched" in kind else (seq,)
    angle = normal(*lead, BLOCK.head_dim // 2 if kind == "whole" else 2, seed=7, scale=3.0).detach()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def keys(kind: str, seq: int = SEQ, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Which keys take part, as options of the op; "packed" is for a batch of one."""
    padding = torch.zeros(BATCH, seq, dtype=torch.bool)
    if kind == "left padding":
        padding[1, :3] = True
    padding[0, seq - 2 :] = kind == "right padding"
    options: dict[str, dict[str, Any]] = {
        "all": {},
        "window": {"window": (2, 1)},
        "bool mask": {"attn_mask": (normal(seq, seq, seed=3) > -0.5).detach()},
        "float mask": {"attn_mask": normal(BATCH, 1, seq, seq, seed=3, dtype=dtype)},
        "left padding": {"key_padding_mask": padding},
        "right padding": {"key_padding_mask": padding},
        "lengths": {"key_lengths": torch.tensor([seq, 0])},
        "packed": {"cu_seqlens": torch.tensor([0, 2, 2, seq - 1])},
    }
    return options[kind]


def options(v: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """What `ops.causal_block` and `plain` take for a variation besides x, weights and heads."""
    same = ("dropout_p", "is_causal", "kv_heads", "softcap", "placement", "norm", "norm_offset")
    return {
        **{name: v[name] for name in same}, "activation": v["activation"], "seed": 11,
        "rope": tables(v["rope"] if v["keys"] != "packed" else v["rope"].split()[0]
                       if v["rope"] else "", dtype=dtype),
        "rope_interleaved": "interleaved" in v["rope"], **keys(v["keys"], dtype=dtype),
    }  # fmt: skip


def inputs(v: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> Tensor:
    """x (B, S, D), of a batch of one if sequences are packed."""
    return normal(1 if v["keys"] == "packed" else BATCH, SEQ, BLOCK.d, seed=1, dtype=dtype)

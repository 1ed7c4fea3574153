"""What the tests of rotary embedding share: heads of every kind, and the same in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from reference_ops import attention, normal
from torch import Tensor

from fused_remat import ops

BATCH, SEQ, WIDTH = 3, 7, 8
# Whole; groups of two sequences; a sequence at a time, the op in tiles that begin within one.
TOKENS = [512, 16, 4]


@dataclass(frozen=True)
class Heads:
    """What is rotated: heads, their width, R of it, and how."""

    nhead: int
    kv_heads: int
    width: int
    rotated: int
    interleaved: bool = False
    batched: bool = False
    norm: bool = False

    @property
    def packed(self) -> int:
        return (self.nhead + 2 * self.kv_heads) * self.width

    def tables(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor] | None:
        """cos and sin of angles that no two places, pairs or sequences share."""
        if not self.rotated:
            return None
        lead = (BATCH, SEQ) if self.batched else (SEQ,)
        angle = normal(*lead, self.rotated // 2, seed=7, scale=3.0).detach()
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def weights(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        names = ("q_norm_weight", "k_norm_weight") if self.norm else ()
        return {n: normal(self.width, seed=i, dtype=dtype) for i, n in enumerate(names)}


HEADS = {
    "half": Heads(4, 2, 6, 6),
    "interleaved": Heads(4, 4, 6, 6, interleaved=True),
    "partial": Heads(3, 1, 8, 4, batched=True),
    "interleaved partial": Heads(4, 2, 7, 2, interleaved=True, batched=True),
    "norm half": Heads(4, 2, 6, 6, norm=True),
    "norm interleaved": Heads(2, 2, 4, 4, interleaved=True, batched=True, norm=True),
    "norm partial": Heads(4, 1, 5, 2, norm=True),
    "norm alone": Heads(4, 2, 6, 0, norm=True),
}


@pytest.fixture(params=HEADS)
def every_heads(request):
    """In a test file `heads = every_heads`: a test that takes `heads` runs with each of `HEADS`."""
    return HEADS[request.param]


def rotate_plain(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x (B, S, heads, E) in plain PyTorch, cos and sin (S, R/2) or (B, S, R/2)."""
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    r = 2 * cos.shape[-1]
    if interleaved:
        x1, x2 = x[..., :r].unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    else:
        x1, x2 = x[..., :r].chunk(2, -1)
        turned = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
    return torch.cat((turned, x[..., r:]), -1)


def plain(qkv: Tensor, heads: Heads, tables, weights) -> Tensor:
    """`ops.pieces` in plain PyTorch."""
    packed = qkv.unflatten(-1, (-1, heads.width))
    q, k, v = packed.split((heads.nhead, heads.kv_heads, heads.kv_heads), -2)
    if weights:
        q = F.rms_norm(q, (heads.width,), weights["q_norm_weight"], 1e-6)
        k = F.rms_norm(k, (heads.width,), weights["k_norm_weight"], 1e-6)
    if tables is not None:
        q, k = (rotate_plain(x, *tables, heads.interleaved) for x in (q, k))
    return torch.cat((q, k, v), -2).flatten(-2)


def op(qkv: Tensor, heads: Heads, tables, weights, **options) -> Tensor:
    return ops.rotary(
        qkv, *(tables or (None, None)), heads.nhead, heads.kv_heads, heads.interleaved, **weights,
        **options,
    )  # fmt: skip


def block_tensors(heads: Heads, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Leaves of an attention block, in the order of its arguments."""
    shapes = {
        "x": (BATCH, SEQ, WIDTH), "norm_weight": (WIDTH,), "norm_bias": (WIDTH,),
        "qkv_weight": (heads.packed, WIDTH), "qkv_bias": (heads.packed,),
        "proj_weight": (WIDTH, heads.nhead * heads.width), "proj_bias": (WIDTH,),
    }  # fmt: skip
    made = {n: normal(*s, seed=i, dtype=dtype) for i, (n, s) in enumerate(shapes.items())}
    return made | heads.weights(dtype)


def block(t: dict[str, Tensor], heads: Heads, tables=None, **options) -> Tensor:
    options = {"kv_heads": heads.kv_heads, "is_causal": True} | options
    if tables is None:
        tables = heads.tables(t["x"].dtype)
    return ops.attention_block(
        **t, nhead=heads.nhead, rope=tables, rope_interleaved=heads.interleaved, **options
    )


def block_plain(t: dict[str, Tensor], heads: Heads, tables=None) -> Tensor:
    normed = F.layer_norm(t["x"], (WIDTH,), t["norm_weight"], t["norm_bias"])
    packed = F.linear(normed, t["qkv_weight"], t["qkv_bias"])
    weights = {n: w for n, w in t.items() if n in ("q_norm_weight", "k_norm_weight")}
    tables = heads.tables(t["x"].dtype) if tables is None else tables
    packed = plain(packed, heads, tables, weights).unflatten(-1, (-1, heads.width))
    split = (heads.nhead, heads.kv_heads, heads.kv_heads)
    attn = attention(*packed.transpose(1, 2).split(split, 1), is_causal=True)
    return t["x"] + F.linear(attn.transpose(1, 2).flatten(2), t["proj_weight"], t["proj_bias"])

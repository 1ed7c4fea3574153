"""Rotary position embedding of a packed projection, and the RMSNorm of its heads before."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem
from bench.kernels.shapes import Size
from bench.measure.contest import Rig, Work
from bench.measure.registry import Absent
from fused_remat import ops

EPS = 1e-6
BASE = 1e4  # of the angles
NORMED = "normed rope"


@dataclass(eq=False)
class Rope(Problem):
    """x (B, S, (H + 2·Hkv)·E), query heads first, of which halves are turned; values stay.

    `NORMED`: each query and key head is divided by its root mean square before, and weighted.
    """

    batch: int
    nhead: int
    kv_heads: int
    seq_len: int
    head_dim: int

    @property
    def counts(self) -> tuple[int, int, int]:
        """Of query, key and value heads."""
        return self.nhead, self.kv_heads, self.kv_heads

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        norms = ("q_weight", "k_weight") if self.name == NORMED else ()
        x = self.batch, self.seq_len, sum(self.counts) * self.head_dim
        return {"x": x, **dict.fromkeys(norms, (self.head_dim,))}

    @functools.cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin (S, E/2), rounded as models hold them, so that all are given the same."""
        place = torch.arange(self.seq_len, device=self.rig.device, dtype=torch.float64)
        power = torch.arange(0, self.head_dim, 2, device=self.rig.device) / self.head_dim
        angle = place[:, None] / BASE**power
        return angle.cos().to(self.rig.dtype), angle.sin().to(self.rig.dtype)

    @functools.cached_property
    def doubled_tables(self) -> list[Tensor]:
        """The same for both halves, (S, E)."""
        return [torch.cat([t, t], -1) for t in self.tables]

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values (B, S, heads, E), views."""
        return x.unflatten(-1, (-1, self.head_dim)).split_with_sizes(self.counts, 2)

    def reference(self, *inputs: Tensor) -> Tensor:
        """As models are written: heads apart, halves turned, and put together again."""
        x, *weights = inputs
        q, k, v = self.heads(x)
        if weights:
            pairs = zip((q, k), weights, strict=True)
            q, k = (F.rms_norm(t, (self.head_dim,), weight, EPS) for t, weight in pairs)
        cos, sin = (t.to(x.dtype)[:, None] for t in self.doubled_tables)

        def turned(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat([-second, first], -1) * sin

        return torch.cat([turned(q), turned(k), v], 2).flatten(2)

    def work(self, direction: str) -> Work:
        """x and y, or dy and dx; x again for its norms' gradients. The tables are small."""
        elements = self.batch * self.seq_len * sum(self.counts) * self.head_dim
        normed = direction == "bwd" and self.name == NORMED
        return Work(bytes=(3.0 if normed else 2.0) * elements * self.rig.dtype.itemsize)


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    """The model's own heads, if it rotates them."""
    model = size.model
    if model.rope:
        heads = model.nhead, model.kv_heads, size.seq_len, model.head_dim
        yield Rope(rig, "rope", size.batch, *heads)


OP = Op("rope", of_model)
OP.add_stock()


def _tables(p: Rope) -> tuple[Tensor, Tensor]:
    """For who has no norm."""
    if p.name == NORMED:
        raise Absent("it has no norm")
    return p.tables


@OP.provider("liger", module="liger_kernel", needs="triton", in_place=True)
def liger(p: Rope) -> Function:
    """Liger-Kernel's, which takes queries and keys apart and copies those of a packed x."""
    _tables(p)
    from liger_kernel.ops import LigerRopeFunction

    cos, sin = (t[None] for t in p.doubled_tables)

    def function(x: Tensor) -> Tensor:
        q, k, v = p.heads(x)
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return torch.cat([q.transpose(1, 2), k.transpose(1, 2), v], 2).flatten(2)

    return function


@OP.provider("quack", module="quack", needs="cuda", in_place=True, optional=True)
def quack(p: Rope) -> Function:
    """QuACK's, in place of a packed x."""
    tables, given = _tables(p), {"num_heads_q": p.nhead, "headdim": p.head_dim}
    from quack.rotary import apply_rotary_emb_qkv_

    return lambda x: apply_rotary_emb_qkv_(x, *tables, **given)


@OP.provider("flash-attn", module="flash_attn", needs="cuda", in_place=True, optional=True)
def flash_attn(p: Rope) -> Function:
    """flash-attn's Triton kernel, in place of a packed x."""
    tables, heads = _tables(p), (-1, p.head_dim)
    from flash_attn.layers.rotary import apply_rotary_emb_qkv_ as apply

    return lambda x: apply(x.unflatten(-1, heads), *tables, num_heads_q=p.nhead).flatten(2)


def _ours(p: Rope, backend: str) -> Function:
    counts = {"nhead": p.nhead, "kv_heads": p.kv_heads}

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        norms = dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=False))
        return ops.rotary(x, *p.tables, **counts, **norms, eps=EPS, backend=backend)

    return function


OP.add_ours(_ours)

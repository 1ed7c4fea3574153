"""Ops that memory bounds: norms and rotary embedding, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem
from bench.kernels.shapes import Size
from bench.measure.contest import Rig, Work
from fused_remat import ops

EPS = 1e-5
BASE = 1e4  # of the angles


@dataclass(eq=False)
class Norm(Problem):
    """`layer_norm` or `rms_norm` of x (T, D)."""

    tokens: int
    width: int

    mean: ClassVar[float] = 0.5

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"x": (self.tokens, self.width), "weight": (self.width,), "bias": (self.width,)}
        return shapes if self.name == "layer_norm" else {n: shapes[n] for n in ("x", "weight")}

    def reference(self, *inputs: Tensor) -> Tensor:
        x, *affine = inputs
        norm = F.layer_norm if self.name == "layer_norm" else F.rms_norm
        return norm(x, x.shape[-1:], *affine, eps=EPS)

    def work(self, direction: str) -> Work:
        """Count x and y; or x, dy and dx."""
        matrix = self.tokens * self.width * self.rig.dtype.itemsize
        return Work(bytes={"fwd": 2.0, "bwd": 3.0}[direction] * matrix)


NORM = Op("norm", lambda rig, size: [Norm(rig, size.model.norm, size.tokens, size.model.d_model)])


@NORM.provider("liger", module="liger_kernel", needs="cuda")
def liger_norm(p: Norm) -> Function:
    from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

    if p.name == "layer_norm":
        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


@NORM.ours()
def our_norm(p: Norm, backend: str) -> Function:
    norm = ops.layer_norm if p.name == "layer_norm" else ops.rms_norm
    return lambda x, *affine: norm(x, *affine, eps=EPS, backend=backend)


@dataclass(eq=False)
class Rope(Problem):
    """x (B, S, (H + 2·Hkv)·E), query heads first, of which halves are rotated; values stay."""

    batch: int
    nhead: int
    kv_heads: int
    seq_len: int
    head_dim: int

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.nhead, self.kv_heads, self.kv_heads

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.batch, self.seq_len, sum(self.counts) * self.head_dim)}

    @functools.cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin (S, E/2), rounded as models hold them."""
        position = torch.arange(self.seq_len, device=self.rig.device, dtype=torch.float64)
        power = torch.arange(0, self.head_dim, 2, device=self.rig.device) / self.head_dim
        angle = position[:, None] / BASE**power
        return angle.cos().to(self.rig.dtype), angle.sin().to(self.rig.dtype)

    @functools.cached_property
    def doubled_tables(self) -> list[Tensor]:
        """The tables for both halves, (S, E)."""
        return [torch.cat([t, t], -1) for t in self.tables]

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values (B, S, heads, E), views."""
        return x.unflatten(-1, (-1, self.head_dim)).split_with_sizes(self.counts, 2)

    def reference(self, *inputs: Tensor) -> Tensor:
        """Rotate as models are written: split heads, rotate halves, concatenate."""
        (x,) = inputs
        q, k, v = self.heads(x)
        cos, sin = (t.to(x.dtype)[:, None] for t in self.doubled_tables)

        def rotated(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat([-second, first], -1) * sin

        return torch.cat([rotated(q), rotated(k), v], 2).flatten(2)

    def work(self, direction: str) -> Work:
        """Count x and y, or dy and dx; the tables are small."""
        elements = self.batch * self.seq_len * sum(self.counts) * self.head_dim
        return Work(bytes=2.0 * elements * self.rig.dtype.itemsize)


def _ropes(rig: Rig, size: Size) -> Iterator[Problem]:
    model = size.model
    if model.rope:
        heads = model.nhead, model.kv_heads, size.seq_len, model.head_dim
        yield Rope(rig, "rope", size.batch, *heads)


ROPE = Op("rope", _ropes)


@ROPE.provider("liger", module="liger_kernel", needs="triton", in_place=True)
def liger_rope(p: Rope) -> Function:
    """Liger-Kernel's, which takes queries and keys apart and copies those of a packed x."""
    from liger_kernel.ops import LigerRopeFunction

    cos, sin = (t[None] for t in p.doubled_tables)

    def function(x: Tensor) -> Tensor:
        q, k, v = p.heads(x)
        q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return torch.cat([q.transpose(1, 2), k.transpose(1, 2), v], 2).flatten(2)

    return function


@ROPE.ours()
def our_rope(p: Rope, backend: str) -> Function:
    counts = {"nhead": p.nhead, "kv_heads": p.kv_heads}
    return lambda x: ops.rotary(x, *p.tables, **counts, backend=backend)

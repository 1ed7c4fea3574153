"""Ops that memory binds: norms, dropout with a residual, rotary embedding; their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import SIGMAS, Function, Op, Problem
from bench.kernels.shapes import Size
from bench.measure.contest import P, Results, Rig, Work, WrongResultError
from bench.measure.registry import Absent
from fused_remat import ops

EPS, HEADS_EPS = 1e-5, 1e-6
BASE = 1e4  # of the angles
NORMED = "normed rope"
#: Of 1 + |residual|: an x above shows in y whether it was kept, in any dtype.
_SHOWS = 0.1


# --- norms


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
        """x and y; or x, dy and dx."""
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


# --- residual + dropout(x)


@dataclass(eq=False)
class Dropout(Problem):
    """x and residual (T, D). Everyone draws a mask, a new one at every call, and shows it in y."""

    name: str = field(default="dropout + residual", init=False)
    tokens: int
    width: int
    _seen: list[Tensor] = field(default_factory=list, init=False)  # masks of all checked calls

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("x", "residual"), (self.tokens, self.width))

    def reference(self, *inputs: Tensor) -> Tensor:
        x, residual = inputs
        return residual + F.dropout(x, P)

    def work(self, direction: str) -> Work:
        """x, residual and y; or dy and dx: the residual's gradient is dy itself."""
        matrix = self.tokens * self.width * self.rig.dtype.itemsize
        return Work(bytes={"fwd": 3.0, "bwd": 2.0}[direction] * matrix)

    def truth(self, direction: str) -> Results:
        """Nobody's: see `truth_of`."""
        return {}

    def truth_of(self, direction: str) -> Callable[[Results], Results]:
        """What the results should be under the mask that y shows.

        Raises: WrongResultError where it keeps too many or too few, or the mask was there before.
        """

        def truth(found: Mapping[str, Tensor]) -> Results:
            x, residual = (t.double() for t in self.sets[0].values())
            added, dy = found["y"].double() - residual, self.dys[0].double()
            kept, shows = _nearer(added, x / (1.0 - P)), x.abs() > _SHOWS * (1.0 + residual.abs())
            share, count = kept[shows].double().mean().item(), int(shows.sum())
            if abs(share - (1.0 - P)) > SIGMAS * (P * (1.0 - P) / count) ** 0.5:
                raise WrongResultError(f"it keeps {share:.4f} of {count}, expected {1.0 - P:.4f}")
            if any(torch.equal(kept & shows, before) for before in self._seen):
                raise WrongResultError("the mask is that of a call before")
            self._seen.append(kept & shows)
            if direction == "fwd":
                return {"y": residual + kept * x / (1.0 - P)}
            scaled = dy / (1.0 - P)
            kept = torch.where(shows, kept, _nearer(found["dx"].double(), scaled))
            return {"dx": kept * scaled, "dresidual": dy}

        return truth


def _nearer(value: Tensor, kept: Tensor) -> Tensor:
    """Whether a value is what is kept rather than 0."""
    return (value - kept).abs() < value.abs()


#: At the model's width, whether it is trained with dropout or not.
DROPOUT = Op("dropout", lambda rig, size: [Dropout(rig, size.tokens, size.model.d_model)])


@DROPOUT.ours()
def our_dropout(p: Dropout, backend: str) -> Function:
    """The mask is drawn again in the backward."""
    return lambda x, residual: ops.dropout_add(x, residual, P, backend=backend)


# --- rotary position embedding, and the RMSNorm of heads before


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
            q, k = (F.rms_norm(t, (self.head_dim,), weight, HEADS_EPS) for t, weight in pairs)
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


def _ropes(rig: Rig, size: Size) -> Iterator[Problem]:
    model = size.model
    if model.rope:
        heads = model.nhead, model.kv_heads, size.seq_len, model.head_dim
        yield Rope(rig, "rope", size.batch, *heads)


ROPE = Op("rope", _ropes)


@ROPE.provider("liger", module="liger_kernel", needs="triton", in_place=True)
def liger_rope(p: Rope) -> Function:
    """Liger-Kernel's, which takes queries and keys apart and copies those of a packed x."""
    if p.name == NORMED:
        raise Absent("it has no norm")
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

    def function(x: Tensor, *weights: Tensor) -> Tensor:
        norms = dict(zip(("q_norm_weight", "k_norm_weight"), weights, strict=False))
        return ops.rotary(x, *p.tables, **counts, **norms, eps=HEADS_EPS, backend=backend)

    return function

"""What the tests of transformer blocks share: weights of every kind, and the same in plain PyTorch.

`plain` takes the arguments of `ops.causal_block`, and `seed` for dropout with the masks that the
generator's definition gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from reference_ops import attention, dropout, normal
from reference_rotary import rotate_plain
from torch import Tensor

from fused_remat import random

Weights = Mapping[str, Tensor]
#: layer, A (rank, in), B (out, rank), scale; as `ops.causal_block(lora=...)`.
Update = tuple[str, Tensor, Tensor, float]

ACTIVATIONS = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block's sizes, and which weights it has."""

    d: int = 12
    nhead: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    hidden: int = 20
    split: bool = True
    gated: bool = True
    placement: str = "pre"
    norm: str = "rms_norm"
    qk_norm: bool = False
    bias: bool = False
    qkv_bias: bool = False

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear layer."""
        d, queries, keys = self.d, self.nhead * self.head_dim, self.kv_heads * self.head_dim
        packed = {"qkv": (queries + 2 * keys, d)}
        apart = {"q": (queries, d), "k": (keys, d), "v": (keys, d)}
        mlp = {"fc1": (self.hidden, d), "fc2": (d, self.hidden)}
        gate = {"gate": (self.hidden, d)} if self.gated else {}
        return (apart if self.split else packed) | {"proj": (d, queries)} | gate | mlp

    @property
    def norms(self) -> tuple[str, ...]:
        return ("norm1", "norm2", *(("post1", "post2") if self.placement == "sandwich" else ()))

    def weights(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
        """Leaves; matrices scaled to keep the size of what they meet, norms around 1."""
        made: dict[str, Tensor] = {}

        def add(name: str, *shape: int, scale: float = 1.0, around: float = 0.0) -> None:
            t = normal(*shape, seed=seed + len(made), scale=scale).detach() + around
            made[name] = t.to(dtype).requires_grad_()

        for name, (out, width) in self.linears.items():
            add(f"{name}.weight", out, width, scale=width**-0.5)
            if self.bias or (self.qkv_bias and name in ("qkv", "q", "k", "v")):
                add(f"{name}.bias", out, scale=0.2)
        for name in self.norms:
            add(f"{name}.weight", self.d, scale=0.2, around=1.0)
            if self.norm == "layer_norm":
                add(f"{name}.bias", self.d, scale=0.2)
        for name in ("q_norm", "k_norm") if self.qk_norm else ():
            add(f"{name}.weight", self.head_dim, scale=0.2, around=1.0)
        return made

    def updates(
        self, layers: Sequence[str] = (), rank: int = 3, dtype: torch.dtype = torch.float64
    ) -> list[Update]:
        """Low-rank updates of `layers`, all linear ones if none are named; leaves."""
        made = []
        for i, name in enumerate(layers or self.linears):
            out, width = self.linears[name]
            a = normal(rank, width, seed=100 + i, scale=width**-0.5, dtype=dtype)
            made.append((name, a, normal(out, rank, seed=200 + i, dtype=dtype), 0.5 + 0.25 * i))
        return made

    def rope(self, seq: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """cos and sin (seq, head_dim / 2) of angles that no two places or pairs share."""
        angle = normal(seq, self.head_dim // 2, seed=7, scale=3.0).detach()
        return angle.cos().to(dtype), angle.sin().to(dtype)


def leaves(x: Tensor, weights: Weights, lora: Sequence[Update] = ()) -> dict[str, Tensor]:
    """What wants a gradient, by name."""
    matrices = {f"{m}{i}": t for i, u in enumerate(lora) for m, t in zip("AB", u[1:3], strict=True)}
    named = {"x": x, **weights, **matrices}
    return {name: t for name, t in named.items() if t.requires_grad}


def _rms(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * (weight + offset)


def plain(
    x: Tensor, w: Weights, nhead: int, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = True, *, kv_heads: int | None = None,
    cu_seqlens: Tensor | None = None, rope: tuple[Tensor, Tensor] | None = None,
    rope_interleaved: bool = False, placement: str = "pre", norm: str = "rms_norm",
    eps: float = 1e-6, norm_offset: float = 0.0, qk_norm_eps: float | None = None,
    activation: str = "silu", attention_dropout_p: float | None = None,
    lora: Sequence[Update] = (), lora_dropout_p: float = 0.0, seed: int = 0, **options: object,
) -> Tensor:  # fmt: skip
    """`ops.causal_block`; `options` are those of `reference_ops.attention`."""
    kv_heads = nhead if kv_heads is None else kv_heads

    def normed(name: str, t: Tensor) -> Tensor:
        weight = w[f"{name}.weight"]
        if norm == "rms_norm":
            return _rms(t, weight, eps, norm_offset)
        return F.layer_norm(t, t.shape[-1:], weight + norm_offset, w.get(f"{name}.bias"), eps)

    def linear(name: str, t: Tensor) -> Tensor:
        y = F.linear(t, w[f"{name}.weight"], w.get(f"{name}.bias"))
        for i, (layer, a, b, scale) in enumerate(lora):
            if layer == name:
                low = dropout(t, random.LORA + i, lora_dropout_p, seed)
                y = y + scale * low.to(a.dtype) @ a.T @ b.T
        return y.to(t.dtype)

    def attended(t: Tensor) -> Tensor:
        layers = ("qkv",) if "qkv.weight" in w else ("q", "k", "v")
        packed = torch.cat([linear(layer, t) for layer in layers], -1)
        heads = packed.unflatten(-1, (nhead + 2 * kv_heads, -1))
        q, k, v = heads.split((nhead, kv_heads, kv_heads), -2)
        if "q_norm.weight" in w:
            head_eps = eps if qk_norm_eps is None else qk_norm_eps
            q = _rms(q, w["q_norm.weight"], head_eps, norm_offset)
            k = _rms(k, w["k_norm.weight"], head_eps, norm_offset)
        if rope is not None:
            q, k = (rotate_plain(t, *rope, rope_interleaved) for t in (q, k))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        p = dropout_p if attention_dropout_p is None else attention_dropout_p
        merged = attention(
            q, k, v, attn_mask, p, is_causal, cu_seqlens_q=cu_seqlens, seed=seed, **options
        )
        return linear("proj", merged.transpose(1, 2).flatten(2))

    def mlp(t: Tensor) -> Tensor:
        act, up = ACTIVATIONS[activation], linear("fc1", t)
        up = act(linear("gate", t)) * up if "gate.weight" in w else act(up)
        return linear("fc2", dropout(up, random.MLP, dropout_p, seed))

    def half(t: Tensor, number: str, site: int, inner: Callable[[Tensor], Tensor]) -> Tensor:
        before, after = f"norm{number}", f"post{number}"
        y = inner(t if placement == "post" else normed(before, t))
        y = dropout(normed(after, y) if placement == "sandwich" else y, site, dropout_p, seed)
        return normed(before, t + y) if placement == "post" else t + y

    mid = half(x, "1", random.RESIDUAL1, attended)
    return half(mid, "2", random.RESIDUAL2, mlp)

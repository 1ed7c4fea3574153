"""`CausalLayer`: the computation of `FusedRematCausalLayer` in ordinary operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.ops.activation import ActivationLike, activation_name
from fused_remat.ops.checks import check_heads, check_norm_kind, check_p
from fused_remat.policies import Policy
from fused_remat.spec import check_one_of
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.norm import NORMS


class CausalLayer(nn.Module):
    """Attention and an MLP with norms and residuals.

    The constructor is that of `FusedRematCausalLayer`, whose docstring describes it; policy,
    backend and accumulate_into have no effect here.

    >>> layer = CausalLayer(16, 4, 32, kv_heads=2)
    >>> layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float = 0.0,
        activation: ActivationLike = "silu",
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: str = "rms_norm",
        norm_eps: float = 1e-6,
        gated: bool = True,
        bias: bool = False,
        qkv_bias: bool | None = None,
        qk_norm: bool = False,
        window: int | None = None,
        softcap: float = 0.0,
        attention_dropout: float | None = None,
        is_causal: bool = True,
        rope_interleaved: bool = False,
        placement: str = "pre",
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = nhead if kv_heads is None else kv_heads
        check_heads(nhead, kv_heads)
        check_norm_kind(norm)
        check_one_of("placement", placement, "pre", "post", "sandwich")
        check_window(window)
        if softcap < 0.0:
            raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
        if head_dim is None and d_model % nhead:
            raise ValueError(
                f"nhead must divide d_model, got {nhead} and {d_model}; or pass head_dim"
            )
        self.d_model, self.nhead, self.kv_heads = d_model, nhead, kv_heads
        self.head_dim = d_model // nhead if head_dim is None else head_dim
        self.dropout = check_p("dropout", dropout)
        p = self.dropout if attention_dropout is None else attention_dropout
        self.attention_dropout = check_p("attention_dropout", p)
        self.activation = _named(activation)
        self.window, self.softcap, self.is_causal = window, float(softcap), bool(is_causal)
        self.rope_interleaved, self.placement = bool(rope_interleaved), placement
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        queries, keys = nhead * self.head_dim, kv_heads * self.head_dim
        qkv_bias = bias if qkv_bias is None else qkv_bias
        self.q = nn.Linear(d_model, queries, qkv_bias, **factory)
        self.k = nn.Linear(d_model, keys, qkv_bias, **factory)
        self.v = nn.Linear(d_model, keys, qkv_bias, **factory)
        self.proj = nn.Linear(queries, d_model, bias, **factory)
        self.gate = nn.Linear(d_model, dim_feedforward, bias, **factory) if gated else None
        self.up = nn.Linear(d_model, dim_feedforward, bias, **factory)
        self.down = nn.Linear(dim_feedforward, d_model, bias, **factory)
        affine = factory if norm == "rms_norm" else {**factory, "bias": bias}
        for name in ("norm1", "norm2", *(("post1", "post2") if placement == "sandwich" else ())):
            setattr(self, name, NORMS[norm].module(d_model, norm_eps, **affine))
        for name in ("q_norm", "k_norm"):
            setattr(self, name, nn.RMSNorm(self.head_dim, norm_eps, **factory) if qk_norm else None)
        self._set_options(policy, backend, accumulate_into)

    def _set_options(self, policy: str | Policy, backend: str, accumulate_into: str | None) -> None:
        """Do nothing; `FusedLayer` has these options."""

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute `FusedRematCausalLayer.forward`, with the tables of `rope` one by one."""
        masks = (attn_mask, key_padding_mask, key_lengths, cu_seqlens)
        layer: Any = self
        post, sandwich = self.placement == "post", self.placement == "sandwich"
        y = _attended(layer, x if post else layer.norm1(x), cos, sin, masks)
        y = F.dropout(layer.post1(y) if sandwich else y, layer.dropout, layer.training)
        mid = layer.norm1(x + y) if post else x + y
        y = _mlp(layer, mid if post else layer.norm2(mid))
        y = F.dropout(layer.post2(y) if sandwich else y, layer.dropout, layer.training)
        out: Tensor = layer.norm2(mid + y) if post else mid + y
        return out


def check_window(window: int | None) -> None:
    """Raise ValueError unless `window` is None or a count of keys."""
    if window is not None and (type(window) is not int or window < 0):
        raise ValueError(f"window must be a count of keys or None, got {window!r}")


def _named(activation: ActivationLike) -> str:
    name = activation if isinstance(activation, str) else activation_name(activation)
    if name not in ACTIVATIONS:
        shown = ", ".join(ACTIVATIONS)
        raise ValueError(f"unknown activation {activation!r}; valid: {shown}, and their functions")
    return name


def _mlp(layer: Any, x: Tensor) -> Tensor:
    act = ACTIVATIONS[layer.activation].fwd
    y = act(layer.up(x)) if layer.gate is None else act(layer.gate(x)) * layer.up(x)
    down: Tensor = layer.down(F.dropout(y, layer.dropout, layer.training))
    return down


def _attended(
    layer: Any, x: Tensor, cos: Tensor | None, sin: Tensor | None, masks: tuple[Tensor | None, ...]
) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (-1, layer.head_dim)) for part in (layer.q, layer.k, layer.v))
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    if cos is not None and sin is not None:
        q, k = (_rotated(t, cos, sin, layer.rope_interleaved).to(v.dtype) for t in (q, k))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    p = layer.attention_dropout if layer.training else 0.0
    alone = all(mask is None for mask in masks) and layer.window is None
    if alone and not layer.softcap:
        y = F.scaled_dot_product_attention(
            q, k, v, None, p, layer.is_causal, enable_gqa=layer.nhead != layer.kv_heads
        )
    else:
        y = _masked(q, k, v, p, _mask(layer, x, masks), layer.softcap)
    out: Tensor = layer.proj(y.transpose(1, 2).flatten(2))
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first elements of heads (B, S, H, E), in float32 at least."""
    wide, rotated = torch.promote_types(x.dtype, torch.float32), 2 * cos.shape[-1]
    cos, sin = (t.unsqueeze(-2).to(wide) for t in (cos, sin))
    turned, rest = x[..., :rotated].to(wide), x[..., rotated:].to(wide)
    if interleaved:
        x1, x2 = turned.unflatten(-1, (-1, 2)).unbind(-1)
        y = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    else:
        x1, x2 = turned.chunk(2, -1)
        y = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
    return torch.cat((y, rest), -1).to(x.dtype)


def _mask(layer: Any, x: Tensor, masks: tuple[Tensor | None, ...]) -> Tensor:
    """Return one mask, (B, H, S, S), that is added to the scores; reads no value of `masks`."""
    attn_mask, padding, lengths, cu = masks
    position = torch.arange(x.shape[1], device=x.device)
    before = position[:, None] - position  # how far before the query the key is
    seen = before >= 0 if layer.is_causal else torch.ones_like(before, dtype=torch.bool)
    if layer.window is not None:
        seen = seen & (before.abs() <= layer.window)
    if cu is not None:
        sequence = (position[:, None] >= cu).sum(-1)  # 0 and len(cu) stand for none
        inside = (sequence > 0) & (sequence < cu.shape[0])
        seen = seen & (sequence[:, None] == sequence) & inside
    seen = seen[None, None]
    if lengths is not None:
        seen = seen & (position < lengths[:, None])[:, None, None]
    added = []
    for mask, excludes in ((attn_mask, False), (padding, True)):
        if mask is None:
            continue
        mask = mask[:, None, None] if excludes else mask
        if mask.dtype == torch.bool:
            seen = seen & (~mask if excludes else mask)
        else:
            added.append(mask)
    scores = torch.zeros((), dtype=torch.float32, device=x.device).masked_fill(~seen, -torch.inf)
    for mask in added:
        scores = scores + mask
    return scores


def _masked(q: Tensor, k: Tensor, v: Tensor, p: float, mask: Tensor, softcap: float) -> Tensor:
    """Compute attention with a mask that is added; queries without any key give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), p)
    scores = softcap * torch.tanh((q @ k.mT) * (q.shape[-1] ** -0.5 / softcap)) + mask
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    probs = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return F.dropout(probs, p).to(v.dtype) @ v

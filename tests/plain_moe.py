"""Mixtures of experts in plain PyTorch: every expert computes every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.moe_spec import MoESpec, RouterSpec


def plain_routing(
    spec: RouterSpec, logits: Tensor, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights of all experts (T, E), 0 for those not chosen, and the experts (T, k)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if spec.scores == "sigmoid" else wide.softmax(-1)
    if spec.scores == "top_k_softmax":
        scores = wide
    choice = scores.detach() if correction is None else scores.detach() + correction
    if spec.groups > 1:
        groups = choice.unflatten(-1, (spec.groups, -1))
        rank = groups.sort(-1, descending=True).values[..., : spec.best].sum(-1)
        worst = rank.argsort(-1, descending=True)[:, spec.top_groups :]
        groups = groups.scatter(1, worst[..., None].expand(-1, -1, groups.shape[-1]), -torch.inf)
        choice = groups.flatten(1)
    chosen = choice.topk(spec.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    if spec.scores == "top_k_softmax":
        weights = weights.softmax(-1)
    if spec.normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.zeros_like(scores).scatter(-1, chosen, weights * spec.scale), chosen


def plain_moe(
    spec: MoESpec, x: Tensor, weights: Mapping[str, Any], dropped: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the mixture of x (T, D) and the router's logits; `weights` by the block's names.

    `dropped`: the pairs (T, E) of a token and an expert that is not computed.
    """

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    logits = linear("router", x)
    routed, chosen = plain_routing(spec.router, logits, weights.get("router.correction"))
    y = torch.zeros_like(x)
    for e in range(spec.router.experts):
        w = routed[:, e : e + 1].to(x.dtype)
        up, down = weights["experts_up.weight"][e], weights["experts_down.weight"][e]
        up, down = (up.t(), down.t()) if spec.transposed else (up, down)
        names = ("experts_up.bias", "experts_down.bias")
        biases = [None if weights.get(n) is None else weights[n][e] for n in names]
        pre = F.linear(x * w if spec.weighs_input else x, up, biases[0])
        out = F.linear(_activated(spec, pre), down, biases[1])
        hit = (chosen == e).any(-1, keepdim=True)
        hit = hit if dropped is None else hit & ~dropped[:, e : e + 1]
        y = y + torch.where(hit, out if spec.weighs_input else out * w, 0.0)
    if spec.shared is not None:
        act = F.silu(linear("shared_gate", x)) if spec.shared.gated else 1.0
        up = linear("shared_fc1", x)
        shared = linear("shared_fc2", act * up if spec.shared.gated else F.silu(up))
        y = y + (linear("shared_router", x).sigmoid() * shared if spec.shared_gate else shared)
    return y, logits


def _activated(spec: MoESpec, pre: Tensor) -> Tensor:
    if not spec.gated:
        return torch.relu(pre).square() if spec.activation == "relu2" else F.silu(pre)
    gate, up = (pre[:, ::2], pre[:, 1::2]) if spec.interleaved else pre.chunk(2, 1)
    if spec.activation == "clamped_swish":
        gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit) + 1
        return gate * torch.sigmoid(gate * spec.alpha) * up
    return F.silu(gate) * up


def moe_weights(
    spec: MoESpec,
    width: int,
    hidden: int,
    shared: int = 0,
    bias: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return weights of a mixture by the block's names, leaves that require gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.weight": shape for name, shape in spec.linear_shapes(width, shared).items()
    }
    own = spec.stack_shapes(width, hidden)
    shapes |= {name: own[name] for name in spec.weights if bias or not name.endswith("bias")}
    weights = {}
    for name, shape in shapes.items():
        scale = width**-0.5 if len(shape) > 1 else 1.0
        t = torch.randn(shape, generator=generator, dtype=torch.float64).mul_(scale).to(dtype)
        weights[name] = t.requires_grad_(name != "router.correction")
    return weights

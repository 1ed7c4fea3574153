"""Activations of experts, gated or not, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fused_remat.moe_spec import CLAMPED, ExpertsSpec
from fused_remat.steps.activation import ACTIVATIONS

#: Returns the gradient of pre-activations, given that of the activation and where to write it.
Vjp = Callable[..., Tensor]


def columns(spec: ExpertsSpec, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of the gate and of the up projection, as views."""
    if spec.interleaved:
        return pre[:, ::2], pre[:, 1::2]
    gate, up = pre.chunk(2, 1)
    return gate, up


def activation(spec: ExpertsSpec, pre: Tensor) -> Tensor:
    """Return the activation of pre-activations, a new tensor."""
    if not spec.gated:
        return ACTIVATIONS[spec.activation].fwd(pre)
    gate, up = columns(spec, pre)
    if spec.activation != CLAMPED:
        return ACTIVATIONS[spec.activation].fwd(gate).mul_(up)
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return torch.sigmoid(gate * spec.alpha).mul_(gate).mul_(up.add_(1.0))


def activation_vjp(spec: ExpertsSpec, pre: Tensor) -> tuple[Tensor, Vjp]:
    """Return the activation, and a function of its gradient that returns that of `pre`.

    The function overwrites its first argument, and writes to the second unless None.
    """
    if not spec.gated:
        entry = ACTIVATIONS[spec.activation]

        def plain(dact: Tensor, out: Tensor | None = None) -> Tensor:
            return entry.bwd(dact, pre, dact if out is None else out)

        return entry.fwd(pre), plain
    gate, up = columns(spec, pre)
    if spec.activation == CLAMPED:
        return _clamped_vjp(spec, pre, gate, up)
    row = ACTIVATIONS[spec.activation]
    value = row.fwd(gate)

    def vjp(dact: Tensor, out: Tensor | None = None) -> Tensor:
        d = pre.new_empty(pre.shape) if out is None else out
        dgate, dup = columns(spec, d)
        torch.mul(dact, value, out=dup)
        row.bwd(dact.mul_(up), gate, dgate)
        return d

    return value * up, vjp


def _clamped_vjp(spec: ExpertsSpec, pre: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Vjp]:
    low, high = -spec.limit, spec.limit
    g, u = gate.clamp(max=high), up.clamp(low, high).add_(1.0)
    s = torch.sigmoid(g * spec.alpha)
    value = g * s

    def vjp(dact: Tensor, out: Tensor | None = None) -> Tensor:
        d = pre.new_empty(pre.shape) if out is None else out
        dgate, dup = columns(spec, d)
        torch.mul(dact, value, out=dup)
        dup.masked_fill_((up < low) | (up > high), 0.0)
        slope = (1.0 - s).mul_(value).mul_(spec.alpha).add_(s)  # of g * sigmoid(alpha * g)
        torch.mul(dact.mul_(u), slope, out=dgate)
        dgate.masked_fill_(gate > high, 0.0)
        return d

    return value * u, vjp

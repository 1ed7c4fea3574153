"""The mixture of experts of a `CausalLayer`: its modules, its block, and the same unfused."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.moe_spec import MoESpec, RouterSpec
from fused_remat.spec import MLPSpec
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.routing import route


class StackedExperts(nn.Module):
    """The weights of experts, stacked as transformers stacks them.

    gate_up_proj (E, 2·F, D), or up_proj (E, F, D) without a gate; down_proj (E, D, F); with `bias`
    also gate_up_proj_bias (E, 2·F), or up_proj_bias (E, F), and down_proj_bias (E, D).
    """

    def __init__(
        self, experts: int, width: int, hidden: int, activation: str, gated: bool, bias: bool,
        **factory: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.activation, self.gated = activation, gated
        rows = 2 * hidden if gated else hidden
        for name, out, columns in ((self._up, rows, width), ("down_proj", width, hidden)):
            weight = nn.Parameter(torch.empty(experts, out, columns, **factory))
            self.register_parameter(name, weight)
            offset = nn.Parameter(torch.empty(experts, out, **factory)) if bias else None
            self.register_parameter(f"{name}_bias", offset)
        self.reset_parameters()

    @property
    def _up(self) -> str:
        return "gate_up_proj" if self.gated else "up_proj"

    def reset_parameters(self) -> None:
        """Initialize each expert as two `nn.Linear`s."""
        for name in (self._up, "down_proj"):
            weight: Any = getattr(self, name)
            for param in (weight, getattr(self, f"{name}_bias")):
                if param is not None:
                    bound = 1 / math.sqrt(weight.shape[-1])
                    nn.init.uniform_(param, -bound, bound)

    def tensors(self) -> dict[str, Tensor | None]:
        """Return the parameters by the block's names."""
        return {
            f"experts_{part}.{kind}": getattr(self, name + ("_bias" if kind == "bias" else ""))
            for part, name in (("up", self._up), ("down", "down_proj"))
            for kind in ("weight", "bias")
        }

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the sum (T, D) of each token's experts; `weights` and `chosen` (T, k)."""
        act, params = ACTIVATIONS[self.activation].fwd, self.tensors()
        up, up_bias, down, down_bias = params.values()
        assert up is not None and down is not None
        y = x.new_zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
        dtype = x.dtype
        for e in range(len(up)):
            token, rank = (chosen == e).nonzero(as_tuple=True)
            hidden = F.linear(x[token], up[e], None if up_bias is None else up_bias[e])
            if self.gated:
                gate, linear = hidden.chunk(2, -1)
                hidden = act(gate) * linear
            else:
                hidden = act(hidden)
            out = F.linear(hidden, down[e], None if down_bias is None else down_bias[e])
            dtype = out.dtype  # that of autocast, if it is on
            y = y.index_add(0, token, (out * weights[token, rank, None]).to(y.dtype))
        return y.to(dtype)


def add_experts(
    layer: nn.Module, router: RouterSpec, hidden: int, shared: int, shared_gate: bool, gated: bool,
    bias: bool, factory: dict[str, Any],
) -> None:  # fmt: skip
    """Give a `CausalLayer` the modules of a mixture of experts."""
    own: Any = layer
    if not isinstance(router, RouterSpec):
        raise TypeError(f"experts must be a RouterSpec or None, got {type(router).__name__}")
    if shared < 0 or (shared_gate and not shared):
        raise ValueError(
            "shared_feedforward must be positive for shared_gate=True, and never negative, got "
            f"{shared}"
        )
    width, activation = own.d_model, own.activation
    own.router = nn.Linear(width, router.experts, bias, **factory)
    sizes = router.experts, width, hidden
    own.experts = StackedExperts(*sizes, activation, gated, bias, **factory)
    names = ("shared_gate", "shared_up") if gated else ("shared_up",)
    for name in names if shared else ():
        setattr(own, name, nn.Linear(width, shared, bias, **factory))
    if shared:
        own.shared_down = nn.Linear(shared, width, bias, **factory)
    if shared_gate:
        own.shared_router = nn.Linear(width, 1, False, **factory)
    if router.corrected:
        wide = torch.promote_types(own.router.weight.dtype, torch.float32)
        zeros = torch.zeros(router.experts, device=factory["device"], dtype=wide)
        own.register_buffer("router_correction", zeros)


def moe_of(layer: Any) -> MoESpec:
    """Return the mixture of experts of a `CausalLayer` that has one."""
    activation, gated = layer.activation, layer.experts.gated
    shared = MLPSpec(activation=activation, gated=gated)
    return MoESpec(
        router=layer.routing,
        activation=activation,
        gated=gated,
        shared=shared if "shared_up" in layer._modules else None,
        shared_gate="shared_router" in layer._modules,
    )


def mixture(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the mixture of experts of a `CausalLayer`; return it and the router's logits."""
    flat = x.flatten(0, 1)
    logits = layer.router(flat)
    weights, chosen = route(layer.routing, logits, layer._buffers.get("router_correction"))
    y = layer.experts(flat, weights, chosen)
    if "shared_up" in layer._modules:
        act, up = ACTIVATIONS[layer.activation].fwd, layer.shared_up(flat)
        act_up = act(layer.shared_gate(flat)) * up if layer.experts.gated else act(up)
        shared = layer.shared_down(act_up)
        if "shared_router" in layer._modules:
            shared = shared * layer.shared_router(flat).sigmoid()
        y = y + shared
    return y.view_as(x), logits

"""`FusedRematCausalLayer(experts=...)` against its stock layer, and compiled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from fused_remat import FusedRematCausalLayer
from fused_remat.layers.causal import CausalLayer
from fused_remat.moe_spec import RouterSpec

SIGMOID = RouterSpec(
    experts=6, top_k=2, scores="sigmoid", corrected=True, groups=3, top_groups=2, best=2
)
LAYERS: dict[str, dict[str, Any]] = {
    "normalized": {"experts": RouterSpec(experts=6, top_k=2, normalize=True)},
    "shared": {
        "experts": RouterSpec(experts=6, top_k=2), "shared_feedforward": 10, "shared_gate": True,
    },
    "sandwich": {"experts": SIGMOID, "shared_feedforward": 10, "placement": "sandwich"},
    "post": {
        "experts": RouterSpec(experts=6, top_k=2), "gated": False, "bias": True,
        "placement": "post", "activation": "gelu",
    },
}  # fmt: skip


def pair(name: str, dtype: torch.dtype = torch.float64) -> tuple[CausalLayer, Any]:
    torch.manual_seed(0)
    stock = CausalLayer(16, 4, 12, kv_heads=2, dtype=dtype, **LAYERS[name])
    fused = FusedRematCausalLayer(16, 4, 12, kv_heads=2, dtype=dtype, **LAYERS[name])
    fused.load_state_dict(stock.state_dict())
    return stock, fused


def grads(layer: Any, own: Any, x: torch.Tensor) -> list[torch.Tensor]:
    y = layer(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, [x, *own.parameters()], dy)]


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_gradients_are_the_stock_layers(name: str) -> None:
    stock, fused = pair(name)
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    assert fused.why_not_fused(x) is None
    expected = grads(stock, stock, x)
    for policy in ("full", "fast", "none"):
        fused.policy = policy
        for layer in (fused, pickle.loads(pickle.dumps(copy.deepcopy(fused)))):
            for a, b in zip(grads(layer, layer, x), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_compiled_gradients_are_the_layers() -> None:
    _, fused = pair("shared", torch.float32)
    x = torch.randn(2, 7, 16, requires_grad=True)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for a, b in zip(grads(compiled, fused, x), grads(fused, fused, x), strict=True):
        torch.testing.assert_close(a, b)


def test_bad_options_raise() -> None:
    with pytest.raises(TypeError, match="experts must be a RouterSpec or None, got int"):
        FusedRematCausalLayer(16, 4, 12, experts=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need experts, got experts=None"):
        FusedRematCausalLayer(16, 4, 12, shared_feedforward=8)

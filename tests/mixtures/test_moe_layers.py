"""`FusedRematCausalLayer(experts=...)` against its stock layer, and compiled."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from fused_remat import FusedRematCausalLayer, FusedRematWarning, explain
from fused_remat.execution.observe import OBSERVERS
from fused_remat.layers.causal import CausalLayer
from fused_remat.moe_spec import RouterSpec
from fused_remat.steps.routing import Routing

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


def with_logits(layer: Any, own: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a layer, and the gradients of a loss of both."""
    y, logits = layer(x, return_router_logits=True)
    loss = y.square().sum() + logits.float().logsumexp(-1).square().sum()
    return [y, logits, *torch.autograd.grad(loss, [x, *own.parameters()])]


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_router_logits_are_a_second_result(name: str) -> None:
    stock, fused = pair(name)
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    assert fused.why_not_fused(x, return_router_logits=True) is None
    expected = with_logits(stock, stock, x)
    assert expected[1].shape == (14, 6)
    results, runs = [], list[Any]()
    OBSERVERS.append(runs.append)
    try:
        for policy in ("full", "fast", "none"):
            fused.policy = policy
            results.append(with_logits(fused, fused, x))
        torch._dynamo.reset()
        compiled = torch.compile(fused, backend="aot_eager")  # in eager mode, between two graphs
        results.append(with_logits(compiled, fused, x))
    finally:
        OBSERVERS.remove(runs.append)
    assert [run.call.graph.side_outputs for run in runs] == [("router",)] * 4
    hook = fused.router.register_forward_hook(lambda *_: None)
    fused.policy = "full"
    with pytest.warns(FusedRematWarning, match="router has hooks"):  # under checkpointing
        results.append(with_logits(fused, fused, x))
    hook.remove()
    for result in results:
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)  # the loss is in float32


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_autocast_is_the_stock_layers(name: str) -> None:
    stock, fused = pair(name, torch.float32)
    x = torch.randn(2, 7, 16, requires_grad=True)
    exact = with_logits(stock, stock, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.why_not_fused(x) is None
        expected, found = with_logits(stock, stock, x), with_logits(fused, fused, x)
    for truth, a, b in zip(exact, found, expected, strict=True):
        assert a.dtype == b.dtype
        error, own = ((t - truth).norm() for t in (a.float(), b.float()))
        assert error <= 1.5 * own + 1e-2 * truth.norm()  # as far from float32 as the stock layer


def test_explain_names_what_backward_computes_again() -> None:
    _, fused = pair("normalized", torch.float32)
    text = str(explain(fused, torch.randn(2, 7, 16, requires_grad=True)))
    assert "weights of the chosen experts; backward has a formula for the same experts" in text
    node = next(node for node in fused._example().nodes if isinstance(node, Routing))
    text = replace(node, router=None).description[0]  # as in a traced layer
    assert text.endswith("backward computes them again, under autograd, of the same experts")


def test_bad_options_raise() -> None:
    for layer in (FusedRematCausalLayer(16, 4, 12), CausalLayer(16, 4, 12)):
        with pytest.raises(ValueError, match="return_router_logits=True needs experts"):
            layer(torch.randn(1, 2, 16), return_router_logits=True)
    with pytest.raises(TypeError, match="experts must be a RouterSpec or None, got int"):
        FusedRematCausalLayer(16, 4, 12, experts=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need experts, got experts=None"):
        FusedRematCausalLayer(16, 4, 12, shared_feedforward=8)

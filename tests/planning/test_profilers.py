"""What FLOP counters and profilers see of a fused block."""

import pytest
import torch
from reference import EXACT_PRESETS
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bench.pages.presets import Kept, block
from fused_remat import FusedRematLayer
from fused_remat.ops import moe

D, H, B, S = 64, 4, 3, 32
UNIT = B * S * D * D


def flops(layer):
    """FLOPs of forward and backward in units of T·D²."""
    x = torch.randn(B, S, D, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = layer(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    return forward.get_total_flops() / UNIT, backward.get_total_flops() / UNIT


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("policy", EXACT_PRESETS)
@pytest.mark.parametrize("limit", [32, 512])
def test_products_are_counted_forward_and_backward(norm_first, policy, limit, monkeypatch):
    """24 D² forward, 48 backward and what the README's table lists as rebuilt, a token.

    Attention is not counted without dropout: PyTorch has no formula for its flash kernel for CPUs,
    for the stock layer neither.
    """
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: limit)
    layer = FusedRematLayer(
        D, H, 4 * D, 0.0, "gelu", norm_first=norm_first, batch_first=True, policy=policy
    )
    extra = Kept(block(norm_first), policy).work.partition("D²")[0]
    assert flops(layer) == (24, 48 + (int(extra) if extra.isdigit() else 0))


def test_attention_in_blocks_is_counted():
    """With dropout: 4·S·D forward, and the five products of its backward, 10·S·D, a token."""
    layer = FusedRematLayer(D, H, 4 * D, 0.1, norm_first=True, batch_first=True, policy="none")
    assert flops(layer) == (24 + 4 * S / D, 48 + 10 * S / D)


@pytest.mark.parametrize("hidden", [32, 30])  # PyTorch's grouped products take no rows of 120 bytes
def test_products_of_experts_are_counted(hidden):
    """6·D·F a pair forward, 12 backward and 4 of the pre-activations again; routers 2·D·E, 4, 2."""
    tokens, experts, top_k = 24, 4, 2
    sizes = (experts, D), (experts, 2 * hidden, D), (experts, D, hidden)
    router, up, down = (torch.randn(size, requires_grad=True) for size in sizes)
    x = torch.randn(tokens, D, requires_grad=True)
    with FlopCounterMode(display=False) as forward:
        y = moe(x, router, up, down, top_k=top_k)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    pairs, routers = tokens * top_k * D * hidden, tokens * D * experts
    assert forward.get_total_flops() == 6 * pairs + 2 * routers
    assert backward.get_total_flops() == 16 * pairs + 6 * routers


def test_the_counter_attributes_them_to_the_layer():
    model = nn.Sequential(FusedRematLayer(D, H, 4 * D, 0.0, batch_first=True))
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(B, S, D)).sum().backward()
    assert "Sequential.0" in counter.get_flop_counts()


def test_profiler_ranges_name_the_steps():
    layer = FusedRematLayer(D, H, 4 * D, 0.1, norm_first=True, batch_first=True, policy="lean")
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        layer(torch.randn(B, S, D)).sum().backward()
    names = {event.key for event in recorded.key_averages()}
    assert {"FusedRematBlock", "FusedRematBlockBackward"} <= names
    assert {f"fused_remat::compute {n}" for n in ("norm1", "qkv", "attn", "up", "output")} <= names
    assert {f"fused_remat::backward {n}" for n in ("norm1", "qkv", "attn", "up", "output")} <= names

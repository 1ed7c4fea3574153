"""Attention through the ops, the triton backend against the eager one, with the same seed."""

import pytest
import torch
from poisoned import check_error
from reference import EXACT_PRESETS, pair

from fused_remat import explain, ops
from fused_remat.execution import choose

B, S, H, KV, E, D = 2, 19, 4, 2, 8, 24
CU = torch.tensor([0, 7, 8, 15])


def mask(*shape, seed=1):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.masked_fill(values > 1.2, -torch.inf)


ATTENTION = {
    "dropout": {"dropout_p": 0.3, "is_causal": True},
    "mask": {"attn_mask": mask(S, S), "softcap": 3.0},
    "masks": {"attn_mask": mask(B, 1, S, S), "key_padding_mask": mask(B, S) > 0.5},
    "window": {"window": (5, 2), "scale": 0.7},
    "lengths": {"key_lengths": torch.tensor([S, 4]), "dropout_p": 0.2},
}


def compare(call, leaves, factor=10):
    """Output and gradients of `call(backend)`; `leaves` of both are the same tensors."""
    found = []
    for backend in ("triton", "eager"):
        y = call(backend)
        dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for a, b in zip(*found, strict=True):
        check_error(a, b, torch.float32, factor)


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("policy", ["full", "lean"])
def test_attention(name, policy):
    torch.manual_seed(0)
    heads = [torch.randn(B, h, S, E, requires_grad=True) for h in (H, KV, KV)]
    options, leaves = dict(ATTENTION[name]), list(heads)
    if name == "mask":
        options["attn_mask"] = options["attn_mask"].clone().requires_grad_()
        leaves.append(options["attn_mask"])
    compare(
        lambda backend: ops.attention(*heads, policy=policy, seed=3, backend=backend, **options),
        leaves,
    )


@pytest.mark.parametrize("policy", EXACT_PRESETS)
@pytest.mark.parametrize("grouped", [False, True], ids=["whole", "in groups"])
def test_attention_block(policy, grouped, monkeypatch):
    """Rotary, head norms, shared heads, dropout of both kinds; sequences one at a time."""
    if grouped:
        monkeypatch.setattr(choose, "_CPU_TOKENS", 4)
    torch.manual_seed(0)
    x, norm = torch.randn(B, S, D, requires_grad=True), torch.randn(D, requires_grad=True)
    qkv = (torch.randn((H + 2 * KV) * E, D) / 5).requires_grad_()
    proj = (torch.randn(D, H * E) / 6).requires_grad_()
    heads = [torch.randn(E, requires_grad=True) for _ in range(2)]
    angle = torch.randn(S, E // 4)

    def call(backend):
        return ops.attention_block(
            x, norm, None, qkv, None, proj, None, H, None, 0.2, 0.1, True, kv_heads=KV,
            norm="rms_norm", rope=(angle.cos(), angle.sin()), q_norm_weight=heads[0],
            k_norm_weight=heads[1], policy=policy, seed=5, backend=backend,
        )  # fmt: skip

    compare(call, [x, norm, qkv, proj, *heads])


@pytest.mark.parametrize("policy", ["full", "fast"])
def test_packed_attention_block(policy):
    torch.manual_seed(0)
    x, norm = torch.randn(1, S, D, requires_grad=True), torch.ones(D)
    qkv = (torch.randn(3 * H * E, D) / 5).requires_grad_()
    proj = (torch.randn(D, H * E) / 6).requires_grad_()
    angle = torch.randn(1, S, E // 2)

    def call(backend):
        return ops.attention_block(
            x, norm, None, qkv, None, proj, None, H, None, 0.2, 0.1, True, cu_seqlens=CU,
            rope=(angle.cos(), angle.sin()), policy=policy, seed=5, backend=backend,
        )  # fmt: skip

    compare(call, [x, qkv, proj])


def test_rebuilding_has_the_forwards_bits():
    """Gradients of all presets are the same bits, dropout and a mask's gradient among them."""
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for policy in ("full", "lean"):
            torch.manual_seed(0)
            heads = [torch.randn(B, h, S, E, requires_grad=True) for h in (H, KV, KV)]
            bias = torch.randn(1, H, S, S, requires_grad=True)
            y = ops.attention(*heads, bias, 0.2, True, policy=policy, seed=1, backend="triton")
            found.append([y, *torch.autograd.grad(y.square().sum(), [*heads, bias])])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_explain_names_both_directions():
    _, layer = pair(d_model=24, nhead=3, dim_feedforward=40, batch_first=True, dropout=0.1)
    layer.backend = "triton"
    said = str(explain(layer, torch.randn(2, 5, 24)))
    assert "kernel attention_fwd; attention_dkdv_bwd and attention_dq_bwd: " in said

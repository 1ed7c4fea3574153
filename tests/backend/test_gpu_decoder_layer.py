"""The decoder layer at real sizes on a GPU: results, bits of every preset, kept bytes."""

import copy

import pytest
import torch
from places import BF16, DEVICE, ON_GPU, error_of, normal, sized
from reference import EXACT_PRESETS, randomize
from torch import nn

from fused_remat import FusedRematDecoderLayer, memory_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, M, D, H = sized(4, 512, 768, 1024, 16) if ON_GPU else (2, 9, 13, 24, 3)
NORMS = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])


def layers(dropout=0.0, norm_first=True, policy="full"):
    """A stock layer with random parameters, and a fused one with the same."""
    torch.manual_seed(0)
    how = {"batch_first": True, "norm_first": norm_first, "activation": "gelu"}
    stock = randomize(nn.TransformerDecoderLayer(D, H, 4 * D, dropout, **how)).to(DEVICE, BF16)
    return stock, FusedRematDecoderLayer.from_layer(copy.deepcopy(stock), policy, "triton")


def run(layer, tgt, memory, dy, dtype=BF16):
    """Output, and gradients of both inputs and every parameter; causal, the memory padded."""
    tgt, memory = (t.detach().to(dtype).requires_grad_() for t in (tgt, memory))
    later = torch.ones(S, S, dtype=torch.bool, device=DEVICE).triu(1)
    padding = torch.arange(M, device=DEVICE).expand(B, M) >= M - 5
    torch.manual_seed(1)
    y = layer(
        tgt, memory, tgt_mask=later, tgt_is_causal=True, memory_key_padding_mask=padding
    )  # fmt: skip
    leaves = [tgt, memory, *layer.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


def data():
    return [normal(BF16, B, n, D) for n in (S, M, S)]


@NORMS
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_error_is_at_most_one_and_a_half_times_pytorchs(norm_first, policy):
    stock, fused = layers(norm_first=norm_first, policy=policy)
    tensors = data()
    exact = run(copy.deepcopy(stock).double(), *tensors, torch.float64)
    biggest = max(g.norm() for g in exact[1:])
    for mine, theirs, true in zip(
        run(fused, *tensors), run(stock, *tensors), exact, strict=True
    ):  # fmt: skip
        if true.norm() > 1e-3 * biggest:  # else all cancellation: a key's bias
            # Besides PyTorch's own, a sixth of a rounding.
            assert error_of(mine, true) <= 1.5 * error_of(theirs, true) + 1e-3


@NORMS
def test_rungs_have_the_same_bits_under_deterministic_algorithms(norm_first):
    tensors, found = data(), []
    torch.use_deterministic_algorithms(True)
    try:
        for policy in EXACT_PRESETS if ON_GPU else ("full", "none"):
            found.append(run(layers(0.1, norm_first, policy)[1], *tensors))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@NORMS
def test_kept_bytes_are_the_prediction(norm_first):
    tgt, memory, _ = data()
    for policy in EXACT_PRESETS if ON_GPU else ("fast",):
        _, fused = layers(0.1, norm_first, policy)
        (row,) = memory_report(fused, tgt.requires_grad_(), memory.requires_grad_()).layers[:1]
        assert row.kept_bytes == row.predicted_bytes > 0

"""The decoder layer on kernels: results, dropout, bits of every preset, kept bytes."""

import copy

import pytest
import torch
from places import BF16, DEVICE, ON_GPU, assert_bits, at, deterministic, error_of, normal
from reference import EXACT_PRESETS
from reference_decoder import pair
from reference_decoder import run as results

from fused_remat import memory_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, M, D, H = at((4, 512, 768, 1024, 16), (2, 9, 13, 24, 3))
DTYPES = [BF16] if ON_GPU else [torch.float32, BF16]
EITHER = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Besides 1.5 times PyTorch's own error, a sixth of a rounding; float32: sums in another order.
FLOOR = {torch.bfloat16: 1e-3, torch.float16: 1e-3, torch.float32: 1e-5}
NORMS = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])


def layers(dtype=BF16, dropout=0.0, norm_first=True, policy="full"):
    """A stock layer with random parameters, and a fused one with the same."""
    sizes = {"d_model": D, "nhead": H, "dim_feedforward": 4 * D}
    stock, fused = pair(policy, dropout=dropout, norm_first=norm_first, **sizes)
    fused.backend = "triton"
    return stock.to(DEVICE, dtype), fused.to(DEVICE, dtype)


def run(layer, tgt, memory, dy, hints=False):
    """Output, and gradients of both inputs and every parameter; causal, and the memory padded.

    `hints`: both attentions are causal by a hint, which stands for a mask.
    """
    masks = {"memory_key_padding_mask": torch.arange(M, device=DEVICE).expand(B, M) >= M - 5}
    if hints:
        hint = torch.zeros(1, 1, device=DEVICE)
        masks = {"memory_mask": hint, "memory_is_causal": True, "tgt_mask": hint}
    else:
        masks["tgt_mask"] = torch.ones(S, S, dtype=torch.bool, device=DEVICE).triu(1)
    torch.manual_seed(1)
    return results(layer, tgt, memory, dy, tgt_is_causal=True, **masks)


def data(dtype):
    return [normal(dtype, B, n, D) for n in (S, M, S)]


def check(fused, other, dtype, hints=False):
    tensors = data(dtype)
    found, theirs = run(fused, *tensors, hints), run(other, *tensors, hints)
    exact = run(copy.deepcopy(other).double(), *(t.double() for t in tensors), hints)
    biggest = max(g.norm() for g in exact[1:])
    for i, (mine, yardstick, true) in enumerate(zip(found, theirs, exact, strict=True)):
        if true.norm() > 1e-3 * biggest:  # else all cancellation: a key's bias
            error, allowed = error_of(mine, true), 1.5 * error_of(yardstick, true) + FLOOR[dtype]
            assert error <= allowed, f"{i}: {error:.1e} beside {allowed:.1e}"


@EITHER
@NORMS
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_error_is_at_most_one_and_a_half_times_pytorchs(norm_first, policy, dtype):
    stock, fused = layers(dtype, norm_first=norm_first, policy=policy)
    check(fused, stock, dtype)


@EITHER
def test_dropout_and_causal_hints_as_on_the_eager_backend(dtype):
    _, fused = layers(dtype, dropout=0.2, policy="lean")
    eager = copy.deepcopy(fused)
    eager.backend = "eager"
    check(fused, eager, dtype, hints=True)


@NORMS
def test_presets_have_the_same_bits_under_deterministic_algorithms(norm_first):
    tensors = data(BF16)
    with deterministic():
        first, *others = (
            run(layers(BF16, 0.1, norm_first, policy)[1], *tensors)
            for policy in at(EXACT_PRESETS, ("full", "none"))
        )
    for other in others:
        assert_bits(other, first)


@NORMS
def test_kept_bytes_are_the_prediction(norm_first):
    tgt, memory, _ = data(BF16)
    for policy in at(EXACT_PRESETS, ("fast",)):
        _, fused = layers(BF16, 0.1, norm_first, policy)
        (row,) = memory_report(fused, tgt.requires_grad_(), memory.requires_grad_()).layers[:1]
        assert row.kept_bytes == row.predicted_bytes > 0

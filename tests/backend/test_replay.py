"""The replay check on kernels: the routines of deterministic mode, and no difference."""

import pytest
import torch
from accuracy import assert_bits
from places import BF16, DEVICE, PLACE, at, deterministic, normal
from reference import EXACT_PRESETS

from fused_remat import FusedRematLayer, ReplayError, check_replay

kernels_only = pytest.mark.skipif(PLACE == "aten", reason="needs TRITON_INTERPRET=1")


@kernels_only
@pytest.mark.composes("Replay check", "the triton backend, by the routines of deterministic mode")
@pytest.mark.parametrize("policy", ["full", "none"])
def test_gradients_are_those_of_deterministic_mode(policy):
    how = {"policy": policy, "backend": "triton", "norm_first": True, "device": DEVICE}
    layer = FusedRematLayer(32, 2, 32, 0.2, **how)
    x = normal(torch.float32, 9, 1, 32).requires_grad_()

    def gradients():
        torch.manual_seed(0)
        y = layer(x)
        assert y.grad_fn.execution.ops.name == "triton"
        return torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    with check_replay():
        got = gradients()
        y = layer(x)
    with deterministic():
        assert_bits(got, gradients())
    layer.norm2.weight.data[4] = 2.0
    with pytest.raises(ReplayError, match=r"'norm2.weight' differs at \(index 4\): .* read 1, "):
        y.sum().backward()


@pytest.mark.gpu
@pytest.mark.composes("Replay check", "the triton backend on a GPU")
@pytest.mark.parametrize("dtype, norm_first", [(BF16, True), (torch.float32, False)])
def test_a_sound_layer_passes(dtype, norm_first):
    how = {"batch_first": True, "norm_first": norm_first, "device": DEVICE, "dtype": dtype}
    d, heads, tokens = at((256, 4, 256), (24, 3, 9), (128, 4, 40))
    layer = FusedRematLayer(d, heads, 4 * d, 0.1, activation="gelu", backend="triton", **how)
    x = normal(dtype, at(4, 2), tokens, d).requires_grad_()
    for layer.policy in at(EXACT_PRESETS, ("full", "balanced")):
        with check_replay():
            layer(x).float().square().mean().backward()

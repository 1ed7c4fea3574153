"""The replay check on a GPU: every preset, with dropout, finds no difference."""

import pytest
import torch
from places import DEVICE, normal
from reference import EXACT_PRESETS

from fused_remat import FusedRematLayer, check_replay

pytestmark = pytest.mark.gpu


@pytest.mark.composes("Replay check", "the triton backend on a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_sound_layer_passes(dtype, norm_first):
    how = {"batch_first": True, "norm_first": norm_first, "device": DEVICE, "dtype": dtype}
    layer = FusedRematLayer(256, 4, 1024, 0.1, activation="gelu", **how)
    x = normal(dtype, 4, 256, 256).requires_grad_()
    for layer.policy in EXACT_PRESETS:
        with check_replay():
            layer(x).float().square().mean().backward()

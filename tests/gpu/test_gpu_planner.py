"""Plans on a GPU: the predicted peak against `max_memory_allocated`, kept bytes, segments."""

import pytest
import torch
from gpu_layers import NO_FALLBACK
from places import BF16, DEVICE, ON_GPU, normal, sized
from torch import nn

from fused_remat import convert, plan
from fused_remat.report.step import run_step

pytestmark = [pytest.mark.gpu, NO_FALLBACK]
LAYERS, B, S, D, H = sized(8, 4, 1024, 1024, 16, tiny=(4, 2, 17, 32, 4))
WITHIN = 0.03


def model_of(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, H, 4 * D, 0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return convert(model.to(DEVICE, BF16), backend="triton")


def squared(output):
    return output.float().square().mean()


def peak_of(model, x):
    """Of a step, everything on the device counted."""
    if not ON_GPU:
        return None
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = squared(model(x))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        del loss, grads
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("norm_first", [True, False])
def test_peaks_hold_and_kept_bytes_are_exact(norm_first):
    model = model_of(norm_first)
    x = normal(BF16, B, S, D)
    fastest = plan(model, x, loss=squared)
    low, high = fastest.frontier[0].peak_bytes, fastest.peak_bytes
    for i in range(5):
        budget = low + (high - low) * i // 4
        found = fastest.within(budget)
        found.apply(model)
        kept = sum(saved.nbytes for saved in run_step(model, [], (x,), {}, squared).saved)
        assert found.kept_bytes == kept
        peak = peak_of(model, x)
        if peak is not None and found.timeline()[-1].peak < found.peak_bytes:
            assert abs(found.peak_bytes - peak) <= WITHIN * peak

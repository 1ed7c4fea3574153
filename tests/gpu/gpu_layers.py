"""The layers that tests on a GPU run, and a step of a model."""

import pytest
import torch
from places import BF16, DEVICE, ON_GPU, normal, sized
from torch import nn

from fused_remat import FusedRematLayer

NO_FALLBACK = pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning")
CUDA_ONLY = pytest.mark.skipif(not ON_GPU, reason="needs CUDA's allocator, streams or graphs")
B, S, D, H = sized(4, 512, 1024, 8, tiny=(2, 9, 24, 3))
#: How far two runs of a call may be apart in bfloat16: products and ATen's attention may take
#: another kernel, or add in another order. Other dropout masks are some 0.5 apart.
APART = 2e-2


def layer_of(policy="full", dropout=0.1, activation="relu", **how):
    """The same values every time."""
    torch.manual_seed(0)
    how = {"batch_first": True, "norm_first": True, "device": DEVICE, "dtype": BF16, **how}
    return FusedRematLayer(D, H, 4 * D, dropout, activation, policy=policy, **how)


def stack_of(policies, dropout=0.1, alternating=False, **how):
    """A layer of each policy; every other one post-norm if `alternating`."""
    return nn.Sequential(
        *(
            layer_of(policy, dropout, norm_first=not (alternating and i % 2), **how)
            for i, policy in enumerate(policies)
        )
    )


def data():
    return normal(BF16, B, S, D)


def step(call, model, x):
    """Output and gradients; memory that forward frees is written over, on the same stream."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    y = call(x)
    torch.full((B, S, 4 * D), torch.nan, device=DEVICE, dtype=BF16)
    return [y, *torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])]

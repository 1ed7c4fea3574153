"""Layers inside torch.utils.checkpoint on a GPU: the same results, dropout and random state."""

import functools

import pytest
import torch
from places import BF16, DEVICE, ON_GPU, error_of, normal, sized
from reference import EXACT_PRESETS
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="reads the generator of CUDA"),
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, D, H = sized(4, 256, 512, 8, tiny=(2, 9, 24, 3))
#: Of two runs of a call in bfloat16, whose attention may add in any order (test_encoder_layers.py);
#: other dropout masks would be some 0.5 apart.
APART = 2e-2


def step(model, forward, x, dy):
    """Output, gradients, and the state of the generator after forward and after backward."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = forward(x)
    states = [torch.cuda.get_rng_state(DEVICE)]
    y.backward(dy)
    states.append(torch.cuda.get_rng_state(DEVICE))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], states


@pytest.mark.composes("Outer checkpointing", "torch.utils.checkpoint on a GPU, with dropout")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_the_same_as_without(backend, use_reentrant):
    torch.manual_seed(0)
    layers = [
        FusedRematLayer(D, H, 4 * D, 0.5, batch_first=True, norm_first=i % 2 == 0, device=DEVICE,
                        dtype=BF16, policy=policy, backend=backend)
        for i, policy in enumerate(EXACT_PRESETS)
    ]  # fmt: skip
    model = nn.Sequential(*layers)
    x, dy = normal(BF16, B, S, D), normal(BF16, B, S, D)
    way = functools.partial(checkpoint, use_reentrant=use_reentrant)
    found, states = step(model, lambda x: functools.reduce(lambda h, m: way(m, h), model, x), x, dy)
    expected, expected_states = step(model, model, x, dy)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert error_of(a, b) <= APART, i
    assert all(map(torch.equal, states, expected_states))

"""Layers inside torch.utils.checkpoint on a GPU: the same results, dropout and random state."""

import functools

import pytest
import torch
from gpu_layers import APART, data, stack_of
from places import DEVICE, ON_GPU, error_of
from reference import EXACT_PRESETS
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="reads the generator of CUDA"),
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]


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
    model = stack_of(EXACT_PRESETS, 0.5, alternating=True, backend=backend)
    x, dy = data(), data()
    way = functools.partial(checkpoint, use_reentrant=use_reentrant)
    found, states = step(model, lambda x: functools.reduce(lambda h, m: way(m, h), model, x), x, dy)
    expected, expected_states = step(model, model, x, dy)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert error_of(a, b) <= APART, i
    assert all(map(torch.equal, states, expected_states))

"""Layers on several CUDA streams."""

import pytest
import torch
from places import DEVICE, ON_GPU, normal

from fused_remat import FusedRematLayer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="runs on CUDA streams"),
]
B, S, D, H = 8, 512, 512, 8


def layer_of(policy):
    torch.manual_seed(0)
    how = {"batch_first": True, "norm_first": True, "device": DEVICE, "dtype": torch.bfloat16}
    return FusedRematLayer(D, H, 4 * D, 0.1, policy=policy, **how)


def step(layer, x, stream=None):
    """Gradients, forward on `stream`; what it frees is written over at once by another tensor."""
    torch.manual_seed(1)
    here = torch.cuda.current_stream()
    stream = here if stream is None else stream
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        y = layer(x)
    here.wait_stream(stream)
    y.record_stream(here)
    grads = torch.autograd.grad(y.float().square().mean(), list(layer.parameters()))
    del y
    for side in (here, stream):
        with torch.cuda.stream(side):
            torch.full((B, S, 4 * D), torch.nan, device=DEVICE)
    return grads


@pytest.mark.composes(
    "Concurrency and faults",
    "layers on two CUDA streams, forward on a side stream and backward on the default one",
)
@pytest.mark.parametrize("policy", ["full", "none"])
def test_forward_on_a_side_stream_and_backward_on_the_default_one(policy):
    layer, x = layer_of(policy), normal(torch.bfloat16, B, S, D).detach()
    expected = step(layer, x)
    side = torch.cuda.Stream()
    for _ in range(5):
        got = step(layer, x, side)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.composes(
    "Concurrency and faults",
    "layers on two CUDA streams, forward on a side stream and backward on the default one",
)
def test_two_layers_on_two_streams():
    layers = [layer_of("full"), layer_of("fast")]
    x = normal(torch.bfloat16, B, S, D).detach()
    expected = [step(layer, x) for layer in layers]
    here, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in layers]
    for _ in range(5):
        losses = []
        for layer, stream in zip(layers, streams, strict=True):
            torch.manual_seed(1)
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                losses.append(layer(x).float().square().mean())
        for stream in streams:
            here.wait_stream(stream)
        params = [p for layer in layers for p in layer.parameters()]
        got = torch.autograd.grad(losses, params)
        assert all(torch.equal(a, b) for a, b in zip(got, sum(expected, ()), strict=True))

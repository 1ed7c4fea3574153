"""Layers on several CUDA streams."""

import pytest
import torch
from gpu_layers import B, D, S, data, layer_of, stack_of
from places import DEVICE, ON_GPU, assert_bits

from fused_remat import Policy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="runs on CUDA streams"),
]


def step(model, x, stream=None):
    """Gradients, forward on `stream`; what it frees is written over at once by another tensor."""
    torch.manual_seed(1)
    here = torch.cuda.current_stream()
    stream = here if stream is None else stream
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        y = model(x)
    here.wait_stream(stream)
    y.record_stream(here)
    grads = torch.autograd.grad(y.float().square().mean(), list(model.parameters()))
    del y
    for side in (here, stream):
        with torch.cuda.stream(side):
            torch.full((B, S, 4 * D), torch.nan, device=DEVICE)
    return grads


OFFLOAD = Policy(save={"attn", "qkv"}, offload={"input", "qkv"})


@pytest.mark.composes(
    "Concurrency and faults",
    "layers on two CUDA streams, forward on a side stream and backward on the default one",
)
@pytest.mark.parametrize("policy", ["full", "none", OFFLOAD], ids=["full", "none", "offload"])
def test_forward_on_a_side_stream_and_backward_on_the_default_one(policy):
    """Of several layers: what the last one offloads does not leave."""
    model, x = stack_of([policy] * 3), data()
    expected, side = step(model, x), torch.cuda.Stream()
    for _ in range(5):
        assert_bits(step(model, x, side), expected)


@pytest.mark.composes(
    "Concurrency and faults",
    "layers on two CUDA streams, forward on a side stream and backward on the default one",
)
def test_two_layers_on_two_streams():
    layers, x = [layer_of("full"), layer_of("fast")], data()
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
        assert_bits(torch.autograd.grad(losses, params), sum(expected, ()))

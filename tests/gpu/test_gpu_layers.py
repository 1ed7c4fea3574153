"""Layers on a GPU under torch.compile and checkpoints, and on several CUDA streams."""

import functools

import pytest
import torch
from accuracy import assert_bits
from gpu_layers import APART, CUDA_ONLY, NO_FALLBACK, B, D, S, data, stack_of, step
from places import BF16, DEVICE, deterministic, error_of, normal
from reference import EXACT_PRESETS
from torch.utils.checkpoint import checkpoint

from fused_remat import Policy
from fused_remat.report.allocations import SavedBytes

pytestmark = [pytest.mark.gpu, NO_FALLBACK]
OFFLOAD = Policy(save={"attn", "qkv"}, offload={"input", "qkv"})


@pytest.fixture
def same_routines():
    """Of forward and backward, compiled or not."""
    torch._dynamo.reset()
    with deterministic():
        yield


def assert_keeps_the_same(model, call):
    """As blocks do, compiled or not."""
    kept = []
    for way in (model, call):
        with SavedBytes(exclude=model.parameters()) as saved:
            y = way(data().requires_grad_())
        kept.append(saved.total)
        del y
    assert kept[0] == kept[1]


@pytest.mark.composes("torch.compile", "Inductor on CUDA: eager mode's bits and bytes kept")
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_inductor(policy, same_routines):
    model = stack_of([policy] * 2)
    call = torch.compile(model, fullgraph=True, dynamic=True)
    for batch in (B, B + 1):
        x = normal(BF16, batch, S, D)
        assert_bits(step(call, model, x), step(model, model, x))
    assert_keeps_the_same(model, call)


@pytest.mark.composes(
    "torch.compile", 'mode="reduce-overhead" (CUDA graphs), dropout anew at every step'
)
def test_reduce_overhead(same_routines):
    model = stack_of(["lean"] * 2, dropout=0.5)
    call = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    x = data()
    assert_keeps_the_same(model, call)
    made = []
    for seed in (1, 2, 1, 2, 1):
        torch.compiler.cudagraph_mark_step_begin()
        torch.manual_seed(seed)
        y = call(x)
        y.float().square().mean().backward()
        made.append(y.detach().clone())
        model.zero_grad()
    assert not torch.equal(made[3], made[4])  # replays: another seed, other dropout
    assert error_of(made[2], made[4]) < 1e-2  # the same seed, the same


def checkpointed(model, forward, x, dy):
    """Output, gradients, and the state of the generator after forward and after backward."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = forward(x)
    states = [torch.cuda.get_rng_state(DEVICE)]
    y.backward(dy)
    states.append(torch.cuda.get_rng_state(DEVICE))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], states


@CUDA_ONLY
@pytest.mark.composes("Outer checkpointing", "torch.utils.checkpoint on a GPU, with dropout")
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_checkpoints_change_nothing(backend, use_reentrant):
    model = stack_of(EXACT_PRESETS, 0.5, alternating=True, backend=backend)
    x, dy = data(), data()
    way = functools.partial(checkpoint, use_reentrant=use_reentrant)
    in_checkpoints = lambda x: functools.reduce(lambda h, m: way(m, h), model, x)  # noqa: E731
    found, states = checkpointed(model, in_checkpoints, x, dy)
    expected, expected_states = checkpointed(model, model, x, dy)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert error_of(a, b) <= APART, i
    assert all(map(torch.equal, states, expected_states))


def on_stream(model, x, stream=None):
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


@CUDA_ONLY
@pytest.mark.composes(
    "Concurrency and faults",
    "layers on two CUDA streams, forward on a side stream and backward on the default one",
)
@pytest.mark.parametrize("policy", ["full", "none", OFFLOAD], ids=["full", "none", "offload"])
def test_forward_on_a_side_stream_and_backward_on_the_default_one(policy):
    """Of several layers: what the last one offloads does not leave."""
    model, x = stack_of([policy] * 3), data()
    expected, side = on_stream(model, x), torch.cuda.Stream()
    for _ in range(5):
        assert_bits(on_stream(model, x, side), expected)

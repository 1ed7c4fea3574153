"""Offload on a GPU: bits, bytes left on the device, pinned memory, compiled, planned.

Where there is no GPU, a mover for the CPU stands in, and what reads CUDA's allocator is skipped.
On another stream: test_gpu_layers.py.
"""

import contextlib

import pytest
import torch
from accuracy import assert_bits
from gpu_layers import CUDA_ONLY, NO_FALLBACK, data, stack_of, step
from offload_mover import moving
from places import DEVICE, ON_GPU, deterministic

from fused_remat import Policy, memory_report, plan
from fused_remat.planner import calibrate

pytestmark = [pytest.mark.gpu, NO_FALLBACK]
LAYERS = 6
POLICIES = {
    "input": Policy(offload={"input"}),
    "input and qkv": Policy(save={"attn", "qkv"}, offload={"input", "qkv"}),
}
POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture(autouse=True)
def same_routines():
    """Of forward and backward; without a GPU, somebody copies."""
    torch._dynamo.reset()
    with deterministic(), contextlib.nullcontext() if ON_GPU else moving():
        yield


def stack(policy, dropout=0.1):
    return stack_of([policy] * LAYERS, dropout)


def expected_of(policy, x):
    """Without offload."""
    model = stack(Policy(save=policy.save))
    return step(model, model, x)


@POLICY
def test_gradients_are_the_same_bits(policy):
    x = data()
    expected, model = expected_of(policy, x), stack(policy)
    for _ in range(20):
        assert_bits(step(model, model, x), expected)


@CUDA_ONLY
@POLICY
def test_bytes_on_the_device_are_the_predicted(policy):
    """After forward: what stays of every layer, and all of the last, which has not left."""
    model, x = stack(policy, dropout=0.0), data()
    step(model, model, x)  # workspaces and compiled kernels stay
    x.requires_grad_()
    torch.cuda.empty_cache()
    requested = "requested_bytes.all.current"
    before = torch.cuda.memory_stats(DEVICE)[requested]
    y = model(x)
    kept = torch.cuda.memory_stats(DEVICE)[requested] - before - y.nbytes
    if "input" not in policy.offload:
        kept += x.nbytes  # of the first layer, which was there
    y.float().square().mean().backward()
    del y
    report = memory_report(model, x)
    assert report.kept_bytes == report.predicted_bytes > 0 and report.offloaded_bytes > 0
    assert kept == report.kept_bytes + report.offloaded_bytes // LAYERS


@pytest.mark.composes(
    "torch.compile",
    "offload, Inductor on CUDA: eager mode's bits",
    limits="brought back at the beginning of the layer's own backward; no CUDA graphs",
)
def test_inductor():
    policy, x = POLICIES["input and qkv"], data()
    expected, model = expected_of(policy, x), stack(policy)
    call = torch.compile(model, fullgraph=True)
    for _ in range(5):
        assert_bits(step(call, model, x), expected)


@CUDA_ONLY
@pytest.mark.composes(
    "CUDA graphs",
    "offload",
    limits="in eager mode nothing moves while a graph is captured; a compiled layer raises",
)
def test_captured_in_a_cuda_graph():
    policy, x = POLICIES["input"], data().requires_grad_()
    model, side = stack(policy, dropout=0.0), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = torch.autograd.grad(model(x).float().square().mean(), x)[0]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
        assert y.grad_fn.extras.offloaded is None
        found = torch.autograd.grad(y.float().square().mean(), x)[0]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@CUDA_ONLY
def test_a_plan_offloads_within_its_budget():
    assert min(calibrate(DEVICE).host_link()) > 1e9
    model, x = stack("full", dropout=0.0), data()
    found = plan(model, x, offload=True, segments=False, accumulates=True)
    tight = found.within(found.frontier[0].peak_bytes)
    tight.apply(model)
    report = memory_report(model, x)
    assert report.kept_bytes == tight.kept_bytes
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats(DEVICE)
        model(x).sum().backward()
        model.zero_grad(set_to_none=False)
    assert torch.cuda.max_memory_allocated(DEVICE) <= 1.03 * tight.peak_bytes

"""Offload on a GPU: bits, bytes left on the device, pinned memory, streams, compiled, planned.

Where there is no GPU, a mover for the CPU stands in, and what reads CUDA's allocator is left out.
"""

import pytest
import torch
from offload_mover import moving
from places import BF16, DEVICE, ON_GPU, normal, sized
from torch import nn

from fused_remat import FusedRematLayer, Policy, memory_report, plan
from fused_remat.graph.build import block_graph
from fused_remat.planner import calibrate
from fused_remat.report.allocations import predict_kept_bytes
from fused_remat.spec import nn_layer_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
LAYERS, B, S, D, H = sized(6, 4, 512, 1024, 8) if ON_GPU else (6, 2, 9, 24, 3)
CUDA_ONLY = pytest.mark.skipif(not ON_GPU, reason="reads the allocator of CUDA")
POLICIES = {
    "input": Policy(offload={"input"}),
    "input and qkv": Policy(save={"attn", "qkv"}, offload={"input", "qkv"}),
    "codes": Policy(save={"attn": "native", "qkv": "int8"}, offload={"qkv"}),
}
POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@pytest.fixture(autouse=True)
def deterministic():
    """The routines of forward and backward are then the same; without a GPU, somebody copies."""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)
    if ON_GPU:
        yield
    else:
        with moving():
            yield
    torch.use_deterministic_algorithms(False)


def stack(policy, dropout=0.1):
    torch.manual_seed(0)
    how = {"batch_first": True, "norm_first": True, "device": DEVICE, "dtype": BF16}
    return nn.Sequential(
        *(FusedRematLayer(D, H, 4 * D, dropout, **how, policy=policy) for _ in range(LAYERS))
    )


def keeping(policy):
    """The same without offload."""
    return Policy(save=policy.save)


def overwrite():
    """What was just freed is another's."""
    if ON_GPU:
        torch.full((B, S, 4 * D), torch.nan, device=DEVICE, dtype=BF16)


def step(call, model, x, stream=None):
    """Output and gradients; freed memory is written over after forward, on the same stream."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    y = call(x)
    overwrite()
    return [y, *torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])]


def assert_bits(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


@POLICY
def test_gradients_are_the_same_bits(policy):
    x = normal(BF16, B, S, D)
    expected = step(model := stack(keeping(policy)), model, x)
    model = stack(policy)
    for _ in range(20):
        assert_bits(step(model, model, x), expected)


@CUDA_ONLY
def test_forward_on_a_side_stream():
    policy, x = POLICIES["input and qkv"], normal(BF16, B, S, D)
    expected = step(model := stack(keeping(policy)), model, x)
    model, here, side = stack(policy), torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(5):
        side.wait_stream(here)
        with torch.cuda.stream(side):
            found = step(model, model, x)
        here.wait_stream(side)
        assert_bits(found, expected)


def predicted(policy, device):
    spec = nn_layer_spec(True, H, D // H, "relu")
    shapes = {"input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D),
              "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D)}  # fmt: skip
    needs_grad = ["input", *spec.weights]
    return sum(
        predict_kept_bytes(
            block_graph(spec), policy, shapes, needs_grad, B, S, BF16, device=device
        ).values()
    )


@CUDA_ONLY
@POLICY
def test_bytes_on_the_device_are_the_predicted(policy):
    """After forward: what stays of every layer, and all of the last, which has not left."""
    model, x = stack(policy, dropout=0.0), normal(BF16, B, S, D)
    step(model, model, x)  # workspaces and compiled kernels stay
    x.requires_grad_()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats(DEVICE)["requested_bytes.all.current"]
    y = model(x)
    kept = torch.cuda.memory_stats(DEVICE)["requested_bytes.all.current"] - before - y.nbytes
    if "input" not in policy.offload:
        kept += x.nbytes  # of the first layer, which was there
    assert kept == (LAYERS - 1) * predicted(policy, DEVICE) + predicted(policy, "cpu")
    y.float().square().mean().backward()
    del y
    report = memory_report(model, x)
    assert report.kept_bytes == report.predicted_bytes == LAYERS * predicted(policy, DEVICE)
    moved = predicted(policy, "cpu") - predicted(policy, DEVICE)
    assert report.offloaded_bytes == LAYERS * moved


@CUDA_ONLY
def test_copies_are_in_pinned_memory():
    node = stack(POLICIES["input and qkv"])(normal(BF16, B, S, D).requires_grad_()).grad_fn
    for _ in range(LAYERS):
        hosts = [node.saved_tensors[place] for place in node.extras.offloaded.places]
        assert len(hosts) == 2 and all(host.is_pinned() for host in hosts)
        node = node.next_functions[0][0]


@CUDA_ONLY
def test_the_peak_is_lower():
    peaks = []
    for policy in (Policy(save={"qkv", "attn"}), POLICIES["input and qkv"]):
        model, x = stack(policy), normal(BF16, B, S, D)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats(DEVICE)
            step(model, model, x)
        peaks.append(torch.cuda.max_memory_allocated(DEVICE))
        del model
    moved = B * S * 4 * D * 2  # of one layer; three may be there at a time
    assert peaks[1] <= peaks[0] - (LAYERS - 3) * moved


@pytest.mark.composes(
    "torch.compile",
    "offload, Inductor on CUDA: eager mode's bits",
    limits="brought back at the beginning of the layer's own backward; no CUDA graphs",
)
def test_inductor():
    policy, x = POLICIES["input and qkv"], normal(BF16, B, S, D)
    expected = step(model := stack(keeping(policy)), model, x)
    model = stack(policy)
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
    policy, x = POLICIES["input"], normal(BF16, B, S, D).requires_grad_()
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
    link = calibrate(DEVICE).host_link()
    assert link.out > 1e9 and link.back > 1e9
    model, x = stack("full", dropout=0.0), normal(BF16, B, S, D)
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

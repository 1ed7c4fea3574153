"""The layer under autocast at real sizes on a GPU: dtypes, results, bits, kept bytes, training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import BF16, DEVICE, ON_GPU, error_of, normal, sized
from reference import EXACT_PRESETS, PARAM_NAMES
from torch import nn

from fused_remat import FusedRematLayer, memory_report
from fused_remat.graph.build import block_graph
from fused_remat.report.allocations import predict_kept_bytes
from fused_remat.spec import nn_layer_spec

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, D, H = sized(4, 512, 1024, 8) if ON_GPU else (2, 9, 24, 3)
NORMS = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
LOW = pytest.mark.parametrize("low", dict.fromkeys([BF16, torch.float16]), ids=str)
# The error may be 1.5 times PyTorch's own under the same autocast, plus a sixth of a rounding.
FLOOR = {torch.bfloat16: 1e-3, torch.float16: 1e-4}
NAMES = ("y", "dx", *PARAM_NAMES)


def layers(dropout=0.0, norm_first=True, policy="full"):
    """A stock layer with random float32 parameters, and a fused one with the same."""
    torch.manual_seed(0)
    how = {"batch_first": True, "norm_first": norm_first, "activation": "gelu", "device": DEVICE}
    stock = nn.TransformerEncoderLayer(D, H, 4 * D, dropout, **how)
    with torch.no_grad():
        for p in stock.parameters():
            if p.dim() == 1:  # biases and norms are constants at first
                p.add_(0.1 * torch.randn_like(p))
    fused = FusedRematLayer(D, H, 4 * D, dropout, **how, policy=policy, backend="triton")
    fused.load_state_dict(stock.state_dict())
    return stock, fused


def run(layer, x, dy, low=None):
    """Output, and gradients of x and every parameter; backward outside autocast."""
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    with torch.autocast(DEVICE.type, low or BF16, enabled=low is not None):
        y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy.to(y.dtype))]


def check_against(found, theirs, exact, low):
    for name, mine, other, true in zip(NAMES, found, theirs, exact, strict=True):
        assert mine.dtype == other.dtype, name
        error, allowed = error_of(mine, true), 1.5 * error_of(other, true) + FLOOR[low]
        assert error <= allowed, f"relative error of {name} is {error:.1e}, allowed {allowed:.1e}"


@pytest.mark.composes("Autocast", "forward and backward of the layer, Triton kernels on CUDA")
@LOW
@NORMS
@pytest.mark.parametrize("src", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_matches_pytorchs_layer(low, norm_first, src):
    """Dtypes of output and gradients too, for every dtype of src."""
    stock, fused = layers(norm_first=norm_first)
    x, dy = normal(src, B, S, D), normal(src, B, S, D)
    found, theirs = run(fused, x, dy, low), run(stock, x, dy, low)
    check_against(found, theirs, run(stock.double(), x.double(), dy.double()), low)


@NORMS
@pytest.mark.skipif(not ON_GPU, reason="autocast converts the norms' parameters on CUDA only")
def test_parameters_in_low_precision(norm_first):
    stock, fused = layers(norm_first=norm_first)
    x, dy = normal(torch.float32, B, S, D), normal(torch.float32, B, S, D)
    for layer in (stock, fused):
        layer.to(BF16)
    found, theirs = run(fused, x, dy, BF16), run(stock, x, dy, BF16)
    check_against(found, theirs, run(stock.double(), x.double(), dy.double()), BF16)


@NORMS
def test_dropout_as_on_the_eager_backend(norm_first):
    _, fused = layers(dropout=0.1, norm_first=norm_first, policy="balanced")
    eager = copy.deepcopy(fused)
    eager.backend = "eager"
    x, dy = normal(torch.float32, B, S, D), normal(torch.float32, B, S, D)
    found, theirs = run(fused, x, dy, BF16), run(eager, x, dy, BF16)
    check_against(found, theirs, run(eager.double(), x.double(), dy.double()), BF16)


@NORMS
def test_rungs_have_the_same_bits_under_deterministic_algorithms(norm_first):
    x, dy = normal(torch.float32, B, S, D), normal(torch.float32, B, S, D)
    torch.use_deterministic_algorithms(True)
    try:
        found = [
            run(layers(dropout=0.1, norm_first=norm_first, policy=policy)[1], x, dy, BF16)
            for policy in EXACT_PRESETS
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for policy, other in zip(EXACT_PRESETS[1:], found[1:], strict=True):
        for name, a, b in zip(NAMES, found[0], other, strict=True):
            assert torch.equal(a, b), f"{name} of {policy}"


@NORMS
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_kept_bytes_are_the_predicted(norm_first, policy):
    _, fused = layers(dropout=0.1, norm_first=norm_first, policy=policy)
    x = normal(torch.float32, B, S, D).requires_grad_()
    spec = nn_layer_spec(norm_first, H, D // H, "gelu", dropout=0.1)
    shapes = {
        "input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D),
        "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D),
    }  # fmt: skip
    needs_grad = (*spec.weights, "input")
    names = predict_kept_bytes(
        block_graph(spec), policy, shapes, needs_grad, B, S, torch.float32, BF16
    )
    with torch.autocast(DEVICE.type, BF16):
        assert memory_report(fused, x).kept_bytes == sum(names.values())
        if not ON_GPU:
            return
        fused(x).sum().backward()  # workspaces and compiled kernels stay
        requested = "requested_bytes.all.current"
        before = torch.cuda.memory_stats(DEVICE)[requested]
        y = fused(x)
        kept = torch.cuda.memory_stats(DEVICE)[requested] - before - y.nbytes + x.nbytes
    assert kept == sum(names.values())  # no copies of weights among them


@pytest.mark.composes("Autocast", "training with `torch.amp.GradScaler`, float16 on CUDA")
def test_training_with_a_grad_scaler_follows_the_stock_layer():
    losses = []
    for layer in layers():
        torch.manual_seed(2)
        x, target = normal(torch.float32, 2, B, S, D)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**40)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        found = []
        for i in range(21):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, torch.float16):
                loss = F.mse_loss(layer(x).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            # The first gradients overflow: that step is skipped.
            scaler.update(None if i else 2.0**8)
            found.append(loss.detach())
        assert found[0] == found[1]
        losses.append(torch.stack(found))
    # Roundings of two orders of summation, in 20 steps of the same path.
    torch.testing.assert_close(*losses, rtol=4 * torch.finfo(torch.float16).eps, atol=0.0)
    assert losses[1][-1] < losses[1][0]

"""The layer under autocast on kernels, a float32 stream: dtypes, results, bits, bytes, training."""

import copy

import pytest
import torch
import torch.nn.functional as F
from places import BF16, DEVICE, ON_GPU, assert_bits, at, deterministic, error_of, normal
from reference import EXACT_PRESETS, PARAM_NAMES, pair, run

from fused_remat import explain, memory_report
from fused_remat.graph.build import block_graph
from fused_remat.report.allocations import predict_kept_bytes
from fused_remat.spec import nn_layer_spec
from fused_remat.triton import norm as norms
from fused_remat.triton import tables

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, D, H = at((4, 512, 1024, 8), (2, 11, 24, 3))
F16, F32 = torch.float16, torch.float32
NORMS = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
LOW = pytest.mark.parametrize("low", dict.fromkeys([BF16, F16]), ids=str)
# The error may be 1.5 times PyTorch's own under the same autocast, plus a sixth of a rounding; of
# small gradients PyTorch's own happens to be next to nothing, and is no yardstick.
FLOOR = {torch.bfloat16: 1e-3, F16: at(1e-4, 4 * torch.finfo(F16).eps)}
NAMES = ("y", "dx", *PARAM_NAMES)


@pytest.fixture(params=["tables"] if ON_GPU else ["one kernel", "as on Hopper"])
def routes(request, monkeypatch):
    """Interpreted, both settings of the tables of routes; the interpreter's own is the first."""
    if request.param == "as on Hopper":
        monkeypatch.setattr(tables, "MLP_BWD_IN_ONE", frozenset())
        monkeypatch.setattr(tables, "LINEAR_END_IN_KERNEL", frozenset())
        monkeypatch.setattr(tables, "ATTENTION_BY_ATEN", frozenset({"interpreter"}))


def layers(dropout=0.0, norm_first=True, policy="full"):
    """A stock layer with random float32 parameters, and a fused one with the same."""
    how = {"batch_first": True, "norm_first": norm_first, "activation": "gelu"}
    stock, fused = pair(D, H, 4 * D, dropout, policy=policy, **how)
    fused.backend = "triton"
    return stock.to(DEVICE), fused.to(DEVICE)


def data(dtype=F32):
    return normal(dtype, B, S, D), normal(dtype, B, S, D)


def results(layer, x, dy, low=BF16):
    """Output, and gradients of x and every parameter, of autocast unless `low` is None."""
    torch.manual_seed(1)
    with torch.autocast(DEVICE.type, low or BF16, enabled=low is not None):
        return run(layer, x, dy)


def check_against(found, theirs, exact, low):
    for name, mine, other, true in zip(NAMES, found, theirs, exact, strict=True):
        assert mine.dtype == other.dtype, name
        error, allowed = error_of(mine, true), 1.5 * error_of(other, true) + FLOOR[low]
        assert error <= allowed, f"relative error of {name} is {error:.1e}, allowed {allowed:.1e}"


def check(fused, other, x, dy, low=BF16):
    found, theirs = results(fused, x, dy, low), results(other, x, dy, low)
    check_against(found, theirs, results(other.double(), x.double(), dy.double(), None), low)


@pytest.mark.composes("Autocast", "forward and backward of the layer, Triton kernels on CUDA")
@LOW
@NORMS
@pytest.mark.parametrize("src", at([F32, torch.bfloat16, F16], [F32, F16]), ids=str)
@pytest.mark.parametrize("policy", at(["full"], ["full", "fast"]))
def test_matches_pytorchs_layer(low, norm_first, src, policy, routes):
    """Dtypes of output and gradients too, for every dtype of src; norms' parameters are float32."""
    stock, fused = layers(norm_first=norm_first, policy=policy)
    check(fused, stock, *data(src), low)


@NORMS
@pytest.mark.skipif(not ON_GPU, reason="autocast converts the norms' parameters on CUDA only")
def test_parameters_in_low_precision(norm_first):
    stock, fused = layers(norm_first=norm_first)
    check(fused.to(BF16), stock.to(BF16), *data())


@NORMS
@pytest.mark.parametrize("wide", [False, True], ids=["rows", "wide rows"])
def test_dropout_as_on_the_eager_backend(norm_first, wide, routes, monkeypatch):
    """Of rows too wide for a kernel, a sum and its norm are two steps."""
    if wide:
        monkeypatch.setattr(norms, "FWD_WIDTH", 16)
        monkeypatch.setattr(norms, "BWD_WIDTH", 16)
    _, fused = layers(0.1, norm_first, "balanced")
    eager = copy.deepcopy(fused)
    eager.backend = "eager"
    check(fused, eager, *data())


@NORMS
def test_presets_have_the_same_bits_under_deterministic_algorithms(norm_first):
    x, dy = data()
    with deterministic():
        first, *others = (
            results(layers(0.1, norm_first, policy)[1], x, dy) for policy in EXACT_PRESETS
        )
    for policy, other in zip(EXACT_PRESETS[1:], others, strict=True):
        assert_bits(other, first, policy)


@pytest.mark.skipif(ON_GPU, reason="of the interpreter's routes")
def test_explain_names_kernels_and_dtypes():
    with torch.autocast("cpu", F16):
        (block,) = explain(layers(0.1)[1], data()[0])
    assert "backend triton, products in float16, stream in float32" in block.title
    steps = dict(block.forward)
    assert steps["norm1"] == "kernel norm_fwd, rounded to float16"
    assert "one kernel: product and activation" in steps["act"]
    end = "ATen's addmm: nothing follows that could be fused; pointwise kernel"
    assert steps["output"] == f"{end}, added to the residual in the stream's dtype"


@NORMS
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_kept_bytes_are_the_predicted(norm_first, policy):
    _, fused = layers(0.1, norm_first, policy)
    x = data()[0].requires_grad_()
    spec = nn_layer_spec(norm_first, H, D // H, "gelu", dropout=0.1)
    shapes = {
        "input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D),
        "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D),
    }  # fmt: skip
    needs_grad = (*spec.weights, "input")
    names = predict_kept_bytes(block_graph(spec), policy, shapes, needs_grad, B, S, F32, BF16)
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
    losses, steps = [], at(20, 4)
    for layer in layers():
        torch.manual_seed(2)
        x, target = normal(F32, 2, B, S, D)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**40)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        found = []
        for i in range(steps + 1):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, F16):
                loss = F.mse_loss(layer(x).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            # The first gradients overflow: that step is skipped.
            scaler.update(None if i else 2.0**8)
            found.append(loss.detach())
        assert found[0] == found[1]
        losses.append(torch.stack(found))
    # Roundings of two orders of summation, in 20 steps of the same path.
    torch.testing.assert_close(*losses, rtol=4 * torch.finfo(F16).eps, atol=0.0)
    assert losses[1][-1] < losses[1][0]

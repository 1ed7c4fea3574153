"""The layer under float16 autocast on the triton backend, interpreted: a float32 stream."""

import pytest
import torch
from reference import EXACT_PRESETS, pair, run

from fused_remat import explain
from fused_remat.triton import norm as norms
from fused_remat.triton import tables

SIZES = {"d_model": 24, "nhead": 3, "dim_feedforward": 40, "batch_first": True}
FP16 = torch.float16
# Where PyTorch's own error happens to be next to nothing, 1.5 times it is no yardstick.
FLOOR = 4 * torch.finfo(FP16).eps
NORMS = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])


@pytest.fixture(params=["one kernel", "as on Hopper"])
def routes(request, monkeypatch):
    """Both settings of the tables of routes; the interpreter's own is the first."""
    if request.param == "as on Hopper":
        monkeypatch.setattr(tables, "MLP_BWD_IN_ONE", frozenset())
        monkeypatch.setattr(tables, "LINEAR_END_IN_KERNEL", frozenset())
        monkeypatch.setattr(tables, "ATTENTION_BY_ATEN", frozenset({"interpreter"}))


def layers(policy, **kwargs):
    stock, fused = pair(**SIZES, **{"dropout": 0.0, "activation": "gelu", **kwargs}, policy=policy)
    fused.backend = "triton"
    return stock, fused


def under_autocast(layer, x, dy):
    with torch.autocast("cpu", FP16):
        return run(layer, x, dy)


def check_errors(found, theirs, exact):
    for i, (mine, other, true) in enumerate(zip(found, theirs, exact, strict=True)):
        assert mine.dtype == other.dtype
        error, allowed = ((t.double() - true).norm() / true.norm() for t in (mine, other))
        assert error <= 1.5 * allowed + FLOOR, f"{i}: {error:.1e} beside {allowed:.1e}"


@NORMS
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_errors_are_those_of_the_stock_layer(norm_first, policy, routes):
    stock, fused = layers(policy, norm_first=norm_first)
    x, dy = torch.randn(2, 2, 11, 24)
    found, theirs = under_autocast(fused, x, dy), under_autocast(stock, x, dy)
    check_errors(found, theirs, run(stock.double(), x.double(), dy.double()))


@NORMS
@pytest.mark.parametrize("wide", [False, True], ids=["rows", "wide rows"])
def test_matches_eager_with_dropout(norm_first, wide, routes, monkeypatch):
    """The eager backend under the same autocast is the yardstick, in float64 the truth.

    Of rows too wide for a kernel, a sum and its norm are two steps.
    """
    if wide:
        monkeypatch.setattr(norms, "FWD_WIDTH", 16)
        monkeypatch.setattr(norms, "BWD_WIDTH", 16)
    _, fused = layers("balanced", norm_first=norm_first, dropout=0.2)
    x, dy = torch.randn(2, 2, 11, 24)
    results = []
    for backend in ("triton", "eager"):
        fused.backend = backend
        torch.manual_seed(3)
        results.append(under_autocast(fused, x, dy))
    torch.manual_seed(3)
    check_errors(*results, run(fused.double(), x.double(), dy.double()))


@NORMS
def test_a_float16_src(norm_first, routes):
    """It stays float16 on the CPU; norms' parameters are float32."""
    stock, fused = layers("full", norm_first=norm_first)
    x, dy = torch.randn(2, 2, 11, 24).half()
    found, theirs = under_autocast(fused, x, dy), under_autocast(stock, x, dy)
    check_errors(found, theirs, run(stock.double(), x.double(), dy.double()))


@NORMS
def test_rungs_have_the_same_bits_under_deterministic_mode(norm_first):
    torch.use_deterministic_algorithms(True)
    try:
        x, dy = torch.randn(2, 2, 5, 24)
        found = []
        for policy in EXACT_PRESETS:
            torch.manual_seed(1)
            _, fused = layers(policy, norm_first=norm_first, dropout=0.1)
            torch.manual_seed(1)
            found.append(under_autocast(fused, x, dy))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_explain_names_kernels_and_dtypes():
    _, fused = layers("full", norm_first=True, dropout=0.1)
    with torch.autocast("cpu", FP16):
        (block,) = explain(fused, torch.randn(2, 5, 24))
    assert "backend triton, products in float16, stream in float32" in block.title
    steps = dict(block.forward)
    assert steps["norm1"] == "kernel norm_fwd, rounded to float16"
    assert "one kernel: product and activation" in steps["act"]
    end = "ATen's addmm: nothing follows that could be fused; pointwise kernel"
    assert steps["output"] == f"{end}, added to the residual in the stream's dtype"

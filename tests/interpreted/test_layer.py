"""The layer and the ops on the triton backend, interpreted, against PyTorch's layer and eager."""

import warnings

import pytest
import torch
from poisoned import check_error
from reference import PARAM_NAMES, RUNGS, pair, run

import fused_remat
from fused_remat import explain, ops
from fused_remat.backends import registry
from fused_remat.backends.triton import tables

SIZES = {"d_model": 24, "nhead": 3, "dim_feedforward": 40, "batch_first": True}
# float16: PyTorch's own layer rounds every step too.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3}


def close(found, expected, dtype):
    for name, a, b in zip(("y", "dx", *PARAM_NAMES), found, expected, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)
        if name == "self_attn.in_proj_bias":  # a third of it, the keys' bias, has no gradient
            error = (a.double() - b.double()).norm() / b.double().norm()
        assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("policy", RUNGS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_matches_pytorchs_layer(dtype, norm_first, policy, activation):
    stock, fused = pair(
        **SIZES, dropout=0.0, norm_first=norm_first, activation=activation, policy=policy
    )
    stock, fused = stock.to(dtype), fused.to(dtype)
    fused.backend = "triton"
    x, dy = torch.randn(2, 2, 11, 24).to(dtype)
    close(run(fused, x, dy), run(stock.double(), x.double(), dy.double()), dtype)


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("policy", RUNGS)
@pytest.mark.parametrize("frozen", [(), ("linear2.weight",), ("linear1.weight", "linear1.bias")])
def test_matches_eager_with_dropout(norm_first, policy, frozen):
    _, fused = pair(**SIZES, dropout=0.2, norm_first=norm_first, policy=policy)
    for name in frozen:
        fused.get_parameter(name).requires_grad_(False)
    x, dy = torch.randn(2, 2, 11, 24)
    results = []
    for backend in ("triton", "eager"):
        fused.backend = backend
        torch.manual_seed(3)
        results.append(run(fused, x, dy))
    for a, b in zip(*results, strict=True):
        check_error(a, b, torch.float32, factor=10)


@pytest.mark.parametrize("in_one", [True, False], ids=["in one", "pre read"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_both_routes_of_the_mlps_backward(gated, in_one, monkeypatch):
    families = frozenset({"interpreter"} if in_one else ())
    monkeypatch.setattr(tables, "MLP_BWD_IN_ONE", families)
    monkeypatch.setattr(tables, "LINEAR_END_IN_KERNEL", families)
    test_mlp_blocks(gated, "full")


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_rungs_have_the_same_bits_under_deterministic_mode(norm_first):
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for policy in RUNGS:
            _, fused = pair(**SIZES, dropout=0.1, norm_first=norm_first, policy=policy)
            fused.backend = "triton"
            torch.manual_seed(1)
            found.append(run(fused, torch.ones(2, 5, 24) + torch.arange(24.0), None))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("policy", ["full", "none"])
def test_mlp_blocks(gated, policy):
    torch.manual_seed(0)
    x, residual, dy = torch.randn(3, 2, 7, 16, requires_grad=True).unbind()
    up, down, gate = torch.randn(24, 16) / 4, torch.randn(16, 24) / 5, torch.randn(24, 16) / 4
    for weight in (up, down, gate):
        weight.requires_grad_()
    results = []
    for backend in ("triton", "eager"):
        torch.manual_seed(5)
        how = {"dropout_p": 0.3, "policy": policy, "backend": backend}
        if gated:
            y = ops.gated_mlp(x, gate, up, down, **how)
        else:
            y = ops.mlp(x, up, None, down, None, **how)
        y = ops.dropout_add(y, residual, 0.3, backend=backend)
        y = ops.rms_norm(y, backend=backend)
        leaves = [x, up, down, *([gate] if gated else [])]
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for a, b in zip(*results, strict=True):
        check_error(a, b, torch.float32, factor=10)


def test_explain_names_kernels_and_reasons():
    _, fused = pair(**SIZES, dropout=0.1, norm_first=True, policy="full")
    fused.backend = "triton"
    text = str(explain(fused, torch.randn(2, 5, 24)))
    assert "backend triton" in text
    for words in (
        "kernel norm_fwd",
        "one kernel: product and activation",
        "backward output and act (one kernel",
    ):
        assert words in text


def test_what_the_kernels_cannot_do_falls_back_with_one_warning():
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    registry._backend_for.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert registry.get_backend("triton", x).name == "eager"
            assert registry.get_backend("triton", x.bfloat16()).name == "eager"
    assert sum("float64" in str(w.message) for w in caught) == 1
    assert any("bfloat16" in str(w.message) for w in caught)
    assert all(issubclass(w.category, fused_remat.FusedRematWarning) for w in caught)


def test_empty_and_single_inputs():
    _, fused = pair(**SIZES, dropout=0.0, norm_first=True)
    fused.backend = "triton"
    x = torch.randn(1, 1, 24, requires_grad=True)
    fused(x).sum().backward()
    assert x.grad.isfinite().all()

"""The layer and the ops on the triton backend, interpreted, against PyTorch's layer and eager."""

import warnings

import pytest
import torch
from poisoned import check_error
from reference import EXACT_PRESETS, PARAM_NAMES, pair, run
from tiers import exhaustive, pairwise
from torch._subclasses.fake_tensor import FakeTensorMode

import fused_remat
from fused_remat import explain, ops
from fused_remat.execution import choose
from fused_remat.triton import tables

SIZES = {"d_model": 24, "nhead": 3, "dim_feedforward": 40, "batch_first": True}
# Relative L2 against float64. float32: a layer's sums, in another order. float16: every step rounds
# by 2**-11, a dozen in a row, as in PyTorch's own layer.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 6e-3}


@pytest.fixture(params=["one kernel", "as on Hopper"])
def routes(request, monkeypatch):
    """Both settings of the tables of routes; the interpreter's own is the first."""
    if request.param == "as on Hopper":
        monkeypatch.setattr(tables, "MLP_BWD_IN_ONE", frozenset())
        monkeypatch.setattr(tables, "LINEAR_END_IN_KERNEL", frozenset())
        monkeypatch.setattr(tables, "ATTENTION_BY_ATEN", frozenset({"interpreter"}))


def check_close(found, expected, dtype):
    for name, a, b in zip(("y", "dx", *PARAM_NAMES), found, expected, strict=True):
        error = (a.double() - b.double()).norm() / b.double().norm()
        assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    "dtype, norm_first, policy",
    pairwise(list(TOLERANCE), [False, True], list(EXACT_PRESETS)),
    ids=str,
)
def test_matches_pytorchs_layer(dtype, norm_first, policy, routes):
    stock, fused = pair(
        **SIZES, dropout=0.0, norm_first=norm_first, activation="gelu", policy=policy
    )
    stock, fused = stock.to(dtype), fused.to(dtype)
    fused.backend = "triton"
    x, dy = torch.randn(2, 2, 11, 24).to(dtype)
    check_close(run(fused, x, dy), run(stock.double(), x.double(), dy.double()), dtype)


@pytest.mark.parametrize(
    "norm_first, policy",
    [
        *((i % 2 == 0, policy) for i, policy in enumerate(EXACT_PRESETS)),
        *(exhaustive(i % 2 == 1, policy) for i, policy in enumerate(EXACT_PRESETS)),
    ],
)
def test_matches_eager_with_dropout(norm_first, policy, routes):
    check_against_eager(norm_first, policy, ())


@pytest.mark.parametrize(
    "norm_first, policy, frozen",
    pairwise(
        [False, True], ["full", "fast"], [("linear2.weight",), ("linear1.weight", "linear1.bias")]
    ),
    ids=str,
)
def test_matches_eager_with_frozen_parameters(norm_first, policy, frozen, routes):
    check_against_eager(norm_first, policy, frozen)


def check_against_eager(norm_first, policy, frozen):
    """Output and gradients, with dropout."""
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


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_accumulates_into_main_grad(norm_first, routes):
    _, fused = pair(**SIZES, dropout=0.0, norm_first=norm_first)
    fused.half().backend = "triton"
    (x, dy), params = torch.randn(2, 2, 11, 24).half(), [*fused.parameters()]
    expected = torch.autograd.grad(fused(x), params, dy)
    fused.accumulate_into = "main_grad"
    for p in params:
        p.main_grad = torch.ones_like(p, dtype=torch.float32)
    fused(x).backward(dy)
    for p, g in zip(params, expected, strict=True):
        torch.testing.assert_close((p.main_grad - 1).half(), g, rtol=2**-9, atol=1e-5)
        assert p.grad is None and not torch.equal(p.main_grad, p.main_grad.half().float())


@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
def test_rungs_have_the_same_bits_under_deterministic_mode(norm_first, routes):
    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for policy in EXACT_PRESETS:
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
def test_mlp_blocks(gated, policy, routes):
    check_mlp_block(gated, policy)


def check_mlp_block(gated, policy):
    """Output and gradients of an MLP, the residual sum and a norm, with dropout."""
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
    choose.forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert choose.ops_for("triton", x).name == "eager"
            assert choose.ops_for("triton", x.bfloat16()).name == "eager"
    assert sum("float64" in str(w.message) for w in caught) == 1
    assert any("bfloat16" in str(w.message) for w in caught)
    assert all(issubclass(w.category, fused_remat.FusedRematWarning) for w in caught)


def test_empty_and_single_inputs():
    _, fused = pair(**SIZES, dropout=0.0, norm_first=True)
    fused.backend = "triton"
    x = torch.randn(1, 1, 24, requires_grad=True)
    fused(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("how", ["every other", "expanded", "a column"])
def test_parameters_of_any_layout(how):
    """Biases and norm weights whose elements are not side by side."""
    torch.manual_seed(0)
    vector = {
        "every other": torch.randn(48)[::2],
        "expanded": torch.full((1,), 3.0).expand(24),
        "a column": torch.randn(24, 5)[:, 2],
    }[how].requires_grad_()
    x, w1, w2 = torch.randn(2, 7, 16), torch.randn(24, 16) / 4, torch.randn(16, 24) / 5
    results = []
    for backend in ("triton", "eager"):
        y = ops.mlp(x, w1, vector, w2, vector[:16], backend=backend)
        z = ops.layer_norm(torch.cat([y, y[..., :8]], -1), vector, vector, backend=backend)
        results.append([z.detach(), *torch.autograd.grad(z.square().sum(), vector)])
    for a, b in zip(*results, strict=True):
        check_error(a, b, torch.float32, factor=10)


def test_new_settings_of_float32_precision():
    """The legacy getter raises once the new settings were used."""
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    try:
        check_mlp_block(False, "full")
    finally:
        settings.fp32_precision = before


def test_tensors_without_memory_are_eagers():
    with FakeTensorMode():
        x = torch.empty(2, 5, 8)
        assert choose.ops_for("triton", x).name == "eager"
        y = ops.mlp(x, torch.empty(16, 8), None, torch.empty(8, 16), None, backend="triton")
    assert y.shape == x.shape

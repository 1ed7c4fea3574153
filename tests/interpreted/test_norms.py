from dataclasses import replace

import pytest
import torch
from poisoned import TARGET, check_error, check_margin, keep_of, poisoned, wide
from tiers import pairwise

from fused_remat import ops
from fused_remat.spec import NormSpec
from fused_remat.steps.norm import NORMS, norm_bwd, norm_fwd
from fused_remat.steps.residual import residual_add
from fused_remat.triton import norm as norms

SHAPES = [(1, 1), (5, 63), (70, 64), (7, 300)]
DTYPES = [torch.float32, torch.float16]
LAYER_NORM = NormSpec(kind="layer_norm")


WALKED = [False, True]


@pytest.fixture(params=WALKED, ids=["narrow", "wide"])
def walked(request, monkeypatch):
    """Rows within a tile, and rows walked in blocks of 32."""
    if request.param:
        monkeypatch.setattr(norms, "FWD_WIDTH", 0)
        monkeypatch.setattr(norms, "BWD_WIDTH", 0)
        monkeypatch.setattr(norms, "_WIDE_BLOCK", 64)
    return request.param


def inputs(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape[0], shape[1] + 3).to(dtype)[:, : shape[1]] * 2 + 3
    weight, bias = torch.randn(2, shape[1]).to(dtype)
    return x, weight, bias


def exact_stats(kind, x):
    return norm_fwd(NormSpec(kind=kind), x.double(), None, None)[1:]


def empty_stats(kind, rows):
    return tuple(torch.full((rows, 1), torch.nan) for _ in NORMS[kind].stats)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_rebuild(kind, dtype, shape, walked):
    x, weight, bias = inputs(shape, dtype)
    spec = NormSpec(kind=kind)
    exact, *stats = norm_fwd(spec, x.double(), weight.double(), bias.double())
    y, made = poisoned(*shape, dtype), empty_stats(kind, shape[0])
    norms.norm_fwd(spec, x, None, None, weight, bias, None, y, made, False).run()
    check_margin(y)
    check_error(y, exact, dtype)
    for found, true in zip(made, stats, strict=True):
        check_error(found, true, torch.float32, factor=4 if shape[1] > 1 else 200)
    again = poisoned(*shape, dtype)
    norms.norm_fwd(spec, x, None, None, weight, bias, None, again, made, True).run()
    assert torch.equal(y, again), "a rebuild from statistics has the forward's bits"


def test_rows_of_64k():
    torch.manual_seed(0)
    x = torch.randn(2, norms.MAX_WIDTH) + 100
    y, made = poisoned(*x.shape, x.dtype), empty_stats("layer_norm", 2)
    norms.norm_fwd(LAYER_NORM, x, None, None, None, None, None, y, made, False).run()
    # Beside a mean of 100, x itself has a rounding error of 100 * 2**-24.
    check_error(y, norm_fwd(LAYER_NORM, x.double(), None, None)[0], x.dtype, 10)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_of_a_sum(dtype, p):
    shape = (9, 100)
    x, weight, bias = inputs(shape, dtype)
    residual = torch.randn(shape).to(dtype)
    keep = keep_of(*shape, p) if p else None
    total, y = poisoned(*shape, dtype), poisoned(*shape, dtype)
    made = empty_stats("layer_norm", shape[0])
    norms.norm_fwd(LAYER_NORM, x, residual, keep, weight, bias, total, y, made, False).run()
    check_margin(total)
    check_margin(y)
    exact = residual_add(x.double(), residual.double(), wide(keep))
    check_error(total, exact, dtype)
    of_total = norm_fwd(LAYER_NORM, total.double(), weight.double(), bias.double())
    check_error(y, of_total[0], dtype)


# Not of width 1, whose gradient cancels to nothing.
@pytest.mark.parametrize(
    "kind, dtype, shape, needs_grad, walked",
    pairwise(
        list(NORMS), DTYPES, [(1, 4), *SHAPES[1:]], ["x w b", "x", "w", "b w"], WALKED
    ),
    ids=str, indirect=["walked"],
)  # fmt: skip
def test_backward(kind, dtype, shape, needs_grad, walked):
    x, weight, _ = inputs(shape, dtype)
    dy = torch.randn(shape[1]).to(dtype).expand(shape) if needs_grad == "x" else x.flip(0) - 3
    add = torch.randn(shape).to(dtype) if needs_grad != "x" else None
    stats = tuple(s.float() for s in exact_stats(kind, x))
    marks = tuple(name in needs_grad.split() for name in "xwb")
    exact = norm_bwd(
        NormSpec(kind=kind), dy.double(), x.double(), tuple(s.double() for s in stats),
        weight.double(), marks, add=None if add is None else add.double(),
    )  # fmt: skip
    dx = poisoned(*shape, dtype) if marks[0] else None
    dweight, dbias = (torch.full((shape[1],), torch.nan) if m else None for m in marks[1:])
    launches = norms.norm_bwd(
        NormSpec(kind=kind), dy, x, stats, weight, add, dx, dweight, dbias, TARGET
    )
    assert sum(launch.kernel is norms.column_sum_kernel for launch in launches) <= 1  # for both
    for launch in launches:
        launch.run()
    if dx is not None:
        check_margin(dx)
    for found, true in zip((dx, dweight, dbias), exact, strict=True):
        assert (found is None) == (true is None)
        if found is not None:
            # x - mean loses digits to x's own rounding where a row is short.
            check_error(found, true, dtype if found is dx else torch.float32, factor=20)


def test_rows_more_than_2_31_elements_apart():
    apart = torch.empty(2**31 + 4096, dtype=torch.float16).as_strided((3, 64), (2**30, 1))
    apart.copy_(torch.randn(3, 64))
    y, made = poisoned(3, 64, torch.float16), empty_stats("layer_norm", 3)
    norms.norm_fwd(LAYER_NORM, apart, None, None, None, None, None, y, made, False).run()
    check_margin(y)
    check_error(y, norm_fwd(LAYER_NORM, apart.double(), None, None)[0], y.dtype)


def test_a_norm_without_a_kernel_is_atens_after_a_product_too(monkeypatch):
    def halved(*args):
        y, rstd = NORMS["rms_norm"].fwd(*args)
        return y / 2, rstd

    monkeypatch.setitem(NORMS, "halved", replace(NORMS["rms_norm"], fwd=halved))
    torch.manual_seed(0)
    shapes = {"qkv": (24, 8), "proj": (8, 8), "fc1": (16, 8), "fc2": (8, 16), "norm1": (8,)}
    shapes["norm2"] = (8,)
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    x = torch.randn(2, 5, 8)
    found, expected = (
        ops.causal_block(x, weights, 2, norm="halved", backend=name) for name in ("triton", "eager")
    )
    torch.testing.assert_close(found, expected)

"""Norms: values, statistics and gradients against float64, rebuilt bits, sums."""

import pytest
import torch
from accuracy import assert_bits
from places import (
    BF16,
    PLACE,
    at,
    check_all,
    check_error,
    compiled,
    double,
    mask_of,
    misaligned,
    normal,
    run,
    wide,
)  # fmt: skip
from tiers import pairwise

from fused_remat.spec import NormSpec
from fused_remat.steps.fused import linear_norm_fwd
from fused_remat.steps.modulation_aten import Rows, modulated_norm_bwd, modulated_norm_fwd
from fused_remat.steps.norm import NORMS, norm_bwd, norm_fwd
from fused_remat.steps.residual import residual_add
from fused_remat.triton import norm as norms

LAYER_NORM = NormSpec(kind="layer_norm")
F16, F32 = torch.float16, torch.float32
# Dtype, rows and width. On a GPU: powers of two, odd, one row, rows that are walked in blocks.
CASES = at(
    [
        (BF16, 8192, 1024), (BF16, 4099, 1000), (BF16, 8191, 2048), (BF16, 2048, 8192),
        (BF16, 300, 16384), (BF16, 1000, 65536), (F32, 4099, 1000), (F32, 257, 20000),
        (BF16, 8191, 576), (BF16, 4099, 1536),
        (F16, 4099, 1000), (F16, 1, 63),
    ],
    [(dtype, *shape) for dtype in (F32, BF16) for shape in ((1, 1), (5, 63), (70, 64), (7, 300))],
    [
        (BF16, 70, 1000), (BF16, 33, 2048), (BF16, 9, 8192), (BF16, 5, 16384), (BF16, 5, 20000),
        (F32, 33, 1000), (F32, 5, 20000), (F16, 33, 1000), (F16, 1, 63), (BF16, 33, 576),
        (BF16, 9, 1536),
    ],
)  # fmt: skip
NARROW = [case for case in CASES if 1 < case[2] <= 16384]
# Dtype; rows before the first, rows of a sequence, rows: of parts of sequences, or a row each.
SEQUENCES = [
    (F32, (8, 20, 37)), (BF16, (8, 20, 37)), (F32, (0, 1, 5)), (F32, (3, 7, 1)),
    (BF16, (70, 70, 70)), (BF16, (0, 33, 99)), (F32, (65, 130, 64)), (F32, (129, 130, 262)),
    (F32, (190, 200, 33)), (BF16, (2, 1, 3)),
]  # fmt: skip
WALKS = ["in a tile", "in blocks"] if PLACE == "interpreter" else ["as tables say"]


@pytest.fixture(params=WALKS)
def walk(request, monkeypatch):
    """Rows within a tile, and rows walked in blocks of 64, whatever their width."""
    if request.param == "in blocks":
        monkeypatch.setattr(norms, "FWD_WIDTH", 0)
        monkeypatch.setattr(norms, "BWD_WIDTH", 0)
        monkeypatch.setattr(norms, "_WIDE_BLOCK", 64)


def inputs(dtype, rows, width):
    x = misaligned(normal(dtype, rows, width, scale=2.0, shift=3.0))
    return x, normal(dtype, width, shift=1.0), normal(dtype, width)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_rebuild(kind, case, walk):
    x, weight, bias = inputs(*case)
    spec = NormSpec(kind=kind)
    y, *stats = run(norm_fwd, spec, x, weight, bias)
    exact, *true_stats = norm_fwd(spec, *double(x, weight, bias))
    # The variance of one element is nothing but rounding, and rstd 316 times that.
    check_error(y, exact)
    check_all(stats, true_stats, compiled(1, 4 if case[2] > 1 else 200))
    again, *same = run(norm_fwd, spec, x, weight, bias, stats=tuple(stats))
    assert torch.equal(y, again), "a rebuild from statistics has the forward's bits"
    assert_bits(same, stats)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("affine", ["both", "weight", "bias"])
@pytest.mark.parametrize("dtype, case", SEQUENCES, ids=str)
def test_a_weight_of_each_sequence(kind, affine, dtype, case, walk):
    """With a condition of another dtype, whose rows are columns of a larger one."""
    width, (first, tokens, count) = at(1000, 63), case
    rows, spec = Rows(first, tokens), NormSpec(kind=kind)
    x, dy, add = (misaligned(normal(dtype, count, width)) for _ in range(3))
    both = normal(F32, 5, 2 * width, shift=1.0)
    weight = None if affine == "bias" else both[:, :width]
    bias = None if affine == "weight" else both[:, width:]
    y, *stats = run(modulated_norm_fwd, spec, x, weight, bias, rows)
    exact, *true_stats = modulated_norm_fwd(spec, *double(x, weight, bias), rows)
    check_error(y, exact)
    check_all(stats, true_stats, compiled(1, 4))
    again, *_ = run(modulated_norm_fwd, spec, x, weight, bias, rows, stats=tuple(stats))
    assert torch.equal(y, again), "a rebuild from statistics has the forward's bits"
    needs = (True, weight is not None, bias is not None)
    grads = run(modulated_norm_bwd, spec, dy, x, tuple(stats), weight, rows, needs, add=add)
    expected = modulated_norm_bwd(
        spec, *double(dy, x), tuple(true_stats), *double(weight), rows, needs, *double(add)
    )
    for grad, true in zip(grads, expected, strict=True):
        assert (grad is None) == (true is None)
        if grad is not None:
            check_error(grad, true, dtype=dtype)


def test_rows_of_64k():
    x = normal(F32, 2, norms.MAX_WIDTH, shift=100.0)
    # Beside a mean of 100, x itself has a rounding error of 100 * 2**-24.
    y, *_ = run(norm_fwd, LAYER_NORM, x, None, None)
    check_error(y, norm_fwd(LAYER_NORM, x.double(), None, None)[0], 10)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("case", NARROW, ids=str)
def test_a_norm_after_a_product(case, kind, p):
    (dtype, rows, width), spec = case, NormSpec(kind=kind)
    x, weight, bias = inputs(dtype, rows, width)
    given = normal(dtype, width, width, scale=width**-0.5), normal(dtype, width)
    residual, mask = normal(dtype, rows, width), mask_of(rows, width, p)
    total, *normed = run(linear_norm_fwd, x, *given, residual, mask, spec, weight, bias)
    product = x.double() @ given[0].double().t() + given[1].double()
    # The product, as large as both, is rounded before it is multiplied and added.
    check_error(total, residual_add(product, residual.double(), wide(mask)), 2)
    check_all(normed, norm_fwd(spec, *double(total, weight, bias)), float32=compiled(1, 4))


MARKS = ["x w b", "x", "w", "b w"]
# Not of one row, nor of width 1, whose gradient cancels to nothing.
BACKWARD = compiled(
    [(kind, c, m, WALKS[0]) for kind in NORMS for m in MARKS for c in CASES if c[1] > 1],
    pairwise(list(NORMS), [c if c[2] > 1 else (c[0], 1, 4) for c in CASES], MARKS, WALKS),
)


@pytest.mark.parametrize("kind, case, needs_grad, walk", BACKWARD, ids=str, indirect=["walk"])
def test_backward(kind, case, needs_grad, walk):
    x, weight, _ = inputs(*case)
    weight = None if needs_grad == "x" else weight
    rows, width = x.shape
    spec, marks = NormSpec(kind=kind), tuple(name in needs_grad.split() for name in "xwb")
    dy = normal(x.dtype, width).expand(rows, width) if needs_grad == "x" else x.flip(0) - 3
    add = normal(x.dtype, rows, width) if needs_grad != "x" else None
    exact_stats = norm_fwd(spec, x.double(), None, None)[1:]
    stats = tuple(s.float() for s in exact_stats)
    found = run(norm_bwd, spec, dy, x, stats, weight, marks, add)
    assert_bits(run(norm_bwd, spec, dy, x, stats, weight, marks, add), found, "the run matters")
    exact = norm_bwd(spec, *double(dy, x), double(*stats), *double(weight), marks, *double(add))
    # x - mean loses digits to x's own rounding where a row is short; up to 8192 terms cancel.
    check_all(found, exact, compiled(1, 20), float32=compiled(5, 20))

"""Norms, dropout, activations, rotary embedding at real sizes on a GPU, against float64.

Outputs are full of NaN before. Products are `test_gpu_products.py`'s.
"""

import dataclasses

import pytest
import torch
from gpu_checks import (
    BF16,
    DEVICE,
    ON_GPU,
    check_error,
    check_written,
    double,
    keep_of,
    misaligned,
    normal,
    poisoned,
    sized,
    target,
    wide,
)

from fused_remat import random
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.linear import linear_fwd
from fused_remat.steps.norm import norm_bwd, norm_fwd
from fused_remat.steps.residual import dropout, residual_add
from fused_remat.steps.rotary import rotary_bwd, rotary_fwd

pytest.importorskip("triton", reason="Triton is not installed")

from fused_remat.spec import AttentionSpec, RotarySpec
from fused_remat.steps.norm import NORMS as KINDS
from fused_remat.steps.rotary import RotaryCall
from fused_remat.triton import norm as norms
from fused_remat.triton import pointwise, products, rotary

pytestmark = pytest.mark.gpu
ids = {"ids": lambda value: str(value).removeprefix("torch.").replace(" ", "")}
# Rows and width: powers of two, odd, one row, rows that are walked in blocks.
NORMS = [
    (BF16, 8192, 1024), (BF16, 4099, 1000), (BF16, 8191, 2048), (BF16, 2048, 8192),
    (BF16, 300, 16384), (BF16, 1000, 65536), (torch.float32, 4099, 1000),
    (torch.float32, 257, 20000), (torch.float16, 4099, 1000), (torch.float16, 1, 63),
]  # fmt: skip


# --- norms


def norm_inputs(dtype, rows, width):
    rows, width = sized(rows, width)
    x = misaligned(normal(dtype, rows, width, scale=2.0, shift=3.0))
    return x, normal(dtype, width, shift=1.0), normal(dtype, width)


def empty_stats(kind, rows):
    nan = torch.full((rows, 1), torch.nan, device=DEVICE)
    return tuple(nan.clone() for _ in KINDS[kind].stats)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", NORMS, **ids)
def test_norm_forward_and_rebuild(kind, case):
    x, weight, bias = norm_inputs(*case)
    spec = NormSpec(kind=kind)
    exact, *stats = norm_fwd(spec, *double(x, weight, bias))
    y, again = poisoned(*x.shape, x.dtype), poisoned(*x.shape, x.dtype)
    made = empty_stats(kind, x.shape[0])
    norms.norm_fwd(spec, x, None, None, weight, bias, None, y, made, False).run()
    check_written(y)
    check_error(y, exact)
    for found, true in zip(made, stats, strict=True):
        check_error(found, true)
    norms.norm_fwd(spec, x, None, None, weight, bias, None, again, made, True).run()
    assert torch.equal(y, again), "a rebuild from statistics has the forward's bits"


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("case", [c for c in NORMS if c[2] <= 16384], **ids)
def test_norm_of_a_sum(case, p):
    x, weight, bias = norm_inputs(*case)
    residual, keep = normal(x.dtype, *x.shape), keep_of(*x.shape, p) if p else None
    total, y = poisoned(*x.shape, x.dtype), poisoned(*x.shape, x.dtype)
    made = empty_stats("layer_norm", x.shape[0])
    norms.norm_fwd(NormSpec(), x, residual, keep, weight, bias, total, y, made, False).run()
    check_written(total)
    check_written(y)
    check_error(total, residual_add(*double(x, residual), wide(keep)))
    check_error(y, norm_fwd(NormSpec(), *double(total, weight, bias))[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("needs_grad", ["x w b", "x", "b w"])
@pytest.mark.parametrize("case", [c for c in NORMS if c[1] > 1], **ids)
def test_norm_backward(kind, needs_grad, case):
    x, weight, _ = norm_inputs(*case)
    rows, width = x.shape
    dy = (
        normal(x.dtype, width).expand(rows, width)
        if needs_grad == "x"
        else normal(x.dtype, *x.shape)
    )
    add = normal(x.dtype, rows, width) if needs_grad == "x w b" else None
    stats = tuple(s.float() for s in norm_fwd(NormSpec(kind=kind), x.double(), None, None)[1:])
    marks = tuple(name in needs_grad.split() for name in "xwb")
    given = (NormSpec(kind=kind), *double(dy, x), double(*stats), weight.double(), marks)
    exact = norm_bwd(*given, add=None if add is None else add.double())
    dx = poisoned(rows, width, x.dtype) if marks[0] else None
    nan = torch.full((width,), torch.nan, device=DEVICE)
    sums = [nan.clone() if mark else None for mark in marks[1:]]
    for _ in range(2):
        before = [None if s is None else s.clone() for s in sums]
        for launch in norms.norm_bwd(
            NormSpec(kind=kind), dy, x, stats, weight, add, dx, *sums, target()
        ):
            launch.run()
    for first, second in zip(before, sums, strict=True):
        assert first is None or torch.equal(first, second), "no sum depends on the run"
    if dx is not None:
        check_written(dx)
    for found, true in zip((dx, *sums), exact, strict=True):
        assert (found is None) == (true is None)
        if found is not None:
            # float32: x - mean loses the digits of 3 beside 2, and up to 8192 terms cancel.
            check_error(found, true, factor=5 if found.dtype == torch.float32 else 1)


# --- one pass over a matrix


@pytest.mark.parametrize("dtype", [BF16, torch.float32], **ids)
@pytest.mark.parametrize("layout", ["aligned", "misaligned", "expanded"])
def test_dropout_and_residual(dtype, layout):
    rows, width = sized(4099, 4104)
    x, residual = normal(dtype, rows, width), normal(dtype, rows, width)
    if layout == "misaligned":
        x, residual = misaligned(x), misaligned(residual)
    elif layout == "expanded":
        x = x[:1].expand(rows, width)
    keep = keep_of(rows, width, 0.3)
    y, dx = (poisoned(rows, width, dtype, odd=layout == "misaligned") for _ in range(2))
    pointwise.dropout_add_fwd(x, residual, keep, y).run()
    pointwise.dropout_add_fwd(x, None, keep, dx).run()
    check_written(y)
    check_written(dx)
    check_error(y, residual_add(*double(x, residual), wide(keep)))
    check_error(dx, dropout(x.double(), wide(keep)))


@pytest.mark.parametrize("row0", [0, 2**32 - 3, 2**40 + 1])
def test_dropout_draws_the_bits_of_the_definition(row0):
    """The kernels', and the eager backend's on this device, beside the CPU's."""
    rows, width = sized(515, 4104)
    keep = keep_of(rows, width, 0.3, row0)
    key = keep.site_key.cpu()
    expected = random.keep_scale(key, row0, rows, width, 0.3, torch.float32)
    y = poisoned(rows, width, torch.float32)
    pointwise.dropout_add_fwd(torch.ones_like(y), None, keep, y).run()
    assert torch.equal(y.cpu(), expected)
    assert torch.equal(keep.tensor().cpu(), expected)
    # In a product's end: ones times ones are the width.
    x, weight = torch.ones(rows, 16, device=DEVICE), torch.ones(width, 16, device=DEVICE)
    y = poisoned(rows, width, BF16)
    args = x.to(BF16), weight.to(BF16), None, None, keep, None, None, y
    products.linear_fwd(*args, target()).run()
    assert torch.equal(y.cpu() != 0, expected != 0)


@pytest.mark.parametrize("act", pointwise.PAIRS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], **ids)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_activation(act, dtype, p):
    rows, width = sized(2051, 4104)
    x, dy = normal(dtype, rows, width, scale=2.0), normal(dtype, rows, width)
    keep = keep_of(rows, width, p) if p else None
    y, again, dx = (poisoned(rows, width, dtype) for _ in range(3))
    pointwise.act_fwd(x, act, keep, y).run()
    pointwise.act_bwd(dy, x, act, keep, dx, again).run()
    for found in (y, again, dx):
        check_written(found)
    exact = activation_fwd(act, None, x.double(), wide(keep))
    check_error(y, exact)
    check_error(again, exact)
    check_error(dx, activation_bwd(act, dy.double(), None, x.double(), wide(keep), False)[1])


@pytest.mark.parametrize("act", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], **ids)
@pytest.mark.parametrize("needs_grad", ["both", "gate", "up"])
def test_gated(act, dtype, needs_grad):
    rows, width = sized(2051, 4104)
    gate, up, dy = (normal(dtype, rows, width) for _ in range(3))
    keep = keep_of(rows, width, 0.3)
    y = poisoned(rows, width, dtype)
    pointwise.gated_fwd(gate, up, act, keep, y).run()
    check_written(y)
    check_error(y, activation_fwd(act, *double(gate, up), wide(keep)))
    dgate = poisoned(rows, width, dtype) if needs_grad != "up" else None
    dup = poisoned(rows, width, dtype) if needs_grad != "gate" else None
    given = None if needs_grad == "up" else up
    pointwise.gated_bwd(dy, gate, given, act, keep, dgate, dup).run()
    marks = (needs_grad != "up", needs_grad != "gate")
    exact = activation_bwd(act, *double(dy, gate, given), wide(keep), False, marks)
    for found, true in zip((dgate, dup), exact, strict=True):
        assert (found is None) == (true is None)
        if found is not None:
            check_written(found)
            check_error(found, true)


# --- rotary position embedding

# Query heads, key heads, width of a head, elements rotated.
ROTARY = [(32, 8, 128, 128), (16, 16, 64, 32), (12, 4, 96, 96), (8, 1, 256, 64), (3, 1, 33, 10)]


@pytest.mark.parametrize("heads", ROTARY, **ids)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], **ids)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_rotary(heads, dtype, interleaved, norm):
    """Forward and backward, in place and not; several sequences, from the middle of one."""
    nhead, kv_heads, width, rotated = heads
    (rows,), seq_len = sized(2051), 300
    x, dy = (misaligned(normal(dtype, rows, (nhead + 2 * kv_heads) * width)) for _ in range(2))
    angle = normal(torch.float32, seq_len, rotated // 2, scale=3.0)
    weights = normal(dtype, 2, width, shift=1.0).unbind() if norm else (None, None)
    spec = AttentionSpec(
        num_heads=nhead, num_kv_heads=kv_heads, head_dim=width, scale=1.0,
        rotary=RotarySpec(interleaved=interleaved),
        head_norm=NormSpec(kind="rms_norm", eps=1e-6) if norm else None,
    )  # fmt: skip
    call = RotaryCall(spec, angle.cos(), angle.sin(), *weights, 7, seq_len)
    exact = dataclasses.replace(
        call, **dict(zip(("cos", "sin", "q_weight", "k_weight"),
                         double(call.cos, call.sin, *weights), strict=True)),
    )  # fmt: skip
    y, same = poisoned(*x.shape, dtype), x.clone()
    rotary.rotary_fwd(x, call, y, target()).run()
    rotary.rotary_fwd(same, call, same, target()).run()
    check_written(y)
    check_error(y, rotary_fwd(x.double(), exact))
    assert torch.equal(same, y), "in place has the same bits"
    dx, same = poisoned(*x.shape, dtype), dy.clone()
    sums = [torch.full((width,), torch.nan, device=DEVICE) for _ in "qk"] if norm else []
    given = x.double() if norm else None
    expected = rotary_bwd(dy.double(), given, exact, (True, norm, norm), False)
    for into, made in ((dx, dy), (same, same)):
        before = [s.clone() for s in sums]
        if norm:
            for launch in rotary.rotary_norm_bwd(made, x, call, into, *sums, target()):
                launch.run()
        else:
            rotary.rotary_fwd(made, call, into, target(), back=True).run()
    assert torch.equal(same, dx), "in place has the same bits"
    assert all(map(torch.equal, before, sums)), "no sum depends on the run"
    check_written(dx)
    for found, true in zip((dx, *sums), expected, strict=False):
        # float32: sums of 2051 tokens in 32 heads, of both signs.
        check_error(found, true, factor=5 if found.dtype == torch.float32 else 1)


# --- beyond 2**31 elements


def enough_memory(gib):
    return not ON_GPU or torch.cuda.mem_get_info()[0] > gib * 2**30


@pytest.mark.parametrize("kernel", ["dropout_add", "act_fwd", "norm", "linear"])
def test_more_elements_than_32_bits_count(kernel):
    if not enough_memory(20):
        pytest.skip("needs 20 GiB of memory")
    rows, width = sized(2**20 + 37, 2056)  # 2**31 is row 1,044,495
    y = torch.full((rows, width), torch.nan, dtype=BF16, device=DEVICE)
    part = slice(-300, None)
    if kernel == "linear":
        x, weight = normal(BF16, rows, 16), normal(BF16, width, 16)
        products.linear_fwd(x, weight, None, None, None, None, None, y, target()).run()
        exact = linear_fwd(*double(x[part], weight), None)
    else:
        x = normal(BF16, 4096, width).repeat(-(-rows // 4096), 1)[:rows]
        if kernel == "norm":
            stats = empty_stats("rms_norm", rows)
            spec = NormSpec(kind="rms_norm")
            norms.norm_fwd(spec, x, None, None, None, None, None, y, stats, False).run()
            exact = norm_fwd(spec, x[part].double(), None, None)[0]
        elif kernel == "act_fwd":
            pointwise.act_fwd(x, "gelu", None, y).run()
            exact = activation_fwd("gelu", None, x[part].double(), None)
        else:
            keep = keep_of(rows, width, 0.3, row0=5)
            pointwise.dropout_add_fwd(x, None, keep, y).run()
            first = rows - x[part].shape[0]
            there = keep_of(x[part].shape[0], width, 0.3, row0=5 + first)
            exact = dropout(x[part].double(), wide(there))
    assert not any(block.isnan().any() for block in y.split(2**18)), "an element was not written"
    check_error(y[part], exact)

"""Rotary kernels, interpreted: values and what is written, in place, any layout, through the op."""

import dataclasses

import pytest
import torch
from poisoned import TARGET, check_error, check_margin, poisoned
from tiers import pairwise

from fused_remat import ops
from fused_remat.execution.choose import choose
from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec
from fused_remat.steps.operations import OPERATIONS
from fused_remat.steps.rotary import RotaryCall, rotary_bwd, rotary_fwd
from fused_remat.triton import rotary

DTYPES = [torch.float32, torch.float16]
# Query heads, key heads, width of a head, elements rotated.
HEADS = [(1, 1, 2, 2), (3, 1, 7, 2), (4, 2, 6, 6), (12, 4, 24, 8), (16, 2, 33, 0)]
SEQ, ROWS, TOKEN0 = 5, 23, 7  # from the middle of the second sequence to the sixth


def inputs(heads, dtype, interleaved, norm, batched, table=torch.float32):
    """x, dy and the call; rows apart by more than they are wide."""
    torch.manual_seed(0)
    nhead, kv_heads, width, rotated = heads
    columns = (nhead + 2 * kv_heads) * width
    x, dy = (torch.randn(ROWS, columns + 3).to(dtype)[:, :columns] for _ in range(2))
    cos = sin = None
    if rotated:
        lead = (6, SEQ) if batched else (SEQ,)
        cos, sin = (torch.randn(*lead, rotated // 2).to(table) for _ in "cs")
    weights = torch.randn(2, width).to(dtype).unbind() if norm else (None, None)
    spec = AttentionSpec(
        num_heads=nhead, num_kv_heads=kv_heads, head_dim=width, scale=1.0,
        rotary=RotarySpec(interleaved=interleaved) if rotated else None,
        head_norm=NormSpec(kind="rms_norm", eps=1e-6) if norm else None,
    )  # fmt: skip
    return x, dy, RotaryCall(spec, cos, sin, *weights, TOKEN0, SEQ)


def wide(call):
    """The call in float64, for the exact result."""
    named = {n: getattr(call, n) for n in ("cos", "sin", "q_weight", "k_weight")}
    return dataclasses.replace(
        call, **{n: None if t is None else t.double() for n, t in named.items()}
    )


@pytest.fixture(params=[False, True], ids=["half", "interleaved"])
def interleaved(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["one table", "a table a sequence"])
def batched(request):
    return request.param


@pytest.mark.parametrize(
    "heads, dtype, norm, interleaved, batched",
    pairwise(HEADS, DTYPES, [False, True], [False, True], [False, True]),
    ids=str,
)
def test_forward(heads, dtype, norm, interleaved, batched):
    x, _, call = inputs(heads, dtype, interleaved, norm, batched)
    y, same = poisoned(*x.shape, dtype), x.clone()
    rotary.rotary_fwd(x, call, y, TARGET).run()
    check_margin(y)
    check_error(y, rotary_fwd(x.double(), wide(call)), dtype)
    rotary.rotary_fwd(same, call, same, TARGET).run()
    assert torch.equal(same, y), "in place has the same bits"
    values = heads[1] * heads[2]
    assert torch.equal(y[:, -values:], x[:, -values:])


@pytest.mark.parametrize("heads", [h for h in HEADS if h[3]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward_of_the_rotation(heads, dtype, interleaved, batched):
    _, dy, call = inputs(heads, dtype, interleaved, False, batched)
    dx, same = poisoned(*dy.shape, dtype), dy.clone()
    rotary.rotary_fwd(dy, call, dx, TARGET, back=True).run()
    check_margin(dx)
    exact, *_ = rotary_bwd(dy.double(), None, wide(call), (True, False, False), False)
    check_error(dx, exact, dtype)
    rotary.rotary_fwd(same, call, same, TARGET, back=True).run()
    assert torch.equal(same, dx)


@pytest.mark.parametrize(
    "heads, dtype, needs_grad, interleaved, batched",
    pairwise(HEADS, DTYPES, ["x q k", "x", "q k", "k"], [False, True], [False, True]),
    ids=str,
)
def test_backward_of_the_norm(heads, dtype, needs_grad, interleaved, batched):
    x, dy, call = inputs(heads, dtype, interleaved, True, batched)
    marks = tuple(name in needs_grad.split() for name in "xqk")
    dx = poisoned(*x.shape, dtype) if marks[0] else None
    sums = [torch.full((heads[2],), torch.nan) if mark else None for mark in marks[1:]]
    for launch in rotary.rotary_norm_bwd(dy, x, call, dx, *sums, TARGET):
        launch.run()
    exact = rotary_bwd(dy.double(), x.double(), wide(call), marks, False)
    if dx is not None:
        check_margin(dx)
        same, again = dy.clone(), [None if s is None else torch.empty_like(s) for s in sums]
        for launch in rotary.rotary_norm_bwd(same, x, call, same, *again, TARGET):
            launch.run()
        assert torch.equal(same, dx), "in place has the same bits"
        assert all(s is None or torch.equal(s, a) for s, a in zip(sums, again, strict=True))
    for found, true in zip((dx, *sums), exact, strict=True):
        assert (found is None) == (true is None)
        if found is not None:
            # Sums cancel, and so does dx in a head of two: what is left has lost some digits.
            check_error(found, true, dtype if found is dx else torch.float32, factor=8)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_layouts_that_are_read_as_they_are_or_copied(norm, interleaved):
    """Columns apart, rows expanded; tables of different strides, expanded, of 16 bits."""
    x, dy, call = inputs(HEADS[2], torch.float16, interleaved, norm, True, torch.float16)
    apart = torch.stack((x, x), -1)[..., 0]
    flat = dy[:1].expand_as(dy)
    cos = call.cos[:1].expand(6, -1, -1)
    sin = call.sin.mT.contiguous().mT
    odd = dataclasses.replace(call, cos=cos, sin=sin)
    for given in (apart, flat):
        y = poisoned(*x.shape, x.dtype)
        rotary.rotary_fwd(given, odd, y, TARGET).run()
        check_margin(y)
        check_error(y, rotary_fwd(given.double(), wide(odd)), x.dtype)
    if norm:
        dx, dq, dk = poisoned(*x.shape, x.dtype), *torch.full((2, 6), torch.nan)
        for launch in rotary.rotary_norm_bwd(flat, apart, odd, dx, dq, dk, TARGET):
            launch.run()
        check_margin(dx)
        exact = rotary_bwd(flat.double(), apart.double(), wide(odd), (True,) * 3, False)
        for found, true in zip((dx, dq, dk), exact, strict=True):
            check_error(found, true, x.dtype if found is dx else torch.float32, factor=8)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_rotated_meets_no_angle(value, interleaved):
    """0 times infinity is not a number: values, and elements after R, come out as they went in."""
    x, _, call = inputs((2, 2, 7, 4), torch.float32, interleaved, False, False)
    heads = x.clone().view(ROWS, 6, 7)
    heads[:, 4:, 2] = heads[:, :4, 5] = value
    y = rotary_fwd(heads.flatten(1), call)
    made = poisoned(ROWS, 42, torch.float32)
    rotary.rotary_fwd(heads.flatten(1), call, made, TARGET).run()
    assert torch.equal(made.isfinite(), y.isfinite())
    assert int(made.isfinite().logical_not().sum()) == ROWS * 6


def test_a_head_of_zeros_without_eps_spoils_no_other():
    """rstd of the lanes beyond the last row or head is no part of a sum."""
    x, dy, call = inputs((3, 1, 4, 4), torch.float32, False, True, False)
    spec = dataclasses.replace(call.spec, head_norm=NormSpec(kind="rms_norm", eps=0.0))
    call = dataclasses.replace(call, spec=spec)
    dx, (dq, dk) = torch.empty_like(dy), torch.full((2, 4), torch.nan)
    for launch in rotary.rotary_norm_bwd(dy, x, call, dx, dq, dk, TARGET):
        launch.run()
    assert all(t.isfinite().all() for t in (dx, dq, dk))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_rows_more_than_2_31_elements_apart(norm):
    _, _, call = inputs(HEADS[2], torch.float16, False, norm, False)
    width = 48
    apart = torch.empty(2**31 + 4096, dtype=torch.float16).as_strided((3, width), (2**30, 1))
    apart.copy_(torch.randn(3, width))
    before = apart.clone()
    rotary.rotary_fwd(apart, call, apart, TARGET).run()
    check_error(apart, rotary_fwd(before.double(), wide(call)), torch.float16)
    if norm:
        apart.copy_(before)
        dy, dx = torch.randn(3, width).half(), poisoned(3, width, torch.float16)
        rotary.rotary_norm_bwd(dy, apart, call, dx, None, None, TARGET)[0].run()
        exact, *_ = rotary_bwd(
            dy.double(), before.double(), wide(call), (True, False, False), False
        )
        check_error(dx, exact, torch.float16, factor=8)


def test_tables_whose_rows_are_2_30_elements_apart():
    _, _, call = inputs((1, 1, 2, 2), torch.float16, False, False, False)
    x, tables = torch.randn(6, 6).half(), torch.randn(2, 3, 1).half()
    apart = [torch.empty(2**31 + 2, dtype=torch.float16) for _ in "cs"]
    cos, sin = (
        t.as_strided((3, 1), (2**30, 1)).copy_(v) for t, v in zip(apart, tables, strict=True)
    )
    far = dataclasses.replace(call, cos=cos, sin=sin, token0=0, seq_len=3)
    near = dataclasses.replace(far, cos=tables[0], sin=tables[1])
    y = poisoned(6, 6, torch.float16)
    rotary.rotary_fwd(x, far, y, TARGET).run()
    check_margin(y)
    check_error(y, rotary_fwd(x.double(), wide(near)), torch.float16)


def test_a_frame_far_into_the_batch_reads_its_own_tables():
    x, _, call = inputs(HEADS[2], torch.float32, False, False, True)
    whole = rotary_fwd(x.double(), wide(call))
    later = dataclasses.replace(call, token0=TOKEN0 + 9)
    y = poisoned(ROWS - 9, x.shape[1], torch.float32)
    rotary.rotary_fwd(x[9:], later, y, TARGET).run()
    check_error(y, whole[9:], torch.float32)


def test_heads_too_wide_for_a_program_are_atens(monkeypatch):
    x, dy, call = inputs(HEADS[2], torch.float32, False, True, False)
    key, made = OPERATIONS[rotary_fwd].key(x, call), []
    for widest in (8, 4):
        monkeypatch.setattr(rotary, "MAX_HEAD", widest)
        forward, backward = (choose(f, "triton", key) for f in (rotary_fwd, rotary_bwd))
        grads = backward.run(dy, x, call, (True,) * 3, False)
        made.append((forward.reason(), forward.run(x, call), *grads))
    assert made[0][0] == "kernel rotary_fwd" and "not triton: heads" in made[1][0]
    for a, b in zip(made[0][1:], made[1][1:], strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("policy", ["full", "lean", "fast"])
def test_the_attention_block(norm, policy, interleaved):
    """Through the backend, against the eager one in float64; backward twice, the same."""
    torch.manual_seed(0)
    shapes = [(2, 9, 8), (8,), (8,), (48, 8), (48,), (8, 24), (8,), *[(6,)] * (2 if norm else 0)]
    angle = torch.randn(9, 2)
    leaves = [torch.randn(s).mul(0.5).requires_grad_() for s in shapes]

    def run(backend, dtype):
        given = [t.detach().to(dtype).requires_grad_() for t in leaves]
        names = dict(zip(("q_norm_weight", "k_norm_weight"), given[7:], strict=False))
        tables = angle.cos().to(dtype), angle.sin().to(dtype)
        y = ops.attention_block(
            *given[:7], 4, kv_heads=2, rope=tables, rope_interleaved=interleaved, policy=policy,
            backend=backend, **names,
        )  # fmt: skip
        dy = torch.linspace(-1, 1, y.numel(), dtype=dtype).view(y.shape)
        first = torch.autograd.grad(y, given, dy, retain_graph=True)
        second = torch.autograd.grad(y, given, dy)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        return [y, *first]

    for found, exact in zip(run("triton", torch.float32), run("eager", torch.float64), strict=True):
        # A dozen products and sums of float32, some of them cancelling.
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)

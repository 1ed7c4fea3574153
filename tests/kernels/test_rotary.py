"""Rotary embedding and norms of heads: values, gradients, in place, any layout."""

import dataclasses

import pytest
import torch
from accuracy import assert_bits
from places import (
    BF16,
    DEVICE,
    PLACE,
    at,
    check_all,
    check_error,
    compiled,
    double,
    far_apart,
    ids,
    misaligned,
    normal,
    run,
    target,
)  # fmt: skip
from tiers import pairwise

from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec
from fused_remat.steps.rotary import RotaryTables, pack_heads, rotary_bwd, rotary_fwd
from fused_remat.triton import rotary

F32 = torch.float32
DTYPES = [BF16, F32]
# Query heads, key heads, width of a head, elements rotated.
HEADS = at(
    [(32, 8, 128, 128), (16, 16, 64, 32), (12, 4, 96, 96), (8, 1, 256, 64), (3, 1, 33, 10)],
    [(1, 1, 2, 2), (3, 1, 7, 2), (4, 2, 6, 6), (12, 4, 24, 8), (16, 2, 33, 0)],
    [(8, 2, 128, 128), (4, 4, 64, 32), (3, 1, 96, 96), (2, 1, 256, 64), (3, 1, 33, 10)],
)
SOME = HEADS[2]
ROWS, SEQ = at((2051, 300), (23, 5), (37, 11))
TOKEN0 = 7  # from the middle of a sequence to that of another
NORM = pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


BATCHED = at([False], [False, True])
NEEDS_GRAD = at(["x q k"], ["x q k", "x", "q k", "k"])


def cases(*axes):
    """All of them on a GPU, else enough for every pair of values."""
    every = pairwise(*axes)
    return at([pytest.param(*case.values) for case in every], every)


def call_of(heads, dtype=F32, interleaved=False, norm=False, batched=False, table=F32):
    """A call, with a table for each sequence if `batched`."""
    nhead, kv_heads, width, rotated = heads
    cos = sin = None
    if rotated:
        lead = (-(-(ROWS + TOKEN0) // SEQ), SEQ) if batched else (SEQ,)
        angle = normal(F32, *lead, rotated // 2, scale=3.0)
        cos, sin = angle.cos().to(table), angle.sin().to(table)
    spec = AttentionSpec(
        num_heads=nhead, num_kv_heads=kv_heads, head_dim=width, scale=1.0,
        rotary=RotarySpec(interleaved=interleaved) if rotated else None,
        head_norm=NormSpec(kind="rms_norm", eps=1e-6) if norm else None,
    )  # fmt: skip
    weights = normal(dtype, 2, width, shift=1.0).unbind() if norm else (None, None)
    return RotaryTables(spec, cos, sin, *weights, TOKEN0, SEQ)


def tokens_of(heads, dtype=F32, rows=ROWS):
    """Packed heads, in rows an odd number of elements apart."""
    return misaligned(normal(dtype, rows, (heads[0] + 2 * heads[1]) * heads[2]))


def wide(call):
    """The call in float64, for the exact result."""
    names = ("cos", "sin", "q_weight", "k_weight")
    given = double(*(getattr(call, name) for name in names))
    return dataclasses.replace(call, **dict(zip(names, given, strict=True)))


def backward(dy, x, call, marks, owned=False):
    return run(rotary_bwd, dy, x, call, marks, owned)


def exact_backward(dy, x, call, marks):
    return rotary_bwd(*double(dy, x), wide(call), marks, False)


@pytest.mark.parametrize(
    "heads, dtype, norm, interleaved, batched",
    cases(HEADS, DTYPES, [False, True], [False, True], BATCHED),
    **ids,
)
def test_forward(heads, dtype, norm, interleaved, batched):
    x, call = tokens_of(heads, dtype), call_of(heads, dtype, interleaved, norm, batched)
    y = run(rotary_fwd, x, call)
    check_error(y, rotary_fwd(x.double(), wide(call)))
    same = x.clone()
    assert_bits([run(rotary_fwd, same, call, same)], [y], "in place")
    values = heads[1] * heads[2]
    assert torch.equal(y[:, -values:], x[:, -values:])


@pytest.mark.parametrize(
    "heads, dtype, needs_grad, interleaved, batched",
    cases(HEADS, DTYPES, ["of the rotation", *NEEDS_GRAD], [False, True], BATCHED),
    **ids,
)
def test_backward(heads, dtype, needs_grad, interleaved, batched):
    """Of the rotation alone, or of the norm too."""
    norm, dy = needs_grad != "of the rotation", tokens_of(heads, dtype)
    call = call_of(heads, dtype, interleaved, norm, batched)
    x = tokens_of(heads, dtype) if norm else None
    marks = tuple(name in needs_grad.split() for name in "xqk") if norm else (True, False, False)
    exact = exact_backward(dy, x, call, marks)
    # Sums cancel, and so does dx in a head of two: what is left has lost some digits.
    factors = (compiled(1, 8), compiled(5, 8)) if norm else ()
    for owned in (dy, dy.contiguous()):  # two layouts, whose sums have different orders
        found = backward(owned, x, call, marks)
        check_all(found, exact, *factors)
    same = backward(owned, x, call, marks, owned=True)
    assert_bits(same, found, "in place, and in another run")
    if marks[0] and (PLACE != "aten" or not norm):
        assert same[0].data_ptr() == owned.data_ptr()


LAYOUTS = ["(B, H, S, E)", "(B, S, H, E)", "columns apart"]


@pytest.mark.parametrize(
    "heads, dtype, layout, interleaved, batched",
    cases(HEADS, DTYPES, LAYOUTS, [False, True], BATCHED),
    **ids,
)
def test_heads_are_packed_rotated_back_and_summed(heads, dtype, layout, interleaved, batched):
    """As attention's backward leaves them: in any layout, which changes no bit."""
    nhead, kv_heads, width, _ = heads
    batch, (seq, total) = 3, (SEQ, (nhead + 2 * kv_heads) * width)
    call = call_of(heads, dtype, interleaved, batched=batched)
    call = dataclasses.replace(call, token0=SEQ if batched else 0)
    given = [normal(dtype, batch, n, seq, width) for n in (nhead, kv_heads, kv_heads)]
    same = {
        "(B, H, S, E)": lambda x: x,
        "(B, S, H, E)": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "columns apart": lambda x: torch.stack((x, x), -1)[..., 0],
    }[layout]
    packed = torch.cat([x.transpose(1, 2) for x in given], 2).reshape(-1, total)
    for tables in (call, dataclasses.replace(call, cos=None, sin=None)):
        exact = exact_backward(packed, None, tables, (True, False, False))[0]
        dx, again = (misaligned(torch.full_like(packed, torch.nan)) for _ in "xy")
        sums = run(pack_heads, tuple(map(same, given)), tables, dx, True)
        check_error(dx, exact, 1 if tables is call else 0)
        check_error(sums, exact.sum(0), dtype=F32 if PLACE != "aten" else dtype)
        assert run(pack_heads, tuple(given), tables, again, False) is None
        assert_bits([dx], [again])
    x, dx = tokens_of(heads, dtype, len(packed)), torch.full_like(packed, torch.nan)
    call = call_of(heads, dtype, interleaved, True, batched)
    call = dataclasses.replace(call, token0=SEQ if batched else 0)
    found = run(rotary_bwd, dx, x, call, (True,) * 3, True, tuple(map(same, given)))
    assert PLACE == "aten" or found[0] is dx
    assert_bits(found, backward(packed, x, call, (True,) * 3), "norms read heads, too")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 8, 8), (3, 1, 10, 4)], ids=str)
def test_without_values(heads, norm):
    """The rows end with the keys, and the results are those of rows with values."""
    x, call = tokens_of(heads), call_of(heads, interleaved=True, norm=norm)
    rest, last = dataclasses.replace(call, values=False), (heads[0] + heads[1]) * heads[2]
    assert_bits([run(rotary_fwd, x[:, :last], rest)], [run(rotary_fwd, x, call)[:, :last]])
    marks = (True, norm, norm)
    dx, *dweights = backward(x, x if norm else None, call, marks)
    part = x[:, :last]
    found = backward(part, part if norm else None, rest, marks)
    assert_bits(found, [dx[:, :last], *dweights])


@NORM
@INTERLEAVED
def test_layouts_that_are_read_as_they_are_or_copied(norm, interleaved):
    """Columns apart, rows expanded; tables of different strides, expanded, of 16 bits."""
    x, dy = tokens_of(SOME, torch.float16), tokens_of(SOME, torch.float16)
    call = call_of(SOME, torch.float16, interleaved, norm, True, torch.float16)
    apart = torch.stack((x, x), -1)[..., 0]
    flat = dy[:1].expand_as(dy)
    cos, sin = call.cos[:1].expand(len(call.cos), -1, -1), call.sin.mT.contiguous().mT
    odd = dataclasses.replace(call, cos=cos, sin=sin)
    for given in (apart, flat):
        check_error(run(rotary_fwd, given, odd), rotary_fwd(given.double(), wide(odd)))
    if norm:
        exact = exact_backward(flat, apart, odd, (True,) * 3)
        check_all(
            backward(flat, apart, odd, (True,) * 3), exact, compiled(1, 8), float32=compiled(5, 8)
        )


@pytest.mark.gpu
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@INTERLEAVED
def test_what_is_not_rotated_meets_no_angle(value, interleaved):
    """0 times infinity is not a number: values, and elements after R, come out as they went in."""
    call = call_of((2, 2, 7, 4), interleaved=interleaved)
    heads = normal(F32, ROWS, 6, 7)
    heads[:, 4:, 2] = heads[:, :4, 5] = value
    made = torch.zeros(ROWS, 42, device=DEVICE)
    rotary.rotary_fwd(heads.flatten(1), call, made, target()).run()
    assert torch.equal(made.isfinite(), rotary_fwd(heads.flatten(1), call).isfinite())
    assert int(made.isfinite().logical_not().sum()) == ROWS * 6


def test_a_head_of_zeros_without_eps_spoils_no_other():
    """rstd of the lanes beyond the last row or head is no part of a sum."""
    heads = (3, 1, 4, 4)
    call = call_of(heads, norm=True)
    spec = dataclasses.replace(call.spec, head_norm=NormSpec(kind="rms_norm", eps=0.0))
    call = dataclasses.replace(call, spec=spec)
    found = backward(tokens_of(heads), tokens_of(heads), call, (True,) * 3)
    assert all(t.isfinite().all() for t in found)


@NORM
def test_rows_more_than_2_31_elements_apart(norm):
    """The same bits as of a copy, in place too."""
    call, x = call_of((4, 2, 6, 6), torch.float16, norm=norm), far_apart(3, 48)
    marks, y = (True, False, False), run(rotary_fwd, x.clone(), call)
    assert_bits(*(backward(t, t if norm else None, call, marks) for t in (x, x.clone())))
    assert_bits([run(rotary_fwd, x, call), run(rotary_fwd, x, call, x)], [y, y])

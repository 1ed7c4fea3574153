"""Attention's kernels, interpreted, against blocks of ATen products in float64."""

import pytest
import torch
from attention_cases import (
    FACTOR,
    INF,
    KEY,
    SMALL,
    attention_call,
    check,
    exact_results,
    normal,
    packed_heads,
    run_kernels,
    spoiled_results,
)  # fmt: skip
from poisoned import TARGET, check_error

from fused_remat import ops, random
from fused_remat.triton import attention
from fused_remat.triton.tables import AttentionTile

DTYPES = [torch.float32, torch.float16]
SIZES = (2, 2, 2, 18, 24, 16)
SQUARE = (2, 2, 2, 20, 20, 16)
BLOCKS = (2, 1, 1, 33, 40, 16)  # with blocks that no query reaches the edge of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 8, 16, 20, 40, 72, 256])
def test_heads_of_any_width(width, dtype):
    check((1, 2, 2, 18, 18, width), dtype, right=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "tile",
    [AttentionTile(16, 32, 4, 1), AttentionTile(32, 16, 4, 1, split=True)],
    ids=["wide", "high, split"],
)
def test_tiles(tile, dtype):
    check(SQUARE, dtype, tile=tile, right=0, p=0.2)
    check(SIZES, dtype, tile=tile, value_width=24)


@pytest.mark.parametrize("lengths", [(33, 40), (40, 33), (1, 17), (48, 48)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (9, 0), (0, 0), (3, 20), (20, -1)], ids=str)
def test_windows(lengths, window):
    left, right = window
    check((1, 1, 1, *lengths, 16), left=left, right=right)


@pytest.mark.parametrize("far", [2**31 - 1, 2**40])
def test_windows_wider_than_32_bits_hold_sums_of(far):
    cu = torch.tensor([0, 13, 30])
    for packed in ({}, {"cu_q": cu, "cu_k": cu}):
        check((1, 1, 1, 33, 40, 16), left=far, right=far, **packed)
        check((1, 1, 1, 33, 40, 16), left=far, right=0, **packed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 1), (6, 2), (3, 3)], ids=str)
def test_shared_key_heads(heads, dtype):
    check((2, *heads, 20, 20, 16), dtype, right=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_soft_cap_and_scale(dtype):
    check(SQUARE, dtype, softcap=1.5, right=0)
    check(SIZES, dtype, softcap=1.5, scale=1.0)
    check(SIZES, dtype, scale=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(18, 24), (1, 2, 18, 24), (2, 1, 18, 24), (2, 2, 18, 24), (1, 1, 1, 24), (2, 1, 18, 1)],
    ids=str,
)
def test_additive_masks_of_every_broadcast_and_their_gradient(shape, dtype):
    torch.manual_seed(1)
    mask = torch.randn(shape)
    mask[..., 5:8] = -INF
    mixed = {"p": 0.25} if dtype == torch.float32 else {"softcap": 2.0, "right": 2}
    check(SIZES, dtype, mask=mask.to(dtype), mask_grad=True, **mixed)


@pytest.mark.parametrize("keeps", [False, True], ids=["excludes", "keeps"])
@pytest.mark.parametrize("padded", [False, True], ids=["mask", "mask and padding"])
def test_bool_masks(keeps, padded):
    mask = torch.rand(2, 1, 33, 40, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[:, :, :, :16] = keeps  # a block that is seen whole
    mask[:, :, :16, 16:] = not keeps  # and one that is not seen
    mask[0, 0, 20] = not keeps  # a row that sees nothing
    padding = torch.arange(40) >= torch.tensor([[40], [13]]) if padded else None
    found = check(
        BLOCKS, mask=mask, true_means="attend" if keeps else "exclude", padding=padding, right=3
    )
    assert (found["out"].view(2, 33, 16)[0, 20] == 0.0).all()
    assert found["lse"][0, 0, 20] == INF


def test_both_masks_have_their_gradient():
    padding = torch.randn(2, 24)
    padding[1, 20:] = -INF
    check(SIZES, mask=torch.randn(2, 18, 24)[:, None], padding=padding, mask_grad=True)


def test_rows_that_are_far_everywhere_keep_their_digits():
    """-1e9 for every key is the same softmax as none: scores must not be lost beside it."""
    mask = torch.zeros(18, 24)
    mask[4], mask[5, 20:], mask[6] = -1e9, -1e9, 3e4
    check(SIZES, mask=mask)
    least, none = torch.full((18, 24), torch.finfo(torch.float32).min), torch.zeros(18, 24)
    found, expected = (
        spoiled_results(SIZES, torch.float32, lambda *heads: heads, mask=m) for m in (least, none)
    )
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("far", [200.0, -1e9])
def test_far_rows_beside_blocks_that_nothing_is_added_to(far):
    """What a row is shifted by must be taken from all of its blocks, or from none."""
    mask = torch.zeros(18, 40)
    mask[:9, 35] = far
    check((2, 2, 2, 18, 40, 16), mask=mask)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_key_lengths_and_what_lies_beyond(dtype):
    """What is beyond the lengths may be anything: it is not read, not even multiplied by 0."""

    def spoil(q, k, v):
        k[0, :, 7:], v[0, :, 7:] = torch.nan, INF
        return q, k, v

    lengths = torch.tensor([7, 24])
    options = dict(lengths=lengths, p=0.2)
    for right in (-1, 0) if dtype == torch.float32 else (0,):
        clean = check(SIZES, dtype, right=right, **options)
        spoiled = spoiled_results(SIZES, dtype, spoil, right=right, **options)
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(spoiled[name], clean[name]), name


def test_key_lengths_of_any_stride():
    apart, one = torch.tensor([[7, 1], [24, 1]])[:, 0], torch.tensor(9).expand(2)
    check(SIZES, lengths=apart)
    check(SIZES, lengths=one, mask=torch.randn(18, 24), mask_grad=True)


def test_blocks_that_are_excluded_are_not_read():
    """NaN in keys that no query of a tile may see does not reach it, by a window or by a mask."""
    sizes, visible = (1, 1, 1, 32, 64, 16), torch.ones(32, 64, dtype=torch.bool)
    visible[:16, 32:], visible[16:, :32] = False, False

    def spoil(q, k, v):
        v[:, :, 32:] = torch.nan
        return q, k, v

    def nan_rows(sizes, **options):
        call = attention_call(sizes, **options)
        _, heads = packed_heads(sizes, torch.float32, sizes[5], normal)
        out, lse = torch.empty(sizes[3], sizes[5]), torch.empty(1, 1, sizes[3])
        for launch in attention.forward(*spoil(*heads), call, out, lse, TARGET, SMALL):
            launch.run()
        return out.isnan().any(1)

    assert nan_rows(sizes).all()
    by_mask = nan_rows(sizes, mask=visible)
    assert not by_mask[:16].any() and by_mask[16:].all()
    by_window = nan_rows((1, 1, 1, 64, 64, 16), right=0)
    assert not by_window[:32].any() and by_window[32:].all()


@pytest.mark.parametrize("row0", [0, 2**32 - 30])
def test_dropout_is_the_generators_in_forward_and_backward(row0):
    sizes, p = (2, 2, 1, 20, 24, 16), 0.4
    keep = random.keep_scale(KEY, row0, 80, 24, p, torch.float32).view(2, 2, 20, 24)
    q, v = torch.zeros(2, 2, 20, 16), torch.eye(24).expand(2, 1, 24, 24)
    k, dout = torch.zeros(2, 1, 24, 16), torch.zeros(2, 20, 2, 24)
    call = attention_call(sizes, p=p, row0=row0)
    forward = (
        run_kernels(call, q, k, v, dout.view(40, 48))["out"].view(2, 20, 2, 24).transpose(1, 2)
    )
    torch.testing.assert_close(forward, keep / 24)
    dout[0, 3, 1] = 1.0  # of query (0, 1, 3): dv of key n is keep / 24 in every column
    dv = run_kernels(call, q, k, v, dout.view(40, 48))["dv"]
    torch.testing.assert_close(dv[0, 0], (keep[0, 1, 3] / 24)[:, None].expand(24, 24))


@pytest.mark.parametrize("how", ["expanded", "transposed", "misaligned", "apart"])
def test_operands_of_any_layout(how):
    def lay_out(q, k, v):
        if how == "expanded":
            return q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)
        if how == "transposed":
            return tuple(x.mT.contiguous().mT for x in (q, k, v))
        if how == "apart":
            return tuple(x.repeat_interleave(3, 2)[:, :, ::3] for x in (q, k, v))
        return tuple(torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in (q, k, v))

    check(SQUARE, inputs=lay_out, right=0)


@pytest.mark.parametrize("which", range(3), ids=["query", "key", "value"])
def test_gradients_of_heads_whose_rows_are_not_side_by_side(which):
    """The gradients are laid out like the heads, but a kernel writes rows side by side."""
    torch.manual_seed(0)
    heads = [torch.randn(2, 2, 20, 16) for _ in range(3)]
    heads[which] = heads[which].mT.contiguous().mT
    heads = [x.requires_grad_() for x in heads]
    found, expected = (
        torch.autograd.grad(ops.attention(*heads, is_causal=True, backend=b).square().sum(), heads)
        for b in ("triton", "eager")
    )
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_descriptors_where_they_can_serve():
    """Tensor descriptors for aligned heads; pointers for others, and where rows end early."""

    def uses_descriptors(sizes, **options):
        call = attention_call(sizes, **options)
        _, (q, k, v) = packed_heads(sizes, torch.float32, sizes[5], normal)
        out, lse = normal(sizes[0] * sizes[3], sizes[1] * sizes[5], torch.float32), None
        *_, launch = attention.forward(q, k, v, call, out, lse, TARGET, SMALL)
        return launch.constants["TMA"]

    assert uses_descriptors(SQUARE) and uses_descriptors((1, 2, 1, 5, 9, 20))
    assert not uses_descriptors((1, 2, 1, 5, 9, 5))
    assert not uses_descriptors(SQUARE, lengths=torch.tensor([3, 4]))


def test_heads_more_than_2_31_elements_apart():
    q = torch.empty(2**31 + 4096, dtype=torch.float16).as_strided((1, 2, 18, 16), (0, 2**31, 16, 1))
    q.copy_(torch.randn(1, 2, 18, 16))
    _, (_, k, v) = packed_heads((1, 2, 2, 18, 18, 16), torch.float16, 16, normal)
    call, dattn = attention_call((1, 2, 2, 18, 18, 16)), normal(18, 32, torch.float16)
    found = run_kernels(call, q, k, v, dattn)
    for name, exact in exact_results(call, q, k, v, dattn).items():
        if exact is not None:
            check_error(found[name], exact, torch.float16, FACTOR)


def test_rebuilding_gives_the_same_bits():
    results = [check(SIZES, torch.float16, p=0.1, right=0) for _ in range(2)]
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.equal(results[0][name], results[1][name])

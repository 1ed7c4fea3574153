"""Attention's kernels, interpreted, against blocks of ATen products in float64."""

import dataclasses

import pytest
import torch
from poisoned import TARGET, check_error, check_margin, poisoned

from fused_remat import ops, random
from fused_remat.backends import eager_attention
from fused_remat.backends.base import AttentionCall
from fused_remat.backends.triton import attention, attention_masks
from fused_remat.backends.triton.tables import AttentionTile

DTYPES = [torch.float32, torch.float16]
KEY = random.site_keys(torch.tensor(5))[random.ATTENTION]
INF = float("inf")
SMALL = AttentionTile(16, 16, 4, 1)
# float32: sums of products in another order, and exponentials to 2 ulp of an argument of about 5.
# float16: the result, the probabilities and their gradients are rounded, by 2**-11 each.
FACTOR = 2


def attention_call(sizes, **options):
    """A call over (B, H, Hkv, S_q, S_k, E) without anything, but for `options`."""
    b, h, kv, m, n, e = sizes
    plain = dict(
        batch=b, nhead=h, kv_heads=kv, q_len=m, kv_len=n, scale=e**-0.5, left=-1, right=-1,
        softcap=0.0, mask=None, padding=None, dmask=None, dpadding=None, mask_keeps=True,
        mask_grad=False, p=0.0, site_key=KEY, row0=0,
    )  # fmt: skip
    return AttentionCall(**(plain | options))


def packed_heads(sizes, dtype, value_width, make):
    """q, k, v as views of one matrix of packed projections, by `make(rows, width, dtype)`."""
    b, h, kv, m, n, e = sizes
    if m == n and value_width == e:
        whole = make(b * m, (h + 2 * kv) * e, dtype)
        heads = whole.view(b, m, h + 2 * kv, e).transpose(1, 2)
        return [whole], heads.split_with_sizes((h, kv, kv), 1)
    made = [
        make(b * m, h * e, dtype),
        make(b * n, kv * e, dtype),
        make(b * n, kv * value_width, dtype),
    ]
    shapes = ((b, m, h, e), (b, n, kv, e), (b, n, kv, value_width))
    return made, tuple(x.view(s).transpose(1, 2) for x, s in zip(made, shapes, strict=True))


def normal(rows, width, dtype):
    return torch.randn(rows, width).to(dtype)


def with_buffers(call, dtype):
    """The call with zeros for the gradients of those masks that have one."""
    wanted = {}
    for name in ("mask", "padding"):
        mask = getattr(call, name)
        if call.mask_grad and mask is not None and mask.is_floating_point():
            wanted[f"d{name}"] = torch.zeros(mask.shape, dtype=dtype)
    return dataclasses.replace(call, **wanted)


def exact_results(call, q, k, v, dattn):
    """Output and gradients by name, in float64."""
    q, k, v, dattn = (x.double() for x in (q, k, v, dattn))
    call = with_buffers(call, torch.float64)
    out, lse = eager_attention.forward(q, k, v, call, widen=False)
    grads = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    eager_attention.backward(dattn, q, k, v, out, lse, call, grads, widen=False)
    masks = {"dmask": call.dmask, "dpadding": call.dpadding}
    return dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True)) | masks


def check(sizes, dtype=torch.float32, value_width=None, tile=SMALL, inputs=None, **options):
    """Run the kernels on poisoned outputs; every result within rounding of float64's."""
    torch.manual_seed(0)
    call = attention_call(sizes, **options)
    width = sizes[5] if value_width is None else value_width
    _, (q, k, v) = packed_heads(sizes, dtype, width, normal)
    if inputs is not None:
        q, k, v = inputs(q, k, v)
    dattn = normal(sizes[0] * sizes[3], sizes[1] * width, dtype)
    found = run_kernels(call, q, k, v, dattn, tile)
    for name, exact in exact_results(call, q, k, v, dattn).items():
        if exact is not None:
            # A gradient that is all cancellation is 0 to rounding of what it is the difference of.
            terms = call.batch * call.nhead * call.q_len * call.kv_len / exact.numel()
            size = torch.full(
                (exact.numel(),), 0.1 * max(1.0, terms if "mask" in name else 1.0) ** 0.5
            )
            mine = torch.cat([found[name].double().flatten(), size])
            check_error(mine, torch.cat([exact.flatten(), size]), dtype, FACTOR)
    return found


def run_kernels(call, q, k, v, dattn, tile=SMALL):
    sizes = (call.batch, call.nhead, call.kv_heads, call.q_len, call.kv_len, q.shape[-1])
    out = poisoned(*dattn.shape, q.dtype)
    lse = torch.full((call.batch, call.nhead, call.q_len), torch.nan)
    for launch in attention.forward(q, k, v, call, out, lse, TARGET, tile):
        launch.run()
    check_margin(out)
    assert not lse.isnan().any()
    call = with_buffers(call, torch.float32)
    wholes, grads = packed_heads(sizes, q.dtype, v.shape[-1], poisoned)
    launches = attention.backward(dattn, q, k, v, out, lse, call, grads, TARGET, (tile, tile))
    for launch in launches:
        launch.run()
    for whole in wholes:
        check_margin(whole)
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *grads), strict=True))
    return found | {"dmask": call.dmask, "dpadding": call.dpadding, "lse": lse}


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
    found = check(BLOCKS, mask=mask, mask_keeps=keeps, padding=padding, right=3)
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


def spoiled_results(sizes, dtype, spoil, **options):
    torch.manual_seed(0)
    call = attention_call(sizes, **options)
    _, (q, k, v) = packed_heads(sizes, dtype, sizes[5], normal)
    dattn = normal(sizes[0] * sizes[3], sizes[1] * sizes[5], dtype)
    return run_kernels(call, *spoil(q, k, v), dattn)


PACKED = {
    "self": ([0, 5, 5, 33, 40], None),
    "tail": ([0, 9, 21], None),
    "head": ([3, 20, 38], None),
    "cross": ([0, 5, 20, 20, 40], [0, 17, 21, 30, 36]),
    "none": ([0], None),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 1)], ids=str)
def test_packed_sequences(name, window):
    cu_q, cu_k = (None if c is None else torch.tensor(c, dtype=torch.int32) for c in PACKED[name])
    cu_k = cu_q if cu_k is None else cu_k
    options = dict(cu_q=cu_q, cu_k=cu_k, left=window[0], right=window[1], p=0.2)
    sizes = (1, 2, 1, 40, 40, 16)
    clean = check(sizes, **options)

    def spoil(q, k, v):
        q[:, :, int(cu_q[-1]) :] = torch.nan
        k[:, :, int(cu_k[-1]) :], v[:, :, int(cu_k[-1]) :] = torch.nan, INF
        return q, k, v

    spoiled = spoiled_results(sizes, torch.float32, spoil, **options)
    for found in ("out", "dq", "dk", "dv"):
        assert torch.equal(spoiled[found], clean[found]), found


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_tokens_of_no_sequence_may_hold_anything(softcap):
    """NaN in them, and in their gradient, reaches no other token, and their own gradient is 0."""
    torch.manual_seed(0)
    cu = torch.tensor([3, 20, 38])
    call = attention_call((1, 2, 1, 40, 40, 16), cu_q=cu, cu_k=cu, softcap=softcap)
    outside = torch.ones(40, dtype=torch.bool)
    outside[3:38] = False
    _, heads = packed_heads((1, 2, 1, 40, 40, 16), torch.float32, 16, normal)
    dattn = normal(40, 32, torch.float32)
    clean = run_kernels(call, *heads, dattn)
    for x in heads:
        x[:, :, outside] = torch.nan
    dattn[outside] = torch.nan
    spoiled = run_kernels(call, *heads, dattn)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(spoiled[name], clean[name]), name
    assert (spoiled["dq"][:, :, outside] == 0.0).all()


@pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])
def test_bounds_beyond_the_tokens_reach_no_others(by_keys):
    """On a GPU nobody checks them: nothing beyond the tensors may be read for it."""
    cu = torch.tensor([-5, 9, 1000])
    call = attention_call((1, 1, 1, 40, 40, 16), cu_q=cu, cu_k=cu)
    bounds, launch = attention_masks._bounds(call, 80, 80, by_keys)
    launch.run()
    assert bounds.min() >= 0 and bounds.max() <= 40


def test_packed_sequences_with_masks():
    cu = torch.tensor([0, 13, 30])
    mask, padding = torch.randn(1, 2, 40, 40), torch.rand(1, 40) < 0.2
    check(
        (1, 2, 2, 40, 40, 16), cu_q=cu, cu_k=cu, mask=mask, padding=padding, mask_grad=True, right=0
    )


@pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])
@pytest.mark.parametrize("name", PACKED)
def test_intervals_of_packed_sequences(name, by_keys):
    cu_q, cu_k = (None if c is None else torch.tensor(c) for c in PACKED[name])
    call = attention_call(
        (1, 1, 1, 40, 40, 16), cu_q=cu_q, cu_k=cu_q if cu_k is None else cu_k, left=4, right=2
    )
    bounds, launch = attention_masks._bounds(call, 4, 2, by_keys)
    launch.run()
    seen = torch.zeros(40, 40, dtype=torch.bool)
    for i in range(cu_q.numel() - 1):
        for q in range(int(cu_q[i]), int(cu_q[i + 1])):
            at = q + int(call.cu_k[i + 1]) - int(cu_q[i + 1])
            first, last = max(int(call.cu_k[i]), at - 4), min(int(call.cu_k[i + 1]), at + 3)
            seen[q, first:last] = True
    row = torch.arange(40)
    expected = seen.t() if by_keys else seen
    assert torch.equal((row >= bounds[:, :1]) & (row < bounds[:, 1:]), expected)


@pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])
def test_lists_of_blocks(by_keys):
    """Visited is what anything of is seen; without mask arithmetic, what is seen whole."""
    mask = torch.zeros(2, 1, 37, 70)
    mask[0, :, :, 16:32], mask[0, 0, 3, 5], mask[1, :, 16:, :20] = -INF, 0.5, -INF
    padding = torch.zeros(2, 70, dtype=torch.bool)
    padding[1, 50:] = True
    call = attention_call((2, 3, 3, 37, 70, 16), mask=mask, padding=padding, right=4, left=40)
    problem, before = attention_masks.prepare(torch.empty(2, 3, 37, 16), call, TARGET, True)
    blocks, strides, launches = attention_masks.lists(problem, SMALL, by_keys)
    for launch in before + launches:
        launch.run()
    assert blocks.shape[:2] == (2, 1) and strides[1] == 0
    place = torch.arange(37)[:, None] + 33
    window = (torch.arange(70) <= place + 4) & (torch.arange(70) >= place - 40)
    bias = mask[:, 0].masked_fill(padding[:, None], -INF).masked_fill(~window, -INF)
    if by_keys:
        bias = bias.transpose(1, 2)
    rows, cols = bias.shape[1:]
    width = -(-cols // 16)
    for b in range(2):
        for i in range(-(-rows // 16)):
            row = blocks[b, 0, i]
            pieces = [bias[b, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16] for j in range(width)]
            whole = [j for j in range(width) if (pieces[j] == 0).all() and pieces[j].shape[1] == 16]
            partial = [j for j in range(width) if (pieces[j] != -INF).any() and j not in whole]
            assert row[: row[width]].tolist() == partial
            assert sorted(row[width - row[width + 1] : width].tolist()) == whole


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

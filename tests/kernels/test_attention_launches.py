"""Attention's launches: tiles, what is read and written, masks' blocks, quantized heads."""

import dataclasses

import pytest
import torch
from attention_calls import attention_call as call_of
from places import (
    BF16,
    DEVICE,
    PLACE,
    at,
    check_error,
    check_written,
    error_of,
    nan,
    normal,
    poisoned,
    sized,
    target,
)  # fmt: skip
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_remat import random
from fused_remat.execution.choose import ops_for
from fused_remat.formats import Quantized, QuantizedHeads, quantize
from fused_remat.random import Uniform, site_keys
from fused_remat.steps.attention import attention_bwd, attention_fwd
from fused_remat.triton import attention
from fused_remat.triton.tables import AttentionTile

pytestmark = pytest.mark.gpu
# On a GPU the kernels serve no float32, and take the tiles of the tables.
DTYPES = [BF16, torch.float16] if PLACE == "gpu" else [torch.float32, torch.float16]
TILES = {
    "small": AttentionTile(16, 16, 4, 1),
    "wide": AttentionTile(16, 32, 4, 1),
    "high, split": AttentionTile(32, 16, 4, 1, split=True),
} if PLACE != "gpu" else {"of the tables": None}  # fmt: skip
SMALL = TILES.get("small")
INF = float("inf")
NAMES = ("out", "dq", "dk", "dv")
# Exponentials to 2 ulp of an argument of about 5; of 16 bits, the probabilities and their gradients
# are rounded too.
FACTOR = at(2.5, 2)
# (B, H, Hkv, S_q, S_k, E).
SIZES = at((2, 4, 2, 1018, 1032, 64), (2, 2, 2, 18, 24, 16))
SQUARE = at((2, 4, 4, 1032, 1032, 64), (2, 2, 2, 20, 20, 16))
interpreted_only = pytest.mark.skipif(PLACE == "gpu", reason="of the interpreter's small tiles")


def attention_call(sizes, **options):
    """A call over (B, H, Hkv, S_q, S_k, E) without anything, but for `options`."""
    key = random.site_keys(torch.tensor(5, device=DEVICE))[random.ATTENTION]
    return call_of(sizes, **{"site_key": key, **options})


def heads_of(sizes, dtype, value_width=None, make=lambda m, n, dtype: normal(dtype, m, n)):
    """The matrices that `make(rows, width, dtype)` gives, and q, k, v as views of these."""
    b, h, kv, m, n, e = sizes
    v = e if value_width is None else value_width
    if m == n and v == e:  # one packed projection
        whole = make(b * m, (h + 2 * kv) * e, dtype)
        heads = whole.view(b, m, h + 2 * kv, e).transpose(1, 2)
        return [whole], heads.split_with_sizes((h, kv, kv), 1)
    shapes = ((m, h, e), (n, kv, e), (n, kv, v))
    made = [make(b * s, heads * width, dtype) for s, heads, width in shapes]
    views = (x.view(b, *shape).transpose(1, 2) for x, shape in zip(made, shapes, strict=True))
    return made, tuple(views)


def inputs_of(sizes, dtype, value_width=None):
    """q, k, v and the gradient of the output."""
    width = sizes[5] if value_width is None else value_width
    _, heads = heads_of(sizes, dtype, value_width)
    return *heads, normal(dtype, sizes[0] * sizes[3], sizes[1] * width)


def with_buffers(call, dtype):
    """The call with zeros for the gradients of those masks that have one."""
    wanted = {}
    for name in ("mask", "padding"):
        mask = getattr(call, name)
        if call.mask_grad and mask is not None and mask.is_floating_point():
            wanted[f"d{name}"] = torch.zeros(mask.shape, dtype=dtype, device=DEVICE)
    return dataclasses.replace(call, **wanted)


def launched(call, q, k, v, dattn, tile=SMALL):
    """Results of the kernels by name; everything is written, and nothing beside it."""
    spec = call.spec
    sizes = (call.batch, spec.num_heads, spec.num_kv_heads, call.q_len, call.kv_len, q.shape[-1])
    out = poisoned(*dattn.shape, q.dtype)
    lse = nan(call.batch, spec.num_heads, call.q_len)
    for launch in attention.forward(q, k, v, call, out, lse, target(), tile):
        launch.run()
    check_written(out)
    assert not lse.isnan().any()
    call = with_buffers(call, torch.float32)
    wholes, grads = heads_of(sizes, q.dtype, v.shape[-1], poisoned)
    tiles = None if tile is None else (tile, tile)
    for launch in attention.backward(dattn, q, k, v, out, lse, call, grads, target(), tiles):
        launch.run()
    for whole in wholes:
        check_written(whole)
    found = dict(zip(NAMES, (out, *grads), strict=True))
    return found | {"dmask": call.dmask, "dpadding": call.dpadding, "lse": lse}


def check(sizes, dtype=DTYPES[0], value_width=None, tile=SMALL, **options):
    """Every result within rounding of what the operation gives in float64; returns them."""
    call, given = attention_call(sizes, **options), inputs_of(sizes, dtype, value_width)
    found = launched(call, *given, tile)
    q, k, v, dattn = (x.double() for x in given)
    call = with_buffers(call, torch.float64)
    out, lse = attention_fwd(q, k, v, call)
    grads = tuple(torch.full_like(x, torch.nan) for x in (q, k, v))
    attention_bwd(dattn, q, k, v, out, lse, call, grads)
    exact = dict(zip(NAMES, (out, *grads), strict=True))
    exact |= {"dmask": call.dmask, "dpadding": call.dpadding}
    for name, true in exact.items():
        if true is not None:
            # A gradient that is all cancellation is 0 to rounding of what it is the difference of.
            terms = call.batch * call.spec.num_heads * call.q_len * call.kv_len / true.numel()
            size = 0.1 * max(1.0, terms if "mask" in name else 1.0) ** 0.5
            least = torch.full((true.numel(),), size, dtype=torch.float64, device=DEVICE)
            mine = torch.cat([found[name].double().flatten(), least])
            check_error(mine, torch.cat([true.flatten(), least]), FACTOR, name, dtype)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_tiles(tile, dtype):
    check(SQUARE, dtype, tile=TILES[tile], right=0, p=0.2)
    check(SQUARE, dtype, tile=TILES[tile], p=0.3, row0=2**32 - 3)
    check(SIZES, dtype, tile=TILES[tile], value_width=24)
    cu = torch.tensor([0, 5, 5, SQUARE[3] - 3], device=DEVICE)
    check((1, *SQUARE[1:]), dtype, tile=TILES[tile], cu_q=cu, cu_k=cu, softcap=1.5)


@pytest.mark.parametrize("width", [1, 20, 72, 256])
def test_nothing_is_written_beside_heads_of_any_width(width):
    check((1, 2, 1, 18, 18, width), DTYPES[-1], right=0)
    check((1, 1, 1, 33, 40, width), DTYPES[-1], left=9, right=0, value_width=max(1, width - 3))


@pytest.mark.parametrize("keeps", [False, True], ids=["excludes", "keeps"])
@pytest.mark.parametrize("padded", [False, True], ids=["mask", "mask and padding"])
def test_bool_masks(keeps, padded):
    mask = torch.rand(2, 1, 33, 40, device=DEVICE) < 0.5
    mask[:, :, :, :16] = keeps  # a block that is seen whole
    mask[:, :, :16, 16:] = not keeps  # and one that is not seen
    mask[0, 0, 20] = not keeps  # a row that sees nothing
    ends = torch.tensor([[40], [13]], device=DEVICE)
    padding = torch.arange(40, device=DEVICE) >= ends if padded else None
    means = {"true_means": "attend" if keeps else "exclude"}
    found = check((2, 1, 1, 33, 40, 16), mask=mask, padding=padding, right=3, **means)
    assert (found["out"].view(2, 33, 16)[0, 20] == 0.0).all()
    assert found["lse"][0, 0, 20] == INF


def test_rows_that_are_far_everywhere_keep_their_digits():
    """-1e9 for every key is the same softmax as none: scores must not be lost beside it."""
    sizes, mask = (2, 2, 2, 18, 24, 16), torch.zeros(18, 24, device=DEVICE)
    mask[4], mask[5, 20:], mask[6] = -1e9, -1e9, 3e4
    check(sizes, mask=mask)
    least, given = torch.finfo(torch.float32).min, inputs_of(sizes, DTYPES[0])
    found, expected = (
        launched(attention_call(sizes, mask=torch.full_like(mask, far)), *given)
        for far in (least, 0.0)
    )
    for name in NAMES:
        torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("far", [200.0, -1e9])
def test_far_rows_beside_blocks_that_nothing_is_added_to(far):
    """What a row is shifted by must be taken from all of its blocks, or from none."""
    mask = torch.zeros(18, 40, device=DEVICE)
    mask[:9, 35] = far
    check((2, 2, 2, 18, 40, 16), mask=mask)


@interpreted_only
def test_blocks_that_are_excluded_are_not_read():
    """NaN in keys that no query of a tile may see does not reach it, by a window or by a mask."""
    sizes, visible = (1, 1, 1, 32, 64, 16), torch.ones(32, 64, dtype=torch.bool)
    visible[:16, 32:], visible[16:, :32] = False, False

    def nan_rows(sizes, **options):
        q, k, v, _ = inputs_of(sizes, torch.float32)
        v[:, :, 32:] = torch.nan
        out, lse = torch.empty(sizes[3], sizes[5]), torch.empty(1, 1, sizes[3])
        call = attention_call(sizes, **options)
        for launch in attention.forward(q, k, v, call, out, lse, target(), SMALL):
            launch.run()
        return out.isnan().any(1)

    assert nan_rows(sizes).all()
    by_mask = nan_rows(sizes, mask=visible)
    assert not by_mask[:16].any() and by_mask[16:].all()
    by_window = nan_rows((1, 1, 1, 64, 64, 16), right=0)
    assert not by_window[:32].any() and by_window[32:].all()


def test_descriptors_where_they_can_serve():
    """Tensor descriptors for aligned heads; pointers for others, and where rows end early."""

    def uses_descriptors(sizes, **options):
        q, k, v, out = inputs_of(sizes, DTYPES[0])
        call = attention_call(sizes, **options)
        *_, launch = attention.forward(q, k, v, call, out, None, target(), SMALL)
        return launch.constants["TMA"]

    by_descriptors = attention.family(target()) in attention.ATTENTION_BY_DESCRIPTORS
    aligned = (1, 2, 1, 5, 9, at(24, 20))
    assert uses_descriptors(SQUARE) == uses_descriptors(aligned) == by_descriptors
    assert not uses_descriptors((1, 2, 1, 5, 9, 5))
    assert not uses_descriptors(SQUARE, lengths=torch.tensor([3, 4], device=DEVICE))


# --- which keys a query sees

BY_KEYS = pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])


@BY_KEYS
def test_bounds_beyond_the_tokens_reach_no_others(by_keys):
    """On a GPU nobody checks them: nothing beyond the tensors may be read for it."""
    cu = torch.tensor([-5, 9, 1000], device=DEVICE)
    call = attention_call((1, 1, 1, 40, 40, 16), cu_q=cu, cu_k=cu)
    bounds, launch = attention._bounds(call, 80, 80, by_keys)
    launch.run()
    assert bounds.min() >= 0 and bounds.max() <= 40


@interpreted_only
@BY_KEYS
def test_lists_of_blocks(by_keys):
    """Visited is what anything of is seen; without mask arithmetic, what is seen whole."""
    mask = torch.zeros(2, 1, 37, 70)
    mask[0, :, :, 16:32], mask[0, 0, 3, 5], mask[1, :, 16:, :20] = -INF, 0.5, -INF
    padding = torch.zeros(2, 70, dtype=torch.bool)
    padding[1, 50:] = True
    call = attention_call((2, 3, 3, 37, 70, 16), mask=mask, padding=padding, right=4, left=40)
    problem, before = attention.prepare(torch.empty(2, 3, 37, 16), call, target(), True)
    blocks, strides, launches = attention.lists(problem, SMALL, by_keys)
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


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("width", [64, 128])
def test_long_sequences_beside_atens_flash(width, causal):
    length, width = sized(32768, width, tiny=(48, 16))
    sizes = (1, 4, 4, length, length, width)
    call, given = attention_call(sizes, right=0 if causal else -1), inputs_of(sizes, BF16)
    found, (q, k, v, dattn) = launched(call, *given, None), given
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        attn, lse = attention_fwd(q, k, v, call)
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        attention_bwd(dattn, q, k, v, attn, lse, call, grads)
    for name, theirs in zip(NAMES, (attn, *grads), strict=True):
        # Two results in 16 bits, each off by up to 1e-2.
        assert error_of(found[name], theirs) <= 2e-2, name


# --- quantized heads: of 64 and 128 elements dequantized as they are loaded, others before

CASES = {
    "causal": dict(right=0),
    "shared key heads": dict(right=0, kv_heads=2),
    "window and soft-cap": dict(left=7, right=2, softcap=2.0),
    "lengths": dict(lengths=torch.tensor([20, 11], device=DEVICE)),
    "packed sequences": dict.fromkeys(("cu_q", "cu_k"), torch.tensor([0, 13, 40], device=DEVICE)),
    "a mask and its gradient": dict(mask=True, mask_grad=True),
}


# Masks do not depend on the width, nor on the dtype. On a GPU ATen serves some of them.
@interpreted_only
@pytest.mark.parametrize(
    "case, width, dtype",
    [
        *(("shared key heads", width, torch.float16) for width in (64, 128, 20)),
        *((case, 64, DTYPES[0]) for case in CASES),
    ],
    ids=str,
)
def test_gradients_are_those_of_dequantized_heads(case, width, dtype):
    options = dict(CASES[case])
    batch, nhead, tokens = (1, 4, 40) if case == "packed sequences" else (2, 4, 20)
    kv = options.pop("kv_heads", nhead)
    if options.get("mask"):
        options["mask"] = normal(dtype, 1, nhead, tokens, tokens)
    call = attention_call((batch, nhead, kv, tokens, tokens, width), **options)
    table = ops_for("triton", torch.empty(1, device=DEVICE), dtype)
    x = normal(dtype, batch * tokens, (nhead + 2 * kv) * width)
    uniform = Uniform(site_keys(torch.tensor(0, device=DEVICE))[0], 0, *x.shape)
    whole = Quantized("int8", quantize(x, "int8", uniform), x.shape[1], dtype)
    packed = [
        QuantizedHeads(whole, batch, first * width, count, width)
        for first, count in zip((0, nhead, nhead + kv), (nhead, kv, kv), strict=True)
    ]
    plain = [heads.of(whole.tensor()) for heads in packed]
    out, lse = table[attention_fwd](*plain, call)
    dy = torch.randn_like(out)
    made = []
    for heads in (packed, plain):
        mine = with_buffers(call, torch.float32)
        grads = tuple(torch.full(x.shape, torch.nan, dtype=dtype, device=DEVICE) for x in heads)
        table[attention_bwd](dy, *heads, out, lse, mine, grads)
        made.append([*grads, *([mine.dmask] if call.mask_grad else [])])
    for got, expected in zip(*made, strict=True):
        assert torch.equal(got, expected) and expected.isfinite().all()

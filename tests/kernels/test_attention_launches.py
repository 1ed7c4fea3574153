"""Attention's launches: what is read and written, descriptors, long sequences."""

import pytest
import torch
from attention_calls import attention_call as call_of
from places import (
    BF16,
    COMPILED,
    DEVICE,
    at,
    check_error,
    check_written,
    compiled,
    double,
    nan,
    normal,
    poisoned,
    target,
)  # fmt: skip

from fused_remat import random
from fused_remat.steps.attention import attention_bwd, attention_fwd
from fused_remat.triton import attention, attention_masks
from fused_remat.triton.tables import AttentionTile

pytestmark = pytest.mark.gpu
F32, SMALL = torch.float32, AttentionTile(16, 16, 4, 1)
# On a GPU the kernels serve no float32.
DTYPES = [BF16, torch.float16] if COMPILED else [F32, torch.float16]
NAMES = ("out", "dq", "dk", "dv")
# Exponentials to 2 ulp of an argument of about 5; of 16 bits, the probabilities and their gradients
# are rounded too.
FACTOR = compiled(2.5, 2)
# (B, H, Hkv, S_q, S_k, E).
SQUARE = at((2, 4, 4, 1032, 1032, 64), (2, 2, 2, 20, 20, 16), (2, 2, 2, 168, 168, 64))
interpreted_only = pytest.mark.skipif(COMPILED, reason="of the interpreter's small tiles")


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


def launched(call, q, k, v, dattn):
    """Results of the kernels by name; everything is written, and nothing beside it."""
    spec = call.spec
    sizes = (call.batch, spec.num_heads, spec.num_kv_heads, call.q_len, call.kv_len, q.shape[-1])
    out = poisoned(*dattn.shape, q.dtype)
    lse = nan(call.batch, spec.num_heads, call.q_len)
    for launch in attention.forward(q, k, v, call, out, lse, target()):
        launch.run()
    assert not lse.isnan().any()
    wholes, grads = heads_of(sizes, q.dtype, v.shape[-1], poisoned)
    for launch in attention.backward(dattn, q, k, v, out, lse, call, grads, target()):
        launch.run()
    for whole in (out, *wholes):
        check_written(whole)
    return dict(zip(NAMES, (out, *grads), strict=True))


def body(call, q, k, v, dattn):
    """Results of the operation's own body by name."""
    attn, lse = attention_fwd(q, k, v, call)
    grads = tuple(torch.empty_like(t) for t in (q, k, v))
    attention_bwd(dattn, q, k, v, attn, lse, call, grads)
    return dict(zip(NAMES, (attn, *grads), strict=True))


def check(sizes, dtype=DTYPES[-1], value_width=None, **options):
    """Every result within rounding of what the operation gives in float64."""
    call, given = attention_call(sizes, **options), inputs_of(sizes, dtype, value_width)
    found = launched(call, *given)
    for name, true in body(call, *double(*given)).items():
        # A gradient that is all cancellation is 0 to rounding of what it is the difference of.
        least = torch.full_like(true, 0.1)
        mine = torch.cat([found[name].double(), least])
        check_error(mine, torch.cat([true, least]), FACTOR, name, dtype)


@pytest.mark.parametrize("width", [1, 20, 72, 256])
def test_nothing_is_written_beside_heads_of_any_width(width):
    check((1, 2, 1, 18, 18, width), right=0)
    check((1, 1, 1, 33, 40, width), left=9, right=0, value_width=max(1, width - 3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_in_rows_about_2_32(dtype):
    check(SQUARE, dtype, p=0.3, row0=2**32 - 3)


# --- which keys a query sees


BY_KEYS = pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])


@pytest.mark.executed
@BY_KEYS
def test_bounds_beyond_the_tokens_reach_no_others(by_keys):
    """On a GPU nobody checks them: nothing beyond the tensors may be read for it."""
    cu = torch.tensor([-5, 9, 1000], device=DEVICE)
    call = attention_call((1, 1, 1, 40, 40, 16), cu_q=cu, cu_k=cu)
    bounds, launch = attention_masks._bounds(call, 80, 80, by_keys)
    launch.run()
    assert bounds.min() >= 0 and bounds.max() <= 40


@interpreted_only
@BY_KEYS
def test_lists_of_blocks(by_keys):
    """Visited is what anything of is seen; without mask arithmetic, what is seen whole."""
    mask = torch.zeros(2, 1, 37, 70)
    mask[0, :, :, 16:32], mask[0, 0, 3, 5], mask[1, :, 16:, :20] = -torch.inf, 0.5, -torch.inf
    padding = (torch.arange(70) >= 50) & torch.tensor([[False], [True]])
    call = attention_call((2, 3, 3, 37, 70, 16), mask=mask, padding=padding, right=4, left=40)
    problem, before = attention_masks.prepare(torch.empty(2, 3, 37, 16), call, target(), True)
    blocks, strides, launches = attention_masks.lists(problem, SMALL, by_keys)
    for launch in before + launches:
        launch.run()
    assert blocks.shape[:2] == (2, 1) and strides[1] == 0
    far = torch.arange(70) - torch.arange(37)[:, None] - 33
    hidden = padding[:, None] | (far > 4) | (far < -40)
    bias = mask[:, 0].masked_fill(hidden, -torch.inf)
    for row, tile in zip(
        blocks.flatten(0, 2),
        [t for b in bias for t in (b.T if by_keys else b).split(16)],
        strict=True,
    ):
        pieces = tile.split(16, 1)
        whole = [j for j, p in enumerate(pieces) if p.shape[1] == 16 and not p.any()]
        partial = [j for j, p in enumerate(pieces) if p.isfinite().any() and j not in whole]
        width = len(pieces)
        assert row[: row[width]].tolist() == partial
        assert sorted(row[width - row[width + 1] : width].tolist()) == whole

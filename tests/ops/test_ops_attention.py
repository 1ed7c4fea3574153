"""Attention as a function: layouts, shared heads, masks, windows, dropout, and SDPA's results."""

import pytest
import torch
import torch.nn.functional as F
from accuracy import check_error
from reference_attention import heads, mask_of
from reference_ops import attention, compare, in_pieces, normal, results, visible
from tiers import exhaustive, pairwise

from fused_remat import ops, random

# --- layouts


def transposed(x):
    """(B, H, S, E) in the memory of (B, S, H, E), as projections make it."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def turned(x):
    """The last two dimensions the other way round in memory."""
    return x.mT.contiguous().mT


def strided(x):
    return torch.stack((x, x), -1)[..., 0]


def expanded(x):
    return x[:1].expand_as(x)


LAYOUTS = [torch.Tensor.contiguous, transposed, turned, strided, expanded]


@pytest.mark.parametrize("layout, is_causal, tokens", pairwise(LAYOUTS, [True, False], [512, 4]))
def test_inputs_of_any_layout(layout, is_causal, tokens):
    q, k, v = heads(batch=3)
    with in_pieces(tokens):
        compare(
            lambda: ops.attention(*map(layout, (q, k, v)), is_causal=is_causal),
            lambda: attention(*map(layout, (q, k, v)), is_causal=is_causal),
            [q, k, v],
        )


def test_the_output_is_a_view_of_heads_side_by_side():
    """(B, S, H, E): what the next projection reads, without a copy."""
    y = ops.attention(*heads(v_width=3))
    assert y.shape == (2, 4, 5, 3)
    assert y.transpose(1, 2).is_contiguous()


def test_views_of_one_packed_projection():
    packed = normal(2, 5, 8 * 4)

    def split():
        return packed.view(2, 5, 8, 4).transpose(1, 2).split((4, 2, 2), 1)

    compare(lambda: ops.attention(*split()), lambda: attention(*split()), [packed])


def test_one_tensor_as_query_key_and_value():
    x = normal(2, 3, 5, 4)
    compare(lambda: ops.attention(x, x, x), lambda: attention(x, x, x), [x])


@pytest.mark.parametrize(
    "empty, policy, options",
    pairwise(
        [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}, {"q_len": 0, "kv_len": 0}],
        ["full", "lean"],
        [{}, {"is_causal": True}, {"dropout_p": 0.3}, {"window": (1, 1), "softcap": 1.0}],
    ),
)
def test_no_batch_queries_or_keys(empty, policy, options):
    """Without keys every row is 0; nothing gives a gradient."""
    q, k, v = heads(**empty)
    mask = normal(1, 1, q.shape[2], k.shape[2])
    y, *grads = results(lambda: ops.attention(q, k, v, mask, policy=policy, **options), [q, k, v])
    assert y.shape == q.shape and not any(t.any() for t in (y, *grads))
    y, *grads = results(lambda: ops.attention(q, k, v, policy=policy, **options), [q, k, v])
    assert y.shape == q.shape and not any(t.any() for t in (y, *grads))


# --- the same as SDPA

SDPA = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "shared heads": {"enable_gqa": True},
    "one shared head": {"enable_gqa": True},
    "causal, shared": {"is_causal": True, "enable_gqa": True},
    "bool mask": {"attn_mask": visible(9, 9, (-1, 3), False)},
    "float mask": {"attn_mask": normal(3, 1, 9, 9).detach()},
    "mask, shared": {"attn_mask": visible(9, 9, (4, 1), False), "enable_gqa": True},
}


@pytest.mark.parametrize(
    "name, dtype, tokens",
    pairwise(list(SDPA), [torch.float64, torch.float32, torch.bfloat16, torch.float16], [512, 4]),
)
def test_errors_are_no_larger_than_sdpas(name, dtype, tokens):
    options = SDPA[name]
    kv_heads = {"shared heads": 2, "causal, shared": 2, "mask, shared": 2, "one shared head": 1}
    inputs = heads(batch=3, q_len=9, kv_len=9, kv_heads=kv_heads.get(name, 4), dtype=dtype)
    dy = normal(3, 4, 9, 4, seed=5).detach().to(dtype)

    def run(fn, to, **options):
        given = [t.detach().to(to).requires_grad_() for t in inputs]
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            options["attn_mask"] = mask.to(dtype).to(to)
        return results(lambda: fn(*given, **options), given, dy.to(to))

    ours = {k: v for k, v in options.items() if k != "enable_gqa"}
    with in_pieces(tokens):
        got = run(ops.attention, dtype, **ours)
    peer = run(F.scaled_dot_product_attention, dtype, **options)
    exact = run(F.scaled_dot_product_attention, torch.float64, **options)
    check_error(got, peer, exact, ["output", "query", "key", "value"])


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 7), (7, 3), (1, 7), (20, 37)])
@pytest.mark.parametrize("tokens", [512, 4])
def test_causal_aligns_the_last_query_with_the_last_key(q_len, kv_len, tokens):
    """As SDPA with an explicit mask; queries before the first key see nothing, and are 0."""
    q, k, v = heads(q_len=q_len, kv_len=kv_len, kv_heads=4)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    with in_pieces(tokens):
        compare(
            lambda: ops.attention(q, k, v, is_causal=True),
            lambda: F.scaled_dot_product_attention(q, k, v, seen).masked_fill(
                ~seen.any(-1)[:, None], 0.0
            ),
            [q, k, v],
        )


def test_one_causal_query_sees_every_key():
    """Decoding with a cache."""
    q, k, v = heads(q_len=1)
    assert torch.equal(ops.attention(q, k, v), ops.attention(q, k, v, window=(-1, -1)))
    torch.testing.assert_close(ops.attention(q, k, v, is_causal=True), ops.attention(q, k, v))


def test_a_query_head_reads_the_key_head_of_its_group():
    q, k, v = heads(nhead=6, kv_heads=3)
    y = ops.attention(q, k, v)
    for h in range(6):
        alone = ops.attention(q[:, h : h + 1], k[:, h // 2, None], v[:, h // 2, None])
        torch.testing.assert_close(y[:, h : h + 1], alone)


# --- windows and soft-cap


@pytest.mark.parametrize("window", [(0, 0), (2, 0), (0, 3), (-1, 2), (4, -1), (100, 100)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(40, 40), (20, 37), (37, 20)])
def test_a_window_counts_keys_before_and_after_the_querys_place(window, q_len, kv_len):
    """Values that are one-hot show which keys had a part."""
    q, k, _ = heads(q_len=q_len, kv_len=kv_len)
    v = torch.eye(kv_len, dtype=torch.float64).expand(2, 2, -1, -1)
    for tokens in (512, 4):
        with in_pieces(tokens):
            y = ops.attention(q, k, v, window=window)
        assert torch.equal(y != 0, visible(q_len, kv_len, window, False).expand_as(y))


def test_causal_with_a_window_looks_back_only():
    q, k, v = heads(q_len=7)
    both = ops.attention(q, k, v, is_causal=True, window=(2, 5))
    assert torch.equal(both, ops.attention(q, k, v, window=(2, 0)))


def test_a_wide_softcap_is_none_and_a_narrow_one_bounds_scores():
    q, k, v = heads()
    torch.testing.assert_close(ops.attention(q, k, v, softcap=1e6), ops.attention(q, k, v))
    flat = ops.attention(100 * q, 100 * k, v, softcap=1e-9)
    mean = v.mean(2, keepdim=True).repeat_interleave(2, 1)
    torch.testing.assert_close(flat, mean.expand_as(flat))


# --- masks

GRID = (3, 4, 5, 7)
FORMS = [
    (), (7,), (1,), (5, 7), (5, 1), (1, 7), (4, 1, 1), (4, 5, 7), (1, 5, 7), (3, 1, 1, 7),
    (3, 4, 5, 7), (1, 4, 1, 7), (3, 1, 5, 1), (1, 1, 1, 1), (3, 1, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape, kind",
    [
        # Its gradient is summed to each form; of values a few forms stand for the rest.
        *((shape, "wants a gradient") for shape in FORMS),
        *(
            (shape, kind) if shape in ((), (5, 7), (3, 1, 1, 7), GRID) else exhaustive(shape, kind)
            for shape in FORMS
            for kind in ("bool", "float", "float32")
        ),
    ],
)
def test_masks_of_every_form(shape, kind):
    q, k, v = heads(batch=3)
    mask = mask_of(kind, shape)
    leaves = [q, k, v] + ([mask] if mask.requires_grad else [])
    for options in ({}, {"dropout_p": 0.3, "seed": 7}, {"is_causal": True}):
        for tokens in (512, 4):
            with in_pieces(tokens):
                compare(
                    lambda: ops.attention(q, k, v, mask, **options),  # noqa: B023
                    lambda: attention(q, k, v, mask, **options),  # noqa: B023
                    leaves,
                )


@pytest.mark.parametrize("layout", [turned, strided, expanded])
@pytest.mark.parametrize("kind", ["bool", "float", "wants a gradient"])
@pytest.mark.parametrize("shape", [GRID, (5, 7)])
def test_masks_of_any_layout(layout, kind, shape):
    q, k, v = heads(batch=3)
    mask, padding = mask_of(kind, shape), mask_of(kind, (3, 7), seed=8)
    compare(
        lambda: ops.attention(q, k, v, layout(mask), key_padding_mask=layout(padding)),
        lambda: attention(q, k, v, layout(mask), key_padding_mask=layout(padding)),
        [q, k, v] + ([mask, padding] if mask.requires_grad else []),
    )


@pytest.mark.parametrize("kind", ["bool", "float", "float32", "wants a gradient"])
@pytest.mark.parametrize("mask_kind", [None, "bool", "wants a gradient"])
def test_key_padding_of_every_kind(kind, mask_kind):
    """Bool: True is excluded, the other way round from attn_mask."""
    q, k, v = heads(batch=3)
    padding = mask_of(kind, (3, 7))
    mask = None if mask_kind is None else mask_of(mask_kind, (5, 7), seed=6)
    leaves = [t for t in (q, k, v, padding, mask) if t is not None and t.requires_grad]
    for tokens in (512, 4):
        with in_pieces(tokens):
            compare(
                lambda: ops.attention(q, k, v, mask, key_padding_mask=padding),
                lambda: attention(q, k, v, mask, key_padding_mask=padding),
                leaves,
            )


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize("padded", [True, False])
def test_a_row_of_the_lowest_finite_value_is_uniform(options, padded):
    """What models write for -inf: the scores drown in it, and softmax makes them equal."""
    q, k, v = heads(dtype=torch.float32)
    mask = torch.zeros(2, 1, 5, 7)
    mask[0, 0, 2] = mask[1, 0, :, 4:] = torch.finfo(torch.float32).min
    padding = torch.tensor([[0.0] * 6 + [-torch.inf], [0.0] * 7]) if padded else None
    ours, plain = (
        results(lambda: fn(q, k, v, mask, key_padding_mask=padding, **options), [q, k, v])  # noqa: B023
        for fn in (ops.attention, attention)
    )
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)
    seen = 6 if padded else 7
    mean = v[0, :, :seen].mean(1).repeat_interleave(2, 0)
    torch.testing.assert_close(ours[0][0, :, 2], mean.detach())


def test_a_float32_mask_beside_16_bits_is_not_rounded():
    q, k, v = heads(dtype=torch.bfloat16)
    mask = (normal(5, 7) + 100.0).detach().float().requires_grad_()  # bfloat16 steps by 0.5 there
    y, *grads = results(lambda: ops.attention(q, k, v, mask), [mask])
    wide = [t.double().detach() for t in (q, k, v)]
    exact = mask.detach().double().requires_grad_()
    expected, dmask = results(lambda: attention(*wide, exact), [exact])
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=0.02)
    assert grads[0].dtype == torch.float32
    torch.testing.assert_close(grads[0].double(), dmask, rtol=0, atol=0.05)
    y = ops.attention(q, k, v, mask.detach())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=0.02)


def test_a_masks_gradient_is_summed_over_pieces_in_float32():
    """1500 sequences that all want more of the first key: terms of one sign."""
    q, k, v = (t.detach().bfloat16() for t in heads(batch=1500, nhead=1, kv_heads=1))
    v = torch.zeros_like(v).index_fill_(2, torch.tensor(0), 1.0)
    mask = normal(5, 7, dtype=torch.bfloat16)

    def run(fn, dtype):
        leaf = mask.detach().to(dtype).requires_grad_()
        dy = torch.ones(1500, 1, 5, 4, dtype=dtype)
        return results(lambda: fn(*(t.to(dtype) for t in (q, k, v)), leaf), [leaf], dy)

    with in_pieces(5):
        ours = run(ops.attention, torch.bfloat16)
    peer, exact = run(attention, torch.bfloat16), run(attention, torch.float64)
    check_error(ours, peer, exact, ["output", "mask"])


def test_true_in_a_mask_takes_part_and_in_key_padding_is_excluded():
    q, k, v = heads()
    first = torch.zeros(5, 7, dtype=torch.bool)
    first[:, 0] = True
    only = v[:, :, :1].repeat_interleave(2, 1).expand(-1, -1, 5, -1)
    torch.testing.assert_close(ops.attention(q, k, v, first), only)
    padding = ~first[:1].expand(2, -1)
    torch.testing.assert_close(ops.attention(q, k, v, key_padding_mask=padding), only)


@pytest.mark.parametrize(
    "policy, options, kind, dtype",
    pairwise(
        ["full", "lean"], [{}, {"dropout_p": 0.3}, {"softcap": 2.0}, {"window": (3, 1)}],
        ["bool", "float", "wants a gradient", "padding"], [torch.float32, torch.bfloat16],
    ),
)  # fmt: skip
def test_rows_without_keys_are_zero_and_gradients_finite(policy, options, kind, dtype):
    q, k, v = heads(dtype=dtype)
    seen = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(0)) < 0.7
    seen[0, 0, 2] = False
    seen[1] = False  # a whole sequence
    mask, padding = seen, None
    if kind == "padding":
        mask, padding = None, torch.tensor([[False], [True]]).expand(2, 7)
    elif kind != "bool":
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        mask.requires_grad_(kind == "wants a gradient")
    leaves = [q, k, v] + ([mask] if kind == "wants a gradient" else [])
    y, *grads = results(
        lambda: ops.attention(q, k, v, mask, key_padding_mask=padding, policy=policy, **options),
        leaves,
    )
    assert y[0].any() and not y[1].any() and (kind == "padding" or not y[0, :, 2].any())
    assert all(t.isfinite().all() for t in (y, *grads))
    dq, dk, dv = grads[:3]
    assert not any(g[1].any() for g in (dq, dk, dv)) and dk[0].any() and dv[0].any()


# --- dropout


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"window": (3, 1)}, {"window": (9, 0), "softcap": 2.0}]
)
@pytest.mark.parametrize("tokens", [512, 4])
def test_dropout_drops_the_generators_elements(options, tokens):
    """Row (b*H + h)*S_q + q, column key: whatever is skipped, and in which pieces."""
    q, k, v = heads(batch=3, q_len=37, kv_len=41)
    key = random.site_keys(torch.tensor(11))[random.ATTENTION]
    rows = 3 * 4 * 37
    keep = random.keep_scale(key, 0, rows, 41, 0.4, torch.float64).view(3, 4, 37, 41)
    eye = torch.eye(41, dtype=torch.float64).expand(3, 2, -1, -1)

    def explicit():
        probs = ops.attention(q, k, eye, **options)
        return (probs * keep) @ v.repeat_interleave(2, 1)

    with in_pieces(tokens):
        dropped = ops.attention(q, k, v, None, 0.4, seed=11, **options)
        torch.testing.assert_close(dropped, explicit())
        compare(
            lambda: ops.attention(q, k, v, None, 0.4, seed=11, **options),
            lambda: attention(q, k, v, None, 0.4, seed=11, **options),
            [q, k, v],
        )

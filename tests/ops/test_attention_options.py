"""Attention as a function: shared heads, masks, windows, dropout, and SDPA's results."""

import pytest
import torch
import torch.nn.functional as F
from accuracy import check_error
from block_inputs import (
    compare,
    compare_attention,
    heads,
    in_pieces,
    mask_of,
    normal,
    results,
    same_bits,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import attention, plain_block, visible
from tiers import MORE, exhaustive, pairwise

from fused_remat import ops, random
from fused_remat.spec import AttentionSpec, BlockSpec, BranchSpec, NormSpec

# --- layouts and sizes


def test_the_output_is_a_view_of_heads_side_by_side():
    """(B, S, H, E): what the next projection reads, without a copy."""
    y = ops.attention(*heads(v_width=3))
    assert y.shape == (2, 4, 5, 3)
    assert y.transpose(1, 2).is_contiguous()


def test_views_of_one_projection_and_one_tensor_as_query_key_and_value():
    packed, x = normal(2, 5, 8 * 4), normal(2, 3, 5, 4)

    def split():
        return packed.view(2, 5, 8, 4).transpose(1, 2).split((4, 2, 2), 1)

    compare(lambda: ops.attention(*split()), lambda: attention(*split()), [packed])
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
    for mask in (normal(1, 1, q.shape[2], k.shape[2]), None):
        call = lambda: ops.attention(q, k, v, mask, policy=policy, **options)  # noqa: B023, E731
        y, *grads = results(call, [q, k, v])
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
    kv_heads = 1 if name == "one shared head" else 2 if "enable_gqa" in options else 4
    inputs = heads(batch=3, q_len=9, kv_len=9, kv_heads=kv_heads, dtype=dtype)
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
KINDS = ["bool", "float", "float32", "wants a gradient"]


def wanted(*tensors):
    return [t for t in tensors if t is not None and t.requires_grad]


@pytest.mark.parametrize(
    "shape, kind",
    [
        # Its gradient is summed to each form; of values a few forms stand for the rest.
        (shape, kind)
        if kind == "wants a gradient" or shape in ((), (5, 7), (3, 1, 1, 7), GRID)
        else exhaustive(shape, kind)
        for shape in FORMS
        for kind in KINDS
    ],
)
def test_masks_of_every_form(shape, kind):
    args = [*heads(batch=3), mask_of(kind, shape)]
    for options in ({}, {"dropout_p": 0.3, "seed": 7}, {"is_causal": True}):
        compare_attention(args, options, wanted(*args))


def heads_inside(t):
    return t.transpose(-3, -2).contiguous().transpose(-3, -2) if t.dim() > 2 else t


LAYOUTS = {
    "heads inside": heads_inside,
    "turned": lambda t: t.mT.contiguous().mT,
    "strided": lambda t: torch.stack((t, t), -1)[..., 0],
    "expanded": lambda t: t[:1].expand_as(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["bool", "float", "wants a gradient"])
@pytest.mark.parametrize("shape", [GRID, (5, 7)])
def test_inputs_and_masks_of_any_layout(layout, kind, shape):
    lay, args = LAYOUTS[layout], [*heads(batch=3), mask_of(kind, shape)]
    padding = mask_of(kind, (3, 7), seed=8)
    for causal in (False, True):

        def call(fn, causal=causal):
            return fn(*map(lay, args), key_padding_mask=lay(padding), is_causal=causal)

        compare(lambda: call(ops.attention), lambda: call(attention), wanted(*args, padding))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask_kind", [None, "bool", "wants a gradient"])
def test_key_padding_of_every_kind(kind, mask_kind):
    """Bool: True is excluded, the other way round from attn_mask."""
    padding = mask_of(kind, (3, 7))
    args = [*heads(batch=3), mask_kind and mask_of(mask_kind, (5, 7), seed=6)]
    compare_attention(args, {"key_padding_mask": padding}, wanted(*args, padding))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}])
@pytest.mark.parametrize("padded", [True, False])
def test_a_row_of_the_lowest_finite_value_is_uniform(options, padded):
    """What models write for -inf: the scores drown in it, and softmax makes them equal."""
    q, k, v = heads(dtype=torch.float32)
    mask = torch.zeros(2, 1, 5, 7)
    mask[0, 0, 2] = mask[1, 0, :, 4:] = torch.finfo(torch.float32).min
    padding = torch.tensor([[0.0] * 6 + [-torch.inf], [0.0] * 7]) if padded else None
    given = {"key_padding_mask": padding, **options}
    compare(
        lambda: ops.attention(q, k, v, mask, **given),
        lambda: attention(q, k, v, mask, **given),
        [q, k, v],
    )
    mean = v[0, :, : 6 if padded else 7].mean(1).repeat_interleave(2, 0)
    torch.testing.assert_close(ops.attention(q, k, v, mask, **given)[0, :, 2], mean)


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
    y, *grads = results(
        lambda: ops.attention(q, k, v, mask, key_padding_mask=padding, policy=policy, **options),
        wanted(q, k, v, mask),
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
    keep = random.keep_scale(key, 0, 3 * 4 * 37, 41, 0.4, torch.float64).view(3, 4, 37, 41)
    eye = torch.eye(41, dtype=torch.float64).expand(3, 2, -1, -1)
    with in_pieces(tokens):
        probs = ops.attention(q, k, eye, **options)
        dropped = ops.attention(q, k, v, None, 0.4, seed=11, **options)
        torch.testing.assert_close(dropped, (probs * keep) @ v.repeat_interleave(2, 1))
        compare(
            lambda: ops.attention(q, k, v, None, 0.4, seed=11, **options),
            lambda: attention(q, k, v, None, 0.4, seed=11, **options),
            [q, k, v],
        )


# --- everything together


@st.composite
def calls(draw):
    """Tensors and options of `ops.attention`: of padded or of packed sequences."""
    kv_heads, kinds = draw(st.integers(1, 3)), st.sampled_from([None, *KINDS[:2], KINDS[3]])
    nhead, sides = kv_heads * draw(st.integers(1, 3)), {}
    batch, q_len, kv_len = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 40)),
        draw(st.integers(0, 40)),
    )
    if draw(st.booleans()):  # bounds of up to four sequences, and tokens of none around them
        batch, count, sizes = 1, draw(st.integers(0, 4)), []
        for side in "qk":
            steps = [draw(st.integers(0, 3)), *(draw(st.integers(0, 20)) for _ in range(count))]
            sides[f"cu_seqlens_{side}"] = torch.tensor(steps).cumsum(0)
            sizes.append(max(1, sum(steps) + draw(st.integers(0, 3))))
        q_len, kv_len = sizes
    widths = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    qkv = heads(batch, nhead, kv_heads, q_len, kv_len, *widths)
    mask_kind, padding_kind = draw(kinds), draw(kinds)
    grid = (batch, nhead, q_len, kv_len)
    shape = [n if draw(st.booleans()) else 1 for n in grid][draw(st.integers(0, 4)) :]
    options = {
        "dropout_p": draw(st.sampled_from([0.0, 0.3])),
        "is_causal": draw(st.booleans()),
        "window": draw(st.just((-1, -1)) | st.tuples(st.integers(-1, 9), st.integers(-1, 9))),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "seed": draw(st.integers(0, 99)),
        "key_padding_mask": padding_kind and mask_of(padding_kind, (batch, kv_len), seed=8),
    }
    return [*qkv, mask_kind and mask_of(mask_kind, shape)], options | sides


@settings(max_examples=100 * MORE)
@given(calls(), st.sampled_from([512, 50, 4]), st.sampled_from(["full", "lean"]))
def test_any_options_together(call, tokens, policy):
    args, options = call
    with in_pieces(tokens):
        compare(
            lambda: ops.attention(*args, policy=policy, **options),
            lambda: attention(*args, **options),
            wanted(*args, options["key_padding_mask"]),
        )


GRADCHECKED = [
    {"is_causal": True},
    {"dropout_p": 0.3, "seed": 3},
    {"window": (2, 0), "dropout_p": 0.3, "seed": 3},
    {"softcap": 0.7, "scale": 1.3},
    {"key_padding_mask": torch.tensor([[False] * 6 + [True], [True] * 7])},
    {"key_padding_mask": normal(2, 7), "dropout_p": 0.2, "seed": 1},
]


@pytest.mark.parametrize("options", GRADCHECKED)
@pytest.mark.parametrize("shape", [None, (5, 1), (2, 1, 1, 7)])
def test_gradcheck_of_the_options(options, shape):
    padding = options.get("key_padding_mask")
    others = wanted(None if shape is None else normal(*shape), padding)

    def fn(q, k, v, *rest):
        mask = None if shape is None else rest[0]
        given = {"key_padding_mask": rest[-1]} if wanted(padding) else {}
        return ops.attention(q, k, v, mask, **options | given)

    assert torch.autograd.gradcheck(fn, [*heads(v_width=3), *others], fast_mode=True)


# --- what may not change


@pytest.mark.parametrize(
    "name, changed",
    [
        ("attn_mask", mask_of("bool", (7, 7))),
        ("attn_mask", mask_of("float", (7, 7))),
        ("key_padding_mask", mask_of("bool", (1, 7))),
        ("key_lengths", torch.tensor([3])),
        ("cu_seqlens_q", torch.tensor([0, 3, 5])),
        ("cu_seqlens_k", torch.tensor([0, 3, 5])),
    ],
)
def test_changing_masks_and_lengths_raises(name, changed):
    qkv, given = heads(1, q_len=7), {name: changed}
    if name.startswith("cu"):
        given = {n: torch.tensor([0, 3, 5]) for n in ("cu_seqlens_q", "cu_seqlens_k")} | given
    y = ops.attention(*qkv, **given)
    changed.zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_changing_the_output_raises_where_it_is_kept():
    qkv = heads()
    expected = torch.autograd.grad(2 * ops.attention(*qkv, policy="full").sum(), qkv)
    y = ops.attention(*qkv, policy="full").mul_(2.0)
    assert same_bits(torch.autograd.grad(y.sum(), qkv), expected)
    y = ops.attention(*qkv, policy="lean").mul_(2.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


# --- the block


@pytest.mark.parametrize("kv_heads", [None, 1, 2])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("tokens", [512, 4])
def test_attention_block_is_its_parts(kv_heads, norm, biased, tokens):
    """Query heads first, then key heads, then value heads; a float mask with gradient."""
    kv, width, e = kv_heads or 4, 8, 3
    x, mask, padding = normal(3, 5, width), normal(4, 5, 5), torch.zeros(3, 5, dtype=torch.bool)
    padding[1, 3:] = True
    rows = (4 + 2 * kv) * e
    w = {"norm.weight": normal(width), "norm.bias": normal(width, seed=1),
         "qkv.weight": normal(rows, width), "qkv.bias": normal(rows),
         "proj.weight": normal(width, 4 * e), "proj.bias": normal(width, seed=2)}  # fmt: skip
    w |= {} if biased else dict.fromkeys(("norm.bias", "qkv.bias", "proj.bias"))
    options = {"softcap": 3.0, "scale": 0.4, "window": (3, 2)}
    op = AttentionSpec(num_heads=4, num_kv_heads=kv, head_dim=e, **options)
    branch = BranchSpec(op=op, norm=NormSpec(kind=norm, eps=1e-3))
    spec = BlockSpec(kind="plain", branches=(branch,))
    with in_pieces(tokens):
        compare(
            lambda: ops.attention_block(
                x, *w.values(), 4, mask, kv_heads=kv_heads, key_padding_mask=padding, norm=norm,
                eps=1e-3, policy="fast", **options,
            ),
            lambda: plain_block(spec, w | {"input": x, "mask": mask, "padding": padding}),
            wanted(x, mask, *w.values()),
        )  # fmt: skip

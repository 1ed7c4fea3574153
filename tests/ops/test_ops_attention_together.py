"""Attention as a function: any options together, the block around it, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_attention import heads, mask_of
from reference_ops import CASES, attention, compare, in_pieces, normal, results
from tiers import MORE

from fused_remat import ops

# --- everything together


@st.composite
def calls(draw):
    """Arguments of `ops.attention`, and which of its tensors are leaves."""
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    nhead = kv_heads * draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, 40)), draw(st.integers(0, 40))
    tensors = heads(
        batch, nhead, kv_heads, q_len, kv_len, draw(st.integers(1, 5)), draw(st.integers(1, 5))
    )
    grid = (batch, nhead, q_len, kv_len)
    kinds = st.sampled_from([None, "bool", "float", "wants a gradient"])
    mask_kind, padding_kind = draw(kinds), draw(kinds)
    mask = padding = None
    if mask_kind:
        shape = [n if draw(st.booleans()) else 1 for n in grid][draw(st.integers(0, 4)) :]
        mask = mask_of(mask_kind, shape)
    if padding_kind:
        padding = mask_of(padding_kind, (batch, kv_len), seed=8)
    options = {
        "dropout_p": draw(st.sampled_from([0.0, 0.3])),
        "is_causal": draw(st.booleans()),
        "window": draw(st.just((-1, -1)) | st.tuples(st.integers(-1, 9), st.integers(-1, 9))),
        "softcap": draw(st.sampled_from([0.0, 1.5])),
        "scale": draw(st.sampled_from([None, 0.3])),
        "seed": draw(st.integers(0, 99)),
        "key_padding_mask": padding,
    }
    tokens = draw(st.sampled_from([512, 50, 4]))
    return [*tensors, mask], options, tokens, draw(st.sampled_from(["full", "lean"]))


@settings(max_examples=60 * MORE)
@given(calls())
def test_any_options_together(call):
    tensors, options, tokens, policy = call
    given = [*tensors, options["key_padding_mask"]]
    leaves = [t for t in given if t is not None and t.requires_grad]
    with in_pieces(tokens):
        compare(
            lambda: ops.attention(*tensors, policy=policy, **options),
            lambda: attention(*tensors, **options),
            leaves,
        )


GRADCHECKED = [
    {"is_causal": True},
    {"dropout_p": 0.3, "seed": 3},
    {"window": (2, 0), "dropout_p": 0.3, "seed": 3},
    {"softcap": 0.7, "scale": 1.3},
    {"key_padding_mask": torch.tensor([[False] * 6 + [True], [True] * 7])},
]


@pytest.mark.parametrize("options", GRADCHECKED)
@pytest.mark.parametrize("shape", [None, (5, 1), (2, 1, 1, 7)])
def test_gradcheck_of_the_options(options, shape):
    inputs = heads(v_width=3) + ([] if shape is None else [normal(*shape)])
    fn = lambda *t: ops.attention(*t, **options)  # noqa: E731
    assert torch.autograd.gradcheck(fn, inputs, fast_mode=True)


def test_gradcheck_of_a_float_key_padding_mask():
    def fn(q, k, v, padding):
        return ops.attention(q, k, v, key_padding_mask=padding, dropout_p=0.2, seed=1)

    assert torch.autograd.gradcheck(fn, (*heads(), normal(2, 7)), fast_mode=True)


# --- what may not change


@pytest.mark.parametrize("kind", ["bool", "float", "padding"])
def test_changing_a_mask_raises(kind):
    q, k, v = heads()
    mask = mask_of("bool" if kind == "padding" else kind, (2, 7) if kind == "padding" else (5, 7))
    named = {"key_padding_mask" if kind == "padding" else "attn_mask": mask}
    y = ops.attention(q, k, v, **named)
    mask.zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


@pytest.mark.parametrize("policy", ["full", "lean"])
def test_changing_the_output_raises_where_it_is_kept(policy):
    q, k, v = heads()
    expected = torch.autograd.grad(2 * ops.attention(q, k, v, policy=policy).sum(), (q, k, v))
    y = ops.attention(q, k, v, policy=policy).mul_(2.0)
    if policy == "lean":
        with pytest.raises(RuntimeError, match="inplace"):
            y.sum().backward()
        return
    got = torch.autograd.grad(y.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


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
    weight, qkv, proj = normal(width), normal((4 + 2 * kv) * e, width), normal(width, 4 * e)
    biases = [normal(width, seed=1), normal((4 + 2 * kv) * e), normal(width, seed=2)]
    bias, qkv_bias, proj_bias = biases if biased else (None, None, None)
    options = {"softcap": 3.0, "scale": 0.4, "window": (3, 2)}

    def parts():
        if norm == "layer_norm":
            normed = F.layer_norm(x, (width,), weight, bias, 1e-3)
        else:
            normed = F.rms_norm(x, (width,), weight, 1e-3) + (0 if bias is None else bias)
        split = (4 * e, kv * e, kv * e)
        q, k, v = (
            t.unflatten(-1, (-1, e)).transpose(1, 2)
            for t in F.linear(normed, qkv, qkv_bias).split(split, -1)
        )
        attn = attention(q, k, v, mask, key_padding_mask=padding, **options)
        return x + F.linear(attn.transpose(1, 2).flatten(2), proj, proj_bias)

    with in_pieces(tokens):
        compare(
            lambda: ops.attention_block(
                x, weight, bias, qkv, qkv_bias, proj, proj_bias, 4, mask, kv_heads=kv_heads,
                key_padding_mask=padding, norm=norm, eps=1e-3, policy="fast", **options,
            ),
            parts,
            [x, mask, weight, qkv, proj, *(biases if biased else [])],
        )  # fmt: skip


@pytest.mark.parametrize("batch", [0, 2])
def test_attention_block_of_nothing(batch):
    case = CASES["attention_block"]
    tensors = case.tensors(batch, seq=0 if batch else 5)
    y, *grads = results(lambda: case.op(tensors, 0.3), list(tensors.values()))
    assert y.shape == tensors["x"].shape and not any(g.any() for g in grads)


# --- errors


def call(q=(2, 4, 5, 8), k=(2, 2, 7, 8), v=(2, 2, 7, 6), mask=None, **options):
    return lambda: ops.attention(*map(torch.zeros, (q, k, v)), mask, **options)


def block(
    x=(2, 5, 8), norm=(8,), bias=(8,), qkv=(24, 8), qb=(24,), proj=(8, 8), pb=(8,), **options
):
    tensors = map(torch.zeros, (x, norm, bias, qkv, qb, proj, pb))
    return lambda: ops.attention_block(*tensors, **({"nhead": 2} | options))


TRUE = torch.ones(5, 7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("attempt", "parts"),
    [
        (call(q=(4, 5, 8)), ["query", "(4, 5, 8)", "(B, heads, S, E)"]),
        (call(v=(2, 7, 6)), ["value", "(2, 7, 6)", "(B, heads, S, E)"]),
        (call(k=(2, 2, 7, 6)), ["key", "(2, 2, 7, 6)", "(2, 4, 5, 8)"]),
        (call(k=(1, 2, 7, 8)), ["key", "(1, 2, 7, 8)", "(2, 4, 5, 8)"]),
        (call(v=(2, 2, 5, 6)), ["value", "(2, 2, 5, 6)", "(2, 2, 7, 8)"]),
        (call(v=(2, 4, 7, 6)), ["value", "(2, 4, 7, 6)", "(2, 2, 7, 8)"]),
        (call(k=(2, 3, 7, 8), v=(2, 3, 7, 6)), ["4 and 3", "(2, 4, 5, 8)", "(2, 3, 7, 8)"]),
        (call(k=(2, 8, 7, 8), v=(2, 8, 7, 6)), ["4 and 8", "(2, 4, 5, 8)", "(2, 8, 7, 8)"]),
        (call(mask=TRUE.T), ["attn_mask", "(7, 5)", "(2, 4, 5, 7)"]),
        (call(mask=TRUE.expand(2, 5, 7)), ["attn_mask", "(2, 5, 7)", "(2, 4, 5, 7)"]),
        (call(mask=TRUE[None, None, None]), ["attn_mask", "(1, 1, 1, 5, 7)", "(2, 4, 5, 7)"]),
        (call(key_padding_mask=TRUE), ["key_padding_mask", "(5, 7)", "(2, 7)"]),
        (call(window=(-2, 0)), ["window", "(-2, 0)"]),
        (call(softcap=-1.0), ["softcap", "-1.0"]),
        (call(dropout_p=1.1), ["dropout_p", "1.1"]),
        (block(x=(5, 8)), ["x has shape (5, 8)", "(B, S, D)"]),
        (block(norm=(7,)), ["norm_weight", "(7,)", "(2, 5, 8)"]),
        (block(bias=(1,)), ["norm_bias", "(1,)", "(2, 5, 8)"]),
        (block(qkv=(24, 7)), ["qkv_weight", "(24, 7)", "(2, 5, 8)"]),
        (block(qkv=(25, 8)), ["qkv_weight", "(25, 8)", "multiples of 6", "(2, 5, 8)"]),
        (block(qb=(8,)), ["qkv_bias", "(8,)", "(24, 8)"]),
        (block(proj=(8, 7)), ["proj_weight", "(8, 7)", "(8, 8)", "(24, 8)"]),
        (block(pb=(1,)), ["proj_bias", "(1,)", "(8, 8)"]),
        (block(nhead=4, kv_heads=3), ["4 and 3"]),
        (block(nhead=0), ["0 and 0"]),
        (block(norm=(8,), residual_dropout_p=2.0), ["residual_dropout_p", "2.0"]),
        (block(attn_mask=TRUE), ["attn_mask", "(5, 7)", "(2, 2, 5, 5)"]),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_raise_and_are_named(attempt, parts):
    with pytest.raises(ValueError) as error:
        attempt()
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16])
def test_masks_of_another_dtype_or_device_raise(name, dtype):
    shape = (5, 7) if name == "attn_mask" else (2, 7)
    for mask in (torch.zeros(shape, dtype=dtype), torch.zeros(shape, device="meta")):
        with pytest.raises(RuntimeError, match=name):
            ops.attention(*heads(), **{name: mask})

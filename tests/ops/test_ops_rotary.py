"""Rotary position embedding and head norms: alone and in the attention block, and what raises."""

import pytest
import torch
from accuracy import check_error
from reference_ops import compare, in_pieces, normal, results
from reference_rotary import (
    BATCH,
    HEADS,
    SEQ,
    TOKENS,
    Heads,
    block,
    block_plain,
    block_tensors,
    every_heads,
    op,
    plain,
)  # fmt: skip
from tiers import exhaustive, pairwise

from fused_remat import ops

heads = every_heads

# --- values and gradients


@pytest.mark.parametrize(
    "heads, tokens, layout",
    pairwise(list(HEADS), TOKENS, ["contiguous", "strided", "expanded"]),
    indirect=["heads"],
)
def test_rotary_is_plain_pytorchs(heads, tokens, layout):
    base, tables, weights = normal(BATCH, SEQ, heads.packed), heads.tables(), heads.weights()

    def x():
        if layout == "strided":
            return torch.stack((base, base), -1)[..., 0]
        return base[:1].expand_as(base) if layout == "expanded" else base

    with in_pieces(tokens):
        compare(
            lambda: op(x(), heads, tables, weights),
            lambda: plain(x(), heads, tables, weights),
            [base, *weights.values()],
        )


@pytest.mark.parametrize(
    "heads, tokens, policy", pairwise(list(HEADS), TOKENS, ["full", "none"]), indirect=["heads"]
)
def test_the_attention_block_is_plain_pytorchs(heads, tokens, policy):
    t = block_tensors(heads)
    with in_pieces(tokens):
        compare(
            lambda: block(t, heads, policy=policy), lambda: block_plain(t, heads), [*t.values()]
        )


@pytest.mark.parametrize("policy", ["full", exhaustive("none")])
def test_gradcheck(heads, policy):
    t = block_tensors(heads)

    def fn(*values):
        return block(dict(zip(t, values, strict=True)), heads, policy=policy)

    assert torch.autograd.gradcheck(fn, [*t.values()], fast_mode=True)
    x, weights = normal(BATCH, SEQ, heads.packed), heads.weights()

    def alone(x, *values):
        given = dict(zip(weights, values, strict=True))
        return op(x, heads, heads.tables(), given, policy=policy)

    assert torch.autograd.gradcheck(alone, [x, *weights.values()], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", [torch.float32, None])
def test_errors_are_no_larger_than_pytorchs(heads, dtype, table):
    x, weights = normal(BATCH, SEQ, heads.packed, dtype=dtype), heads.weights(dtype)
    tables = heads.tables(table or dtype)
    given = x, *weights.values()
    dy = normal(*x.shape, seed=99).detach().to(dtype)

    def run(fn, to):
        x, *values = (t.detach().to(to).requires_grad_() for t in given)
        named = dict(zip(weights, values, strict=True))
        wide = None if tables is None else tuple(t.to(torch.promote_types(t.dtype, to))
                                                 for t in tables)  # fmt: skip
        return results(lambda: fn(x, heads, wide, named), [x, *values], dy.to(to))

    exact, peer = run(plain, torch.float64), run(plain, dtype)
    check_error(run(op, dtype), peer, exact, ["output", "qkv", *weights])


def test_float32_tables_beside_16_bits_are_not_rounded():
    """An angle whose sine bfloat16 cannot tell from that of another one, on numbers that it has."""
    heads, x = HEADS["half"], torch.zeros(1, SEQ, HEADS["half"].packed, dtype=torch.bfloat16)
    x[..., :3] = 256.0
    sin = torch.full((SEQ, 3), 2.0**-2 + 2.0**-11)  # 256 * sin = 64.125: bfloat16 says 64
    cos = torch.full((SEQ, 3), 0.5 + 2.0**-9)  # 128.5
    y = op(x, heads, (cos, sin), {})
    x1, x2 = 128.0, 64.0  # 128.5 rounds to even
    assert (y[..., :3] == x1).all() and (y[..., 3:6] == x2).all()
    x[..., 3:6] = 256.0
    y = op(x, heads, (cos, sin), {})
    # 128.5 + 64.125 = 192.625, rounded once to 193 (steps of 1); rounded tables give 192.
    assert (y[..., 3:6] == 193.0).all()


@pytest.mark.parametrize("tokens", [512, 16])
def test_weight_gradients_of_16_bits_are_summed_in_float32(tokens):
    """2000 sequences of one sign: sums in bfloat16 would stop at 256 terms."""
    heads = Heads(1, 1, 4, 0, norm=True)
    x = normal(2000, SEQ, heads.packed, dtype=torch.bfloat16).detach().abs() + 1
    weights, dy = heads.weights(torch.bfloat16), torch.ones_like(x)
    with in_pieces(tokens):
        ours = results(lambda: op(x, heads, None, weights), [*weights.values()], dy)
    wide = {n: w.detach().double().requires_grad_() for n, w in weights.items()}
    exact = results(lambda: plain(x.double(), heads, None, wide), [*wide.values()], dy.double())
    for a, b in zip(ours[1:], exact[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-8, atol=0)  # one rounding


def test_one_wanted_gradient_at_a_time(heads):
    t = block_tensors(heads)
    every = results(lambda: block(t, heads), [*t.values()])
    for name, expected in zip(t, every[1:], strict=True):
        alone = {n: v.detach().requires_grad_(n == name) for n, v in t.items()}
        for policy in ("full", "none"):
            _, got = results(lambda: block(alone, heads, policy=policy), [alone[name]])  # noqa: B023
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", [(0, SEQ), (BATCH, 0)])
def test_no_batch_and_no_tokens(shape):
    heads = HEADS["norm half"]
    x, weights = normal(*shape, heads.packed), heads.weights()
    angle = torch.zeros(shape[1], 3, dtype=torch.float64)
    y, *grads = results(lambda: op(x, heads, (angle, angle), weights), [x, *weights.values()])
    assert y.shape == x.shape and not any(g.any() for g in grads)


def test_one_sequences_tables_serve_the_whole_batch():
    heads, x = HEADS["half"], normal(BATCH, SEQ, HEADS["half"].packed)
    cos, sin = heads.tables()
    expected = op(x, heads, (cos, sin), {})
    assert torch.equal(op(x, heads, (cos[None], sin[None]), {}), expected)
    whole = cos.expand(BATCH, -1, -1), sin.expand(BATCH, -1, -1)
    with in_pieces(4):
        assert torch.equal(op(x, heads, whole, {}), expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(interleaved):
    """What it is for: places moved by any number, the same attention."""
    heads = Heads(4, 2, 6, 6, interleaved)
    t = block_tensors(heads)
    rate = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    at = [torch.arange(start, start + SEQ)[:, None] * rate for start in (0, 11)]
    first, later = (block(t, heads, (a.cos(), a.sin())) for a in at)
    torch.testing.assert_close(first, later)
    assert not torch.allclose(first, block(t, heads, (2 * at[0].cos(), at[0].sin())))


def test_agreement_with_transformers():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    heads = Heads(4, 2, 6, 6)
    x, (cos, sin) = normal(BATCH, SEQ, heads.packed), heads.tables()
    q, k, v = x.unflatten(-1, (-1, 6)).transpose(1, 2).split((4, 2, 2), 1)
    twice = (torch.cat((t, t), -1)[None] for t in (cos, sin))
    q, k = modeling.apply_rotary_pos_emb(q, k, *twice)
    expected = torch.cat((q, k, v), 1).transpose(1, 2).flatten(2)
    torch.testing.assert_close(op(x, heads, (cos, sin), {}), expected)


# --- errors


@pytest.mark.parametrize("name", ["cos", "sin", "q_norm_weight"])
def test_changing_what_backward_reads_raises(name):
    heads = HEADS["norm half"]
    x, weights, tables = normal(BATCH, SEQ, heads.packed), heads.weights(), heads.tables()
    y = op(x, heads, tables, weights)
    changed = {"cos": tables[0], "sin": tables[1], **weights}[name]
    with torch.no_grad():
        changed.add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def call(cos=(SEQ, 3), sin=None, qkv=(2, SEQ, 48), nhead=4, kv_heads=2, **weights):
    sizes = {n: torch.zeros(s) if isinstance(s, tuple) else s for n, s in weights.items()}
    cos = torch.zeros(cos) if isinstance(cos, tuple) else cos
    sin = torch.zeros_like(cos) if sin is None else sin
    return lambda: ops.rotary(torch.zeros(qkv), cos, sin, nhead, kv_heads, **sizes)


ONE, ZERO = torch.ones(SEQ, 3), torch.zeros(SEQ, 3)


@pytest.mark.parametrize(
    ("attempt", "error", "parts"),
    [
        (call(qkv=(SEQ, 48)), ValueError, ["qkv", "(7, 48)", "(B, S, 8·E)"]),
        (call(qkv=(2, SEQ, 50)), ValueError, ["qkv", "(2, 7, 50)", "4 query", "2 key"]),
        (call(nhead=3), ValueError, ["3 and 2"]),
        (call(nhead=2.0), TypeError, ["2.0"]),
        (call(cos=(SEQ, 4)), ValueError, ["cos", "(7, 4)", "(7, R/2)", "at most 6"]),
        (call(cos=(SEQ, 0)), ValueError, ["cos", "(7, 0)"]),
        (call(cos=(SEQ - 1, 3)), ValueError, ["cos", "(6, 3)", "(2, 7, R/2)"]),
        (call(cos=(3, SEQ, 3)), ValueError, ["cos", "(3, 7, 3)"]),
        (call(cos=(2, SEQ, 4, 3)), ValueError, ["cos", "(2, 7, 4, 3)"]),
        (call(cos=()), ValueError, ["cos", "()"]),
        (call(sin=torch.zeros(SEQ, 2)), ValueError, ["sin", "(7, 2)", "(7, 3)"]),
        (call(sin=torch.zeros(2, SEQ, 3)), ValueError, ["sin", "(2, 7, 3)", "(7, 3)"]),
        (call(q_norm_weight=(6,)), ValueError, ["go together"]),
        (call(q_norm_weight=(6,), k_norm_weight=(5,)), ValueError, ["k_norm_weight", "(5,)"]),
        (lambda: ops.rotary(torch.zeros(2, SEQ, 48), None, None, 4, 2), ValueError, ["nothing"]),
        (lambda: ops.rotary(torch.zeros(2, SEQ, 48), ONE, None, 4, 2), TypeError, ["NoneType"]),
        (call(cos=ONE.double()), RuntimeError, ["cos", "float64", "float32"]),
        (call(cos=ONE.half()), RuntimeError, ["cos", "float16"]),
        (call(cos=ONE.to("meta")), RuntimeError, ["cos", "meta", "cpu"]),
        (call(sin=ZERO.clone().requires_grad_()), RuntimeError, ["sin requires a gradient"]),
        (call(q_norm_weight=torch.ones(6).double(), k_norm_weight=(6,)), RuntimeError,
         ["q_norm_weight", "float64"]),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_raise_and_are_named(attempt, error, parts):
    with pytest.raises(error) as raised:
        attempt()
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize("rope", [ONE, (ONE,), (ONE, None), (ONE, ONE, ONE), 10000.0])
def test_rope_takes_two_tensors(rope):
    t = {n: v.detach().float() for n, v in block_tensors(HEADS["half"]).items()}
    with pytest.raises(TypeError, match=r"rope takes two Tensors|sin must be a Tensor, got None"):
        block(t, HEADS["half"], rope)


def test_tables_of_two_dtypes_raise():
    x = torch.zeros(2, SEQ, 48, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"sin is torch\.bfloat16 and cos torch\.float32"):
        ops.rotary(x, ONE, ZERO.bfloat16(), 4, 2)


def test_tables_that_want_a_gradient_serve_where_there_is_none():
    with torch.no_grad():
        ops.rotary(torch.zeros(2, SEQ, 48), ONE.clone().requires_grad_(), ZERO, 4, 2)

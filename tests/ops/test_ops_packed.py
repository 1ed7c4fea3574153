"""Attention over packed sequences and over padded ones of their own lengths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_ops import CASES, attention, bounds, compare, in_pieces, key_lengths, normal, results
from tiers import MORE, exhaustive, pairwise

from fused_remat import ops

# Bounds of queries and of keys (None: the same), and how many tokens there are of each.
PACKS = {
    "self": ([0, 3, 20, 57], None, 57, 57),
    "one sequence": ([0, 19], None, 19, 19),
    "one token each": ([0, 1, 2, 3], None, 3, 3),
    "one token in all": ([0, 0, 1], None, 1, 1),
    "fewer queries, and more": ([0, 4, 27, 30], [0, 9, 17, 51], 30, 51),
    "without queries, keys, both": ([0, 0, 5, 5, 9], [0, 3, 3, 3, 8], 9, 8),
    "tokens of none": ([2, 7, 9], [1, 4, 10], 12, 13),
    "no sequence": ([4], [3], 9, 7),
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"window": (2, 1)},
    "causal window": {"is_causal": True, "window": (5, 3)},
    "soft-cap": {"softcap": 1.5, "scale": 0.7},
    "dropout": {"dropout_p": 0.3, "seed": 7},
    "causal dropout": {"dropout_p": 0.3, "seed": 7, "is_causal": True},
    "all": {"dropout_p": 0.3, "seed": 7, "window": (7, 2), "softcap": 1.5},
}
OF_NONE = PACKS["tokens of none"]


def packed(pack, dtype=torch.int64):
    cu_q, cu_k, *_ = pack
    return {
        "cu_seqlens_q": torch.tensor(cu_q, dtype=dtype),
        "cu_seqlens_k": None if cu_k is None else torch.tensor(cu_k, dtype=dtype),
    }


def heads(q_len, kv_len, batch=1, nhead=4, kv_heads=2, width=4, v_width=None, **kw):
    shapes = (
        (nhead, q_len, width),
        (kv_heads, kv_len, width),
        (kv_heads, kv_len, v_width or width),
    )
    return [normal(batch, *shape, seed=i, **kw) for i, shape in enumerate(shapes)]


def mask_of(kind, shape, seed=4):
    values = normal(*shape, seed=seed)
    if kind == "bool":
        return (values > -0.5).detach()
    return values if kind == "wants a gradient" else values.detach()


@pytest.fixture
def poisoned():
    """New memory is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def compare_both(args, options, leaves):
    """Whole, and in blocks of 16 query rows."""
    for tokens in (512, 4):
        with in_pieces(tokens):
            compare(
                lambda: ops.attention(*args, **options), lambda: attention(*args, **options), leaves
            )


# --- packed sequences


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "pack, options",
    [
        # Every pack under two options, every option on two packs; random ones are below.
        (pack, option)
        if option in ("causal dropout", "all") or pack in ("self", "fewer queries, and more")
        else exhaustive(pack, option)
        for pack in PACKS
        for option in OPTIONS
    ],
)
def test_a_query_sees_the_keys_of_its_own_sequence(pack, options):
    qkv = heads(*PACKS[pack][2:], v_width=3)
    compare_both(qkv, OPTIONS[options] | packed(PACKS[pack]), qkv)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("options", ["plain", "causal", "all"])
def test_shared_heads(kv_heads, options):
    qkv = heads(57, 57, kv_heads=kv_heads)
    compare_both(qkv, OPTIONS[options] | packed(PACKS["self"]), qkv)


@pytest.mark.parametrize(
    "pack, options, dtype",
    pairwise(
        list(PACKS), ["plain", "causal", "causal window", "soft-cap"],
        [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    ),
)  # fmt: skip
def test_each_sequence_is_as_if_it_were_alone(pack, options, dtype):
    """Bit for bit: the same routine on the same memory."""
    q_len, kv_len = PACKS[pack][2:]
    qkv, options = heads(q_len, kv_len, dtype=dtype), OPTIONS[options]
    given = packed(PACKS[pack], torch.int32)
    dy = normal(1, q_len, 4, 4, seed=9).detach().to(dtype).transpose(1, 2)
    whole = results(lambda: ops.attention(*qkv, **options, **given), qkv, dy)
    expected = [torch.zeros_like(t) for t in whole]
    cu_q, cu_k = PACKS[pack][0], PACKS[pack][1] or PACKS[pack][0]
    for n in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[n : n + 2]), slice(*cu_k[n : n + 2])
        parts = [t[:, :, part] for t, part in zip(qkv, (rows, keys, keys), strict=True)]
        y, *grads = results(lambda: ops.attention(*parts, **options), qkv, dy[:, :, rows])  # noqa: B023
        expected[0][:, :, rows] = y
        expected[1:] = [a + b for a, b in zip(expected[1:], grads, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(whole, expected, strict=True))


GRID = (1, 4, 12, 13)
FORMS = [
    (), (13,), (1,), (12, 13), (12, 1), (1, 13), (4, 1, 1), (4, 12, 13), (1, 12, 13),
    (1, 4, 12, 13), (1, 4, 1, 13), (1, 1, 12, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape, kind, options",
    pairwise(FORMS, ["bool", "float", "wants a gradient"], ["plain", "causal", "all"]),
)
def test_masks_are_over_all_tokens(shape, kind, options):
    qkv = heads(*GRID[2:])
    mask, padding = mask_of(kind, shape), mask_of(kind, (1, 13), seed=8)
    leaves = [t for t in (*qkv, mask) if t.requires_grad]
    given = OPTIONS[options] | packed(OF_NONE)
    compare_both([*qkv, mask], given, leaves)
    leaves += [padding] if padding.requires_grad else []
    compare_both([*qkv, mask], given | {"key_padding_mask": padding}, leaves)


def test_masks_of_one_query_and_of_one_key():
    """Dimensions of size 1 that are the whole, beside sequences that have none of it."""
    for q_len, cu_q, kv_len, cu_k in ((1, [0, 0, 1], 9, [0, 4, 9]), (9, [0, 4, 9], 1, [0, 1, 1])):
        qkv, mask = heads(q_len, kv_len), normal(q_len, kv_len)
        compare_both([*qkv, mask], packed((cu_q, cu_k)), [*qkv, mask])


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("policy", ["full", "lean"])
@pytest.mark.parametrize("options", ["plain", "causal", "all"])
def test_tokens_of_no_sequence_are_zero_and_never_read(options, policy):
    q, k, v = heads(12, 13, dtype=torch.float32)
    with torch.no_grad():
        for t, inside in ((q, slice(2, 9)), (k, slice(1, 10)), (v, slice(1, 10))):
            kept = t[:, :, inside].clone()
            t.fill_(torch.nan)[:, :, inside] = kept
    fn = lambda: ops.attention(q, k, v, policy=policy, **OPTIONS[options], **packed(OF_NONE))  # noqa: E731
    for found, inside in zip(results(fn, [q, k, v]), (slice(2, 9),) * 2 + (slice(1, 10),) * 2,
                             strict=True):  # fmt: skip
        assert found[:, :, inside].isfinite().all() and found[:, :, inside].any()
        found[:, :, inside] = 0.0
        assert torch.equal(found, torch.zeros_like(found))


def test_dropout_draws_the_bits_of_the_whole():
    """One-hot values show them: the same elements as without packing, where both see the key."""
    q, k = torch.zeros(2, 1, 4, 40, 2, dtype=torch.float64)
    eye = torch.eye(40, dtype=torch.float64).expand(1, 4, 40, 40)
    cu = torch.tensor([0, 7, 25, 40])
    for tokens in (512, 4):
        with in_pieces(tokens):
            whole = ops.attention(q, k, eye, None, 0.4, seed=3)
            parts = ops.attention(q, k, eye, None, 0.4, seed=3, cu_seqlens_q=cu)
        own = torch.block_diag(*(torch.ones(n, n) for n in (7, 18, 15))).bool()
        assert torch.equal(parts != 0, (whole != 0) & own)
        assert 0.3 < (parts != 0).sum() / (4 * own.sum()) < 0.9


@st.composite
def packs(draw):
    """Bounds of some sequences of at most 20 tokens, and tokens of none around them."""
    count, sides = draw(st.integers(0, 4)), []
    for _ in range(2):
        steps = [draw(st.integers(0, 3))] + [draw(st.integers(0, 20)) for _ in range(count)]
        sides.append(torch.tensor(steps).cumsum(0))
    tokens = [max(1, int(side[-1]) + draw(st.integers(0, 3))) for side in sides]
    return sides, tokens


@settings(max_examples=40 * MORE)
@given(packs(), st.data())
def test_any_bounds_and_options_together(pack, data):
    (cu_q, cu_k), (q_len, kv_len) = pack
    draw = data.draw
    kv_heads = draw(st.integers(1, 2))
    qkv = heads(q_len, kv_len, nhead=kv_heads * draw(st.integers(1, 2)), kv_heads=kv_heads)
    grid, kinds = (1, qkv[0].shape[1], q_len, kv_len), ["bool", "float", "wants a gradient", None]
    kind, padding_kind = draw(st.sampled_from(kinds)), draw(st.sampled_from(kinds))
    shape = [n if draw(st.booleans()) else 1 for n in grid][draw(st.integers(0, 2)) :]
    mask = None if kind is None else mask_of(kind, shape)
    padding = None if padding_kind is None else mask_of(padding_kind, (1, kv_len), seed=8)
    options = OPTIONS[draw(st.sampled_from(list(OPTIONS)))] | {"key_padding_mask": padding}
    leaves = [t for t in (*qkv, mask, padding) if t is not None and t.requires_grad]
    with in_pieces(draw(st.sampled_from([512, 4]))):
        compare(
            lambda: ops.attention(*qkv, mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options),
            lambda: attention(*qkv, mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options),
            leaves,
        )


# --- key lengths

LENGTHS = torch.tensor([7, 0, 3])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (5, 7), (20, 7), (20, 33)])
def test_keys_beyond_a_length_are_excluded(q_len, kv_len, options):
    """Causal and windows go by the padded sizes; without a key a sequence is 0."""
    qkv = heads(q_len, kv_len, batch=3, v_width=3)
    given = OPTIONS[options] | {"key_lengths": LENGTHS.int()}
    compare_both(qkv, given, qkv)
    assert not ops.attention(*qkv, **given)[1].any()


@pytest.mark.parametrize("options", ["plain", "causal", "all"])
@pytest.mark.parametrize("kind", ["bool", "float", "wants a gradient"])
def test_key_lengths_beside_masks(kind, options):
    qkv = heads(5, 7, batch=3)
    padding, mask = mask_of(kind, (3, 7)), mask_of(kind, (3, 1, 5, 7), seed=6)
    given = OPTIONS[options] | {"key_lengths": LENGTHS}
    leaves = [t for t in (*qkv, padding) if t.requires_grad]
    compare_both(qkv, given | {"key_padding_mask": padding}, leaves)
    leaves += [mask] if mask.requires_grad else []
    compare_both([*qkv, mask], given | {"key_padding_mask": padding}, leaves)
    if padding.requires_grad:
        fn = lambda: ops.attention(*qkv, key_padding_mask=padding, **given)  # noqa: E731
        _, grad = results(fn, [padding])
        beyond = torch.arange(7) >= LENGTHS[:, None]
        assert not grad[beyond].any() and grad[~beyond].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [512, 4])
def test_key_lengths_are_a_padding_mask_by_another_name(dtype, tokens):
    qkv = heads(5, 7, batch=3, dtype=dtype)
    padding = torch.arange(7) >= LENGTHS[:, None]
    with in_pieces(tokens):
        for options in OPTIONS.values():
            ours, masked = (
                results(lambda: ops.attention(*qkv, **options, **one), qkv)  # noqa: B023
                for one in ({"key_lengths": LENGTHS}, {"key_padding_mask": padding})
            )
            assert all(torch.equal(a, b) for a, b in zip(ours, masked, strict=True))


# --- the block


def test_a_block_of_packed_sequences_is_one_of_each():
    """Tokens of no sequence pass through: x and proj's bias."""
    case = CASES["attention_block_packed"]
    tensors = case.tensors(seq=15)
    x, (cu, _) = tensors["x"], bounds(tensors["x"])
    weights = [t for name, t in tensors.items() if name != "x"]

    def block(x, **options):
        return ops.attention_block(x, *weights, 4, is_causal=True, kv_heads=2, **options)

    def parts():
        spans = zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)
        of_none = x[:, cu[-1] :] + tensors["proj_bias"]
        return torch.cat([*(block(x[:, a:b]) for a, b in spans), of_none], 1)

    for tokens in (512, 4):
        with in_pieces(tokens):
            compare(lambda: block(x, cu_seqlens=cu), parts, list(tensors.values()))


@pytest.mark.parametrize("options", OPTIONS)
def test_a_blocks_key_lengths_are_its_padding_mask(options):
    tensors = CASES["attention_block"].tensors(batch=3)
    x, lengths = tensors["x"], key_lengths(tensors["x"])
    padding = torch.arange(x.shape[1]) >= lengths[:, None]
    ours, masked = (
        results(
            lambda: ops.attention_block(
                *tensors.values(),
                4,
                kv_heads=2,
                **OPTIONS[options],
                **one,  # noqa: B023
            ),
            list(tensors.values()),
        )
        for one in ({"key_lengths": lengths}, {"key_padding_mask": padding})
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, masked, strict=True))


# --- errors


@pytest.mark.parametrize("name", ["key_lengths", "cu_seqlens_q", "cu_seqlens_k"])
def test_changing_lengths_raises(name):
    qkv = heads(12, 12)
    given = {"key_lengths": torch.tensor([3])}
    if name != "key_lengths":
        given = {n: torch.tensor([0, 3, 9]) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    y = ops.attention(*qkv, **given)
    given[name].add_(1)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


CU = torch.tensor([0, 3, 5])


def call(batch=1, q_len=5, kv_len=5, **options):
    return lambda: ops.attention(*heads(q_len, kv_len, batch), **options)


def block(batch=1, **options):
    def attempt():
        tensors = CASES["attention_block"].tensors(batch)
        return ops.attention_block(*tensors.values(), 4, kv_heads=2, **options)

    return attempt


@pytest.mark.parametrize(
    ("attempt", "parts"),
    [
        (call(key_lengths=CU), ["key_lengths", "(3,)", "(1,)"]),
        (call(key_lengths=torch.tensor(3)), ["key_lengths", "()", "(1,)"]),
        (call(2, key_lengths=torch.tensor([2, 6])), ["key_lengths[1] is 6", "0 to 5"]),
        (call(2, key_lengths=torch.tensor([-1, 5])), ["key_lengths[0] is -1", "0 to 5"]),
        (call(key_lengths=CU[:1], cu_seqlens_q=CU), ["key_lengths", "cu_seqlens_q", "not both"]),
        (call(key_lengths=CU[:1], cu_seqlens_k=CU), ["key_lengths", "cu_seqlens_q", "not both"]),
        (call(cu_seqlens_k=CU), ["cu_seqlens_k is given without cu_seqlens_q"]),
        (call(2, cu_seqlens_q=CU), ["cu_seqlens_q", "batch of 1", "batch of 2"]),
        (call(kv_len=7, cu_seqlens_q=CU), ["cu_seqlens_k is missing", "5 queries and 7 keys"]),
        (call(cu_seqlens_q=CU[None]), ["cu_seqlens_q", "(1, 3)", "(N + 1,)"]),
        (call(cu_seqlens_q=CU[:0]), ["cu_seqlens_q", "(0,)", "(N + 1,)"]),
        (call(cu_seqlens_q=CU, cu_seqlens_k=CU[None]), ["cu_seqlens_k", "(1, 3)", "(N + 1,)"]),
        (call(cu_seqlens_q=CU, cu_seqlens_k=CU[:2]), ["cu_seqlens_q", "(3,)", "(2,)"]),
        (call(cu_seqlens_q=CU + 1), ["cu_seqlens_q[2] is 6", "0 to 5"]),
        (call(cu_seqlens_q=CU - 1), ["cu_seqlens_q[0] is -1", "0 to 5"]),
        (call(cu_seqlens_q=CU.flip(0)), ["cu_seqlens_q[1] is 3", "less than 5"]),
        (call(cu_seqlens_q=CU, cu_seqlens_k=CU.flip(0)), ["cu_seqlens_k[1] is 3", "less than 5"]),
        (call(kv_len=4, cu_seqlens_q=CU, cu_seqlens_k=CU), ["cu_seqlens_k[2] is 5", "0 to 4"]),
        (block(2, cu_seqlens=CU), ["cu_seqlens needs", "batch of 2"]),
        (block(cu_seqlens=CU + 1), ["cu_seqlens[2] is 6", "0 to 5"]),
        (block(cu_seqlens=CU, key_lengths=CU[:1]), ["key_lengths", "cu_seqlens", "not both"]),
    ],
)  # fmt: skip
def test_lengths_that_do_not_fit_raise_and_are_named(attempt, parts):
    with pytest.raises(ValueError) as error:
        attempt()
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize("name", ["key_lengths", "cu_seqlens_q", "cu_seqlens_k"])
def test_lengths_of_another_kind_raise(name):
    given = {"cu_seqlens_q": CU} if name == "cu_seqlens_k" else {}
    for other in (CU.double(), CU.to(torch.uint8), CU.to("meta")):
        with pytest.raises(RuntimeError, match=rf"{name} is torch\.\w+ on \w+, expected"):
            call(**given | {name: other})()
    with pytest.raises(TypeError, match=rf"{name} must be a Tensor, got list"):
        call(**given | {name: [0, 3, 5]})()

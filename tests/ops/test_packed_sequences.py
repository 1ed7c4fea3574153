"""Attention over packed sequences and padded ones of their own lengths: results, routes, memory."""

import pytest
import torch
from attention_calls import attention_call
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
from op_cases import CASES, bounds, key_lengths, named
from reference import visible_packed
from tiers import exhaustive, pairwise
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat import explain, ops
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps.attention import attention_fwd

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
SOME = ["plain", "causal", "all"]


def packed(cu_q, cu_k=None, *_, dtype=torch.int64):
    return {
        "cu_seqlens_q": torch.tensor(cu_q, dtype=dtype),
        "cu_seqlens_k": None if cu_k is None else torch.tensor(cu_k, dtype=dtype),
    }


def one(q_len, kv_len, **sizes):
    """query, key and value of a batch of one."""
    return heads(1, q_len=q_len, kv_len=kv_len, **sizes)


@pytest.fixture
def poisoned():
    """New memory is NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# --- packed sequences


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "pack, options",
    [
        # Every pack under two options, every option on two packs; random ones are with all options.
        (pack, option)
        if option in ("causal dropout", "all") or pack in ("self", "fewer queries, and more")
        else exhaustive(pack, option)
        for pack in PACKS
        for option in OPTIONS
    ],
)
def test_a_query_sees_the_keys_of_its_own_sequence(pack, options):
    qkv = one(*PACKS[pack][2:], v_width=3)
    compare_attention(qkv, OPTIONS[options] | packed(*PACKS[pack]), qkv)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("options", SOME)
def test_shared_heads(kv_heads, options):
    qkv = one(57, 57, kv_heads=kv_heads)
    compare_attention(qkv, OPTIONS[options] | packed(*PACKS["self"]), qkv)


@pytest.mark.parametrize(
    "pack, options, dtype",
    pairwise(
        list(PACKS), ["plain", "causal", "causal window", "soft-cap"],
        [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    ),
)  # fmt: skip
def test_each_sequence_is_as_if_it_were_alone(pack, options, dtype):
    """Bit for bit: the same routine on the same memory."""
    cu_q, cu_k, q_len, kv_len = PACKS[pack]
    qkv, options = one(q_len, kv_len, dtype=dtype), OPTIONS[options]
    given = packed(cu_q, cu_k, dtype=torch.int32)
    dy = normal(1, q_len, 4, 4, seed=9).detach().to(dtype).transpose(1, 2)
    whole = results(lambda: ops.attention(*qkv, **options, **given), qkv, dy)
    expected = [torch.zeros_like(t) for t in whole]
    for n in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[n : n + 2]), slice(*(cu_k or cu_q)[n : n + 2])
        parts = [t[:, :, part] for t, part in zip(qkv, (rows, keys, keys), strict=True)]
        y, *grads = results(lambda: ops.attention(*parts, **options), qkv, dy[:, :, rows])  # noqa: B023
        expected[0][:, :, rows] = y
        expected[1:] = [a + b for a, b in zip(expected[1:], grads, strict=True)]
    assert same_bits(whole, expected)


FORMS = [
    (), (13,), (1,), (12, 13), (12, 1), (1, 13), (4, 1, 1), (4, 12, 13), (1, 12, 13),
    (1, 4, 12, 13), (1, 4, 1, 13), (1, 1, 12, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "shape, kind, options", pairwise(FORMS, ["bool", "float", "wants a gradient"], SOME)
)
def test_masks_are_over_all_tokens(shape, kind, options):
    args, padding = [*one(12, 13), mask_of(kind, shape)], mask_of(kind, (1, 13), seed=8)
    given = OPTIONS[options] | packed(*PACKS["tokens of none"])
    wanted = [t for t in (*args, padding) if t.requires_grad]
    compare_attention(args, given, wanted[:4])
    compare_attention(args, given | {"key_padding_mask": padding}, wanted)


def test_masks_of_one_query_and_of_one_key():
    """Dimensions of size 1 that are the whole, beside sequences that have none of it."""
    for q_len, cu_q, kv_len, cu_k in ((1, [0, 0, 1], 9, [0, 4, 9]), (9, [0, 4, 9], 1, [0, 1, 1])):
        args = [*one(q_len, kv_len), normal(q_len, kv_len)]
        compare_attention(args, packed(cu_q, cu_k), args)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("policy", ["full", "lean"])
@pytest.mark.parametrize("options", SOME)
def test_tokens_of_no_sequence_are_zero_and_never_read(options, policy):
    qkv, insides = one(12, 13, dtype=torch.float32), (slice(2, 9), slice(1, 10), slice(1, 10))
    with torch.no_grad():
        for t, inside in zip(qkv, insides, strict=True):
            kept = t[:, :, inside].clone()
            t.fill_(torch.nan)[:, :, inside] = kept
    given = {**OPTIONS[options], **packed(*PACKS["tokens of none"]), "policy": policy}
    found = results(lambda: ops.attention(*qkv, **given), qkv)
    for t, inside in zip(found, (insides[0], *insides), strict=True):
        assert t[:, :, inside].isfinite().all() and t[:, :, inside].any()
        t[:, :, inside] = 0.0
        assert torch.equal(t, torch.zeros_like(t))


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


# --- key lengths

LENGTHS = torch.tensor([7, 0, 3])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(7, 7), (5, 7), (20, 7), (20, 33)])
def test_keys_beyond_a_length_are_excluded(q_len, kv_len, options):
    """Causal and windows go by the padded sizes; without a key a sequence is 0."""
    qkv = heads(3, q_len=q_len, kv_len=kv_len, v_width=3)
    given = OPTIONS[options] | {"key_lengths": LENGTHS.int()}
    compare_attention(qkv, given, qkv)
    assert not ops.attention(*qkv, **given)[1].any()


@pytest.mark.parametrize("options", SOME)
@pytest.mark.parametrize("kind", ["bool", "float", "wants a gradient"])
def test_key_lengths_beside_masks(kind, options):
    qkv, padding, mask = heads(3), mask_of(kind, (3, 7)), mask_of(kind, (3, 1, 5, 7), seed=6)
    given = OPTIONS[options] | {"key_lengths": LENGTHS, "key_padding_mask": padding}
    wanted = [t for t in (*qkv, padding, mask) if t.requires_grad]
    compare_attention(qkv, given, wanted[:4])
    compare_attention([*qkv, mask], given, wanted)
    if padding.requires_grad:
        _, grad = results(lambda: ops.attention(*qkv, **given), [padding])
        beyond = torch.arange(7) >= LENGTHS[:, None]
        assert not grad[beyond].any() and grad[~beyond].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [512, 4])
def test_key_lengths_are_a_padding_mask_by_another_name(dtype, tokens):
    """Bit for bit: of attention, and of its block."""
    qkv, tensors = heads(3, dtype=dtype), CASES["attention_block"].tensors(batch=3, dtype=dtype)

    def alone(**options):
        return ops.attention(*qkv, **options)

    def block(**options):
        return ops.attention_block(**named(tensors), nhead=4, kv_heads=2, **options)

    of_block = key_lengths(tensors["x"])
    for fn, leaves, lengths, kv_len in (
        (alone, qkv, LENGTHS, 7),
        (block, list(tensors.values()), of_block, 5),
    ):
        padding = torch.arange(kv_len) >= lengths[:, None]
        for options in OPTIONS.values():
            with in_pieces(tokens):
                ours, masked = (
                    results(lambda: fn(**options, **mask), leaves)  # noqa: B023
                    for mask in ({"key_lengths": lengths}, {"key_padding_mask": padding})
                )
            assert same_bits(ours, masked)


def test_a_block_of_packed_sequences_is_one_of_each():
    """Tokens of no sequence pass through: x and proj's bias."""
    tensors = CASES["attention_block_packed"].tensors(seq=15)
    x, cu = tensors["x"], bounds(tensors["x"])[0]
    weights = [t for name, t in tensors.items() if name != "x"]

    def block(x, **options):
        return ops.attention_block(x, *weights, 4, is_causal=True, kv_heads=2, **options)

    def parts():
        spans = zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)
        of_none = x[:, cu[-1] :] + tensors["proj.bias"]
        return torch.cat([*(block(x[:, a:b]) for a, b in spans), of_none], 1)

    for tokens in (512, 4):
        with in_pieces(tokens):
            compare(lambda: block(x, cu_seqlens=cu), parts, list(tensors.values()))


# --- routes


class Flash(TorchDispatchMode):
    """Counts calls of ATen's flash kernel."""

    def __init__(self):
        super().__init__()
        self.calls = {"forward": 0, "backward": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "flash_attention_for_cpu" in name:
            self.calls["backward" if "backward" in name else "forward"] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("batch", "options", "calls"),
    [
        (1, packed([0, 9, 18, 24, 24, 30], [0, 9, 18, 28, 28, 34]), 4),
        # Causal: where queries are as many as keys.
        (1, packed([0, 9, 18, 24, 24, 30], [0, 9, 18, 28, 28, 34]) | {"is_causal": True}, 3),
        (3, {"key_lengths": torch.tensor([34, 0, 5])}, 1),
        (3, {"key_lengths": torch.tensor([34, 0, 5]), "is_causal": True}, 0),
    ],
)
def test_the_flash_kernel_runs_where_it_can(batch, options, calls):
    """Backward is a call for each of two query heads that share a key head; so is forward where
    there is more than one sequence, or a mask."""
    qkv = heads(batch, q_len=30, kv_len=34)
    with Flash() as flash:
        results(lambda: ops.attention(*qkv, **options), qkv)
    assert flash.calls == {"forward": calls if batch == 1 else 2 * calls, "backward": 2 * calls}


class Attend(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return ops.attention(q, k, v, **self.options)


FLASH, PACKED = "ATen's flash kernel for CPUs", "variable-length sequences, one at a time: "
BLOCKS = "blocks of query rows: causal beside a mask or key lengths, or with S_q other than S_k"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (packed([0, 4, 9], [0, 3, 9]), PACKED + FLASH),
        (packed([0, 4, 9], [0, 4, 8]) | {"is_causal": True}, f"{PACKED}{FLASH}; {BLOCKS}"),
        (packed([0], [9]), PACKED + "none"),
        ({"key_lengths": torch.tensor([5])}, FLASH),
        ({"key_lengths": torch.tensor([5]), "is_causal": True}, BLOCKS),
    ],
)
def test_explain_says_which_routes_and_why(options, expected):
    (block,) = explain(Attend(options), *one(9, 9))
    assert dict(block.forward)["output"] == expected


# --- what the operation is asked and gives


def call_of(q, k, cu_q, cu_k, right=-1):
    sizes = (1, 4, 2, q.shape[2], k.shape[2], q.shape[3])
    cu = {"cu_q": torch.tensor(cu_q), "cu_k": torch.tensor(cu_k)}
    return attention_call(sizes, scale=0.5, right=right, **cu)


@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_logsumexp_is_of_the_whole_in_order(dtype, right):
    """(H, S_q), with +inf for rows that see no key: of no sequence too."""
    q, k, v = (t.detach() for t in one(12, 13, dtype=dtype))
    call = call_of(q, k, [1, 3, 9, 9, 11], [0, 2, 5, 8, 12], right)
    attn, lse = attention_fwd(q, k, v, call)
    seen = visible_packed(call.cu_q, call.cu_k, (12, 13), (-1, -1), right == 0)
    scores = 0.5 * q.double() @ k.double().repeat_interleave(2, 1).mT
    expected = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    expected = expected.masked_fill(~seen.any(-1), torch.inf)
    assert attn.shape == (12, 16) and lse.dtype == torch.promote_types(dtype, torch.float32)
    # In float32 from exact bfloat16 inputs.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(lse.double(), expected[0], **tolerance)
    out = torch.empty_like(attn)
    assert attention_fwd(q, k, v, call, out)[0] is out and torch.equal(out, attn)


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 13], [0, 5], r"queries\[1\] is 13, expected 0 to 12"),
        ([0, 5, 3], [0, 5, 7], r"queries\[2\] is 3, less than 5"),
        ([0, 5], [-1, 5], r"keys\[0\] is -1, expected 0 to 13"),
    ],
)
def test_bounds_that_do_not_fit_raise_where_they_are_read(cu_q, cu_k, message):
    """On a GPU the op does not check them."""
    q, k, v = (t.detach() for t in one(12, 13))
    with pytest.raises(ValueError, match=message):
        attention_fwd(q, k, v, call_of(q, k, cu_q, cu_k))


# --- transients


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.3, "softcap": 1.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transients_are_those_of_one_sequence(options, dtype):
    """A step's peak: at most its output, logsumexp and gradients more than one sequence's alone."""
    ends = [0, 300, 812, 1012, 1424, 2024]
    count = ends[-1]
    qkv = one(count, count, width=16, dtype=dtype)
    dy = torch.ones(1, count, 4, 16, dtype=dtype).transpose(1, 2)

    def peak(qkv, dy, **given):
        return measure_allocations(
            lambda: results(lambda: ops.attention(*qkv, **options, **given), qkv, dy)
        ).peak

    whole = peak(qkv, dy, cu_seqlens_q=torch.tensor(ends))
    alone = 0
    for n in range(len(ends) - 1):
        span = slice(*ends[n : n + 2])
        parts = [t[:, :, span].detach().requires_grad_() for t in qkv]
        alone = max(alone, peak(parts, dy[:, :, span]))
    made = dy.nbytes + sum(t.nbytes for t in qkv) + 4 * count * 4
    assert whole <= alone + made + 4096  # bounds, and rounding
    assert alone + made < 4 * count * count * 4 / 2  # half of all scores

"""Attention by our kernels, through the op: every kind of call, against explicit attention.

In deterministic mode, where PyTorch fills what is not written with NaN.
"""

import itertools
from dataclasses import dataclass

import pytest
import reference
import torch
from accuracy import assert_bits, check_error
from block_inputs import LAYOUTS, results
from places import BF16, COMPILED, DEVICE, at, compiled, deterministic, normal, sized

from fused_remat import ops
from fused_remat.triton import attention, tables

pytestmark = pytest.mark.gpu
# On a GPU the kernels serve no float32.
DTYPES = [BF16, torch.float16] if COMPILED else [torch.float16, torch.float32]
# The error may be 1.5 times that of PyTorch's operators in float32, rounded, plus this: some two
# roundings more, of what products take (probabilities, gradients of scores); float32: sums in
# another order, and exponentials to 2 ulp of an argument of about 5.
FLOOR = {
    torch.bfloat16: 4e-3, torch.float16: compiled(5e-4, 4e-4), torch.float32: compiled(1e-5, 4e-6),
}  # fmt: skip
INF = float("inf")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Every call is the kernels'."""
    calls, forward = [], attention.forward
    monkeypatch.setattr(tables, "ATTENTION_BY_ATEN", frozenset())
    monkeypatch.setattr(attention, "forward", lambda *args: calls.append(1) or forward(*args))
    with deterministic():
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    assert calls, "the kernels did not run"


@dataclass
class Sizes:
    """Of a call, neither multiples of a tile nor odd, and the dtype of what it takes."""

    dtype: torch.dtype = BF16
    b: int = 2
    h: int = at(4, 2)
    kv: int = 0  # as many as h
    m: int = at(1032, 40, 168)
    n: int = at(1032, 40, 168)
    e: int = at(64, 16, 64)
    v: int = 0  # values are as wide as keys

    def __post_init__(self):
        self.kv, self.v = self.kv or self.h, self.v or self.e

    def bias(self, *shape):
        """A float mask that excludes some keys."""
        mask = normal(self.dtype, *shape, scale=2.0)
        if shape[-1] > 8:
            mask[..., 5:8] = -INF
        return mask

    def hidden(self, *shape, share=0.3):
        """True where excluded."""
        return torch.rand(shape, device=DEVICE) < share

    def bounds(self, *shares):
        return torch.tensor([int(s * self.m) for s in shares], device=DEVICE, dtype=torch.int32)


def make(s):
    """q, k, v and the gradient of the output."""
    shapes = ((s.h, s.m, s.e), (s.kv, s.n, s.e), (s.kv, s.n, s.v), (s.h, s.m, s.v))
    return [normal(s.dtype, s.b, *shape) for shape in shapes]


def is_float(t):
    return isinstance(t, torch.Tensor) and t.is_floating_point()


def run(fn, q, k, v, dy, options, convert=lambda t: t):
    """Output and gradients, by name; all that is floating point has one. Converts tensors first."""
    given = {"query": q, "key": k, "value": v}
    given |= {name: t for name, t in options.items() if is_float(t)}
    leaves = {name: convert(t.detach()).requires_grad_() for name, t in given.items()}
    options = options | {name: leaves[name] for name in leaves if name in options}
    heads = [leaves[name] for name in ("query", "key", "value")]
    found = results(lambda: fn(*heads, options), list(leaves.values()), convert(dy))
    return dict(zip(("output", *leaves), found, strict=True))


def plain(q, k, v, options):
    return reference.attention(q, k, v, **options)


def ours(q, k, v, options):
    return ops.attention(q, k, v, **options, backend="triton")


def check(s, inputs=None, **options):
    """Every result within the rule, NaN in the inputs beside the point; returns ours."""
    q, k, v, dy = make(s)
    if inputs is not None:
        q, k, v, dy = inputs(q, k, v, dy)
    found = run(ours, q, k, v, dy, options)
    spoiled = any(bool(t.isnan().any()) for t in (q, k, v, dy))
    cleaned = [t.nan_to_num(0.0) for t in (q, k, v, dy)] if spoiled else (q, k, v, dy)
    if spoiled:
        again = run(ours, *cleaned, options)
        assert_bits(again.values(), found.values(), "what must not be read was")
    with DEVICE:
        theirs = run(plain, *cleaned, options, torch.Tensor.float)
        exact = run(plain, *cleaned, options, torch.Tensor.double)
    rounded = [t.to(mine.dtype) for t, mine in zip(theirs.values(), found.values(), strict=True)]
    check_error([*found.values()], rounded, [*exact.values()], [*exact], floor=FLOOR[s.dtype])
    return found


#: Options of a call over sizes s.
CALLS = {
    "plain": lambda s: {},
    "causal": lambda s: {"is_causal": True},
    "window": lambda s: {"window": (s.n // 4, 0)},
    "both sides": lambda s: {"window": (s.n // 5, s.n // 7)},
    "soft-cap": lambda s: {"softcap": 1.5, "is_causal": True},
    "soft-cap alone": lambda s: {"softcap": 1.5},
    "scale": lambda s: {"scale": 0.3},
    "bias": lambda s: {"attn_mask": s.bias(s.m, s.n)},
    "bias of heads": lambda s: {"attn_mask": s.bias(1, s.h, s.m, s.n)},
    "bias of all": lambda s: {
        "attn_mask": s.bias(s.b, s.h, s.m, s.n), "softcap": 2.0, "window": (-1, 2),
    },
    "bias of keys": lambda s: {"attn_mask": s.bias(s.b, 1, 1, s.n)},
    "bias of queries": lambda s: {"attn_mask": s.bias(1, s.h, s.m, 1)},
    "bias and dropout": lambda s: {"attn_mask": s.bias(s.m, s.n), "dropout_p": 0.25, "seed": 3},
    "far rows": lambda s: {"attn_mask": far_rows(s)},
    "one number": lambda s: {"attn_mask": s.bias(1, 1, 1, 1)},
    "bool": lambda s: {"attn_mask": ~s.hidden(s.b, s.h, s.m, s.n)},
    "hidden rows": lambda s: {"attn_mask": s.hidden(1, 1, s.m, 1).expand(-1, -1, -1, s.n)},
    "half the blocks": lambda s: {"attn_mask": checkered(s)},
    "padding": lambda s: {"key_padding_mask": s.hidden(s.b, s.n), "is_causal": True},
    "float padding": lambda s: {"key_padding_mask": s.bias(s.b, s.n)},
    "both masks": lambda s: {
        "attn_mask": s.bias(s.b, 1, s.m, s.n), "key_padding_mask": s.bias(s.b, s.n),
    },
    "all": lambda s: {
        "attn_mask": s.bias(s.m, s.n), "key_padding_mask": s.hidden(s.b, s.n), "is_causal": True,
        "window": (s.n // 2, -1), "softcap": 5.0, "dropout_p": 0.2, "seed": 3,
    },
    "dropout": lambda s: {"dropout_p": 0.2, "seed": 3},
    "causal dropout": lambda s: {"dropout_p": 0.2, "seed": 3, "is_causal": True},
}  # fmt: skip


def far_rows(s):
    """A mask of rows that are far everywhere, in places, and beside blocks that it adds nothing to.

    What a row is shifted by must be taken from all of its blocks, or from none.
    """
    mask = torch.zeros(s.m, s.n, device=DEVICE)
    mask[4], mask[5, 20:], mask[6], mask[9:12, -5], mask[12:15, -5] = -1e9, -1e9, 3e4, 200.0, -1e9
    return mask


def checkered(s):
    """A bool mask of which whole blocks of 128 see nothing, and one sequence of queries neither."""
    block = sized(128, tiny=(16,), executed=(128,))[0]
    rows, cols = (torch.arange(count, device=DEVICE) // block for count in (s.m, s.n))
    seen = (rows[:, None] + cols) % 2 == 0
    return seen & (rows > 0)[:, None]


def in_dtypes(cases):
    """Cases in every dtype; interpreted in one of two by turns: loops do not depend on it."""
    some = lambda i: compiled(DTYPES, DTYPES[i % 2 : i % 2 + 1])  # noqa: E731
    return [(*case, dtype) for i, case in enumerate(cases) for dtype in some(i)]


@pytest.mark.parametrize("call, dtype", in_dtypes((call,) for call in CALLS), ids=str)
def test_calls(call, dtype):
    s = Sizes(dtype)
    check(s, **CALLS[call](s))


@pytest.mark.skipif(COMPILED, reason="of 16 bits, their gradient is a sum of rounded outputs")
def test_sinks():
    """The kernels' backward takes the output and lse that sinks have changed, in rows far away."""
    s = Sizes(torch.float32)
    sinks = normal(s.dtype, s.h)
    check(s, sinks=sinks, attn_mask=far_rows(s).clamp(max=200.0))
    check(s, sinks=sinks, **CALLS["causal dropout"](s))


@pytest.mark.skipif(COMPILED, reason="takes the tiles of the tables")
@pytest.mark.parametrize("tile", [(16, 16, 4, 1), (32, 16, 4, 1, True)], ids=["small", "high"])
def test_other_tiles(tile, monkeypatch):
    """Small ones, and high ones of which the products are split."""
    monkeypatch.setattr(tables, "_INTERPRETED_ATTENTION", tables.AttentionTile(*tile))
    s = Sizes(torch.float16, b=1)
    for call in ("causal dropout", "half the blocks", "far rows"):
        check(s, **CALLS[call](s))
    check(Sizes(torch.float16, m=18, n=24, v=24))
    check_packed(s, "tail", "soft-cap alone")


@pytest.mark.parametrize("lengths", [(33, 40), (40, 33), (1, 17), (48, 48)], ids=str)
@pytest.mark.parametrize(
    "window", [(-1, -1), (-1, 0), (9, 0), (0, 0), (3, 20), (20, -1), (2**31 - 1, 2**40)], ids=str
)
def test_windows(lengths, window):
    check(Sizes(DTYPES[-1], 1, 1, 1, *lengths), window=window)


#: The last query is at the last key; of one query and two heads, an error is no mean.
LENGTHS = [
    {"h": at(4, 2), "m": at(513, 17, 129), "n": at(1032, 40, 168)},
    {"h": at(4, 2), "m": at(1029, 37, 165), "n": at(619, 24, 107)},
    {"h": 4, "m": 1, "n": at(1032, 40, 168)},
]
SHARED = [{"h": h, "kv": kv} for h, kv in at([(8, 2), (4, 1), (6, 3)], [(4, 1), (6, 2)])]
WIDTHS = [{"e": e} for e in compiled([16, 40, 64, 80, 96, 128, 192, 256], [1, 8, 20, 40, 72, 256])]
WIDTHS += [{"e": e, "v": v} for e, v in ((64, 128), (192, 128), (96, 64), (33, 20))]
SIZES = [
    *itertools.product(SHARED, ["plain", "causal", "bias of heads", "causal dropout"]),
    *itertools.product(LENGTHS, ["plain", "causal", "bias of heads", "all"]),
    *itertools.product(WIDTHS, ["causal dropout", *compiled(["plain", "all"], [])]),
]


@pytest.mark.parametrize("sizes, call, dtype", in_dtypes(SIZES), ids=str)
def test_sizes(sizes, call, dtype):
    """Lengths that differ, key heads that are shared, heads and values of any width."""
    s = Sizes(dtype, **sizes)
    check(s, **CALLS[call](s))


@pytest.mark.executed
@pytest.mark.parametrize("parts", at([1, 2, 4, 5], [2, 4]))
@pytest.mark.parametrize("call", ["causal dropout", "bias of heads", "packed", "lengths"])
def test_groups_divided_among_programs(call, parts, monkeypatch):
    """Five query heads of a key head: parts are of as many, or the last has fewer, or none."""
    monkeypatch.setattr(tables, "group_parts", lambda *_: parts)
    s = Sizes(b=1, h=5, kv=1)
    if call == "packed":
        check_packed(s, "head and tail", "causal")
    elif call == "lengths":
        check(s, key_lengths=torch.tensor([s.n // 3], device=DEVICE))
    else:
        given, options = make(s), CALLS[call](s)
        found = check(s, lambda *_: given, **options)
        assert_bits(found.values(), run(ours, *given, options).values())


# --- layouts


def packed_projection(q, k, v, dy):
    """Views of one matrix of tokens, as a block's are."""
    whole = torch.cat([q, k, v], 1).transpose(1, 2).contiguous().transpose(1, 2)
    return (*whole.split((q.shape[1], k.shape[1], v.shape[1]), 1), dy.transpose(1, 2).contiguous()
            .transpose(1, 2))  # fmt: skip


def misaligned(*heads):
    """Rows an odd number of elements apart, from an odd address on."""
    made = []
    for t in heads:
        wide = t.new_empty(*t.shape[:-1], t.shape[-1] + 1 + t.shape[-1] % 2)
        made.append(wide[..., 1 : t.shape[-1] + 1].copy_(t))
    return made


def far_apart(*heads):
    """Batches 2**31 elements apart: offsets need 64 bits."""
    made = []
    for t in heads:
        count = 2**31 + t[0].numel()
        # Not torch.empty, which would fill it all with NaN here.
        storage = torch.UntypedStorage(count * t.element_size(), device=t.device)
        strides = (2**31, *t[0].contiguous().stride())
        made.append(t.new_empty(0).set_(storage, 0, t.shape, strides).copy_(t))
    return made


def expanded(q, k, v, dy):
    """Keys and values of one sequence and head for all; one gradient for every query."""
    return q, k[:1, :1].expand_as(k), v[:1, :1].expand_as(v), dy[:, :, :1].expand_as(dy)


def laid(name):
    return lambda *heads: map(LAYOUTS[name], heads)


@pytest.mark.parametrize("call", ["plain", "causal", "all"])
@pytest.mark.parametrize(
    "layout", [packed_projection, misaligned, laid("turned"), laid("strided"), far_apart, expanded]
)
def test_layouts(layout, call):
    """Of a layout on which the kernels' results are those of a copy, bit for bit."""
    s = Sizes()
    options = CALLS[call](s)
    found = check(s, layout, **options)
    if layout is packed_projection:
        torch.manual_seed(0)
        CALLS[call](s)
        assert_bits(found.values(), run(ours, *make(s), options).values())


def test_more_heads_than_a_grid_has_columns():
    b, e = sized(70_000, 16, tiny=(40, 16), executed=(40, 16))
    check(Sizes(b=b, h=1, kv=1, m=17, n=17, e=e), is_causal=True)


# --- what is not there is not read


@pytest.mark.parametrize(
    "call, dtype", in_dtypes((call,) for call in ("plain", "causal", "bias", "dropout")), ids=str
)
def test_key_lengths(call, dtype):
    """Keys and values beyond are NaN; one sequence has no key, one has them all."""
    s = Sizes(dtype, b=4, h=at(4, 1))
    lengths = torch.tensor([0, s.n, s.n // 3, s.n - 1], device=DEVICE).repeat_interleave(2)[::2]

    def inputs(q, k, v, dy):
        beyond = torch.arange(s.n, device=DEVICE) >= lengths[:, None]
        nan = beyond[:, None, :, None]
        return q, k.masked_fill(nan, torch.nan), v.masked_fill(nan, torch.nan), dy

    found = check(s, inputs, key_lengths=lengths, **CALLS[call](s))
    assert not found["output"][0].any() and not found["key"][2, :, s.n // 3 :].any()


#: Parts of the tokens at which sequences of queries, and of keys, begin and end. Of very different
#: lengths, some empty; tokens of no sequence, first and last.
PACKED = {
    "self": ((0.0, 0.12, 0.12, 0.8, 1.0), None),
    "tail": ((0.0, 0.2, 0.5), None),
    "head and tail": ((0.05, 0.1, 0.1, 0.55, 0.58, 0.9), None),
    "cross": ((0.0, 0.3, 0.3, 0.7, 1.0), (0.1, 0.2, 0.5, 0.5, 0.99)),
    "none": ((0.0,), None),
}


def check_packed(s, name, call):
    """Tokens of no sequence are NaN, and so is their gradient."""
    cu_q, cu_k = (None if shares is None else s.bounds(*shares) for shares in PACKED[name])
    packed = {"cu_seqlens_q": cu_q} | ({} if cu_k is None else {"cu_seqlens_k": cu_k})
    outside = torch.ones(2, s.m, 1, dtype=torch.bool, device=DEVICE)
    for side, cu in zip(outside, (cu_q, cu_q if cu_k is None else cu_k), strict=True):
        side[int(cu[0]) : int(cu[-1])] = False

    def inputs(*tensors):
        sides = (outside[i] for i in (0, 1, 1, 0))
        return [t.masked_fill(side, torch.nan) for t, side in zip(tensors, sides, strict=True)]

    found = check(s, inputs, **packed, **CALLS[call](s))
    for name, side in (("output", 0), ("query", 0), ("key", 1), ("value", 1)):
        assert not found[name].masked_fill(~outside[side], 0.0).any(), name


IN_PACKS = [
    *((call, "head and tail") for call in ("plain", "causal", "window", "bias", "causal dropout",
                                           "soft-cap alone", "all")),
    *itertools.product(("plain", "both sides"), ("self", "tail", "cross", "none")),
]  # fmt: skip


@pytest.mark.parametrize("call, name, dtype", in_dtypes(IN_PACKS), ids=str)
@pytest.mark.parametrize("kv", at([4, 2], [1]))
def test_packed_sequences(call, name, kv, dtype):
    check_packed(Sizes(dtype, b=1, h=at(4, 2), kv=kv), name, call)


# --- bits


@pytest.mark.parametrize("call", at(["causal", "all", "bias of keys", "one number"], ["all"]))
@pytest.mark.parametrize("heads", at([(4, 4), (8, 2)], [(4, 2)]), ids=str)
def test_five_runs_and_all_policies_have_the_same_bits(call, heads):
    """Nothing is added in any order; a rebuilt output ("full") is the forward's."""
    s = Sizes(h=heads[0], kv=heads[1])
    q, k, v, dy = make(s)
    options = CALLS[call](s)
    first = run(ours, q, k, v, dy, options)
    for policy in (*(["lean"] * at(4, 1)), "full", "none"):
        again = run(ours, q, k, v, dy, options | {"policy": policy})
        assert_bits(first.values(), again.values(), policy)

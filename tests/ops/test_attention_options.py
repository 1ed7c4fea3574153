"""Attention as a function: any options, SDPA's results, masks, packed sequences and routes."""

import pytest
import torch
import torch.nn.functional as F
from block_inputs import (
    LAYOUTS,
    check_beside,
    compare,
    covering,
    heads,
    in_pieces,
    mask_of,
    normal,
    results,
)
from op_cases import PACKS, packed
from reference import attention, visible
from tiers import pairwise
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat import explain, ops

# --- any options together


KINDS = ("bool", "float", "float32", "wants a gradient", "-inf")
LENGTHS = {"key_lengths": torch.tensor([7, 0, 3])}
PADDED = [(5, 7), (7, 5), (1, 7), (20, 37), (37, 20)]
#: How many sequences, queries and keys there are, and options that say where sequences end.
SEQUENCES = (
    *((3, q_len, kv_len, {}) for q_len, kv_len in PADDED),
    *((3, *sizes, LENGTHS) for sizes in [(7, 7), (5, 7), (20, 33)]),
    *((1, q_len, kv_len, packed(cu_q, cu_k)) for cu_q, cu_k, q_len, kv_len in PACKS.values()),
    *((*sizes, {}) for sizes in [(0, 5, 7), (3, 0, 7), (3, 5, 0), (3, 0, 0)]),
)
CALLS = covering(
    {
        "sequences": SEQUENCES,
        # Dimensions of the mask, 1 or whole; none; or no mask.
        "mask": (
            None, "", "K", "1", "QK", "Q1", "1K", "H11", "HQK", "1QK", "B11K", "BHQK", "1H1K",
            "B1Q1", "1111", "B111",
        ),
        "kind": KINDS,
        "padding": (None, *KINDS),
        "layout": tuple(LAYOUTS),
        "kv_heads": (2, 4, 1),
        "v_width": (4, 3),
        "window": ((-1, -1), (0, 0), (2, 0), (0, 3), (-1, 2), (4, -1), (100, 100)),
        "is_causal": (False, True),
        "softcap": (0.0, 1.5),
        "sinks": (False, True),
        "scale": (None, 0.7),
        "dropout_p": (0.0, 0.3),
        "policy": ("full", "lean"),
        "tokens": (512, 50, 4),
    }
)  # fmt: skip
OPTIONS = ("window", "is_causal", "softcap", "scale", "dropout_p")


def qkv(**sizes):
    return dict(zip(("query", "key", "value"), heads(**sizes), strict=True))


def wanted(*tensors):
    return [t for t in tensors if t is not None and t.requires_grad]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("call", CALLS)
def test_any_options_together(call):
    """Every two values of different options meet."""
    batch, q_len, kv_len, where = call["sequences"]
    grid = {"B": batch, "H": 4, "Q": q_len, "K": kv_len, "1": 1}
    args = heads(batch, 4, call["kv_heads"], q_len, kv_len, v_width=call["v_width"])
    if call["mask"] is not None:
        args.append(mask_of(call["kind"], [grid[dim] for dim in call["mask"]]))
    padding = call["padding"] and mask_of(call["padding"], (batch, kv_len), seed=8)
    sinks = normal(4, seed=9) if call["sinks"] else None
    options, lay = {n: call[n] for n in OPTIONS} | where | {"seed": 7}, LAYOUTS[call["layout"]]

    def run(fn, **how):
        given = {"key_padding_mask": padding if padding is None else lay(padding), **options}
        return fn(*map(lay, args), **given, sinks=sinks, **how)

    with in_pieces(call["tokens"]):
        compare(
            lambda: run(ops.attention, policy=call["policy"]),
            lambda: run(attention),
            wanted(*args, padding, sinks),
        )


# --- the same as SDPA

#: Our options; SDPA's, where they are others; key heads of four.
SDPA = {
    "plain": ({}, {}, 4),
    "causal": ({"is_causal": True}, {}, 4),
    "scale": ({"scale": 0.7}, {}, 4),
    "shared heads": ({}, {"enable_gqa": True}, 2),
    "one shared head": ({}, {"enable_gqa": True}, 1),
    "causal, shared": ({"is_causal": True}, {"enable_gqa": True}, 2),
    "bool mask": ({"attn_mask": visible(9, 9, (-1, 3), False)}, {}, 4),
    "float mask": ({"attn_mask": normal(3, 1, 9, 9).detach()}, {}, 4),
    "mask, shared": ({"attn_mask": visible(9, 9, (4, 1), False)}, {"enable_gqa": True}, 2),
}


@pytest.mark.parametrize(
    "name, dtype, tokens",
    pairwise(list(SDPA), [torch.float64, torch.float32, torch.bfloat16, torch.float16], [512, 4]),
)
def test_errors_are_no_larger_than_sdpas(name, dtype, tokens):
    options, others, kv_heads = SDPA[name]
    tensors = qkv(batch=3, q_len=9, kv_len=9, kv_heads=kv_heads, dtype=dtype)
    mask = options.get("attn_mask")
    if mask is not None:
        tensors["attn_mask"] = mask if mask.dtype == torch.bool else mask.to(dtype)
    sdpa = F.scaled_dot_product_attention
    check_beside(
        lambda t: ops.attention(**options | t), lambda t: sdpa(**options | others | t), tensors,
        tokens=tokens,
    )  # fmt: skip


# --- masks


def test_a_float32_mask_beside_16_bits_is_not_rounded():
    q, k, v = heads(dtype=torch.bfloat16)
    mask = (normal(5, 7) + 100.0).detach().float().requires_grad_()  # bfloat16 steps by 0.5 there
    y, *grads = results(lambda: ops.attention(q, k, v, mask), [mask])
    wide = [t.double().detach() for t in (q, k, v)]
    exact = mask.detach().double().requires_grad_()
    expected, dmask = results(lambda: attention(*wide, exact), [exact])
    # Some roundings to bfloat16; a mask that is rounded is off by up to 0.25.
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=0.02)
    assert grads[0].dtype == torch.float32
    torch.testing.assert_close(grads[0].double(), dmask, rtol=0, atol=0.05)
    y = ops.attention(q, k, v, mask.detach())
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=0.02)


# --- what may not change


CU = {f"cu_seqlens_{side}": torch.tensor([0, 3, 5]) for side in "qk"}


@pytest.mark.parametrize(
    "name, given",
    [
        ("attn_mask", {"attn_mask": mask_of("bool", (7, 7))}),
        ("attn_mask", {"attn_mask": mask_of("float", (7, 7))}),
        ("key_padding_mask", {"key_padding_mask": mask_of("bool", (1, 7))}),
        ("key_lengths", {"key_lengths": torch.tensor([3])}),
        *((name, CU) for name in CU),
    ],
)
def test_changing_masks_and_lengths_raises(name, given):
    given = {n: t.clone() for n, t in given.items()}
    y = ops.attention(*heads(1, q_len=7), **given)
    given[name].zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


# --- packed sequences

RANDOM = {"dropout_p": 0.3, "seed": 7, "window": (7, 2), "softcap": 1.5}


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("policy", ["full", "lean"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, RANDOM])
def test_tokens_of_no_sequence_are_zero_and_never_read(options, policy):
    qkv = heads(1, q_len=12, kv_len=13, dtype=torch.float32)
    insides = slice(2, 9), slice(1, 10), slice(1, 10)
    with torch.no_grad():
        for t, inside in zip(qkv, insides, strict=True):
            kept = t[:, :, inside].clone()
            t.fill_(torch.nan)[:, :, inside] = kept
    given = {**options, **packed(*PACKS["tokens of none"][:2]), "policy": policy}
    found = results(lambda: ops.attention(*qkv, **given), qkv)
    for t, inside in zip(found, (insides[0], *insides), strict=True):
        assert t[:, :, inside].isfinite().all() and t[:, :, inside].any()
        t[:, :, inside] = 0.0
        assert torch.equal(t, torch.zeros_like(t))


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


class Attend(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return ops.attention(q, k, v, **self.options)


FLASH, PACKED = "ATen's flash kernel for CPUs", "variable-length sequences, one at a time: "
BLOCKS = "blocks of query rows: causal with S_q other than S_k"
EMPTY = "blocks of query rows: there are no queries or no keys"
BOUNDS = packed([0, 9, 18, 24, 24, 30], [0, 9, 18, 28, 28, 34])
KEY_LENGTHS = {"key_lengths": torch.tensor([34, 0, 5])}


@pytest.mark.parametrize(
    ("batch", "options", "calls", "said"),
    [
        (1, BOUNDS, 4, f"{PACKED}{FLASH}; {EMPTY}"),
        # Causal: where queries are as many as keys.
        (1, BOUNDS | {"is_causal": True}, 3, f"{PACKED}{FLASH}; {BLOCKS}; {EMPTY}"),
        (1, packed([0], [9]), 0, PACKED + "none"),
        (3, KEY_LENGTHS, 1, FLASH),
        (3, KEY_LENGTHS | {"is_causal": True}, 0, f"{BLOCKS} with a mask or key lengths"),
    ],
)
def test_the_flash_kernel_runs_where_it_can_and_explain_says_why(batch, options, calls, said):
    """Backward is a call for each of two query heads that share a key head.

    So is forward where there is more than one sequence, or a mask.
    """
    qkv = heads(batch, q_len=30, kv_len=34)
    with Flash() as flash:
        results(lambda: ops.attention(*qkv, **options), qkv)
    assert flash.calls == {"forward": calls if batch == 1 else 2 * calls, "backward": 2 * calls}
    (block,) = explain(Attend(options), *qkv)
    assert dict(block.forward)["output"] == said

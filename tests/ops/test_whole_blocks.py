"""Whole blocks as functions: the layers' bits and results, every variation, and what is rebuilt."""

import pytest
import torch
import torch.nn.functional as F
from block_inputs import (
    Block,
    compare,
    covering,
    in_pieces,
    mask_of,
    normal,
    results,
    same_bits,
    tables,
)
from block_inputs import leaves as leaves_of
from op_cases import FF, D
from reference import ACTIVATIONS, EXACT_PRESETS, causal_block, make, pair, weights_of
from torch import nn

from fused_remat import ops

# --- an encoder's


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_encoder_block_gives_the_layers_bits(norm_first, policy):
    """Masks mean the opposite: SDPA's True takes part, the layer's is excluded."""
    _, layer = make(policy, dropout=0.2, norm_first=norm_first, batch_first=True)
    x, parts = normal(3, 5, D), weights_of(layer)
    takes_part = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) < 0.7
    padding = torch.tensor([[False] * 5, [True] + [False] * 4, [False] * 3 + [True] * 2])
    found = []
    for call in (
        lambda: layer(x, ~takes_part, src_key_padding_mask=padding),
        lambda: ops.encoder_block(
            x, parts, 2, takes_part, 0.2, key_padding_mask=padding, norm_first=norm_first,
            policy=policy,
        ),
    ):  # fmt: skip
        torch.manual_seed(3)
        found.append(results(call, [x, *parts.values()]))
    assert same_bits(*found)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu", F.silu, torch.sin])
def test_encoder_block_gives_the_stock_layers_results(norm_first, activation):
    stock, _ = pair(D, 2, FF, 0.0, norm_first=norm_first, batch_first=True, dtype=torch.float64)
    stock.activation = getattr(F, activation) if isinstance(activation, str) else activation
    x, mask, parts = normal(3, 5, D), normal(5, 5), weights_of(stock)
    causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    compare(
        lambda: ops.encoder_block(x, parts, 2, mask, is_causal=True, norm_first=norm_first,
                                  activation=activation, policy="lean"),
        lambda: stock(x, mask + causal),
        [x, mask, *parts.values()],
    )  # fmt: skip


# --- a language model's

BATCH, SEQ = 2, 7
PADDING = torch.zeros(2, BATCH, SEQ, dtype=torch.bool)
PADDING[0, 1, :3] = PADDING[1, 0, -2:] = True
#: Which keys take part, as options of the op; "packed" is for a batch of one.
KEYS = {
    "all": {},
    "window": {"window": (2, 1)},
    "bool mask": {"attn_mask": mask_of("bool", (SEQ, SEQ))},
    "float mask": {"attn_mask": mask_of("wants a gradient", (BATCH, 1, SEQ, SEQ))},
    "left padding": {"key_padding_mask": PADDING[0]},
    "right padding": {"key_padding_mask": PADDING[1]},
    "lengths": {"key_lengths": torch.tensor([SEQ, 0])},
    "packed": {"cu_seqlens": torch.tensor([0, 2, 2, SEQ - 1])},
}
#: What a block may be, and all that it may be.
VARIATIONS = covering(
    {
        "split": (True, False),
        "gated": (True, False),
        "placement": ("pre", "post", "sandwich"),
        "norm": ("rms_norm", "layer_norm"),
        "norm_offset": (0.0, 1.0),
        "kv_heads": (2, 4, 1),
        "bias": ("", "qkv", "all"),
        "qk_norm": (False, True),
        "rope": ("whole", "partial", "interleaved batched", ""),
        "activation": tuple(ACTIVATIONS),
        "keys": tuple(KEYS),
        "is_causal": (True, False),
        "softcap": (0.0, 2.0),
        "lora": ("", "lora", "dora"),
        "dropout_p": (0.0, 0.3),
        "tokens": (512, 8),
    }
)


def given(v):
    """x, weights and options of a variation, for the op and for plain PyTorch; its leaves."""
    shared = {n: v[n] for n in ("placement", "norm", "kv_heads")}
    biases = {"bias": v["bias"] == "all", "qkv_bias": v["bias"] == "qkv"}
    sizes = {n: v[n] for n in ("split", "gated", "qk_norm")}
    block = Block(head_dim=6, **shared, **sizes, **biases)
    batch = 1 if v["keys"] == "packed" else BATCH
    x, weights, how = normal(batch, SEQ, block.d, seed=1), block.weights(), {**shared, "seed": 11}
    how |= {n: v[n] for n in ("dropout_p", "is_causal", "softcap", "norm_offset", "activation")}
    if v["rope"]:
        lead = (batch, SEQ) if "batched" in v["rope"] else (SEQ,)
        how["rope"] = tables(*lead, 3 if v["rope"] == "whole" else 2)
        how["rope_interleaved"] = "interleaved" in v["rope"]
    if v["lora"]:
        every = [*block.linears, *["fc2"] * (v["lora"] == "lora")]  # fc2 has two updates
        updates = block.updates(every, dora=v["lora"] == "dora")
        how |= {"lora": updates, "lora_dropout_p": v["dropout_p"]}
    leaves = list(leaves_of(x, weights, how.get("lora", ())).values())
    if v["keys"] == "float mask":
        leaves.append(KEYS["float mask"]["attn_mask"])
    return x, weights, how | KEYS[v["keys"]], leaves


@pytest.mark.parametrize("part", range(4))
def test_every_pair_of_variations_is_plain_pytorchs(part):
    """In float64; the presets, of which each variation takes two, have the same bits."""
    for number, v in enumerate(VARIATIONS[part::4]):
        x, weights, how, leaves = given(v)
        expected = results(lambda: causal_block(x, weights, 4, **how), leaves)  # noqa: B023
        first = None
        for policy in (EXACT_PRESETS[number % 5], EXACT_PRESETS[(number + 2) % 5]):
            call = lambda: ops.causal_block(x, weights, 4, **how, policy=policy)  # noqa: B023, E731
            with in_pieces(v["tokens"]):
                got = results(call, leaves)
            first = first or got
            for a, b, e in zip(got, first, expected, strict=True):
                assert torch.equal(a, b), v
                torch.testing.assert_close(a, e, msg=lambda m: f"{v}: {m}")  # noqa: B023


def test_weight_gradients_of_split_projections_are_one_product():
    """Rows of one tensor, in one group or several; each of its own where one is frozen."""
    block = Block()
    x, weights = normal(BATCH, SEQ, block.d, seed=1), block.weights()
    of = [weights[f"{name}.weight"] for name in "qkv"]
    for leaves, tokens, tensors in ((of, 512, 1), (of, SEQ, 1), (of[:2], 512, 2)):
        of[2].requires_grad_(len(leaves) == 3)
        with in_pieces(tokens):
            y = ops.causal_block(x, weights, 4, kv_heads=2, policy="full")
            grads = torch.autograd.grad(y.sum(), leaves)
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == tensors
        expected = torch.autograd.grad(causal_block(x, weights, 4, kv_heads=2).sum(), leaves)
        torch.testing.assert_close(grads, expected)

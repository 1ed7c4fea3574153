"""`ops.causal_block`: every variation beside plain PyTorch, what it keeps, and what raises."""

import pytest
import torch
import torch.nn.functional as F
from reference import EXACT_PRESETS
from reference_ops import in_pieces, results
from reference_transformer import Block, plain
from reference_transformer import leaves as leaves_of
from torch import nn
from transformer_variations import FACTORS, block, inputs, options, pairwise

from fused_remat import ops
from fused_remat.graph.build import block_graph
from fused_remat.graph.schedule import schedule
from fused_remat.policies import kept_names
from fused_remat.spec import transformer_spec

VARIATIONS = list(pairwise(FACTORS))


def given(v, dtype=torch.float64):
    """What both functions take, and the leaves among it."""
    x, named, how = inputs(v, dtype), block(v).weights(dtype), options(v, dtype)
    if v["lora"]:
        every = [*block(v).linears, "fc2"]  # fc2 has two updates
        how |= {"lora": block(v).updates(every, dtype=dtype), "lora_dropout_p": v["dropout_p"]}
    leaves = list(leaves_of(x, named, how.get("lora", ())).values())
    mask = how.get("attn_mask")
    return x, named, how, leaves + [mask] * (mask is not None and mask.requires_grad)


@pytest.mark.parametrize("part", range(4))
def test_every_pair_of_variations_is_plain_pytorchs(part):
    """In float64; the presets, of which each variation takes two, have the same bits."""
    for number, v in enumerate(VARIATIONS[part::4]):
        x, named, how, leaves = given(v)
        expected = results(lambda: plain(x, named, 4, **how), leaves)  # noqa: B023
        first = None
        for policy in (EXACT_PRESETS[number % 5], EXACT_PRESETS[(number + 2) % 5]):
            with in_pieces(v["tokens"]):
                got = results(
                    lambda: ops.causal_block(x, named, 4, **how, policy=policy),  # noqa: B023
                    leaves,
                )
            first = first or got
            for a, b, e in zip(got, first, expected, strict=True):
                assert torch.equal(a, b), v
                torch.testing.assert_close(a, e, msg=lambda m: f"{v}: {m}")  # noqa: B023


# --- what is rebuilt

FIELDS = {
    "activation": "silu", "gated": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "scale": 0.4, "window": (-1, 0), "projection": "split", "rotary": True,
}  # fmt: skip
SPEC = transformer_spec("rms_norm", 1e-6, **FIELDS)


def backward_steps(spec, policy, frozen=()):
    graph = block_graph(spec)
    needs_grad = {"input", *(n for n in spec.weights if not n.startswith(tuple(frozen)))}
    save = kept_names(policy, graph)
    return [
        str(step) for step in schedule(graph, save, frozenset(needs_grad), tiled=False).backward
    ]


def test_gate_and_up_are_rebuilt_together_once_and_nothing_that_is_not_asked_for():
    assert backward_steps(SPEC, "full") == [
        "compute norm1", "compute qkv", "compute rotated", "compute attn", "compute mid",
        "compute norm2", "compute gate", "compute up", "compute act",
        "backward output", "backward act", "backward up", "backward gate", "backward norm2",
        "backward mid", "backward attn", "backward rotated", "backward qkv", "backward norm1",
    ]  # fmt: skip
    rebuilt = {
        policy: [s for s in backward_steps(SPEC, policy) if s.startswith("compute")]
        for policy in EXACT_PRESETS
    }
    assert rebuilt["fast"] == [
        "compute norm2", "compute gate", "compute up", "compute act", "compute norm1",
    ]  # fmt: skip
    assert rebuilt["none"] == ["compute act", "compute norm2", "compute norm1"]


@pytest.mark.parametrize("placement", ["post", "sandwich"])
def test_fc2_is_rebuilt_only_where_its_norm_asks_for_it(placement):
    spec = transformer_spec("rms_norm", 1e-6, placement=placement, **FIELDS)
    of_fc2 = f"compute {'sum2' if placement == 'post' else 'down'}"
    assert of_fc2 in backward_steps(spec, "full")
    assert all(of_fc2 not in backward_steps(spec, policy) for policy in EXACT_PRESETS[1:])


def test_what_frozen_weights_alone_would_ask_for_is_not_rebuilt():
    steps = backward_steps(SPEC, "none", frozen=("q.", "k.", "v.", "proj", "gate", "fc1", "fc2"))
    assert [s for s in steps if s.startswith("compute")] == []
    steps = backward_steps(SPEC, "lean", frozen=("fc2",))
    assert "compute act" not in steps and "compute up" in steps


# --- errors


def small(dtype=torch.float32, **changes):
    """x, weights and head counts of a Llama's block; a change to None takes a weight away."""
    block = Block()
    weights = {**block.weights(dtype), **{n.replace("__", "."): t for n, t in changes.items()}}
    x = torch.zeros(2, 5, block.d, dtype=dtype)
    return x, {n: t for n, t in weights.items() if t is not None}


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        (
            {"fc3__weight": torch.ones(3)},
            ValueError,
            ["unknown weights ['fc3.weight']", "fc1.bias"],
        ),
        ({"post1__weight": torch.ones(12)}, ValueError, ["unknown weights ['post1.weight']"]),
        ({"qkv__weight": torch.ones(32, 12)}, ValueError, ["either qkv.weight, or q.weight"]),
        ({"q__weight": None}, ValueError, ["either qkv.weight, or q.weight"]),
        ({"q__weight": torch.ones(15, 12)}, ValueError, ["(15, 12)", "4 heads"]),
        ({"q__weight": torch.ones(16, 11)}, ValueError, ["(16, 11)", "(4·E, 12)"]),
        ({"k__weight": torch.ones(16, 12)}, ValueError, ["k.weight", "(16, 12)", "(8, 12)"]),
        ({"v__weight": None}, ValueError, ["v.weight is missing", "(8, 12)"]),
        ({"v__bias": torch.ones(3)}, ValueError, ["v.bias", "(3,)", "(8,)"]),
        ({"proj__weight": torch.ones(12, 12)}, ValueError, ["proj.weight", "(12, 16)"]),
        ({"fc1__weight": None}, ValueError, ["fc1.weight is missing", "(F, 12)"]),
        ({"fc2__weight": torch.ones(12, 19)}, ValueError, ["fc2.weight", "(12, 19)", "(12, 20)"]),
        ({"gate__weight": torch.ones(19, 12)}, ValueError, ["gate.weight", "(19, 12)"]),
        ({"norm1__weight": torch.ones(11)}, ValueError, ["norm1.weight", "(11,)", "(12,)"]),
        ({"q_norm__weight": torch.ones(4)}, ValueError, ["go together"]),
        ({"norm2__weight": torch.ones(12).double()}, RuntimeError, ["norm2.weight", "float64"]),
        ({"norm2__weight": [1.0]}, TypeError, ["norm2.weight", "list"]),
    ],
)
def test_weights_that_do_not_fit_raise_and_are_named(changes, error, parts):
    x, weights = small(**changes)
    with pytest.raises(error) as raised:
        ops.causal_block(x, weights, 4, kv_heads=2)
    assert all(part in str(raised.value) for part in parts), raised.value


A, B = torch.ones(3, 12), torch.ones(16, 3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"x": torch.zeros(5, 12)}, ValueError, r"\(5, 12\), expected \(B, S, D\)"),
        ({"weights": [A]}, TypeError, "weights must map names to tensors, got list"),
        ({"kv_heads": 3}, ValueError, "got 4 and 3"),
        ({"placement": "both"}, ValueError, "'pre' or 'post' or 'sandwich', got 'both'"),
        ({"norm": "batch_norm"}, ValueError, "'layer_norm' or 'rms_norm', got 'batch_norm'"),
        ({"activation": "sigmoid"}, ValueError, "unknown activation 'sigmoid'; valid: relu"),
        ({"activation": torch.sin}, ValueError, "takes the name of an activation"),
        ({"dropout_p": 1.5}, ValueError, r"dropout_p must be between 0 and 1, got 1\.5"),
        ({"attention_dropout_p": -1}, ValueError, "attention_dropout_p .* got -1"),
        ({"softcap": -1.0}, ValueError, "softcap"),
        ({"window": (1,)}, TypeError, "window must be two ints"),
        ({"rope": (A, A)}, ValueError, r"\(3, 12\), expected \(5, R/2\)"),
        ({"lora": [("q", A, B)]}, TypeError, r"lora takes \(layer, A, B, scale\)"),
        (
            {"lora": [("w", A, B, 1.0)]},
            ValueError,
            "no layer 'w' to update; valid: q, k, v",
        ),
        (
            {"lora": [("k", A, B, 1.0)]},
            ValueError,
            r"B of k has shape \(16, 3\), expected \(8, 3\)",
        ),
        ({"lora": [("q", A.half(), B.half(), 1.0)]}, RuntimeError, "torch.float16 .*float32"),
        ({"cu_seqlens": torch.tensor([0, 5])}, ValueError, "batch of 1"),
    ],
)
def test_options_that_do_not_fit_raise(options, error, message):
    x, weights = small()
    given = {"x": x, "weights": weights, "nhead": 4, "kv_heads": 2, **options}
    with pytest.raises(error, match=message):
        ops.causal_block(**given)


@pytest.mark.parametrize(
    "activation", [F.silu, nn.SiLU(), "silu"], ids=["function", "module", "name"]
)
def test_an_activation_by_name_function_or_module(activation):
    x, weights = small(torch.float64)
    y = ops.causal_block(x + 1, weights, 4, kv_heads=2, activation=activation)
    torch.testing.assert_close(y, plain(x + 1, weights, 4, kv_heads=2))

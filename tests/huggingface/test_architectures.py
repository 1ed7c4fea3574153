"""Layers of transformers as blocks: logits and all gradients are those of the stock models."""

import copy

import pytest
import torch
from hf_models import (
    IDS,
    MODELS,
    S,
    all_served,
    allowed,
    build,
    distance,
    in_float64,
    inputs_of,
    packed,
    served,
    step,
)
from reference import EXACT_PRESETS

from fused_remat import convert, explain, memory_report, set_policy


def within(ours, theirs, dtype):
    """Errors at most one and a half times transformers' own, and a floor of a rounding of the
    values themselves: at this size errors are a handful of them."""
    floor = 4 * torch.finfo(dtype).eps
    assert {n: e for n, e in ours.items() if not e <= 1.5 * theirs[n] + floor} == {}


CAUSAL = [name for name in MODELS if name not in ("bert", "roberta", "vit")]


@pytest.mark.composes("Hugging Face", "logits and all gradients of eleven architectures, padding")
@pytest.mark.parametrize("name", MODELS)
def test_float64_in_every_preset(name):
    model = build(name)
    given = inputs_of(name)
    expected = step(in_float64(copy.deepcopy(model)), given)
    convert(model)
    for preset in EXACT_PRESETS:
        set_policy(model, "*", preset)
        got = served(in_float64(model), given)
        assert max(distance(got, expected).values()) < allowed(name), preset


@pytest.mark.parametrize(
    "name, dtype, padded",
    [(name, torch.float32, name != "qwen2") for name in MODELS]
    + [(name, torch.bfloat16, True) for name in ("llama", "gemma3", "bert")],
)
def test_error_is_within_that_of_transformers(name, dtype, padded):
    model = build(name, dtype)
    given = inputs_of(name, padded, dtype)
    oracle = copy.deepcopy(model).double()
    exact = inputs_of(name, padded) | {
        k: v.double() for k, v in given.items() if v.is_floating_point()
    }
    expected = step(in_float64(oracle), exact)
    theirs = distance(step(model, given), expected)
    within(distance(served(convert(model), given), expected), theirs, dtype)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_eager_attention(name):
    model = build(name, torch.float32, "eager")
    given = inputs_of(name)
    expected = step(model, given)
    # Two float32 computations of one thing.
    assert max(distance(served(convert(model), given), expected).values()) < 3e-5


@pytest.mark.composes("Hugging Face", "kept bytes are those predicted; `memory_report`, `explain`")
@pytest.mark.parametrize("name, presets", [("llama", ("full", "fast")), ("bert", ("lean",))])
def test_what_is_kept_is_what_is_predicted(name, presets):
    model, given = build(name, torch.float32), inputs_of(name)
    stock = [row.kept_bytes for row in memory_report(model, **given).layers[:2]]
    convert(model)
    for preset in presets:
        set_policy(model, "*", preset)
        rows = [row for row in memory_report(model, **given).layers if row.policy]
        assert [row.policy for row in rows] == [preset, preset]
        for row, whole in zip(rows, stock, strict=True):
            # What all layers share is the model's: the mask, and RoPE's tables.
            shared = sum(a.bytes for a in row.activations if a.name in ("mask", "cos", "sin"))
            assert row.kept_bytes - shared == row.predicted_bytes
            assert row.predicted_bytes < whole * (0.6 if preset == "fast" else 0.2)
    shown = explain(model, **given)
    assert len(shown) == 2 and "rebuild up" in str(shown[1])


@pytest.mark.composes("Hugging Face", "packed sequences, by `position_ids`")
@pytest.mark.parametrize("name", CAUSAL)
def test_packed_sequences_are_as_those_by_themselves(name):
    model = convert(build(name), policy="lean")
    both, parts = packed(name)
    with all_served():
        got = model(**both).logits[0]
    alone = torch.cat([model(input_ids=part).logits[0] for part in parts])
    # transformers' RMSNorm after the last layer is float32.
    torch.testing.assert_close(got, alone, rtol=1e-6, atol=1e-6)


def test_sequences_have_their_own_positions():
    stock = build("llama")
    fused = convert(copy.deepcopy(stock))
    tokens = IDS["input_ids"].shape[1]
    # Of any distance: without a mask transformers would take a gap for the next packed sequence.
    places = torch.arange(tokens) * torch.tensor([[1], [4]])
    given = {**IDS, "attention_mask": torch.ones_like(IDS["input_ids"]), "position_ids": places}
    with all_served():
        found = fused(**given).logits
    # transformers' RMSNorm is float32 in a float64 model
    torch.testing.assert_close(found, stock(**given).logits, rtol=1e-6, atol=1e-6)


def test_bounds_and_windows_of_flash_attention():
    """What a model hands to its layers for flash attention means what it means for sdpa."""
    model, given = build("mistral"), inputs_of("mistral")
    expected = step(in_float64(copy.deepcopy(model)), given)
    in_float64(convert(model))
    # Not through the setter, which imports the package: nothing of it is called.
    model.config._attn_implementation_internal = "flash_attention_2"
    assert max(distance(served(model, given), expected).values()) < 1e-10
    bounds = torch.tensor([0, 5, S], dtype=torch.int32)
    varlen = {f"cu_seq_lens_{t}": bounds for t in "qk"} | {f"max_length_{t}": 7 for t in "qk"}
    both, parts = packed("mistral")
    with all_served():
        whole = model(**both, **varlen).logits[0]
        alone = torch.cat([model(input_ids=part).logits[0] for part in parts])
    torch.testing.assert_close(whole, alone, rtol=1e-10, atol=1e-10)
    x = torch.zeros(1, S, 32, dtype=torch.float64)
    tables = (torch.ones(1, S, 8, dtype=torch.float64),) * 2
    call = {"position_embeddings": tables, "position_ids": both["position_ids"]}
    layer = model.model.layers[0]
    assert layer.why_not_fused(x, **call) == "sequences are packed without cu_seq_lens"
    model.config._attn_implementation_internal = "flex_attention"
    assert layer.why_not_fused(x, **call).startswith("the attention implementation is 'flex_att")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "bert"])
@pytest.mark.composes("Hugging Face", "autocast to bfloat16, float32 weights")
def test_autocast(name):
    model, given = build(name, torch.float32), inputs_of(name)
    expected = step(in_float64(copy.deepcopy(model).double()), given)
    with torch.autocast("cpu", torch.bfloat16):
        stock = step(model, given)
        ours = served(convert(model), given)
    assert ours["logits"].dtype == stock["logits"].dtype == torch.bfloat16
    within(distance(ours, expected), distance(stock, expected), torch.bfloat16)


_OF_ENCODERS = {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.3}
DROPOUT = {
    "llama": {"attention_dropout": 0.2},
    "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.3},
    "bert": _OF_ENCODERS,
    "vit": _OF_ENCODERS,
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout(name):
    model = build(name, torch.float32, **DROPOUT[name])
    given = inputs_of(name, False, torch.float32)
    convert(model)

    def seeded(seed, policy):
        set_policy(model, "*", policy)
        torch.manual_seed(seed)
        return served(model, given)

    first, again, other = seeded(3, "full"), seeded(3, "none"), seeded(4, "full")
    assert all(torch.equal(value, again[n]) for n, value in first.items())
    assert not torch.equal(first["logits"], other["logits"])

"""Caches of converted models, and where a block cannot stand in for a layer of transformers."""

import copy
import logging
import warnings

import pytest
import torch
import transformers
from hf_models import IDS, build, close, fused_layers, inputs_of, step
from torch import nn

from fused_remat import FusedRematWarning, convert


@pytest.fixture
def model():
    return build("llama")


@pytest.mark.composes("Hugging Face", "the default `use_cache` in training: the cache is dropped")
def test_the_empty_cache_of_training_is_dropped(model, blocks_run):
    assert model.config.use_cache
    expected = step(model, IDS)
    convert(model)
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    transformers.utils.logging.warning_once.cache_clear()
    try:
        close(step(model, IDS), expected)
        out = model(**IDS)
    finally:
        logger.removeHandler(handler)
    assert len(blocks_run) == 4 and out.past_key_values.get_seq_length() == 0
    model.requires_grad_(False).model.layers[1].requires_grad_(True)
    assert model(**IDS).past_key_values.get_seq_length() == 0  # frozen layers, too
    said = [message for message in messages if "past_key_values=None" in message]
    assert len(said) == 1 and "LlamaDecoderLayer" in said[0]


UNFILLED = "gets a cache that an earlier call in training did not fill"


@pytest.mark.composes(
    "Hugging Face", "`use_cache=True` in training: the cache stays empty; its next use warns"
)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("training", [True, False])
def test_the_next_use_of_a_cache_that_training_left_empty_warns(name, copies, training):
    """Where transformers fills the cache, the next call's logits are others."""
    stock, model = build(name), convert(build(name))
    ids, found = IDS["input_ids"], []
    for one in (stock, model):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = one(input_ids=ids[:, :6], use_cache=True)
            out.logits.sum().backward()
        found.append(copy.deepcopy(out.past_key_values) if copies and one is model else
                     out.past_key_values)  # fmt: skip
        one.train(training)
    filled, empty = found
    assert filled.get_seq_length() == 6 and empty.get_seq_length() == 0
    rest = {"input_ids": ids[:, 6:]}
    with torch.set_grad_enabled(training):
        expected = stock(**rest, past_key_values=filled).logits
        alone = model(**rest, use_cache=False).logits
        with pytest.warns(FusedRematWarning, match=UNFILLED) as told:
            got = model(**rest, past_key_values=empty).logits
        assert len([w for w in told if UNFILLED in str(w.message)]) == 1  # of the first layer
    torch.testing.assert_close(got, alone)
    assert not torch.allclose(got, expected)


def prefix(model, count=3):
    generator = torch.Generator().manual_seed(5)
    filled = transformers.DynamicCache(config=model.config)
    for i in range(2):
        kv = torch.randn(2, 2, 2, count, 8, generator=generator, dtype=torch.float64)
        filled.update(kv[0].requires_grad_(), kv[1], i)
    return filled


@pytest.mark.parametrize("training", [True, False])
def test_a_cache_with_tokens_takes_part(model, blocks_run, training):
    model.train(training)
    expected = step(model, {**IDS, "past_key_values": prefix(model)})
    convert(model)
    filled = prefix(model)
    why = "the cache holds tokens" if training else "the call fills a cache in evaluation"
    with pytest.warns(FusedRematWarning, match=why):
        got = step(model, {**IDS, "past_key_values": filled})
    assert not blocks_run and filled.get_seq_length() == 15
    assert all(torch.equal(value, expected[n]) for n, value in got.items())


@pytest.mark.parametrize(
    "name, differences",
    [
        ("gpt2", {"add_cross_attention": True}),
        ("gpt2", {"reorder_and_upcast_attn": True}),
        ("bert", {"is_decoder": True, "add_cross_attention": True}),
        ("llama", {"hidden_act": "relu2"}),
    ],
)
def test_what_the_row_of_an_architecture_lacks_is_read(name, differences, blocks_run):
    model = build(name, **differences)
    expected = step(model, inputs_of(name))
    got = step(convert(model), inputs_of(name))
    assert not fused_layers(model) or len(blocks_run) >= 2
    close(got, expected)
    with pytest.raises(ValueError, match="2 are fused already"):
        convert(model)


def own_forward(model, monkeypatch):
    forward = model.model.layers[0].forward
    model.model.layers[0].forward = lambda *args, **kwargs: forward(*args, **kwargs)


def patched_class(model, monkeypatch):
    stock = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    inner = stock.forward
    monkeypatch.setattr(stock, "forward", lambda *a, **k: inner(*a, **k))


@pytest.mark.parametrize(
    "change, converted, reason",
    [(own_forward, False, "its"), (patched_class, True, "LlamaDecoderLayer")],
)
def test_a_layer_whose_forward_was_replaced(
    model, blocks_run, monkeypatch, change, converted, reason
):
    expected = step(model, IDS)
    if converted:
        convert(model)
    change(model, monkeypatch)
    with pytest.warns(FusedRematWarning, match=f"{reason}.forward was replaced"):
        got = step(model if converted else convert(model), IDS)
    assert len(fused_layers(model)) == 2
    assert len(blocks_run) == (change is own_forward)
    close(got, expected)


def wrapped_norm(layer):
    layer.input_layernorm = nn.Sequential(layer.input_layernorm)


def hooked_linear(layer):
    layer.mlp.up_proj.register_forward_pre_hook(lambda *_: None)


def replaced_forward(layer):
    layer.self_attn.forward = layer.self_attn.forward


NORM = "transformers.models.llama.modeling_llama.LlamaRMSNorm"


@pytest.mark.parametrize(
    "change, reason",
    [
        (wrapped_norm, f"input_layernorm is torch.nn.Sequential; the fused path supports {NORM}"),
        (hooked_linear, "mlp.up_proj has hooks"),
        (replaced_forward, "self_attn.forward was replaced"),
    ],
)
@pytest.mark.parametrize("policy", ["full", "none"])
def test_where_the_block_cannot_stand_in(model, blocks_run, change, reason, policy):
    expected = step(convert(model, policy=policy), IDS)
    change(model.model.layers[0])
    assert model.model.layers[0].why_not_fused(torch.zeros(1, 2, 32), use_cache=True) == reason
    text = rf"model.layers.0 \(LlamaDecoderLayer\) runs transformers' own forward.*{reason}"
    with pytest.warns(FusedRematWarning, match=text):
        got = step(model, IDS)
    assert len(blocks_run) == 3
    close(dict(zip(expected, got.values(), strict=True)), expected)


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"attention_mask": torch.ones(2, 1, 12, 13) > 0}, "attention_mask is torch.bool of shape"),
        ({"attention_mask": torch.ones(2, 3, 12, 12) > 0}, "attention_mask is torch.bool of shape"),
        ({"position_bias": torch.zeros(1)}, "the call passes position_bias"),
        ({"past_key_values": object()}, "the cache holds tokens"),
        ({"position_embeddings": None}, "position_embeddings is NoneType"),
        ({"hidden_states": torch.zeros(2, 12, 32)}, "cos is torch.float64 of shape"),
        ({"hidden_states": torch.zeros(12, 32)}, "hidden_states has shape (12, 32)"),
    ],
)  # fmt: skip
def test_calls_that_the_block_does_not_take(model, given, reason):
    layer = convert(model).model.layers[0]
    tables = (torch.ones(1, 12, 8, dtype=torch.float64),) * 2
    call = {"hidden_states": torch.zeros(2, 12, 32).double(), "position_embeddings": tables}
    assert layer.why_not_fused(**call) is None
    assert layer.why_not_fused(**{**call, **given}).startswith(reason)
    with torch.no_grad():
        assert layer.why_not_fused(**call) == "no gradients are required"


def test_attention_functions_that_were_replaced(model, monkeypatch):
    layer, x = convert(model).model.layers[0], torch.zeros(1, 1, 32).double()
    table = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping
    call = {"position_embeddings": (torch.ones(1, 1, 8).double(),) * 2}
    assert layer.why_not_fused(x, **call) is None
    for owner, name in (  # as sequence parallelism does, and others
        (table, "sdpa"),
        (nn.functional, "scaled_dot_product_attention"),
    ):
        with monkeypatch.context() as patch:
            replace = patch.setitem if owner is table else patch.setattr
            replace(owner, name, lambda *args, **kwargs: None)
            assert layer.why_not_fused(x, **call) == "the attention function 'sdpa' was replaced"

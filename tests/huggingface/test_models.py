"""Converted models of transformers go on as they were: identity, outputs, saving, checkpointing."""

import copy
import functools
import io
import pickle

import pytest
import torch
import transformers
from accuracy import assert_bits
from hf_models import IDS, build, close, fused_layers, step
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematWarning, check_replay, convert, revert
from fused_remat.huggingface.rows import HuggingFaceLayer

CLOSE = {"rtol": 1e-6, "atol": 1e-6}  # transformers' RMSNorm is float32 in a float64 model
LOSS = pytest.mark.parametrize("loss", [False, True], ids=["layers", "loss, too"])


@pytest.fixture
def model():
    return build("llama")


def test_layers_stay_what_they_were(model):
    stock, layer = type(model.model.layers[0]), model.model.layers[0]
    names = {name: id(p) for name, p in model.named_parameters()}
    assert convert(model, policy="lean") is model
    first, second = model.model.layers
    assert first is layer and type(first) is type(second) is not stock
    assert isinstance(first, stock) and isinstance(first, HuggingFaceLayer)
    cls = type(first)
    assert (cls.__name__, cls.__qualname__) == (stock.__name__, stock.__qualname__)
    assert cls.__module__ == stock.__module__
    assert cls.__name__ in model._no_split_modules
    assert {name: id(p) for name, p in model.named_parameters()} == names
    assert [layer.policy for layer in (first, second)] == ["lean", "lean"]
    assert type(revert(model).model.layers[0]) is stock
    assert type(convert(model, every=2).model.layers[0]) is cls  # one class for a stock class
    assert type(model.model.layers[1]) is stock


@pytest.mark.composes("Hugging Face", "`generate()` and evaluation: transformers' own, bit for bit")
@LOSS
def test_generation(model, loss):
    model = model.float().eval()
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompt = {"input_ids": IDS["input_ids"][:, :5]}
    found = []
    for one in (model, convert(copy.deepcopy(model), loss=loss)):
        with torch.no_grad():
            logits = one(**IDS, labels=IDS["input_ids"]).logits
        found.append([one.generate(**prompt, **options), logits])
    assert_bits(*found)


@pytest.mark.composes("Hugging Face", "`output_hidden_states`; `output_attentions` by fallback")
def test_outputs_that_models_record(blocks_run):
    model = build("llama", how="eager")
    expected = model(**IDS, output_hidden_states=True, output_attentions=True)
    convert(model)
    got = model(**IDS, output_hidden_states=True)
    assert blocks_run == ["rotary_transformer_prenorm"] * 2  # also with recorders on the modules
    torch.testing.assert_close(got.hidden_states, expected.hidden_states, **CLOSE)
    with pytest.warns(FusedRematWarning, match="attention weights"):
        got = model(**IDS, output_attentions=True)
    torch.testing.assert_close(got.attentions, expected.attentions, **CLOSE)
    assert len(blocks_run) == 2


@pytest.mark.composes("Hugging Face", "gradients in evaluation, without a cache")
def test_gradients_in_evaluation(model, blocks_run):
    model.eval()
    given = {**IDS, "use_cache": False}
    expected = step(model, given)
    close(step(convert(model), given), expected)
    assert len(blocks_run) == 2


@pytest.mark.composes("Hugging Face", "`gradient_checkpointing_enable()`: blocks rebuild, once")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_gradient_checkpointing_does_not_rebuild_twice(model, blocks_run, reentrant, before):
    expected = step(model, IDS)
    counts = []

    def enable():
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in model.model.layers:
            inner = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = lambda *a, f=inner: counts.append(1) or f(*a)

    if before:
        enable()
    convert(model)
    if not before:
        enable()
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    close(step(model, IDS), expected)
    assert len(blocks_run) == 2 and not counts
    # Without a block, the layer runs under transformers' checkpoint, as the user requested.
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    with pytest.warns(FusedRematWarning, match="mlp has hooks"):
        close(step(model, IDS), expected)
    assert len(blocks_run) == 3 and len(counts) == 1
    revert(model)
    model(**IDS).logits.sum().backward()
    assert len(counts) == 3


@pytest.mark.composes("Hugging Face", "save_pretrained and from_pretrained: the same files")
@LOSS
def test_saving(model, tmp_path, loss):
    model, stock = model.float(), type(model)
    model.save_pretrained(tmp_path / "stock")
    convert(model, policy="fast", loss=loss)
    model.save_pretrained(tmp_path / "fused")
    for file in (tmp_path / "stock").iterdir():
        assert file.read_bytes() == (tmp_path / "fused" / file.name).read_bytes(), file.name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "fused").train()
    assert type(loaded) is stock and not fused_layers(loaded)
    expected = model(**IDS).logits
    assert torch.equal(convert(loaded, policy="fast")(**IDS).logits, expected)
    assert type(revert(model)) is stock


@LOSS
def test_copies_and_pickles(model, loss):
    convert(model, policy="lean", loss=loss)
    expected, file = step(model, IDS), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert [layer.policy for layer in fused_layers(other)] == ["lean", "lean"]
        assert all(torch.equal(value, expected[n]) for n, value in step(other, IDS).items())


@pytest.mark.composes("Hugging Face", "`Trainer`, with `gradient_checkpointing` or without")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(tmp_path, blocks_run, checkpointing):
    data = [{"input_ids": ids, "labels": ids} for ids in IDS["input_ids"].repeat(2, 1)]
    losses = []
    for converted in (False, True):
        model = build("llama", torch.float32)
        options = transformers.TrainingArguments(
            tmp_path, max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True,
            gradient_checkpointing=checkpointing,
        )  # fmt: skip
        trainer = transformers.Trainer(
            convert(model) if converted else model, options, train_dataset=data
        )
        trainer.train()
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert len(blocks_run) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # float32 rounding


@pytest.mark.composes("Hugging Face", "the replay check")
def test_the_replay_check(model, blocks_run):
    convert(model, policy="fast")
    with check_replay():
        step(model, IDS)
    assert len(blocks_run) == 2


@pytest.mark.composes("Hugging Face", "reentrant checkpoint around a layer, with dropout")
def test_a_first_run_without_gradients_draws_the_dropout_of_its_replay():
    layer = convert(build("gpt2", resid_pdrop=0.3)).transformer.h[0]
    results = []
    for call in (layer, functools.partial(checkpoint, layer, use_reentrant=True)):
        x = IDS["input_ids"][..., None].double().repeat(1, 1, 32).requires_grad_()
        torch.manual_seed(0)
        y = call(x)
        y.square().sum().backward()
        results.append([y, x.grad])
    assert_bits(*results)


def test_a_compiled_layer_is_one_graph(model):
    layer = convert(model).model.layers[0]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 32, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(1, 12, 8, generator=generator, dtype=torch.float64)
    tables = (angles.cos(), angles.sin())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for call in (layer, compiled):
        y = call(x, attention_mask=None, position_embeddings=tables, use_cache=False)
        results.append([y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
    assert_bits(*results)

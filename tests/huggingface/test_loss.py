"""`convert(loss=True)`: language models of transformers that train without full logits."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from hf_models import MODELS, VOCAB, build, reasons
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import CausalLMOutput

from fused_remat import FusedRematWarning, conversion, convert, explain, memory_report, revert
from fused_remat.report.allocations import AllocationTrace


def llama(**changes):
    return build("llama", torch.float32, **{"tie_word_embeddings": True, **changes})


def batch(seq=11):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (2, seq), generator=generator)
    labels = tokens.clone()
    labels[0, :3] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model, **inputs):
    """Return what the model returns, and every gradient."""
    model.zero_grad(set_to_none=True)
    out = model(**inputs)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters()}


def compare(model, fused, **inputs):
    expected, grads = step(model, **inputs)
    out, found = step(fused, **inputs)
    assert out.logits is None and expected.logits is not None
    # transformers makes float32 of the logits, whatever the model's dtype; ours are not rounded.
    torch.testing.assert_close(out.loss.float(), expected.loss.float(), rtol=1e-6, atol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    return out


@pytest.mark.composes("Hugging Face", "`convert(loss=True)`: the loss without whole logits")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert"])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["mean", "int", "tensor"])
def test_loss_and_gradients_are_transformers_own(name, items):
    if name == "bert" and items is not None:
        pytest.skip("its loss has no such argument")
    softcap = {"final_logit_softcapping": 0.5} if name == "gemma2" else {}
    model = build(name, tie_word_embeddings=True, **softcap)
    for loss in (True, "grad_in_forward"):
        fused = convert(copy.deepcopy(model), policy="lean", loss=loss)
        assert type(fused).__name__ == type(model).__name__ and isinstance(fused, type(model))
        compare(model, fused, **batch(), **({} if items is None else {"num_items_in_batch": items}))


def test_one_warning_tells_of_missing_logits():
    model = convert(llama(), loss=True)
    with pytest.warns(UserWarning, match="returns logits=None .* loss=False"):
        model(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        assert model(**batch()).logits is None
        assert model.eval()(**batch(), use_cache=False).logits is not None


def test_a_replica_of_data_parallel_has_no_logits():
    """Its parameters are plain tensors."""
    model = convert(llama(), loss=True).train()
    copy = model._replicate_for_data_parallel()
    for path, module in model.named_modules():
        parent, _, name = path.rpartition(".")
        mine = module._replicate_for_data_parallel() if path else copy
        if path:
            copy.get_submodule(parent)._modules[name] = mine
        for key, p in module._parameters.items():
            setattr(mine, key, None if p is None else p * 1.0)
    assert not [*copy.parameters()]
    out = copy(**batch())
    out.loss.backward()
    assert out.logits is None and all(p.grad is not None for p in model.parameters())


def test_a_frozen_head_and_a_head_with_a_bias():
    model = llama(tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(32, VOCAB)
    compare(model, convert(copy.deepcopy(model), loss=True), **batch())
    model.lm_head.requires_grad_(False)
    compare(model, convert(convert(copy.deepcopy(model)), loss=True), **batch())  # later


@pytest.mark.parametrize("inputs", [{"labels": None}, {"logits_to_keep": 3, "labels": None}])
def test_a_call_without_labels_has_logits(inputs):
    """One warning names what to use instead of a loss from logits."""
    model, inputs = llama(), batch() | inputs
    expected = model(**inputs).logits
    model = convert(model, loss=True)
    with reasons() as found, pytest.warns(FusedRematWarning, match="set model.loss_function"):
        logits = model(**inputs).logits
    assert found == ["the call computes no loss from them"]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)  # the layers' rounding
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        model(**inputs)


def test_a_tuple_has_none_in_place_of_logits():
    loss, logits, *_ = convert(llama(), loss=True)(**batch(), return_dict=False)
    assert logits is None and torch.equal(loss, convert(llama(), loss=True)(**batch()).loss)


def smoothed(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """Return the loss of Trainer's label_smoothing_factor=0.1; docs/huggingface.md has it."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
    options = {"label_smoothing": 0.1, "reduction": "sum"}
    loss = F.cross_entropy(logits.float().view(-1, vocab_size), labels, **options)
    return loss / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def sliced(logits, labels, vocab_size, **kwargs):
    """Slice logits and labels, as losses did before, and choose answers by a mask."""
    logits, labels = logits[:, :-1].contiguous(), labels[:, 1:]
    answers = labels != -100
    return 3.0 * nn.CrossEntropyLoss()(logits[answers], labels[answers])


def flattened(logits, labels, vocab_size, **kwargs):
    """Name no vocabulary, or no tokens; measure the perplexity first."""
    with torch.no_grad():
        perplexity = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).exp()
    return F.cross_entropy(logits.view(labels.numel(), -1), labels.flatten()) + 0 * perplexity


def measured(logits, labels, vocab_size, **kwargs):
    with torch.no_grad():
        accuracy = (logits.argmax(-1) == labels).float().mean()
    return sliced(logits, labels, vocab_size) + accuracy


def scaled_in_place(logits, labels, vocab_size, **kwargs):
    flat = logits.view(-1, vocab_size)
    flat *= 2.0
    flat /= 3.0
    return sliced(logits, labels, vocab_size)


def weighted(logits, labels, vocab_size, **kwargs):
    weight = torch.linspace(0.5, 2.0, vocab_size)
    return F.cross_entropy(logits.view(-1, vocab_size), labels.flatten(), weight)


def of_every_token(logits, labels, vocab_size, **kwargs):
    losses = F.cross_entropy(logits.view(-1, vocab_size), labels.reshape(-1), reduction="none")
    return losses.square().mean()


def with_z_loss(logits, labels, vocab_size, **kwargs):
    return sliced(logits, labels, vocab_size) + 1e-3 * logits.logsumexp(-1).square().mean()


def in_the_classes_dimension(logits, labels, vocab_size, **kwargs):
    return F.cross_entropy(logits.transpose(1, 2), labels)


def of_changed_logits(logits, labels, vocab_size, **kwargs):
    logits[..., 3] = -5.0
    return sliced(2 * logits, labels, vocab_size) + (1 - logits).square().mean()


@pytest.mark.parametrize(
    ("loss", "reads"),
    [
        (smoothed, ""), (sliced, ""), (of_every_token, ""), (flattened, ""),
        (weighted, "cross_entropy"), (measured, "argmax"), (scaled_in_place, "__imul__"),
        (with_z_loss, "logsumexp"), (in_the_classes_dimension, "transpose"),
        (of_changed_logits, "__setitem__"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("early", [True, "grad_in_forward"])
def test_a_loss_of_the_users_own(loss, reads, early):
    """Its cross-entropy is fused; a loss that does more has logits, with one warning."""
    model = llama()
    model.loss_function = loss
    fused = convert(copy.deepcopy(model), loss=early)
    if not reads:
        compare(model, fused, **batch())
        return
    with pytest.warns(FusedRematWarning, match=rf"logits \(.* MiB .*: its loss uses .*{reads}"):
        out, grads = step(fused, **batch())
    for _ in range(2):  # the second call may not compute the fused loss first
        expected, wanted = step(model, **batch())
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out.logits, expected.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-6)
        out, grads = step(fused, **batch())
    assert loss_of(fused)[0] == "bypassed" and reads in loss_of(fused)[1]


class OwnCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        loss = F.cross_entropy(logits, labels)
        ctx.save_for_backward((logits.softmax(-1) - F.one_hot(labels, VOCAB)) / len(labels))
        return loss

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.saved_tensors[0], None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_in_an_autograd_function_is_refused(reentrant):
    """No gradient would reach the logits, silently if another loss is added."""

    def loss_of(logits, labels, vocab_size, **kwargs):
        given = logits.view(-1, vocab_size), labels.clamp(min=0).flatten()
        if reentrant:
            return checkpoint(F.cross_entropy, *given, use_reentrant=True)
        return OwnCrossEntropy.apply(*given)

    model = llama()
    model.loss_function = loss_of
    step(model, **batch())
    with pytest.raises(TypeError, match=r"autograd\.Function .* convert\(model, loss=False\)"):
        convert(model, loss=True)(**batch())


def test_a_head_with_hooks_is_called():
    model = convert(llama(), loss=True)
    seen = []
    model.lm_head.register_forward_hook(lambda *args: seen.append(1))
    with pytest.warns(FusedRematWarning, match=r"full logits \(.* MiB .*\): lm_head has hooks"):
        assert model(**batch()).logits is not None and seen


def adapted(model):
    torch.manual_seed(2)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config)


def test_peft_before_and_after():
    model = adapted(llama())
    for fused in (convert(adapted(llama()), loss=True), adapted(convert(llama(), loss=True))):
        compare(model, fused, **batch())


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_a_frozen_model_of_trained_prompts(kind):
    torch.manual_seed(2)
    model = get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=2)).train()
    fused = convert(copy.deepcopy(model), loss=True)
    compare(model, fused, **batch())
    assert loss_of(fused) == ("fused", "")
    frozen = convert(llama().requires_grad_(False), loss=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert frozen(**batch(), use_cache=False).logits is not None


class Keyword(LlamaForCausalLM):
    def forward(self, input_ids, labels=None):
        logits = self.lm_head(input=self.model(input_ids, use_cache=False)[0])
        loss = self.loss_function(logits, labels, VOCAB)
        return CausalLMOutput(loss=loss, logits=logits)


def test_a_head_that_is_called_with_a_keyword():
    model = Keyword(llama().config).train()
    compare(model, convert(copy.deepcopy(model), loss=True), **batch())


def test_no_whole_logits_in_a_step():
    model = llama(vocab_size=20_000, tie_word_embeddings=False)
    model.lm_head.requires_grad_(False)
    fused = convert(model, loss=True)
    inputs = batch(256)
    step(fused, **inputs)
    with AllocationTrace() as trace:
        step(fused, **inputs)
    logits = inputs["input_ids"].numel() * 20_000 * 4
    assert max(span.peak for span in trace.spans) < logits / 2


def test_gradients_in_forward_are_reported():
    """With predicted bytes equal to the kept ones, and explained; `revert` forgets the option."""
    model, inputs = convert(llama(), loss="grad_in_forward"), batch()
    report = memory_report(model, loss=lambda output: output.loss, **inputs)
    other = report.layers[-1]
    kept = {a.name: (a.bytes, a.predicted) for a in other.activations if "gradient" in a.name}
    tokens, width = inputs["input_ids"].numel(), model.config.hidden_size
    sizes = 4 * tokens * width, 4 * VOCAB * width
    names = "input's gradient", "head.weight's gradient"
    assert kept == {name: (size, size) for name, size in zip(names, sizes, strict=True)}
    assert other.predicted_bytes == sum(sizes)
    shown = str(explain(model, **inputs))
    assert "linear_cross_entropy, backend eager, gradients in forward" in shown
    assert not revert(model).__dict__.keys() & {"loss_backend", "loss_grad_in_forward"}
    with pytest.raises(TypeError, match="'grad_in_forward', got 'forward'"):
        convert(model, loss="forward")


def test_models_without_a_head_are_told():
    model = LlamaForSequenceClassification(LlamaConfig(**MODELS["llama"][2]))
    with pytest.raises(ValueError, match=r"no model of transformers .* has a head"):
        convert(model, loss=True)
    with pytest.raises(ValueError, match="2 are fused already"):
        convert(convert(llama(), loss=True), loss=True)


def loss_of(model):
    (loss,) = conversion(model).losses
    return loss.state, loss.reason


def test_an_encoder_may_be_called_first():
    sizes = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1}
    config = T5Config(**sizes, num_heads=4, decoder_start_token_id=0)
    fused, given = convert(T5ForConditionalGeneration(config).train(), loss=True), batch()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        encoded = fused.get_encoder()(given["input_ids"])
        fused(encoder_outputs=encoded, labels=given["labels"]).loss.backward()
    assert loss_of(fused) == ("fused", "")


def test_conversion_tells_what_the_loss_was_computed_by():
    model, inputs = convert(llama(), loss=True), batch()
    assert loss_of(convert(llama())) == ("not requested", "")
    assert "not converted; convert(model, loss=True)" in str(conversion(convert(llama())))
    assert loss_of(model) == ("not called", "")
    explain(model, **inputs)
    memory_report(model, **inputs)
    assert loss_of(model) == ("not called", "")
    step(model, **inputs)
    assert loss_of(model) == ("fused", "")
    assert "loss of LlamaForCausalLM: computed without logits in 1 training call" in str(
        conversion(model)
    )
    del inputs["labels"]
    with torch.no_grad():
        model(**inputs)
    assert loss_of(model)[0] == "fused"
    with pytest.warns(FusedRematWarning, match=r"bypassed.*layers of LlamaForCausalLM"):
        model.model(**inputs).last_hidden_state.sum().backward()  # as trainers of TRL do
    reason = "the last training step called layers of LlamaForCausalLM without it"
    assert loss_of(model) == ("bypassed", reason)
    model(**inputs).logits.sum().backward()
    assert loss_of(model) == ("bypassed", "the call computes no loss from them")
    step(model, **batch())
    assert loss_of(model) == ("fused", "")
    model.lm_head.register_forward_hook(lambda *_: None)
    with pytest.warns(FusedRematWarning, match="lm_head has hooks"):
        step(model, **batch())
    assert loss_of(model) == ("bypassed", "lm_head has hooks")
    assert loss_of(copy.deepcopy(model)) == ("not called", "")

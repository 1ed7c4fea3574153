"""`convert(loss=True)` with heads that have no readable weight, and in trainers."""

import contextlib
import copy
import threading
import warnings

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hf_models import VOCAB, build
from peft import LoraConfig, get_peft_model
from test_loss import batch, llama, loss_of, smoothed, step
from torch import nn

from fused_remat import FusedRematWarning, convert
from fused_remat.huggingface import logits
from fused_remat.report.allocations import AllocationTrace


def adapters(targets=("lm_head",), **options):
    def change(model):
        torch.manual_seed(2)
        config = LoraConfig(r=4, target_modules=list(targets), init_lora_weights=False, **options)
        return get_peft_model(model, config)

    return change


def with_head(make):
    """Return a change that replaces the head by what `make` makes of it; and adds adapters."""

    def change(model):
        model.lm_head = make(model.lm_head)
        return adapters(["q_proj"])(model)

    return change


def bitsandbytes(head, kind="Linear4bit", **options):
    nn_ = pytest.importorskip("bitsandbytes").nn
    packed = getattr(nn_, kind)(*head.weight.shape[::-1], bias=False, **options)
    packed.load_state_dict(head.state_dict())
    return packed.to("cpu")


def bitsandbytes_int8(head):
    return bitsandbytes(head, "Linear8bitLt", has_fp16_weights=False)


def torchao(head):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(head, quantization.Int8WeightOnlyConfig())
    return head.requires_grad_(False)


def hqq(head):
    quantize = pytest.importorskip("hqq.core.quantize")
    options = quantize.BaseQuantizeConfig(nbits=4, group_size=32)
    return quantize.HQQLinear(head, options, compute_dtype=torch.float32, device="cpu")


HEADS = {
    "LoRA": adapters(),
    "LoRA with dropout": adapters(lora_dropout=0.5),
    "DoRA": adapters(use_dora=True),
    "modules_to_save": adapters(["q_proj"], modules_to_save=["lm_head"]),
    "bitsandbytes, 4 bits": with_head(bitsandbytes),
    "bitsandbytes, int8": with_head(bitsandbytes_int8),
    "torchao": with_head(torchao),
    "HQQ": with_head(hqq),
}


@pytest.mark.composes("Hugging Face", "`convert(loss=True)`: quantized and adapted heads")
@pytest.mark.parametrize("tokens", [256, 5])
@pytest.mark.parametrize("name", HEADS)
def test_heads_that_are_called_on_some_tokens_at_a_time(name, tokens, monkeypatch):
    if name == "LoRA with dropout" and tokens < 256:
        pytest.skip("parts of the tokens draw other random numbers")
    monkeypatch.setattr(logits, "_TOKENS", tokens)
    monkeypatch.setattr(logits, "_LOGITS", (1, 1))
    model = build("gemma2", torch.float32, final_logit_softcapping=0.5).eval()
    model = HEADS[name](model).train()
    fused = convert(copy.deepcopy(model), loss=True)
    for items in ({}, {"num_items_in_batch": 7}):
        outputs = []
        for one in (model, fused):
            torch.manual_seed(0)
            outputs.append(step(one, **batch(), **items))
        (expected, wanted), (out, grads) = outputs
        assert out.logits is None and loss_of(fused) == ("fused", "")
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(grads, wanted, rtol=1e-4, atol=1e-6)


def test_adapters_are_switched_before_backward():
    """The head runs again in backward, with the adapter and the dropout of forward."""
    models = [adapters(lora_dropout=0.5)(llama(tie_word_embeddings=False)) for _ in range(2)]
    grads = []
    for model in (models[0], convert(models[1], loss=True)):
        torch.manual_seed(3)
        model.add_adapter("other", model.peft_config["default"])
        norm = model.get_base_model().model.norm.weight.requires_grad_()
        out = model(**batch())
        model.set_adapter("other")
        norm.requires_grad_()  # which PEFT has turned off
        with model.eval().disable_adapter():
            out.loss.backward()
        grads.append(norm.grad)
    assert out.logits is None
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


def test_a_head_with_state_is_called_once():
    model = llama(tie_word_embeddings=False)
    nn.utils.parametrizations.spectral_norm(model.lm_head)
    fused = convert(copy.deepcopy(model), loss=True)
    with pytest.warns(FusedRematWarning, match=r"full logits .*: lm_head is .*Parametrized"):
        out = fused(**batch())
    torch.testing.assert_close(out.loss, model(**batch()).loss, rtol=1e-6, atol=1e-6)
    for (name, mine), theirs in zip(fused.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


@pytest.mark.parametrize(
    ("name", "change"),
    [("gemma2", lambda model: model), ("gemma2", adapters()), ("cohere", lambda model: model)],
    ids=["capped", "adapted", "scaled"],
)
def test_no_logits_in_a_step(name, change, monkeypatch):
    monkeypatch.setattr(logits, "_TOKENS", 16)
    if name == "cohere":
        config = transformers.CohereConfig(
            vocab_size=20_000, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=4, logit_scale=0.3,
        )  # fmt: skip
        model = transformers.CohereForCausalLM(config).train()
    else:
        model = build(name, torch.float32, vocab_size=20_000, final_logit_softcapping=2.0)
    model.get_output_embeddings().requires_grad_(False)
    fused, inputs = convert(change(model), loss=True), batch(256)
    step(fused, **inputs)
    with AllocationTrace() as trace:
        step(fused, **inputs)
    logits_bytes = inputs["input_ids"].numel() * 20_000 * 4
    assert max(span.peak for span in trace.spans) < logits_bytes / 2


def test_a_compiled_model_is_one_graph():
    model = convert(build("gemma2", torch.float32, final_logit_softcapping=0.5), loss=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compare_to, grads = step(model, **batch())
    out, found = step(compiled, **batch())
    assert out.logits is None
    torch.testing.assert_close(out.loss, compare_to.loss, rtol=1e-6, atol=1e-6)
    for name, grad in grads.items():
        torch.testing.assert_close(found[f"_orig_mod.{name}"], grad, rtol=1e-4, atol=1e-6)


class Counting(transformers.LlamaForCausalLM):
    """A model that sets an attribute in forward, and reads its head in another dtype."""

    def forward(self, input_ids, labels=None, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        hidden = self.model(input_ids).last_hidden_state
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        loss = self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_a_model_of_the_users_own():
    model = Counting(llama().config).train()
    fused = convert(copy.deepcopy(model), loss=True)
    (expected, wanted), (out, grads) = step(model, **batch()), step(fused, **batch())
    assert fused.calls == 1 and out.logits is None and "lm_head" not in vars(fused)
    # The logits, or the hidden states and the head, are rounded to bfloat16.
    torch.testing.assert_close(out.loss, expected.loss.float(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(grads, wanted, rtol=5e-2, atol=1e-3)


def test_threads_share_a_model():
    model = convert(llama(), loss=True)
    expected, losses = model(**batch()).loss, []

    def train():
        for _ in range(5):
            losses.append(model(**batch()).loss)

    threads = [threading.Thread(target=train) for _ in range(3)]
    for thread in threads:
        thread.start()
        assert type(model.lm_head) is nn.Linear and type(model.get_output_embeddings()) is nn.Linear
    for thread in threads:
        thread.join()
    assert len(losses) == 15 and all(torch.equal(loss, expected) for loss in losses)


# Trainers.

DATA = [{"input_ids": ids, "labels": ids} for ids in batch()["input_ids"].repeat(2, 1)]


def arguments(folder, kind=transformers.TrainingArguments, **options):
    return kind(
        folder, max_steps=2, per_device_train_batch_size=2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, **options,
    )  # fmt: skip


@pytest.mark.composes("Hugging Face", "`Trainer`: `loss=True`, and metrics of complete logits")
def test_trainer_evaluates_with_logits(tmp_path):
    """And sums the loss over accumulated batches, where it passes num_items_in_batch."""
    found = []
    for loss in (False, True):
        metrics = []

        def compute(prediction, metrics=metrics):
            logits = np.asarray(prediction.predictions)
            metrics.append(logits)
            return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}

        trainer = transformers.Trainer(
            convert(llama(), loss=loss),
            arguments(tmp_path, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1),
            train_dataset=DATA, eval_dataset=DATA, compute_metrics=compute,
        )  # fmt: skip
        trainer.train()
        logged = [
            [row[key] for row in trainer.state.log_history if key in row]
            for key in ("loss", "eval_loss", "eval_accuracy")
        ]
        assert metrics[0].shape == (4, 11, VOCAB) and [len(rows) for rows in logged] == [2, 2, 2]
        found.append([logged, metrics])
    assert loss_of(trainer.model) == ("fused", "")
    (expected, stock), (got, fused) = found
    for a, b in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    for a, b in zip(fused, stock, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_label_smoothing_in_trainer(tmp_path):
    """Trainer takes the labels away, and computes a loss from logits: the model's own does it."""
    losses = []
    for factor, own in ((0.1, False), (0.0, True)):
        model = convert(llama(), loss=True)
        if own:
            model.loss_function = smoothed
        options = arguments(tmp_path, label_smoothing_factor=factor, gradient_accumulation_steps=2)
        trainer = transformers.Trainer(model, options, train_dataset=DATA)
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            trainer.train()
        messages = [str(w.message) for w in shown if w.category is FusedRematWarning]
        assert own or ["label_smoothing_factor" in text for text in messages] == [True]
        assert loss_of(model)[0] == ("fused" if own else "bypassed")
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_trl_computes_the_loss_itself(tmp_path):
    """It replaces the model's forward by one that calls the base model; with one warning."""
    from fused_remat.integrations.trl import fused_lm_head

    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="w0", eos_token="w2"
    )
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in DATA])
    for inside in (False, True):
        model = convert(llama(), loss=True)
        trainer = trl.SFTTrainer(
            model, arguments(tmp_path, trl.SFTConfig, bf16=False), train_dataset=data,
            processing_class=tokenizer,
        )  # fmt: skip
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            with fused_lm_head() if inside else contextlib.nullcontext():
                trainer.train()
        messages = [str(w.message) for w in shown if "bypassed" in str(w.message)]
        assert inside or ["fused_lm_head()" in text for text in messages] == [True]
        assert not (inside and messages) and loss_of(model)[0] == "bypassed"

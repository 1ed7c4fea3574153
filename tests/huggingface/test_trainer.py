"""`FusedRematCallback` in transformers' Trainer and TRL's, and `convert` before Accelerate's."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig
from processes import ROOT
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from fused_remat import FusedRematWarning, Policy, conversion, convert, memory_report
from fused_remat.execution.observe import OBSERVERS
from fused_remat.integrations.transformers import FusedRematCallback
from fused_remat.report.units import human

LAYERS, STEPS, BATCH, VOCAB = 2, 4, 4, 64
IDS = torch.randint(VOCAB, (32, 16), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": ids, "labels": ids} for ids in IDS]

pytestmark = pytest.mark.filterwarnings(
    "ignore:`.*gradient_checkpointing.* is deprecated:FutureWarning"
)


def llama() -> LlamaForCausalLM:
    """Build a Llama whose weights are always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def settings(folder: Path, **options: Any) -> dict[str, Any]:
    """Return arguments of a run on the CPU."""
    own = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": BATCH,
        "learning_rate": 0.1, "optim": "sgd", "logging_steps": 1, "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": [],
    }  # fmt: skip
    return {**own, **options}


def trainer_of(folder: Path, *callbacks: Any, model: Any = None, **options: Any) -> Trainer:
    """Build a Trainer of a Llama, or of a `model_init`."""
    named = {"model_init": llama} if model == "init" else {"model": model or llama()}
    more = {n: options.pop(n) for n in ("compute_metrics",) if n in options}
    trainer = Trainer(
        args=TrainingArguments(**settings(folder, **options)), train_dataset=DATA,
        eval_dataset=DATA[:BATCH], callbacks=list(callbacks), **named, **more,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    return trainer


def losses(trainer: Trainer, **options: Any) -> list[float]:
    """Train, and return the logged losses."""
    trainer.train(**options)
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.fixture
def logged():
    """Return the messages of the callback's logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.fused_remat")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.mark.composes(
    "Hugging Face", "`Trainer` with `FusedRematCallback`, under all checkpointing options"
)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"gradient_accumulation_steps": 2}],
    ids=lambda options: next(iter(options), "defaults"),
)
@pytest.mark.parametrize("loss", [False, True])
def test_training_has_the_losses_of_the_stock_model(tmp_path, logged, options, loss):
    stock = losses(trainer_of(tmp_path, **options))
    callback, blocks = FusedRematCallback("lean", loss=loss), []
    trainer = trainer_of(tmp_path, callback, **options)
    observe = lambda run: blocks.append(run.call.graph.kind)  # noqa: E731
    OBSERVERS.append(observe)
    try:
        fused = losses(trainer)
    finally:
        OBSERVERS.remove(observe)
    # Four steps of other roundings in float32.
    assert fused == pytest.approx(stock, rel=1e-5)
    calls = STEPS * options.get("gradient_accumulation_steps", 1)
    # Each layer is a block, whose forward nothing runs a second time.
    assert blocks.count("linear_cross_entropy") == (calls if loss else 0)
    assert len(blocks) == calls * (LAYERS + loss)
    assert OBSERVERS == []
    # Logged once, with the bytes of one batch.
    (message,) = logged
    report = memory_report(trainer.model.train(), DATA_BATCH)
    layers = [layer for layer in report.layers if layer.policy]
    assert f"blocks keep {human(sum(n.predicted_bytes for n in layers))} for" in message
    assert f"converted {LAYERS} × LlamaDecoderLayer" in message
    assert ("without logits" in message) == loss
    stock_layers = memory_report(llama().train(), DATA_BATCH).layers[:LAYERS]
    bound = float(re.search(r"stock layers at least ([\d.]+) KiB", message)[1]) * 1024
    assert 0.5 < bound / sum(layer.kept_bytes for layer in stock_layers) <= 1


DATA_BATCH = {"input_ids": IDS[:BATCH], "labels": IDS[:BATCH], "use_cache": False}


@pytest.mark.composes("Hugging Face", "`Trainer`'s checkpoints with the callback, and resuming")
def test_a_checkpoint_resumes_and_is_a_stock_one(tmp_path):
    trainer = trainer_of(tmp_path, FusedRematCallback(), save_strategy="steps", save_steps=2)
    first = losses(trainer)
    saved = tmp_path / "checkpoint-2"
    again = trainer_of(tmp_path / "again", FusedRematCallback())
    assert losses(again, resume_from_checkpoint=str(saved)) == first
    assert json.loads((saved / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    trainer.save_model(str(tmp_path / "end"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "end")
    torch.testing.assert_close(loaded.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
    llama().save_pretrained(tmp_path / "stock")
    files = [{path.name for path in (tmp_path / name).iterdir()} for name in ("end", "stock")]
    assert files[0] - files[1] == {"training_args.bin"}


def test_evaluation_has_complete_logits(tmp_path):
    shapes = []

    def compute_metrics(predictions: Any) -> dict[str, float]:
        shapes.append(predictions.predictions.shape)
        return {}

    options = {"eval_strategy": "steps", "eval_steps": 2, "compute_metrics": compute_metrics}
    stock, fused = (
        trainer_of(tmp_path, *callbacks, **options)
        for callbacks in ([], [FusedRematCallback(loss=True)])
    )
    expected, found = losses(stock), losses(fused)
    assert found == pytest.approx(expected, rel=1e-5)  # as above
    logs = [[log.get("eval_loss") for log in t.state.log_history] for t in (stock, fused)]
    evaluated = [[loss for loss in of_one if loss is not None] for of_one in logs]
    assert evaluated[1] == pytest.approx(evaluated[0], rel=1e-5)
    assert shapes == [(BATCH, *IDS.shape[1:], VOCAB)] * 4


def test_a_model_that_the_constructor_does_not_have_is_converted_by_train(tmp_path):
    expected = losses(trainer_of(tmp_path))
    late = trainer_of(tmp_path)
    late.add_callback(FusedRematCallback())
    assert losses(late) == pytest.approx(expected, rel=1e-5)  # as above
    of_function = trainer_of(tmp_path, FusedRematCallback(), model="init")
    found = losses(of_function)
    assert found == pytest.approx(losses(trainer_of(tmp_path, model="init")), rel=1e-5)
    assert {conversion(t.model)[0].state for t in (late, of_function)} == {"converted"}


def test_a_model_that_was_converted_before_keeps_its_policy_with_a_warning(tmp_path):
    model = convert(llama(), "fast")
    with pytest.warns(FusedRematWarning, match="FusedRematCallback have no effect"):
        trainer_of(tmp_path, FusedRematCallback("lean"), model=model)
    assert model.model.layers[0].policy == "fast"


def test_errors_come_from_the_constructors(tmp_path):
    with pytest.raises(ValueError, match="unknown policy 'leen'; valid presets: full, lean"):
        FusedRematCallback("leen")
    with pytest.raises(TypeError, match="policy must be a preset"):
        FusedRematCallback(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss must be True, False or 'grad_in_forward', got 'x'"):
        FusedRematCallback(loss="x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown activation 'nothing'"):
        trainer_of(tmp_path, FusedRematCallback(Policy(save={"nothing"})))


def test_a_compiled_model_trains(tmp_path, logged):
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 2}
    expected = losses(trainer_of(tmp_path, max_steps=2))
    found = losses(trainer_of(tmp_path, FusedRematCallback(), **options))
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(logged) == 1 and "calls of compiled layers are not counted" in logged[0]


@pytest.mark.composes("Hugging Face", "TRL's `SFTTrainer` with LoRA and `FusedRematCallback`")
def test_trls_trainer_with_lora(tmp_path, logged):
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCAB)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="2")
    found = []
    for callbacks in ([], [FusedRematCallback("lean")]):
        from datasets import Dataset

        torch.manual_seed(0)
        trainer = SFTTrainer(
            llama(), SFTConfig(**settings(tmp_path)), processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"input_ids": IDS.tolist()}), callbacks=callbacks,
            peft_config=LoraConfig(r=4, target_modules="all-linear"),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    (message,) = logged
    assert f"converted {LAYERS} × LlamaDecoderLayer: {LAYERS} fused training calls" in message


@pytest.mark.composes("Engines", "a plain loop of Accelerate: `convert` before `prepare`")
def test_a_plain_loop_of_accelerate():
    def run(model: Any) -> list[float]:
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = accelerator.prepare(model.train(), optimizer)
        found = []
        for _ in range(STEPS):
            loss = model(**DATA_BATCH).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    model = convert(llama(), "lean", loss=True)
    assert run(model) == pytest.approx(run(llama()), rel=1e-5)
    assert conversion(model)[0].calls[0].number == STEPS * LAYERS


def test_the_page_shows_what_its_code_logs(logged, tmp_path, monkeypatch):
    page = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
    code, shown = re.search(r"```python\n(.*?)```.*?```\n(.*?)```", page, re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "trainer.md", "exec"), {})
    assert logged == [shown.rstrip()]

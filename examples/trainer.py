"""Fine-tune a causal language model with Hugging Face's `Trainer` and `FusedRematCallback`.

The same steps run under the model's own checkpointing first; printed are the losses of both, what
they keep for backward, and the peak of a step above weights and inputs.

    python examples/trainer.py                             # a tiny Llama: seconds on one core
    python examples/trainer.py --model HuggingFaceTB/SmolLM-135M --seq-len 1024 --bf16
    python examples/trainer.py --model path/to/model --text book.txt --lora

Needs `pip install 'fused-remat[hf]'`. Without `--text`, the text is Python's own manual.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from fused_remat import memory_report
from fused_remat.integrations.transformers import FusedRematCallback
from fused_remat.report.units import human

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler counts bytes on CPUs; it logs a lot


def tiny_llama() -> LlamaForCausalLM:
    """Build a Llama over bytes, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def load(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model, with LoRA's adapters if requested."""
    model = tiny_llama() if args.model is None else AutoModelForCausalLM.from_pretrained(args.model)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    return model


def dataset(args: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Return the text in blocks of tokens, which are the labels as well: the model shifts them."""
    text = args.text.read_text(encoding="utf-8") if args.text else "".join(topics.values())
    if args.model is None:
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    else:
        tokens = torch.tensor(AutoTokenizer.from_pretrained(args.model)(text)["input_ids"])
    blocks = tokens[: len(tokens) // args.seq_len * args.seq_len].view(-1, args.seq_len)
    return [{"input_ids": block, "labels": block} for block in blocks]


def train(
    model: torch.nn.Module, data: list[dict[str, torch.Tensor]], fused: bool, args: Any
) -> list[float]:
    """Train `model` with the callback, or under its own checkpointing; return the losses."""
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.batch,
            learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], seed=0,
            disable_tqdm=True, dataloader_pin_memory=False, use_cpu=not torch.cuda.is_available(),
            bf16=args.bf16, gradient_checkpointing=not fused,
        )  # fmt: skip
        callbacks = [FusedRematCallback(args.policy, loss=args.loss)] if fused else []
        trainer = Trainer(model, settings, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return [float(log["loss"]) for log in trainer.state.log_history if "loss" in log]


def compare(load: Callable[[argparse.Namespace], torch.nn.Module], args: Any) -> None:
    """Train a model in both ways, and print what each keeps."""
    data = dataset(args)
    batch = {name: torch.stack([one[name] for one in data[: args.batch]]) for name in data[0]}
    for fused in (False, True):
        model = load(args)
        losses = train(model, data, fused, args)
        device = next(model.parameters()).device
        inputs = {name: t.to(device) for name, t in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
            report = memory_report(model.train(), inputs, loss=lambda output: output.loss)
        layers = sum(layer.kept_bytes for layer in report.layers if layer.name != "(other)")
        print("FusedRemat" if fused else "checkpointing", end=": ")
        print(f"layers keep {human(layers)}, the model {human(report.kept_bytes)};", end=" ")
        print(f"peak {human(report.peak_bytes)}; losses", *(f"{loss:.4f}" for loss in losses))


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--model", help="a name on the Hub or a local folder; otherwise tiny, with random weights")
    add("--text", type=Path, help="a text file; otherwise Python's manual")
    add("--lora", action="store_true", help="train adapters alone")
    add("--policy", default="full", help="what layers keep: docs/presets.md")
    add("--loss", action="store_true", help="compute the loss without logits")
    add("--bf16", action="store_true", help="autocast to bfloat16")
    add("--steps", type=int, default=5)
    add("--batch", type=int, default=4)
    add("--seq-len", type=int, default=128)
    return parser.parse_args(argv)


if __name__ == "__main__":
    compare(load, parse(__doc__, None))

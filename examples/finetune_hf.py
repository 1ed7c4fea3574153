"""Fine-tune a SmolLM-135M-shaped language model in several ways; memory, time, losses side by side.

Full fine-tuning and LoRA (PEFT), each with a plain loop and with Hugging Face's `Trainer`, each as
the model is, under its own gradient checkpointing, and after `fused_remat.convert`. The model has
random weights, or is read from a local folder; the text is the English of Python's own manual,
which ships with CPython, or a file of yours; the tokenizer is trained on it, or the folder's.

    python examples/finetune_hf.py                      # six of 30 layers: minutes on 2 cores
    python examples/finetune_hf.py --layers 30 --seq-len 1024 --device cuda --dtype bfloat16
    python examples/finetune_hf.py --model path/to/smollm --text book.txt --modes lora

Needs `transformers`, `peft` and, for `Trainer`, `accelerate` (`pip install 'fused-remat[hf]'`).
"""

from __future__ import annotations

import os

# Read when torch is loaded: keeps the profiler, which counts bytes on CPU, from logging its starts.
os.environ["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", "99")

import argparse
import copy
import itertools
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging as transformers_logging

sys.path.append(str(Path(__file__).parents[1]))  # for `bench`, which is not installed
from bench.measure.clock import quantiles
from bench.measure.machine import machine
from bench.tables import markdown, mib, ms
from fused_remat import convert
from fused_remat.policies import EXACT_PRESETS
from fused_remat.report.allocations import measure_allocations

#: Two ways of PyTorch and Hugging Face; every other is a preset of `fused_remat.convert`.
PEERS = ("eager", "checkpoint")
MODES, LOOPS = ("full", "lora"), ("plain", "trainer")
LEARNING_RATE = {"full": 3e-4, "lora": 1e-3}
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}


def smollm(layers: int, vocabulary: int, seq_len: int, kv_heads: int = 3) -> LlamaConfig:
    """The shape of HuggingFaceTB/SmolLM-135M, with its own number of layers or fewer.

    Fewer than its 3 key heads make it narrower in proportion: heads of 64, three to a key head, and
    an MLP of 8/3 of the width.
    """
    return LlamaConfig(
        hidden_size=192 * kv_heads, intermediate_size=512 * kv_heads,
        num_attention_heads=3 * kv_heads, num_key_value_heads=kv_heads,
        num_hidden_layers=layers, vocab_size=vocabulary, max_position_embeddings=max(seq_len, 2048),
        rms_norm_eps=1e-5, tie_word_embeddings=True,
    )  # fmt: skip


def blocks_of(tokens: Tensor, seq_len: int) -> Tensor:
    """The text's tokens in blocks (N, S), shuffled."""
    count = len(tokens) // seq_len
    if not count:
        raise ValueError(f"the text has {len(tokens)} tokens, fewer than a block of {seq_len}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return tokens[: count * seq_len].view(count, seq_len)[order]


def batch_of(blocks: Tensor, step: int, args: argparse.Namespace) -> dict[str, Tensor]:
    """The batch of a step, without end; the labels are the tokens (the model shifts)."""
    places = torch.arange(step * args.batch, (step + 1) * args.batch) % len(blocks)
    tokens = blocks[places].to(args.device)
    return {"input_ids": tokens, "labels": tokens}


@dataclass
class Way(TrainerCallback):
    """One way's model, and what was measured of it; by Trainer itself where that trains it."""

    name: str
    model: Any
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    kept_bytes: int = 0
    peak_bytes: int = 0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:  # of a step; the last logs are of the run
            self.losses.append(float(logs["loss"]))


def build(base: PreTrainedModel, name: str, mode: str, args: argparse.Namespace) -> Way:
    """A copy of `base`, made ready in the way `name`."""
    model: Any = copy.deepcopy(base)
    if mode == "lora":
        torch.manual_seed(0)  # the same adapters at first
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    if name == "checkpoint":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif name in EXACT_PRESETS:
        convert(model, policy=name, loss=not args.logits)
    model.to(args.device, getattr(torch, args.dtype)).train()
    return Way(name, model)


def measure_memory(way: Way, blocks: Tensor, args: argparse.Namespace) -> None:
    """Bytes between forward and backward, and at the peak of a step, above weights and gradients.

    A first step allocates the gradients. The logits and the loss are counted in both.
    """
    batch = batch_of(blocks, 0, args)
    way.model(**batch).loss.backward()
    way.kept_bytes = measure_allocations(lambda: way.model(**batch).loss, args.device).net
    step = measure_allocations(lambda: way.model(**batch).loss.backward(), args.device)
    way.peak_bytes = step.peak
    way.model.zero_grad(set_to_none=True)


def train_plain(ways: list[Way], blocks: Tensor, mode: str, args: argparse.Namespace) -> None:
    """All ways in turn, one step each per round, so that what the machine does falls on all."""
    optimizers = [torch.optim.AdamW(way.model.parameters(), lr=LEARNING_RATE[mode]) for way in ways]
    for step in range(args.steps):
        batch = batch_of(blocks, step, args)
        turns = list(zip(ways, optimizers, strict=True))
        for way, optimizer in turns[step % len(ways) :] + turns[: step % len(ways)]:
            way.on_step_begin()
            loss = way.model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            way.losses.append(loss.item())  # waits for the device
            way.on_step_end()
        show(f"{mode}, plain loop: step {step + 1}/{args.steps}, loss {ways[0].losses[-1]:.3f}")


def train_by_trainer(ways: list[Way], blocks: Tensor, mode: str, args: argparse.Namespace) -> None:
    """One way after another, each with a Trainer of its own, over the same batches."""
    dataset = [{"input_ids": block, "labels": block} for block in blocks]
    for way in ways:
        show(f"{mode}, Trainer: {way.name}")
        with tempfile.TemporaryDirectory() as folder:
            settings = TrainingArguments(
                output_dir=folder, max_steps=args.steps, per_device_train_batch_size=args.batch,
                learning_rate=LEARNING_RATE[mode], logging_steps=1, save_strategy="no",
                report_to=[], disable_tqdm=True, seed=0, use_cpu=args.device == "cpu",
                lr_scheduler_type="constant", max_grad_norm=1.0, dataloader_pin_memory=False,
            )  # fmt: skip
            trainer = Trainer(way.model, settings, train_dataset=dataset, callbacks=[way])
            trainer.remove_callback(PrinterCallback)
            trainer.train()


def show(line: str) -> None:
    """Progress, on stderr."""
    end = "" if sys.stderr.isatty() else "\n"
    print(f"\r{line:<78}" if not end else line, end=end, file=sys.stderr, flush=True)


def rows(ways: list[Way], mode: str, loop: str) -> list[dict[str, Any]]:
    """Return the measurements of each way, compared with the first one."""
    return [
        {
            "mode": mode, "loop": loop, "way": way.name, "kept_bytes": way.kept_bytes,
            "peak_bytes": way.peak_bytes, "seconds": quantiles(way.seconds), "losses": way.losses,
            "largest_loss_difference": max(
                abs(a - b) for a, b in zip(way.losses, ways[0].losses, strict=True)
            ),
        }
        for way in ways
    ]  # fmt: skip


def table(found: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, each compared with the first of its mode and loop."""
    head = ("fine-tuning", "loop", "way", "kept", "", "peak", "step", "", "loss", "differs by")
    cells = []
    for row in found:
        if row["way"] == found[0]["way"]:
            eager = row
        kept, step, losses = row["kept_bytes"], row["seconds"]["p50"], row["losses"]
        cells.append(
            (
                row["mode"], row["loop"], row["way"], mib(kept),
                f"{kept / eager['kept_bytes']:.2f}×", mib(row["peak_bytes"]), ms(step),
                f"{step / eager['seconds']['p50']:.2f}×", f"{losses[0]:.3f} → {losses[-1]:.3f}",
                f"{row['largest_loss_difference']:.1e}",
            )
        )  # fmt: skip
    return markdown(head, cells)


def load(args: argparse.Namespace) -> tuple[PreTrainedModel, Tensor]:
    """The model and the blocks of text, in tokens of the model's."""
    text = args.text.read_text(encoding="utf-8") if args.text else "".join(topics.values())
    torch.manual_seed(0)
    if args.model is not None:
        tokens = AutoTokenizer.from_pretrained(args.model, local_files_only=True)(text)["input_ids"]
        model = AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)
    else:
        tokenizer = ByteLevelBPETokenizer()
        tokenizer.train_from_iterator([text], args.vocabulary, min_frequency=0, show_progress=False)
        tokens = tokenizer.encode(text).ids
        config = smollm(args.layers, tokenizer.get_vocab_size(), args.seq_len)
        model = LlamaForCausalLM(config)
    return model, blocks_of(torch.tensor(tokens), args.seq_len)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, help="a local folder of a model; otherwise random weights")
    add("--text", type=Path, help="a text file; otherwise Python's manual")
    add("--modes", nargs="+", default=MODES, choices=MODES)
    add("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    add("--policies", nargs="+", default=("full", "lean", "fast"), choices=tuple(EXACT_PRESETS))
    add("--logits", action="store_true", help="converted models make whole logits for their loss")
    add("--layers", type=int, default=6, help="of SmolLM-135M's 30, with random weights")
    add("--vocabulary", type=int, default=8192, help="tokens, with random weights")
    add("--seq-len", type=int, default=256)
    add("--batch", type=int, default=4)
    add("--steps", type=int, default=10)
    add("--device", default="cpu")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--json", type=Path, help="also write the results here")
    return parser.parse_args()


def main() -> None:
    """Build, measure, train, report."""
    args, start = parse(), time.perf_counter()
    transformers_logging.set_verbosity_error()
    base, blocks = load(args)
    found: list[dict[str, Any]] = []
    for mode, loop in itertools.product(args.modes, args.loops):
        ways = [build(base, name, mode, args) for name in (*PEERS, *args.policies)]
        for way in ways:
            show(f"{mode}: measuring the memory of {way.name}")
            measure_memory(way, blocks, args)
        train = train_plain if loop == "plain" else train_by_trainer
        train(ways, blocks, mode, args)
        found += rows(ways, mode, loop)
    print(file=sys.stderr)
    parameters = sum(p.numel() for p in base.parameters())
    on = machine(args.device)
    print(f"{type(base).__name__}, {base.config.num_hidden_layers} layers,", end=" ")
    print(f"{parameters / 1e6:.1f} M parameters; {args.batch} × {args.seq_len} tokens,", end=" ")
    print(f"{args.dtype}; {on['gpu'] or on['cpu']}\n\n{table(found)}")
    if args.json is not None:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        report = {"machine": on, "settings": settings, "parameters": parameters, "rows": found}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()

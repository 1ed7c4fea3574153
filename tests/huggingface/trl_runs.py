"""Runs of TRL's trainers on tiny random models, a few steps each."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from hf_models import build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = [f"w{i}" for i in range(40)]
KINDS = ("SFT", "DPO", "KTO", "GRPO", "RLOO")
_LENGTHS = {"max_completion_length": 6, "num_generations": 2, "generation_batch_size": 4}


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def examples(kind: str) -> Dataset:
    draw = random.Random(0)

    def text() -> str:
        return " " + " ".join(draw.choices(WORDS, k=draw.randint(3, 8)))

    columns: dict[str, Any] = {
        "SFT": lambda i: {"text": text()},
        "DPO": lambda i: {"prompt": text(), "chosen": text(), "rejected": text()},
        "KTO": lambda i: {"prompt": text(), "completion": text(), "label": i % 2 == 0},
    }
    return Dataset.from_list([columns.get(kind, lambda i: {"prompt": text()})(i) for i in range(8)])


def reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(WORDS.index(w) for w in text.split() if w in WORDS) / 100 for text in completions]


def trainer(kind: str, model: Any, folder: Path, **options: Any) -> Any:
    """Return TRL's trainer of a kind for `model`, with two examples a step."""
    import trl

    generates = kind in ("GRPO", "RLOO")
    peft = options.pop("peft_config", None)
    given = {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "max_steps": 2,
        "learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 1e6, "report_to": "none",
        "logging_steps": 1, "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False,
        **(_LENGTHS if generates else {"max_length": 24}), **options,
    }  # fmt: skip
    more = {"reward_funcs": reward} if generates else {}
    return getattr(trl, f"{kind}Trainer")(
        model=model,
        args=getattr(trl, f"{kind}Config")(**given),
        train_dataset=examples(kind),
        processing_class=tokenizer(),
        peft_config=peft,
        **more,
    )


def run(kind: str, folder: Path, name: str = "llama", prepare: Any = None, **options: Any) -> Any:
    """Return what was logged, and the trained parameters."""
    torch.manual_seed(0)
    model = build(name, torch.float32, **options.pop("differences", {}))
    model.save_pretrained(folder)  # a reference model is loaded from here
    model.config._name_or_path = str(folder)
    made = trainer(kind, model, folder, **options)
    if prepare is not None:
        prepare(made.model)
    made.train()
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    parameters = {n: p.detach() for n, p in made.model.named_parameters() if p.requires_grad}
    return made, logged, parameters

"""Train with TRL's GRPO: converted layers, and log-probabilities without complete logits.

    python examples/grpo.py                               # a tiny random model, seconds on a CPU
    python examples/grpo.py --compare                     # and the same without FusedRemat
    python examples/grpo.py --model Qwen/Qwen3-0.6B --lora --steps 100

The reward of a completion is the number of its distinct words: replace `reward` and `prompts` by
yours. Needs `trl` and `peft`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from fused_remat import conversion, convert
from fused_remat.integrations.trl import fused_lm_head

WORDS = (
    "a", "and", "be", "can", "do", "every", "few", "good", "have", "is", "know", "like", "many",
    "no", "of", "one", "see", "some", "that", "the", "to",
)  # fmt: skip


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def prompts() -> Dataset:
    return Dataset.from_list([{"prompt": " ".join(WORDS[i : i + 3])} for i in range(16)])


def tiny() -> tuple[Any, PreTrainedTokenizerFast]:
    """Return a random model of two layers, and a tokenizer of words."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return model, PreTrainedTokenizerFast(tokenizer_object=words, **special)


def train(args: argparse.Namespace, fused: bool) -> list[dict[str, float]]:
    """Return what TRL logged of each step."""
    torch.manual_seed(0)
    if args.model is None:
        model, tokenizer = tiny()
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto")
        tokenizer = AutoTokenizer.from_pretrained(args.model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            train_dataset=prompts(),
            processing_class=tokenizer,
            peft_config=LoraConfig(target_modules="all-linear") if args.lora else None,
            args=GRPOConfig(
                output_dir=folder, max_steps=args.steps, per_device_train_batch_size=4,
                num_generations=4, max_completion_length=args.length, learning_rate=1e-3,
                gradient_checkpointing=False, logging_steps=1, report_to="none",
                save_strategy="no", disable_tqdm=True, bf16=torch.cuda.is_available(),
            ),
        )  # fmt: skip
        if fused:  # after TRL has added adapters, before the optimizer's first step
            convert(trainer.model, policy=args.policy)
        with fused_lm_head() if fused else contextlib.nullcontext():
            trainer.train()
        if fused:
            print(conversion(trainer.model))
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="of the Hub or a folder; a tiny random one by default")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters of all layers")
    parser.add_argument("--policy", default="full", help="what converted layers keep (full)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=16, help="of completions, in tokens")
    parser.add_argument("--compare", action="store_true", help="train without FusedRemat as well")
    parser.add_argument("--json", type=Path, help="file for what was logged")
    args = parser.parse_args()
    found = {"fused": train(args, True)} | ({"stock": train(args, False)} if args.compare else {})
    for name, steps in found.items():
        for step in steps:
            print(f"{name}: loss {step['loss']:.6f}, reward {step['reward']:.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()

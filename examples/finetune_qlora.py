"""Fine-tune a causal language model with QLoRA: a 4-bit base, adapters, and `FusedRematCallback`.

The base is bitsandbytes' NF4 with double quantization, and every linear layer has a LoRA adapter.
The same steps run under the model's own checkpointing first; printed are the losses of both, what
they keep for backward, and the peak of a step above weights and inputs.

    python examples/finetune_qlora.py                      # a tiny Llama: seconds on one core
    python examples/finetune_qlora.py --model Qwen/Qwen3-0.6B --seq-len 1024 --bf16

Needs `pip install 'fused-remat[hf]' bitsandbytes`; options are those of trainer.py.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from trainer import compare, parse, tiny_llama
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def load(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model with packed weights, frozen, and trainable adapters."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            tiny_llama().save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            args.model or folder, quantization_config=quantization, dtype=dtype
        )
    # FusedRemat and Trainer decide on checkpointing.
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))


if __name__ == "__main__":
    compare(load, parse(__doc__, None))

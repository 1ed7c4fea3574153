"""Train a mixture of experts with Hugging Face's `Trainer`, its auxiliary loss included.

The same steps run under the model's own checkpointing first; printed are the losses of both, what
they keep for backward, and the peak of a step above weights and inputs. `--lora` adapts attention
and the stacked weights of the experts, which are no modules of their own.

    python examples/finetune_mixture.py                    # a tiny Qwen3-MoE: seconds on one core
    python examples/finetune_mixture.py --model allenai/OLMoE-1B-7B-0924 --lora --bf16

Needs `pip install 'fused-remat[hf]'`; options are those of trainer.py.
"""

from __future__ import annotations

import argparse

import torch
from trainer import compare, parse
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM


def tiny_mixture() -> Qwen3MoeForCausalLM:
    """Build a Qwen3-MoE over bytes, with random weights: 16 experts, 4 for each token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=16,
        num_experts_per_tok=4, norm_topk_prob=True, use_cache=False,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def load(args: argparse.Namespace) -> torch.nn.Module:
    """Return the model with its auxiliary loss, with LoRA's adapters if requested."""
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else tiny_mixture()
    model.config.output_router_logits = True  # which adds the auxiliary loss
    model.config.router_aux_loss_coef = 0.01
    model.router_aux_loss_coef = model.config.router_aux_loss_coef
    if args.lora:
        from peft import LoraConfig, get_peft_model

        stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        torch.manual_seed(0)
        settings = LoraConfig(target_modules=["q_proj", "v_proj"], target_parameters=stacks)
        model = get_peft_model(model, settings)
    return model


if __name__ == "__main__":
    compare(load, parse(__doc__, None))

"""Batched gradients of router logits raise a clear error."""

from __future__ import annotations

import pytest
import torch

from fused_remat import convert


def test_batched_gradients_of_router_logits_raise() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4,
        num_experts_per_tok=2, use_cache=False, output_router_logits=True,
    )  # fmt: skip
    model = convert(transformers.Qwen3MoeForCausalLM(config).train())
    ids = torch.arange(6).view(1, 6)
    logits = model(input_ids=ids).router_logits[0]
    dy = torch.randn(3, *logits.shape)
    inputs = [model.model.layers[0].mlp.gate.weight]
    with pytest.raises(RuntimeError, match="is_grads_batched=True does not support"):
        torch.autograd.grad(logits, inputs, dy, is_grads_batched=True)

"""Hugging Face models on kernels."""

import copy

import pytest
import torch
from places import BF16, DEVICE, ON_GPU, at

from fused_remat import convert

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, D, H, HKV = at((4, 512, 1024, 16, 4), (2, 9, 32, 4, 2), (2, 40, 128, 4, 2))


@pytest.mark.parametrize("padded", [False, True])
def test_a_hugging_face_model_trains_as_it_does_unconverted(padded):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=D, intermediate_size=3 * D, num_attention_heads=H, num_key_value_heads=HKV,
        num_hidden_layers=2, vocab_size=1000 if ON_GPU else 50, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.LlamaForCausalLM(config).to(DEVICE, BF16).train()
    fused = convert(copy.deepcopy(stock), policy="lean", backend="triton", loss=True)
    tokens = torch.randint(config.vocab_size, (B, S), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, : S // 2 if padded else 0] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)}
    losses = []
    for model in (stock, fused):
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 2e-2  # roundings of logits to 16 bits
    for (name, p), q in zip(stock.named_parameters(), fused.parameters(), strict=True):
        difference = (p.grad.double() - q.grad.double()).norm() / p.grad.double().norm()
        assert difference < 5e-2, name  # of two results in 16 bits, each some roundings off

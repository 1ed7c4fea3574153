"""Reports and plans of models with 4-bit weights and adapters, as PEFT prepares them."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from fused_remat import conversion, convert, explain, fit, memory_report, plan

IDS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
LAYERS = 2

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:fused_remat"),
    # PEFT does not pass use_reentrant.
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant:UserWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a small Llama."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    saved = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(saved)
    return saved


def qlora(folder, checkpointing: bool = True, **options) -> nn.Module:
    """Return a model in NF4 with adapters; with `checkpointing`, reentrant as PEFT enables it."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, dtype=torch.float32
    )
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return get_peft_model(model, lora).train()


def batch(size: int) -> dict[str, torch.Tensor]:
    """Return a batch with labels."""
    ids = IDS[:1].repeat(size, 1)
    return {"input_ids": ids, "labels": ids}


def loss(output) -> torch.Tensor:
    """Return the model's loss, without the sum of its logits."""
    return output.loss


def fall_back(model: nn.Module) -> nn.Module:
    """Make every layer run its own forward."""
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_hook(lambda *args: None)
    return model


@pytest.mark.composes("PEFT", "QLoRA: `conversion`, `explain`, `memory_report`, `plan` and `fit`")
@pytest.mark.parametrize("checkpointing", [True, False], ids=["reentrant", "no checkpointing"])
@pytest.mark.parametrize("change", [lambda model: model, fall_back], ids=["as it is", "hooks"])
def test_reports_and_plans_of_qlora(folder, checkpointing, change):
    model = change(qlora(folder, checkpointing))
    convert(model)
    model(**batch(2)).loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    (kind,) = conversion(model)
    assert kind.count == LAYERS and kind.state in ("converted", "checkpointed")
    report = memory_report(model, batch(2), loss=loss)
    layers = [layer for layer in report.layers if layer.policy is not None]
    assert {(layer.ran == "block", layer.reason) for layer in layers} == {
        (kind.state == "converted", kind.reason)
    }
    # Backward reached the layers, whose peak is in it.
    assert all(layer.backward_peak > layer.kept_bytes > 0 for layer in layers)
    # At least the residual stream into each layer, and less than two.
    stream = IDS.numel() * 64 * 4
    assert all(stream <= layer.kept_bytes < 2 * stream for layer in layers)
    explained = explain(model, batch(2))
    assert [entry.reason for entry in explained if "layers" in entry.name] == [kind.reason] * LAYERS
    best = plan(model, batch(2), loss=loss)
    assert len(best.layers) == LAYERS
    assert {layer.reason for layer in best.layers} == {kind.reason}
    if kind.state == "checkpointed":
        assert {layer.label for layer in best.layers} == {"checkpointed"}
        assert best.kept_bytes == report.kept_bytes
    best.apply(model)
    # What came before the reports is as it was.
    after = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.testing.assert_close(after, grads, rtol=0, atol=0)


def test_a_plan_counts_the_state_of_trained_parameters_alone(folder):
    model = convert(qlora(folder))
    trained = [p for p in model.parameters() if p.requires_grad]
    every = torch.optim.AdamW(model.parameters())
    plans = [
        plan(model, batch(2), loss=loss, optimizer=optimizer, costs="analytic")
        for optimizer in (every, torch.optim.AdamW(trained))
    ]
    states = [one.chain.resting["optimizer state"] for one in plans]
    # Two averages and the step's number for each.
    assert states == [sum(2 * p.nbytes + 4 for p in trained)] * 2
    # Packed weights with their scales: 4 bits, and 8 bits for a block of 64.
    packed = {name: p for name, p in model.named_parameters() if p.dtype is torch.uint8}
    assert len(packed) == 7 * LAYERS
    scales = sum(2 * p.numel() // 64 for p in packed.values())
    resting = plans[0].chain.resting["parameters"] - sum(p.nbytes for p in model.parameters())
    # Nested: scales of the scales, one for 256 of them, an offset, and tables of codes.
    assert scales < resting < 2 * scales + len(packed) * 4 * (256 + 16 + 2)


def test_fit_finds_a_batch_of_qlora(folder):
    model = convert(qlora(folder))
    least = plan(model, batch(1), loss=loss, costs="analytic").peak_bytes
    found = fit(model, batch, 4 * least, loss=loss, most=4, costs="analytic")
    assert found.size >= 2
    assert found.plan.peak_bytes <= 4 * least

"""Runs with PEFT's adapters as a user makes them, on plain and on 4-bit weights.

Each is compared with the stock model. How a layer with quantized weights runs is not checked here.
"""

import copy
import functools
import warnings

import pytest
import torch
from hf_models import IDS, build, distance, reasons, step
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn

from fused_remat import convert

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning"),
]


def in_4_bits(model):
    """Return the model with the linear layers of bitsandbytes' NF4, as transformers loads it."""
    bnb = pytest.importorskip("bitsandbytes")
    for module in [*model.get_decoder().modules()]:
        for name, layer in [*module.named_children()]:
            if type(layer) is nn.Linear:
                sizes, has_bias = (layer.in_features, layer.out_features), layer.bias is not None
                new = bnb.nn.Linear4bit(*sizes, has_bias, torch.float32, quant_type="nf4")
                new.load_state_dict(layer.state_dict())
                setattr(module, name, new.to("cpu"))
    model.is_loaded_in_4bit = True
    return model.requires_grad_(False)


FLOAT32 = functools.partial(build, "llama", torch.float32)
BASES = {"float32": FLOAT32, "nf4": lambda: in_4_bits(build("llama", torch.float32))}
each_base = pytest.mark.parametrize("base", BASES.values(), ids=BASES)
each_kind = pytest.mark.parametrize("use_dora", [False, True], ids=["lora", "dora"])


def lora(**more):
    more = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **more}
    return LoraConfig(target_modules=TARGETS, **more)


def adapted(model, *configs):
    torch.manual_seed(1)
    model = get_peft_model(model, configs[0])
    for config in configs[1:]:
        model.add_adapter("other", config)
    for name, p in model.named_parameters():
        if "magnitude" in name:  # as after training
            p.data *= torch.linspace(0.8, 1.2, len(p))
    return model


def check_alike(fused, stock, calls=step, is_block=False):
    with reasons() as why:
        found = calls(fused, IDS)
    assert not is_block or {*why} <= {"no gradients are required"}
    expected = calls(stock, IDS)
    # Two ways of adding up in float32, two layers deep.
    assert max(distance(found, expected).values()) < 3e-5


@each_base
@pytest.mark.parametrize("kind", ["", "use_dora", "lora_bias"])
@pytest.mark.parametrize("after", ["other", None])
def test_adapters_are_switched_between_forward_and_backward(base, kind, after):
    """Backward is that of the adapter which forward had, also where it calls the layer again."""

    def switched(model, given):
        model.zero_grad(set_to_none=True)
        model.base_model.enable_adapter_layers()
        model.set_adapter("default")
        loss = model(**given, use_cache=False).logits.square().mean()
        with torch.no_grad(), model.disable_adapter():  # as for a reference in DPO
            model(**given, use_cache=False)
        if after is None:
            model.base_model.disable_adapter_layers()
        else:
            model.set_adapter(after)
        for name, p in model.named_parameters():
            p.requires_grad_("default" in name)  # which PEFT has turned off
        loss.backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    more = {kind: True} if kind else {}
    stock = adapted(base(), lora(**more), lora(use_rslora=True, **more))
    fused = convert(copy.deepcopy(stock))
    check_alike(fused, stock, switched, base is FLOAT32 and kind != "lora_bias")
    assert len(switched(fused, IDS)) == 2 * len(TARGETS) * (2 + bool(kind))


@each_base
@each_kind
def test_every_state_of_an_adapter(base, use_dora):
    configs = lora(use_dora=use_dora), lora(r=2, use_rslora=True, use_dora=use_dora)
    stock = adapted(base(), *configs)
    fused = convert(copy.deepcopy(stock))
    for active in ("default", "other", ["default", "other"]):
        for model in (stock, fused):
            model.base_model.set_adapter(active)
        check_alike(
            fused, stock, is_block=base is FLOAT32 and (type(active) is str or not use_dora)
        )
    with fused.disable_adapter(), stock.disable_adapter():
        for model in (stock, fused):
            model.get_input_embeddings().requires_grad_(True)  # or there is no gradient
        check_alike(fused, stock)
    for model in (stock, fused):
        model.get_input_embeddings().requires_grad_(False)
        model.base_model.set_adapter("default")
        model.base_model.merge_adapter(["default"])
        model.get_output_embeddings().requires_grad_(True)
    check_alike(fused, stock, is_block=base is FLOAT32)
    for model in (stock, fused):
        model.base_model.unmerge_adapter()
    check_alike(fused, stock, is_block=base is FLOAT32)


@each_base
@each_kind
@pytest.mark.parametrize("is_first", ["convert", "adapt"])
def test_copies_of_norms_and_of_the_head_are_trained(base, use_dora, is_first):
    saved = ["input_layernorm", "post_attention_layernorm", "lm_head"]
    config = lora(use_dora=use_dora, modules_to_save=saved)
    stock = adapted(base(), config)
    fused = convert(adapted(base(), config)) if is_first == "adapt" else None
    fused = fused or adapted(convert(base()), config)
    check_alike(fused, stock, is_block=base is FLOAT32)


@each_base
@each_kind
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(base, use_dora, tmp_path):
    config = lora(use_dora=use_dora, lora_dropout=0.1, modules_to_save=["lm_head"])

    def run(model, optimizer, first, last):
        for i in range(first, last):
            torch.manual_seed(i)
            ids = torch.randint(3, 50, (2, 12))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}

    def optimizer_of(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)

    whole = convert(adapted(base(), config))
    optimizer = optimizer_of(whole)
    run(whole, optimizer, 0, 2)
    whole.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    expected = run(whole, optimizer, 2, 4)

    resumed = PeftModel.from_pretrained(convert(base()), tmp_path, is_trainable=True).train()
    optimizer = optimizer_of(resumed)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    found = run(resumed, optimizer, 2, 4)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@each_base
@each_kind
def test_a_model_prepared_for_training_in_few_bits(base, use_dora):
    """PEFT's function also turns on the model's own checkpointing."""
    models = []
    for convert_it in (lambda model: model, convert):
        with warnings.catch_warnings(action="ignore"):
            model = prepare_model_for_kbit_training(base())
        models.append(convert_it(adapted(model, lora(use_dora=use_dora))))
    check_alike(*models[::-1])

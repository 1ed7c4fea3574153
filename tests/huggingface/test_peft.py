"""PEFT on models of transformers: before conversion and after, every state of its adapters."""

import copy
import warnings

import pytest
import torch
import transformers
from hf_models import IDS, MODELS, allowed, build, distance, in_float64, inputs_of, served, step
from peft import LoraConfig, PeftModel, get_peft_model

from fused_remat import FusedRematWarning, conversion, convert

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

pytestmark = pytest.mark.usefixtures("one_thread")


def lora(targets=("q_proj", "v_proj"), **more):
    more = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **more}
    targets = targets if isinstance(targets, str) else list(targets)
    return LoraConfig(target_modules=targets, **more)


def adapted(model, config):
    torch.manual_seed(1)
    return get_peft_model(model, config)


def pair(config, policy="lean"):
    """Return a Llama in float32 with adapters, and the same converted."""
    stock, fused = (adapted(build("llama", torch.float32), config) for _ in range(2))
    return stock, convert(fused, policy=policy)


def check_alike(fused, stock):
    """Both give the same, `fused` all of it by blocks."""
    found, expected = served(fused, IDS), step(stock, IDS)
    # Two ways of adding up in float32, two layers deep.
    assert max(distance(found, expected).values()) < 3e-5
    return found


@pytest.mark.composes("PEFT", "adapters on all linear layers of eleven architectures")
@pytest.mark.composes(
    "Hugging Face", "PEFT's LoRA and DoRA, before conversion and after", "others: ordinary rebuild"
)
@pytest.mark.parametrize(
    "name, targets", [*((name, "all-linear") for name in MODELS), ("llama", ["q_proj", "v_proj"])]
)
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_before_conversion_and_after(name, targets, use_dora):
    config, given = lora(targets, r=2, use_dora=use_dora), inputs_of(name)
    stock = adapted(build(name), config)
    names = [n for n, _ in stock.named_parameters()]
    expected = step(in_float64(stock), given)
    for fused in (convert(adapted(build(name), config), "lean"),
                  adapted(convert(build(name), "lean"), config)):  # fmt: skip
        got = served(in_float64(fused), given)
        assert [n for n, _ in fused.named_parameters()] == names
        assert all("lora" in n for n in got if n != "logits")
        assert max(distance(got, expected).values()) < allowed(name)
        if name == "llama":
            assert len(got) == 1 + 2 * (2 + use_dora) * (2 if "q_proj" in targets else len(ALL))


def test_every_state_of_two_adapters():
    stock, fused = pair(lora())
    for model in (stock, fused):
        torch.manual_seed(2)
        model.add_adapter("other", lora(ALL, r=2, use_rslora=True))
    check_alike(fused, stock)  # the first is active
    for names in ("other", ["default", "other"]):
        for model in (stock, fused):
            model.base_model.set_adapter(names)
        check_alike(fused, stock)
    with fused.disable_adapter(), stock.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(fused(**IDS).logits, stock(**IDS).logits, rtol=1e-4, atol=1e-5)
    check_alike(fused, stock)
    for model in (stock, fused):
        model.base_model.model.model.layers[0].requires_grad_(True)  # some of the base, too
        model.base_model.merge_adapter(["other"])
    check_alike(fused, stock)
    for model in (stock, fused):
        model.base_model.unmerge_adapter()
    check_alike(fused, stock)
    merged = [model.merge_and_unload().requires_grad_(True) for model in (fused, stock)]
    check_alike(*merged)


def test_adapters_are_saved_and_loaded(tmp_path):
    stock, fused = pair(lora(ALL))
    fused.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        convert(build("llama", torch.float32)), tmp_path, is_trainable=True
    )
    check_alike(loaded, stock)


def test_adapters_on_the_parameters_of_experts():
    """They add to weights in forward and put these back; a block has them as low-rank updates."""
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4,
    }  # fmt: skip
    config = LoraConfig(
        target_modules=["q_proj"], init_lora_weights=False, lora_dropout=0.0,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes)).train()
    stock = adapted(model, config)
    fused = convert(copy.deepcopy(stock))
    ids = torch.randint(1, 64, (2, 16))
    grads = []
    for each in (stock, fused):
        for _ in range(2):
            each.zero_grad()
            with warnings.catch_warnings(action="ignore", category=FusedRematWarning):
                loss = each(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        grads.append({n: p.grad for n, p in each.named_parameters() if p.grad is not None})
    torch.testing.assert_close(grads[1], grads[0])
    (kind,) = conversion(fused)
    assert kind.state == "converted" and not kind.pieces

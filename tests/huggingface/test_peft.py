"""PEFT on models of transformers: before conversion and after, every state of its adapters."""

import copy
import warnings

import pytest
import torch
import transformers
from accuracy import check_error
from hf_models import IDS, MODELS, allowed, build, distance, in_float64, inputs_of, reasons, step
from peft import LoraConfig, PeftModel, get_peft_model

from fused_remat import FusedRematWarning, convert

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
    """A Llama in float32 with adapters, and the same converted."""
    stock, fused = (adapted(build("llama", torch.float32), config) for _ in range(2))
    return stock, convert(fused, policy=policy)


def check_alike(fused, stock, served=True):
    """Both give the same; `served`: all of `fused`'s layers by blocks."""
    with reasons() as why:
        found = step(fused, IDS)
    assert (why == []) == served, why
    expected = step(stock, IDS)
    # Two ways of adding up in float32, two layers deep.
    assert max(distance(found, expected).values()) < 3e-5
    return found


@pytest.mark.composes("PEFT", "adapters on all linear layers of eleven architectures")
@pytest.mark.composes(
    "Hugging Face", "PEFT's LoRA, before conversion and after", "DoRA and others: ordinary rebuild"
)
@pytest.mark.parametrize(
    "name, targets", [*((name, "all-linear") for name in MODELS), ("llama", ["q_proj", "v_proj"])]
)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")
def test_before_conversion_and_after(name, targets):
    config, given = lora(targets, r=2), inputs_of(name)
    stock = adapted(build(name), config)
    names = [n for n, _ in stock.named_parameters()]
    expected = step(in_float64(stock), given)
    for fused in (convert(adapted(build(name), config), "lean"),
                  adapted(convert(build(name), "lean"), config)):  # fmt: skip
        with reasons() as why:
            got = step(in_float64(fused), given)
        assert not why and [n for n, _ in fused.named_parameters()] == names
        assert all("lora" in n for n in got if n != "logits")
        assert max(distance(got, expected).values()) < allowed(name)
        if name == "llama":
            assert len(got) == 1 + 2 * 2 * (2 if "q_proj" in targets else len(ALL))


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


def test_dropout_draws_anew_and_only_in_training():
    stock, fused = pair(lora(lora_dropout=0.5))
    seeded = []
    for _ in range(2):
        torch.manual_seed(3)
        seeded.append([step(fused, IDS)["logits"], step(fused, IDS)["logits"]])
    assert not torch.equal(*seeded[0]) and torch.equal(seeded[0][0], seeded[1][0])
    for module in [*stock.modules(), *fused.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.eval()  # each rules its own, whatever the layer's mode is
    check_alike(fused, stock)


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"use_dora": True}, "the adapter 'default' of self_attn.q_proj is .*DoraLinearVariant"),
        ({"lora_bias": True}, "the adapter 'default' of self_attn.q_proj has a bias"),
    ],
)
def test_other_adapters_run_under_ordinary_rebuild(config, reason):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's, of merging
        stock, fused = pair(lora(**config))
    with pytest.warns(FusedRematWarning, match=reason):
        check_alike(fused, stock, served=False)


def test_a_layer_trained_as_a_whole_beside_adapters():
    stock, fused = pair(lora(modules_to_save=["down_proj"]))
    found = check_alike(fused, stock)
    assert any("modules_to_save" in name for name in found)


def test_adapters_are_saved_and_loaded(tmp_path):
    stock, fused = pair(lora(ALL))
    fused.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(
        convert(build("llama", torch.float32)), tmp_path, is_trainable=True
    )
    check_alike(loaded, stock)


def test_as_exact_as_peft_in_bfloat16():
    """PEFT holds adapters in float32 beside a base in 16 bits."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODELS["qwen2"][2])  # of sizes alone: without biases
    base = transformers.LlamaForCausalLM(config).bfloat16().train()
    stock = adapted(base, lora(ALL))
    ids = IDS["input_ids"]
    assert {p.dtype for p in stock.parameters() if p.requires_grad} == {torch.float32}
    fused, exact = convert(copy.deepcopy(stock)), copy.deepcopy(stock).double()
    found = []
    for model in (fused, stock, exact):
        loss = model(input_ids=ids, labels=ids).loss
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found.append([loss.detach(), *torch.autograd.grad(loss, list(trained.values()))])
    check_error(*found, ["loss", *trained], computed=torch.bfloat16)

"""PEFT on models of transformers: before conversion and after, every state of its adapters."""

import copy
import warnings

import pytest
import torch
from accuracy import check_error
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fused_remat import convert
from fused_remat.layers.fused_layer import DECISIONS
from fused_remat.steps.operations import FusedRematWarning

LLAMA = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    tie_word_embeddings=False,
)  # fmt: skip
GPT2 = GPT2Config(
    vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0,
)  # fmt: skip
IDS = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Two ways of adding up in float32, two layers deep.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}

pytestmark = pytest.mark.usefixtures("one_thread")


def base(config=LLAMA):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config) if config is LLAMA else GPT2LMHeadModel(config)
    return model.train()


def lora(targets=("q_proj", "v_proj"), **more):
    more = {"r": 4, "lora_alpha": 6, "init_lora_weights": False, **more}
    return LoraConfig(target_modules=list(targets), task_type="CAUSAL_LM", **more)


def adapted(model, config, seed=1):
    torch.manual_seed(seed)
    return get_peft_model(model, config)


def pair(config, of=LLAMA, order="peft first", policy="lean"):
    """A model with adapters, and the same converted."""
    stock = adapted(base(of), config)
    if order == "peft first":
        return stock, convert(adapted(base(of), config), policy=policy)
    return stock, adapted(convert(base(of), policy=policy), config)


def step(model):
    """Loss, and the gradients of what is trained by name."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {
        "loss": loss.detach(),
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


def check_alike(fused, stock, served=True):
    """Both give the same; `served`: all of `fused`'s layers by blocks."""
    reasons = []
    observe = lambda layer, reason: reasons.append(reason)  # noqa: E731
    DECISIONS.append(observe)
    try:
        found = step(fused)
    finally:
        DECISIONS.remove(observe)
    assert (reasons == []) == served, reasons
    expected = step(stock)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
    return found


@pytest.mark.composes(
    "Hugging Face", "PEFT's LoRA, before conversion and after", "DoRA and others: ordinary rebuild"
)
@pytest.mark.parametrize("order", ["peft first", "convert first"])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ALL], ids=["q, v", "all"])
def test_before_conversion_and_after(order, targets):
    stock, fused = pair(lora(targets), order=order)
    found = check_alike(fused, stock)
    assert len(found) == 1 + 2 * 2 * len(targets) and all("lora" in n for n in found if n != "loss")
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in stock.named_parameters()]


def test_conv1d_of_gpt2():
    targets = ["c_attn", "c_proj", "c_fc"]
    stock, fused = pair(lora(targets, fan_in_fan_out=True), of=GPT2)
    check_alike(fused, stock)


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
        torch.testing.assert_close(fused(IDS).logits, stock(IDS).logits, **CLOSE)
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
    _, fused = pair(lora(lora_dropout=0.5))
    first, second = step(fused)["loss"], step(fused)["loss"]
    assert first != second
    torch.manual_seed(3)
    third = step(fused)["loss"]
    torch.manual_seed(3)
    assert step(fused)["loss"] == third
    stock, fused = pair(lora(lora_dropout=0.5))
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
    loaded = PeftModel.from_pretrained(convert(base()), tmp_path, is_trainable=True)
    check_alike(loaded, stock)


def test_as_exact_as_peft_in_bfloat16():
    """PEFT holds adapters in float32 beside a base in 16 bits."""
    model = base().to(torch.bfloat16)
    stock = adapted(model, lora(ALL))
    assert {p.dtype for p in stock.parameters() if p.requires_grad} == {torch.float32}
    fused, exact = convert(copy.deepcopy(stock)), copy.deepcopy(stock).double()
    truth = step(exact)
    found = [[step(m)[name] for name in truth] for m in (fused, stock)]
    check_error(*found, list(truth.values()), list(truth), computed=torch.bfloat16)

"""Diffusion models of diffusers: a converted model computes and learns what the stock one does."""

import copy
import functools
import itertools
from collections import Counter

import pytest
import torch
from tiers import exhaustive
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.commands import architectures as measured
from bench.subjects.diffusion import DIFFUSERS, B
from fused_remat import conversion, convert, explain, revert
from fused_remat.execution.observe import OBSERVERS
from fused_remat.steps.rotary import Rotary

pytest.importorskip("diffusers")

#: Of an image: no other size of the models, which would be a second reading of a shape.
TOKENS = 48
#: The states that layers of a model must have.
EXPECTED = {
    "flux": {"converted": 4},
    "flux2": {"converted": 4},
    "sd3": {"converted": 2},
    "sd35": {"converted": 3},
    "auraflow": {"converted": 4},
    "qwen_image": {"converted": 2},
    "wan": {"converted": 2},
    "wan_ti2v": {"converted": 2},
    "hunyuan_video": {"converted": 6},
    "ltx": {"converted": 2},
    "cogvideox": {"converted": 2},
    "sana": {"converted": 2},
    "pixart": {"converted": 2},
    "lumina2": {"converted": 6},
    "z_image": {"converted": 7},
    "dit": {"converted": 2},
    "transformer_2d": {"converted": 2},
    "unet": {"converted": 4},
}
CHOSEN = ["flux", "sd3", "wan", "qwen_image"]
#: Of float64, in which these models compute norms and rotary embeddings in float32; of float32.
SLACK = {torch.float64: 5e-6, torch.float32: 5e-5}

Step = tuple[Tensor, dict[str, Tensor | None]]


def in_dtype(x, dtype):
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    if isinstance(x, list | tuple):
        return type(x)(in_dtype(part, dtype) for part in x)
    return {k: in_dtype(v, dtype) for k, v in x.items()} if isinstance(x, dict) else x


def build(name, dtype=torch.float64):
    """Return a model, no parameter of which has the value that others of its kind have."""
    model, batch = DIFFUSERS[name].make(), DIFFUSERS[name].batch(TOKENS)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape), alpha=0.02)
    if DIFFUSERS[name].keeps_own:
        plain = functools.partial(checkpoint, use_reentrant=False)
        model.enable_gradient_checkpointing(plain)
    return model.to(dtype), in_dtype(batch, dtype)


def step(model, batch) -> Step:
    """Return the output, and the gradients of a random projection of it."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(4)  # DiT drops labels
    (y,) = model(**batch)
    y = torch.stack(y) if isinstance(y, list) else y
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    return y.detach(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def trained(model, batch) -> list[Step]:
    """Return two steps, with an update of all parameters between them."""
    first = step(model, batch)
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-5).step()
    return [first, step(model, batch)]


def assert_same(found: Step, expected: Step) -> None:
    (y, grads), (stock_y, stock) = found, expected
    slack = SLACK[stock_y.dtype]
    assert (y - stock_y).norm() <= slack * stock_y.norm()
    assert grads.keys() == stock.keys()
    least = 1e-6 * max(g.norm() for g in stock.values() if g is not None)
    assert least > 0
    for name, grad in stock.items():
        assert (grads[name] is None) == (grad is None), name
        if grad is not None:
            assert (grads[name] - grad).norm() <= slack * (grad.norm() + least), name


def adapt(model) -> None:
    """Freeze a model, and add random adapters to the linear layers of its blocks."""
    peft = pytest.importorskip("peft")
    model.requires_grad_(False)
    linear = [n for n, m in model.named_modules() if type(m) is nn.Linear and "blocks." in n]
    model.add_adapter(peft.LoraConfig(r=4, target_modules=linear, init_lora_weights=False))
    with torch.no_grad():
        for name, p in model.named_parameters():
            assert p.requires_grad == ("lora_" in name) and bool(p.any()), name


@pytest.mark.composes("Diffusers", "training steps of every model of [this table](diffusion.md)")
@pytest.mark.parametrize("name", DIFFUSERS)
def test_a_converted_model_trains_as_the_stock_one(name):
    model, batch = build(name)
    expected = trained(copy.deepcopy(model), batch)
    for found, stock in zip(trained(convert(model), batch), expected, strict=True):
        assert_same(found, stock)
    states = Counter[str]()
    for kind in conversion(model):
        states[kind.state] += kind.count
        assert kind.state == "converted" or (kind.state == "checkpointed" and kind.reason)
    assert states == Counter(EXPECTED[name]), conversion(model)


@pytest.mark.composes("Diffusers", "`add_adapter`: LoRA on all linear layers of the blocks")
@pytest.mark.parametrize("name", ["flux", "sd3", "wan", exhaustive("qwen_image")])
def test_adapters(name):
    model, batch = build(name)
    adapt(model)
    expected = step(copy.deepcopy(model), batch)
    assert_same(step(convert(model), batch), expected)


@pytest.mark.composes("Diffusers", "`add_adapter` after `convert`")
@pytest.mark.parametrize("name", [exhaustive("flux"), "wan"])
def test_adapters_after_conversion(name):
    model, batch = build(name)
    stock = copy.deepcopy(model)
    adapt(stock)
    adapt(convert(model))
    model.load_state_dict(stock.state_dict())
    assert_same(step(model, batch), step(stock, batch))
    assert {kind.state for kind in conversion(model)} == {"converted"}


@pytest.mark.composes("Diffusers", "adapters saved, loaded and fused; generating; `revert`")
@pytest.mark.parametrize("name", ["flux", exhaustive("wan")])
def test_adapters_are_saved_loaded_and_fused(name, tmp_path):
    stock, batch = build(name)
    model = convert(copy.deepcopy(stock))
    other = convert(copy.deepcopy(stock))
    adapt(model)
    step(model, batch)
    model.save_lora_adapter(tmp_path)
    file = "pytorch_lora_weights.safetensors"
    for one in (stock, other):
        one.load_lora_adapter(tmp_path, weight_name=file, prefix=None)
    with torch.no_grad():
        expected = stock.eval()(**batch)[0]
        for change in (lambda: None, model.eval, model.fuse_lora, lambda: revert(model)):
            change()
            torch.testing.assert_close(model(**batch)[0], expected, rtol=1e-10, atol=1e-10)
    assert_same(step(other, batch), step(stock, batch))


@pytest.mark.composes(
    "Diffusers", "`enable_gradient_checkpointing`, before `convert` or after it, leaves out blocks"
)
@pytest.mark.parametrize("name", ["flux", exhaustive("wan")])
def test_enabled_checkpointing(name):
    model, batch = build(name)
    enabled = copy.deepcopy(model)
    enabled.enable_gradient_checkpointing()
    expected = step(convert(model), batch)
    converted = convert(enabled)
    model.enable_gradient_checkpointing()
    for each in (model, copy.deepcopy(model), converted):
        step(each, batch)  # traces
        runs = []
        OBSERVERS.append(runs.append)
        try:
            assert_same(step(each, batch), expected)
        finally:
            OBSERVERS.remove(runs.append)
        layers = sum(kind.count for kind in conversion(each) if kind.state == "converted")
        assert len(runs) == layers > 0
    stock = revert(model)
    assert "enable_gradient_checkpointing" not in vars(stock)
    assert_same(step(stock, batch), expected)


@pytest.mark.composes("Diffusers", "bfloat16, with Wan's modulation and norms in float32")
def test_bfloat16_with_modulation_in_float32():
    model, batch = build("wan", torch.float32)
    exact = step(copy.deepcopy(model), batch)
    for name, p in model.to(torch.bfloat16).named_parameters():
        if any(part in name for part in model._keep_in_fp32_modules):
            p.data = p.data.float()
    batch = in_dtype(batch, torch.bfloat16)
    stock = step(copy.deepcopy(model), batch)
    found = step(convert(model), batch)
    assert {kind.state for kind in conversion(model)} == {"converted"}

    def error(grads, name):
        return (grads[name].float() - exact[1][name]).norm() / exact[1][name].norm()

    for name in stock[1]:  # double the error of the stock model, and a rounding
        assert error(found[1], name) <= 2 * error(stock[1], name) + 2**-8, name


@pytest.mark.composes("Diffusers", "batches of classifier-free guidance")
@pytest.mark.parametrize("name", ["sd3", "wan", "qwen_image", exhaustive("flux")])
def test_classifier_free_guidance(name):
    """A batch of all images again with other texts, after one without; masks have other values."""
    model, batch = build(name)
    stock = copy.deepcopy(model)

    def doubled(x):
        if isinstance(x, list):
            return x * 2
        return torch.cat([x, x]) if isinstance(x, Tensor) and x.shape[0] == B else x

    guided = {key: doubled(value) for key, value in batch.items()}
    guided["encoder_hidden_states"][B:] = batch["encoder_hidden_states"].flip(1) / 2
    if "encoder_hidden_states_mask" in guided:
        guided["encoder_hidden_states_mask"][B:, -4:] = 0
    convert(model)
    for given in (batch, guided):
        assert_same(step(model, given), step(stock, given))


@pytest.mark.composes("Diffusers", "`fuse_qkv_projections`")
@pytest.mark.parametrize("name", ["sd3", "wan", exhaustive("flux"), exhaustive("qwen_image")])
def test_fused_projections(name):
    """Fused after a step of the converted model, which has other parameters then."""
    model, batch = build(name)
    stock = copy.deepcopy(model)
    convert(model)
    assert_same(step(model, batch), step(stock, batch))
    for each in (model, stock):
        each.fuse_qkv_projections()
    found, expected = step(model, batch), step(stock, batch)
    assert any(g is None for g in expected[1].values())  # of the single projections
    assert_same(found, expected)


def offload(model, kind) -> None:
    hooks = pytest.importorskip("diffusers.hooks")
    cpu = torch.device("cpu")
    hooks.apply_group_offloading(
        model, onload_device=cpu, offload_device=cpu, offload_type=kind, num_blocks_per_group=1
    )


def cast(model) -> None:
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


ORDERS = ["first", "after convert", "after a step"]
HOOKS = {
    "leaf_level": functools.partial(offload, kind="leaf_level"),
    "block_level": functools.partial(offload, kind="block_level"),
    "layerwise_casting": cast,
}


CASES = [*itertools.product(CHOSEN, HOOKS, ORDERS)]


@pytest.mark.composes(
    "Diffusers",
    "group offloading and layerwise casting: gradients",
    limits="layers with hooks run under checkpointing, or as their own forward",
)
@pytest.mark.parametrize(
    ("name", "kind", "hooked"), [exhaustive(*c) if i % 7 else c for i, c in enumerate(CASES)]
)
def test_hooks_that_move_and_cast_weights(name, kind, hooked):
    casts = kind == "layerwise_casting"
    model, batch = build(name, torch.float32 if casts else torch.float64)
    if casts:
        adapt(model)
    stock = copy.deepcopy(model)
    HOOKS[kind](stock)
    if hooked == "first":
        HOOKS[kind](model)
    convert(model)
    if hooked == "after a step":
        step(model, batch)
    if hooked != "first":
        HOOKS[kind](model)
    expected = step(stock, batch)
    for _ in range(2):
        assert_same(step(model, batch), expected)
    for each in conversion(model):
        assert each.state == "checkpointed" or (each.state == "plain" and hooked != "first"), each
        assert "forward was replaced by a hook" in each.reason


@pytest.mark.parametrize("hooked", ORDERS[:2])
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_blocks_run_once_hooks_are_removed(kind, hooked):
    model, batch = build("wan")
    expected = step(copy.deepcopy(model), batch)
    for change in (convert, HOOKS[kind])[:: 1 if hooked != "first" else -1]:
        change(model)
    assert_same(step(model, batch), expected)
    for module in model.modules():
        if hasattr(module, "_diffusers_hook"):
            module._diffusers_hook.remove_hook("group_offloading", recurse=False)
    assert_same(step(model, batch), expected)
    assert [each.state for each in conversion(model)] == ["converted"]


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_autocast_of_a_model_in_16_bits(name):
    """A stream of float32, which times and positions make, meets parameters of bfloat16."""
    model, batch = build(name, torch.bfloat16)
    found = []
    for one in (copy.deepcopy(model), convert(model)):
        with torch.autocast("cpu", torch.bfloat16):
            (y,) = one(**batch)
        y.float().square().mean().backward()
        found.append(torch.cat([p.grad.double().flatten() for p in one.parameters()]))
    assert {kind.state for kind in conversion(model)} == {"converted"}
    # Both round to bfloat16 in other places: 0.003 was measured.
    assert (found[1] - found[0]).norm() <= 0.02 * found[0].norm()


@pytest.mark.parametrize("name", ["wan", "wan_ti2v", "ltx"])
def test_lean_keeps_attention_of_queries_normed_across_heads(name):
    model, batch = build(name)
    block = explain(convert(model, policy="lean"), **batch)[0]
    kept = [name for name in block.kept if "." not in name]
    assert kept == ["input", "memory", "attn1", "attn2"]
    rotary = [type(node) for node in block_nodes(model) if isinstance(node, Rotary)]
    assert rotary and not any("mul" in step for step, _ in block.forward)


def block_nodes(model):
    layer = next(m for m in model.modules() if hasattr(m, "last_trace"))
    return layer.last_trace.graph.nodes


@pytest.mark.parametrize("name", ["flux", "wan_ti2v"])
def test_a_step_takes_no_more_than_with_own_checkpointing(name):
    """Also where each token has a condition of its own, as in Wan 2.2."""
    found = {
        way: measured.Way(way, name, "bare", 256, "full").found for way in ("own", "converted")
    }
    assert found["converted"]["peak"] <= found["own"]["peak"]
    assert found["converted"]["kept"] <= 1.02 * found["own"]["kept"]

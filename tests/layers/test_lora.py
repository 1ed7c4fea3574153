"""Low-rank updates in blocks: what is kept and rebuilt, what is refused; PEFT on the layers.

DoRA is compared with PEFT's own gradients: it does not differentiate its norm, which `gradcheck`
would.

Results of blocks with updates: `tests/ops/test_whole_blocks.py`.
"""

import copy
import functools
import warnings

import pytest
import torch
from accuracy import assert_bits, assert_close, check_error
from block_inputs import Block, calls, in_pieces, normal, results
from layer_kinds import KINDS, run
from peft import LoraConfig, VeloraConfig, inject_adapter_in_model
from reference import EXACT_PRESETS, dropout
from test_dropout import drawn
from torch import nn

from fused_remat import FusedRematLayer, memory_report, ops, random
from fused_remat.graph.schedule import schedule
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps.operations import FusedRematWarning

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_frozen_base_keeps_and_rebuilds_nothing_for_itself():
    block, x = Block(), normal(2, 5, 12, seed=50)
    w = {name: w.detach() for name, w in block.weights().items()}
    kw = {"nhead": block.nhead, "kv_heads": block.kv_heads, "rope": block.rope(5)}
    lora = block.updates(("q", "v"))
    ((call, _),) = calls(lambda: ops.causal_block(x, w, lora=lora, policy="fast", **kw))
    backward = schedule(call.graph, call.save, frozenset(call.needs_grad), False, ()).backward
    steps = [str(step) for step in backward]
    # The MLP's activation and attention's own input are what weights alone would need.
    assert not {"compute act", "compute qkv", "compute attn"} & set(steps)
    after = steps[steps.index("backward rotated") + 1 :]
    assert after == ["compute norm1", "backward qkv", "backward norm1"]


# Layers of torch.nn, with the real PEFT.


def adapted(layer, targets=("linear1", "linear2"), **config):
    config = {"r": 2, "init_lora_weights": False, "target_modules": list(targets), **config}
    return inject_adapter_in_model(LoraConfig(**config), layer)


def encoder(targets=("linear1", "linear2"), dtype=FP64, width=8, r=2, **config):
    """Return a stock encoder layer with adapters, in `dtype`."""
    torch.manual_seed(0)
    # GELU: at ReLU's kink a rounding decides between two gradients.
    layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, "gelu", norm_first=True)
    return scaled(adapted(layer.to(dtype), targets, r=r, **config))


def scaled(layer):
    """Return a layer whose columns DoRA scales by more than 1 or less, as after training."""
    for name, p in layer.named_parameters():
        if "magnitude" in name:
            p.data *= torch.linspace(0.5, 1.5, len(p), dtype=p.dtype)
    return layer


def grads(layer, *inputs):
    """Output and gradients of all that requires one."""
    needs_grad = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]
    return results(lambda: layer(*inputs), needs_grad)


@pytest.mark.composes(
    "PEFT", "LoRA and DoRA on `linear1` and `linear2`", "on `self_attn`: ordinary rebuild"
)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.usefixtures("served")
def test_peft_on_the_encoder_layer(norm_first, use_dora):
    stock, x = encoder(use_dora=use_dora), normal(5, 2, 8)
    stock.norm_first = norm_first
    fused = FusedRematLayer.from_layer(stock, policy="lean")
    for _ in range(2):
        assert_close(grads(fused, x), grads(stock, x))
        stock.linear1.set_adapter([])  # one of the two is off
    stock.eval()
    with torch.no_grad():  # the stock layer's kernel would ignore the adapters
        torch.testing.assert_close(fused(x), stock.train()(x))


@pytest.mark.parametrize("is_base_trained", [False, True])
@pytest.mark.parametrize("policy", EXACT_PRESETS)
@pytest.mark.usefixtures("served")
def test_dora_keeps_what_lora_keeps(policy, is_base_trained):
    """Of which the prediction is exact."""
    x, found = normal(5, 2, 8), []
    for use_dora in (False, True):
        stock = encoder(use_dora=use_dora)
        for p in stock.parameters():
            p.requires_grad_(p.requires_grad or is_base_trained)
        fused = FusedRematLayer.from_layer(stock, policy=policy)
        assert_close(grads(fused, x), grads(stock, x))
        report = memory_report(fused, x)
        assert report.kept_bytes == report.predicted_bytes
        alive = measure_allocations(lambda: fused(x)).net  # noqa: B023
        assert alive == report.kept_bytes  # its output, and its input, which was alive before
        found.append(report.kept_bytes)
    assert found[0] == found[1]


@pytest.mark.parametrize("tokens", [4, 512])
@pytest.mark.usefixtures("served")
def test_dropout_of_dora_is_of_both_of_its_products(tokens):
    """Against PEFT with the masks of the block's definition."""
    p, seed = 0.4, drawn(7)[0]
    stock, x = encoder(use_dora=True, lora_dropout=p), normal(2, 5, 8)
    stock.self_attn.batch_first = True
    fused = FusedRematLayer.from_layer(stock)
    torch.manual_seed(7)
    with in_pieces(tokens):
        found = grads(fused, x)
    for i, layer in enumerate((stock.linear1, stock.linear2)):
        mask = functools.partial(dropout, site=random.LORA + i, p=p, seed=seed)
        layer.lora_dropout["default"].forward = mask
    assert_close(found, grads(stock, x))


@pytest.mark.composes("Hugging Face", "PEFT's LoRA on `FusedRematCausalLayer`, also compiled")
@pytest.mark.parametrize(
    ("name", "targets", "count"),
    [("decoder, post-norm", ["linear1", "linear2"], 4), ("llama", ["q", "v", "up", "down"], 8)],
)
@pytest.mark.parametrize("use_dora", [False, True])
def test_peft_on_the_other_layers(name, targets, count, use_dora):
    kind, config = KINDS[name], {"r": 3, "lora_alpha": 6, "use_dora": use_dora}
    stock, fused = (adapted(m, targets, **config) for m in kind.pair(dtype=torch.float64))
    fused.load_state_dict(scaled(stock).state_dict())
    count += count // 2 * use_dora
    *inputs, dy = kind.data()
    given = kind.given("tables")
    assert fused.why_not_fused(*inputs, **given) is None
    assert sum(p.requires_grad for p in fused.parameters()) == count
    assert_close(run(fused, *inputs, dy, **given), run(stock, *inputs, dy, **given))


def several():
    stock = encoder(["linear1"], use_dora=True)
    adapter = LoraConfig(r=2, target_modules=["linear1"], init_lora_weights=False)
    with warnings.catch_warnings(action="ignore"):  # of a second adapter
        inject_adapter_in_model(adapter, stock, "other")
    stock.linear1.set_adapter(["default", "other"])
    return stock


def without_dropout_alone():
    stock = encoder(["linear1"], use_dora=True, lora_dropout=0.5)
    stock.linear1.lora_dropout.eval()
    return stock


def around_another():
    stock = encoder(["linear1"])
    stock.linear1.base_layer = encoder(["linear1"]).linear1
    return stock


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: encoder(["self_attn"]), "self_attn is peft.tuners.lora.layer.MultiheadAttention;"),
        (several, "linear1 has several active adapters, one of which is DoRA"),
        (without_dropout_alone, "'default' of linear1 and its dropout differ in training mode"),
        (lambda: encoder(velora_config=VeloraConfig()), "is peft.tuners.lora.variants.Velora"),
        (lambda: encoder(lora_bias=True), "the adapter 'default' of linear1 has a bias"),
        (around_another, "linear1.base_layer has adapters itself"),
    ],
)
def test_other_adapters_run_under_ordinary_rebuild(make, reason):
    stock, x = make(), normal(5, 2, 8)
    fused = FusedRematLayer.from_layer(copy.deepcopy(stock))
    with pytest.warns(FusedRematWarning, match=reason):
        found = grads(fused, x)
    assert_close(found, grads(stock, x))


@pytest.mark.parametrize("low", [None, BF16])
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.usefixtures("served")
def test_dtypes_of_adapters_on_a_layer(low, use_dora):
    """float32 adapters in layers of 16 bits, and under autocast: as exact as PEFT's own."""
    given = FP32 if low else BF16
    stock = encoder(dtype=given, width=16, use_dora=use_dora)
    for name, p in stock.named_parameters():
        p.data = p.data.to(FP32 if "lora" in name else given)
    fused, exact = FusedRematLayer.from_layer(stock), copy.deepcopy(stock).double()
    x = normal(60, 2, 16, dtype=given)
    with torch.autocast("cpu", BF16, enabled=low is not None):
        found = [grads(layer, x) for layer in (fused, stock)]
    truth = grads(exact, x.detach().double().requires_grad_())
    names = ["y", "x", *(n for n, p in stock.named_parameters() if p.requires_grad)]
    check_error(*found, truth, names, computed=BF16)


@pytest.mark.parametrize("name", ["encoder, post-norm", "llama"])
def test_a_compiled_layer_has_the_same_bits(name):
    torch._dynamo.reset()
    kind, found = KINDS[name], []
    targets = ["q", "v", "up", "down"] if kind.is_causal else ["linear1", "linear2"]
    layer = adapted(kind.pair()[1], targets, lora_dropout=0.2, use_dora=kind.is_causal)
    for way in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = kind.data(FP32)[0].requires_grad_()
        torch.manual_seed(0)
        y = way(x, **kind.given("tables", FP32))
        params = [p for p in layer.parameters() if p.requires_grad]
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *params])])
    assert_bits(*found)

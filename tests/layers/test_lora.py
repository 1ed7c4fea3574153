"""Low-rank updates in blocks: what is kept and rebuilt, what is refused; PEFT on the layers.

Results of blocks with updates: `tests/ops/test_whole_blocks.py`.
"""

import copy

import pytest
import torch
from accuracy import assert_bits, assert_close, check_error
from block_inputs import Block, calls, normal, results
from layer_kinds import KINDS, run
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from fused_remat import FusedRematLayer, ops
from fused_remat.graph.schedule import schedule
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
    return adapted(layer.to(dtype), targets, r=r, **config)


def grads(layer, *inputs):
    """Output and gradients of all that requires one."""
    needs_grad = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]
    return results(lambda: layer(*inputs), needs_grad)


@pytest.mark.composes(
    "PEFT", "LoRA on `linear1` and `linear2`", "on `self_attn`, DoRA: ordinary rebuild"
)
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.usefixtures("served")
def test_peft_on_the_encoder_layer(norm_first):
    stock, x = encoder(), normal(5, 2, 8)
    stock.norm_first = norm_first
    fused = FusedRematLayer.from_layer(stock, policy="lean")
    for _ in range(2):
        assert_close(grads(fused, x), grads(stock, x))
        stock.linear1.set_adapter([])  # one of the two is off
    stock.eval()
    with torch.no_grad():  # the stock layer's kernel would ignore the adapters
        torch.testing.assert_close(fused(x), stock.train()(x))


@pytest.mark.composes("Hugging Face", "PEFT's LoRA on `FusedRematCausalLayer`, also compiled")
@pytest.mark.parametrize(
    ("name", "targets", "count"),
    [("decoder, post-norm", ["linear1", "linear2"], 4), ("llama", ["q", "v", "up", "down"], 8)],
)
def test_peft_on_the_other_layers(name, targets, count):
    kind = KINDS[name]
    stock, fused = (adapted(m, targets, r=3, lora_alpha=6) for m in kind.pair(dtype=torch.float64))
    fused.load_state_dict(stock.state_dict())
    *inputs, dy = kind.data()
    given = kind.given("tables")
    assert fused.why_not_fused(*inputs, **given) is None
    assert sum(p.requires_grad for p in fused.parameters()) == count
    assert_close(run(fused, *inputs, dy, **given), run(stock, *inputs, dy, **given))


def around_another():
    stock = encoder(["linear1"])
    stock.linear1.base_layer = encoder(["linear1"]).linear1
    return stock


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: encoder(["self_attn"]), "self_attn is peft.tuners.lora.layer.MultiheadAttention;"),
        (lambda: encoder(use_dora=True), "adapter 'default' of linear1 is .*DoraLinearVariant"),
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
@pytest.mark.usefixtures("served")
def test_dtypes_of_adapters_on_a_layer(low):
    """float32 adapters in layers of 16 bits, and under autocast: as exact as PEFT's own."""
    given = FP32 if low else BF16
    stock = encoder(dtype=given, width=16)
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
    layer = adapted(kind.pair()[1], targets, lora_dropout=0.2)
    for way in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = kind.data(FP32)[0].requires_grad_()
        torch.manual_seed(0)
        y = way(x, **kind.given("tables", FP32))
        params = [p for p in layer.parameters() if p.requires_grad]
        found.append([y, *torch.autograd.grad(y.square().sum(), [x, *params])])
    assert_bits(*found)

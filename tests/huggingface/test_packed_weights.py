"""Models with frozen quantized weights: blocks that dequantize them give the stock gradients."""

import copy
import gc
import warnings
import weakref

import pytest
import quantized
import torch
import transformers
from hf_models import IDS, build, distance, reasons, served, step
from quantized import FORMATS, adapt, quantize
from torch import nn

from fused_remat import FusedRematWarning, convert, explain, memory_report
from fused_remat.graph.text import graph_of
from fused_remat.layers import packed
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps import packed as steps

pytestmark = pytest.mark.usefixtures("one_thread")
BF16, F32 = torch.bfloat16, torch.float32
#: Of two layers: in float32 two ways of adding up; in bfloat16 roundings of 0.4% in each product.
LIMITS = {F32: 3e-5, BF16: 6e-2}

#: Architectures: the first two have an entry, the others are traced.
_OTHERS = {
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
}


def model(name: str, dtype: torch.dtype = F32) -> nn.Module:
    if name not in _OTHERS:
        return build(name, dtype)
    config, kind = (getattr(transformers, each) for each in _OTHERS[name])
    torch.manual_seed(0)
    options = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    if name == "glm4":
        options["head_dim"] = 8
    return kind._from_config(config(**options), attn_implementation="sdpa").to(dtype).train()


def pair(name, form, dtype=F32, compute=None, policy="full", **options):
    """Return a quantized model with adapters, and the same converted."""
    stock, fused = (adapt(quantize(model(name, dtype), form, compute), **options) for _ in range(2))
    return stock, convert(fused, policy=policy)


def check(stock, fused, limit):
    expected, found = step(stock, IDS), served(fused, IDS)
    assert max(distance(found, expected).values()) < limit


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_every_format_gives_the_stock_gradients(name, form, dtype):
    check(*pair(name, form, dtype), LIMITS[dtype])


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2", "olmo2", "glm4"])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to")
def test_other_architectures_in_four_bits(name):
    if name == "gpt2":  # whose Conv1D layers are no nn.Linear
        pytest.skip("bitsandbytes replaces nn.Linear")
    check(*pair(name, "nf4"), LIMITS[F32])


@pytest.mark.parametrize("policy", ["lean", "fast", "none"])
@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_every_policy(name, policy):
    check(*pair(name, "nf4", policy=policy), LIMITS[F32])


@pytest.mark.parametrize("name", ["qwen2", "phi3"])
@pytest.mark.parametrize("autocast", [False, True])
def test_products_in_another_dtype_than_the_stream(name, autocast):
    """As after `prepare_model_for_kbit_training`, which converts all but the weights to float32."""
    with torch.autocast("cpu", BF16, enabled=autocast):
        check(*pair(name, "nf4", compute=BF16), LIMITS[BF16])


def test_adapters_with_dropout_and_biases_that_train():
    stock, fused = pair("qwen2", "nf4", lora_dropout=0.0, bias="all")
    check(stock, fused, LIMITS[F32])
    _, fused = pair("llama", "nf4", lora_dropout=0.5)
    torch.manual_seed(0)
    one = served(fused, IDS)
    torch.manual_seed(0)
    two = served(fused, IDS)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_without_adapters_norms_train():
    models = []
    for _ in range(2):
        models.append(quantize(model("llama"), "nf4"))
        for name, p in models[-1].named_parameters():
            p.requires_grad_("norm" in name)
    check(models[0], convert(models[1]), LIMITS[F32])


@pytest.mark.parametrize("name", ["llama", "phi3"])
@pytest.mark.parametrize("form", FORMATS)
def test_nothing_but_the_packed_weight_is_kept(name, form):
    """Kept: as many bytes as without quantization. At the peak, fewer than own checkpointing."""
    long = {"input_ids": IDS["input_ids"].repeat(2, 6)}
    plain = convert(adapt(model(name).requires_grad_(False)))
    stock, fused = pair(name, form)
    stock.gradient_checkpointing_enable({"use_reentrant": False})
    stock.enable_input_require_grads()

    def forward(each):
        return lambda: each(**long).logits

    kept, peaks = {}, {}
    for key, each in (("plain", plain), ("stock", stock), ("fused", fused)):
        step(each, long)  # buffers are made, and a layer is traced
        kept[key] = measure_allocations(forward(each), "cpu").net
        peaks[key] = measure_allocations(lambda each=each: step(each, long), "cpu").peak
    assert kept["fused"] <= kept["plain"]
    assert kept["fused"] <= kept["stock"]
    assert peaks["fused"] <= peaks["stock"]


def test_one_copy_of_a_weight_exists_at_a_time(monkeypatch):
    alive, most, made = weakref.WeakSet(), 0, 0

    def dequantize(*args):
        nonlocal most, made
        copy_ = original(*args)
        alive.add(copy_)
        most, made = max(most, len(alive)), made + 1
        return copy_

    _, fused = pair("llama", "nf4")
    step(fused, IDS)  # the format is tried
    original = steps.FORMATS["bnb_4bit"].dequantize
    monkeypatch.setitem(
        steps.FORMATS, "bnb_4bit", steps.FORMATS["bnb_4bit"]._replace(dequantize=dequantize)
    )
    gc.disable()
    try:
        served(fused, IDS)
    finally:
        gc.enable()
    # Seven products in forward; without the last, in the rebuild; and seven in backward, of which
    # the first layer needs none of its input's gradient in q, k and v.
    assert most == 1
    assert 2 * (7 + 6 + 4) <= made <= 2 * (7 + 6 + 7)


def test_a_program_of_a_pass_repeats_the_steps():
    _, fused = pair("llama", "nf4")
    runs = [step(fused, IDS) for _ in range(12)]  # the first of them as steps
    assert all(torch.equal(runs[0][name], run[name]) for run in runs for name in run)
    layer, x = fused.base_model.model.model.layers[0], torch.randn(2, 12, 32, requires_grad=True)
    tables = fused.base_model.model.model.rotary_emb(x, torch.arange(12)[None])
    text = str(explain(layer, x, code=True, position_embeddings=tables, attention_mask=None))
    assert "bitsandbytes_dequantize_4bit(q_weight" in text
    assert "no program" not in text


def test_the_graph_has_a_text():
    _, fused = pair("llama", "nf4")
    report = memory_report(fused, **IDS)
    assert "packed" not in str(report)
    x = torch.randn(2, 12, 32, requires_grad=True)
    layer = fused.base_model.model.model.layers[0]
    tables = fused.base_model.model.model.rotary_emb(x, torch.arange(12)[None])
    graph = layer._read(hidden_states=x, position_embeddings=tables, attention_mask=None).graph
    assert graph_of(graph.text) is graph


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_quantized_weight_that_requires_a_gradient_raises(name):
    _, fused = pair(name, "torchao int8")
    weight = next(p for n, p in fused.named_parameters() if n.endswith("base_layer.weight"))
    weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"_proj.*weight is quantized.*requires_grad_\(False\)"):
        step(fused, IDS)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_blocks_of_another_size_raise(name):
    _, fused = pair(name, "nf4, one level")
    layer = next(
        m for m in fused.modules() if type(m).__name__ == "Linear4bit" and hasattr(m, "quant_state")
    )
    state = layer.weight.quant_state
    state.blocksize = 128
    with pytest.raises(ValueError, match=r"blocks of 128.* scales of \d+ blocks, of 6\d"):
        step(fused, IDS)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_other_formats_run_under_checkpointing(name):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    models = []
    for _ in range(2):
        made = model(name).requires_grad_(False)
        for path, module in made.named_modules():
            if type(module) is nn.Linear and "lm_head" not in path:
                quantize_(module, Int8DynamicActivationInt8WeightConfig())
        made.get_input_embeddings().requires_grad_(True)
        models.append(made)
    stock, fused = models
    expected = step(stock, IDS)
    convert(fused)
    with pytest.warns(FusedRematWarning, match="checkpoint.*act_quant_kwargs"), reasons() as why:
        found = step(fused, IDS)
    assert len(why) == 2
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_a_format_that_computes_something_else_is_not_used(name, monkeypatch):
    stock, fused = pair(name, "bitsandbytes int8")
    expected = step(stock, IDS)
    monkeypatch.setattr(packed, "_TESTED", {})
    form = steps.FORMATS["bnb_int8"]
    wrong = lambda spec, tensors, dtype: form.dequantize(spec, tensors, dtype) * 1.01  # noqa: E731
    monkeypatch.setitem(steps.FORMATS, "bnb_int8", form._replace(dequantize=wrong))
    with pytest.warns(FusedRematWarning, match="checkpoint.* gives another result"):
        found = step(fused, IDS)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_bitsandbytes_does_not_pack_weights_for_inference(name):
    """On CPUs with AVX512-BF16, in evaluation mode: its own gradients would then be missing."""
    stock, fused = pair(name, "nf4")
    expected, given = step(stock, IDS), {**IDS, "use_cache": False}
    for module in fused.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = True
    fused.eval()
    fused.enable_input_require_grads()
    if name == "phi3":
        with pytest.warns(FusedRematWarning, match=r"evaluation mode.* call train\(\)"):
            step(fused, given)
    else:
        served(fused, given)
    fused.train()
    assert max(distance(served(fused, IDS), expected).values()) < LIMITS[F32]


def test_weights_that_were_packed_for_inference_are_not_read():
    _, fused = pair("llama", "nf4")
    state = next(m for m in fused.modules() if "quant_state" in vars(m)).weight.quant_state
    state.packing_format_for_cpu = True
    x = torch.randn(2, 12, 32)
    layer = fused.base_model.model.model.layers[0]
    assert "packed self_attn.q_proj.base_layer.weight" in layer._unsupported_reason(hidden_states=x)


@pytest.mark.parametrize("form, name", [("nf4", "bnb_4bit"), ("nf4, one level", "bnb_4bit")])
@pytest.mark.parametrize("bias", [False, True])
def test_the_products_that_run_on_cuda(form, name, bias):
    """On CPUs bitsandbytes has the same functions."""
    torch.manual_seed(0)
    module = FORMATS[form](nn.Linear(64, 48, bias=bias), F32).requires_grad_(False)
    x = torch.randn(5, 64)
    found = packed.packed_weight(module, "q", x)
    y = steps.FORMATS[name].product(found.spec, found.tensors, x, module.bias)
    torch.testing.assert_close(y, module(x.requires_grad_()).detach())


@pytest.mark.parametrize("threshold", [0.0, 6.0])
def test_the_int8_product_that_runs_on_cuda(threshold):
    import bitsandbytes as bnb

    torch.manual_seed(0)
    module = quantized.FORMATS["bitsandbytes int8"](nn.Linear(64, 48), None)
    module.state.threshold = threshold
    x = torch.randn(5, 64)
    x[:, 3] = 20.0  # an outlier
    x = x.half()
    found = packed.packed_weight(module, "q", x.float())
    product = steps.FORMATS["bnb_int8"].product
    y = product(found.spec, found.tensors, x, module.bias.half())
    expected = bnb.autograd._functions.MatMul8bitLt.apply(
        x, module.weight, None, module.bias.half(), module.state
    )
    torch.testing.assert_close(y, expected)


def test_a_packed_weight_that_changes_before_backward_raises():
    _, fused = pair("llama", "nf4")
    logits = fused(**IDS).logits
    layer = next(m for m in fused.modules() if "quant_state" in vars(m))
    layer.weight.data.view(-1)[0] += 1  # `data` has a version of its own
    logits.sum().backward()
    logits = fused(**IDS).logits
    with torch.no_grad():
        layer.weight.view(-1)[0] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logits.sum().backward()


def test_copies_and_saved_models_are_quantized(tmp_path):
    _, fused = pair("llama", "nf4")
    other = copy.deepcopy(fused)
    one, two = served(fused, IDS), served(other, IDS)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_compiled_layer_runs_between_graphs():
    _, fused = pair("llama", "nf4")
    layer, x = fused.base_model.model.model.layers[0], torch.randn(2, 12, 32, requires_grad=True)
    tables = fused.base_model.model.model.rotary_emb(x, torch.arange(12)[None])
    call = lambda x: layer(x, position_embeddings=tables, attention_mask=None)  # noqa: E731
    expected = torch.autograd.grad(call(x).square().sum(), x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        y = torch.compile(call, backend="aot_eager")(x)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], expected[0])


def test_the_dtype_of_products():
    """In float32 the result would differ by the roundings that bfloat16 makes."""
    torch.manual_seed(0)
    x = torch.randn(2, 12, 32)
    results = []
    for compute in (BF16, F32):
        _, fused = pair("llama", "nf4", compute=compute)
        layer, tables = fused.base_model.model.model.layers[0], fused.base_model.model.model
        tables = tables.rotary_emb(x, torch.arange(12)[None])
        stock = copy.deepcopy(fused).base_model.model.model.layers[0].eval()
        call = {"position_embeddings": tables, "attention_mask": None}
        y = layer(x.clone().requires_grad_(), **call)
        with torch.enable_grad():
            expected = stock.stock.forward(stock, x.clone().requires_grad_(), **call)
        results.append((y, expected))
    (low, expected), (full, _) = results
    assert (low - expected).norm() < 0.3 * (low - full).norm()


def test_formats_do_not_share_a_trace():
    torch.manual_seed(0)
    for form in ("nf4", "fp4", "nf4, one level", "torchao int8", "torchao int4"):
        check(*pair("olmo2", form), LIMITS[F32])


@pytest.mark.parametrize("form", ["torchao int8", "torchao int4", "nf4"])
def test_a_model_of_16_bits_under_autocast(form):
    """Its comparison with the layer is in 16 bits: torchao's products take no other dtype."""
    with torch.autocast("cpu", BF16):
        check(*pair("phi3", form, BF16), LIMITS[BF16])

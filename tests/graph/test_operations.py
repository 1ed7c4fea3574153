"""Choosing implementations: those for CPUs and their table, registering, explaining."""

import dataclasses
import functools

import pytest
import torch
from attention_calls import attention_call
from processes import ROOT, printed
from torch import nn

from fused_remat import FusedRematLayer, explain, ops
from fused_remat.execution import choose
from fused_remat.random import DropoutMask, site_keys
from fused_remat.spec import NormSpec
from fused_remat.steps import attention_aten, cpu_choice, linear
from fused_remat.steps.cpu_choice import ATTENTION, PRODUCTS
from fused_remat.steps.linear import bias_grad
from fused_remat.steps.norm import norm_fwd
from fused_remat.steps.operations import OPERATIONS, faster

needs_onednn = pytest.mark.skipif(cpu_choice._ONEDNN is None, reason="this PyTorch has no oneDNN")


@pytest.fixture
def settings(monkeypatch):
    """Return a function that sets the environment, or the processor if one is passed."""

    def settings(products="aten", attention="aten", processor=None):
        monkeypatch.setenv(PRODUCTS, products)
        monkeypatch.setenv(ATTENTION, attention)
        choose.forget()
        if processor is not None:
            detect = functools.cache(lambda: processor)
            monkeypatch.setattr(cpu_choice, "processor", detect)

    yield settings
    choose.forget()


@pytest.fixture
def onednn(monkeypatch):
    """Record the shapes of oneDNN's products."""
    shapes = []

    def product(x, weight, *rest, run=cpu_choice._ONEDNN):
        shapes.append((*x.shape, weight.shape[0]))
        return run(x, weight, *rest)

    monkeypatch.setattr(cpu_choice, "_ONEDNN", product)
    return shapes


def gradients(layer, x):
    """Return the output and all gradients."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], x.detach().cos())


def check_close(found, exact):
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()  # float32 sums in another order


@needs_onednn
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_onednn_products_are_right_and_the_same_in_every_preset(settings, onednn, dropout):
    settings("onednn")
    layer, x = FusedRematLayer(128, 2, 1024, dropout), torch.randn(256, 1, 128)
    found = {}
    for preset in ("full", "lean", "balanced", "fast", "none"):
        layer.policy = preset
        torch.manual_seed(1)
        found[preset] = gradients(layer, x)
        assert all(torch.equal(a, b) for a, b in zip(found[preset], found["full"], strict=True))
    assert (256, 128, 1024) in onednn and (256, 1024, 128) in onednn
    torch.manual_seed(1)
    check_close(found["full"], gradients(layer.double(), x.double()))


@needs_onednn
def test_onednn_serves_large_float32_products_on_cpus_unless_it_is_switched_off(settings, onednn):
    settings("onednn")
    x, weight = torch.randn(256, 256), torch.randn(512, 256)
    product = choose.ops_for("eager", x)[linear.linear_fwd]
    assert torch.equal(product(x[:8], weight, None), linear.linear_fwd(x[:8], weight, None))
    product(x.double(), weight.double(), None)
    product(x.bfloat16(), weight.bfloat16(), None)
    assert onednn == []
    product(x, weight, None)
    assert onednn == [(256, 256, 512)]
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(product(x, weight, None), linear.linear_fwd(x, weight, None))
    assert onednn == [(256, 256, 512)]


@pytest.mark.parametrize("width", [2, 129, 512])
def test_products_of_16_bits_in_halves_of_columns_are_right(width):
    x, weight, bias = (
        torch.randn(*sizes, dtype=torch.bfloat16) for sizes in ((300, 64), (width, 64), (width,))
    )
    dy, residual = torch.randn(2, 300, width, dtype=torch.bfloat16)
    mask = DropoutMask(site_keys(torch.tensor(0))[0], 0, 300, width, 0.5, torch.bfloat16)
    columns = torch.empty(300, 2 * width, dtype=torch.bfloat16)[:, width:]
    forward, backward = cpu_choice.linear_fwd_onednn, cpu_choice.linear_dx_onednn
    # Sums of 64 or more numbers, of deviation 8 to 23, rounded to 8 bits up to three times.
    close = functools.partial(torch.testing.assert_close, rtol=2e-2, atol=1e-1)
    for run, whole, operands in (
        (forward, linear.linear_fwd, (x, weight, bias)),
        (forward, linear.linear_fwd, (x, weight, None)),
        (forward, linear.linear_fwd, (x, weight, bias, residual, mask)),
        (backward, linear.linear_dx, (dy, weight)),
        (backward, linear.linear_dx, (torch.cat([dy, dy], 1)[:, :width], weight.t().clone().t())),
    ):
        close(run(*operands), whole(*operands))
    assert forward(x, weight, bias, out=columns) is columns
    close(columns, linear.linear_fwd(x, weight, bias))
    into = x.clone()
    assert backward(dy, weight, into) is into
    close(into, linear.linear_dx(dy, weight, x.clone()))


@pytest.mark.parametrize("steps", [1, 10], ids=["by steps", "by a record"])
def test_halves_are_the_same_in_every_preset(settings, monkeypatch, steps):
    """Of two sequences and of one."""
    settings("onednn")
    monkeypatch.setattr(linear, "cpu_has_native", lambda dtype: True)
    monkeypatch.setattr(choose, "chunk_tokens", lambda *_: 700)
    layer = FusedRematLayer(128, 2, 2048, 0.1, batch_first=True, dtype=torch.bfloat16)
    x, found = torch.randn(3, 350, 128, dtype=torch.bfloat16), []
    for preset in ("full", "none"):
        layer.policy = preset
        for _ in range(steps):
            torch.manual_seed(1)
            last = gradients(layer, x)
        found.append(last)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert str(explain(layer, x)).count("half the columns at a time") == 3


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_attention_in_blocks_where_it_is_faster(settings, dtype, is_causal):
    """Where keys are hidden by causality, or shared; ATen's kernel gives the same."""
    grads = {}
    heads = [torch.randn(2, h, 300, 16, dtype=dtype, requires_grad=True) for h in (4, 2, 2)]
    attention = functools.partial(ops.attention, *heads, is_causal=is_causal)
    for implementation in ("aten", "blocks"):
        settings(attention=implementation)
        grads[implementation] = [attention(), *torch.autograd.grad(attention().sum(), heads)]
        call = attention_call((2, 4, 2, 300, 300, 16), right=0 if is_causal else -1)
        faster = (
            attention_aten.unsupported_call_reason(heads[0], heads[2], call)
            == "faster on this processor"
        )
        assert faster == (implementation == "blocks")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    for a, b in zip(*grads.values(), strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


AMD, INTEL = ("AuthenticAMD", "AVX512"), ("GenuineIntel", "AVX512")
OTHERS = (("AuthenticAMD", "AVX2"), ("GenuineIntel", "AVX2"), ("", "DEFAULT"))


@pytest.mark.parametrize("processor", [AMD, INTEL, *OTHERS])
def test_the_processor_dtype_and_size_choose(settings, monkeypatch, processor):
    settings("", "", processor)
    monkeypatch.setattr(linear, "cpu_has_native", lambda dtype: True)

    def product(dtype, tokens=512):
        sizes = (tokens, 512), (tokens, 1024), (1024, 512)
        x, dy, weight = (torch.empty(*size, dtype=dtype) for size in sizes)
        chosen = {
            choose.choose(function, "eager", OPERATIONS[function].key(*given)).run is not function
            for function, given in (
                (linear.linear_fwd, (x, weight, None)), (linear.linear_dx, (dy, weight)),
            )
        }  # fmt: skip
        assert len(chosen) == 1
        return chosen.pop()

    def attention(dtype, length, right=0):
        q = torch.empty(1, 4, length, 16, dtype=dtype)
        call = attention_call((1, 4, 2, length, length, 16), right=right)
        return attention_aten.unsupported_call_reason(q, q[:, :2], call) is not None

    has = cpu_choice._ONEDNN is not None
    assert product(torch.float32) == (has and processor == AMD)
    assert product(torch.bfloat16) == (processor == INTEL)
    assert not product(torch.bfloat16, 255) and not product(torch.bfloat16, 2048)
    assert not product(torch.float32, 8) and not product(torch.float16)
    assert attention(torch.float32, 512) == attention(torch.bfloat16, 128) == (processor == AMD)
    assert not attention(torch.float32, 128) and not attention(torch.bfloat16, 2048)
    assert not attention(torch.float32, 512, -1)  # grouped heads, not causal


def test_every_entry_cites_committed_results():
    for rule in cpu_choice.RULES:
        assert rule.results
        assert all((ROOT / "bench" / "results" / name).is_file() for name in rule.results)


TRAIN = """
import hashlib, torch
from fused_remat import FusedRematLayer
torch.set_num_threads(1)
torch.manual_seed(0)
digest = hashlib.sha256()
mask = torch.nn.Transformer.generate_square_subsequent_mask(512)
for dtype in (torch.float32, torch.bfloat16):
    layer = FusedRematLayer(128, 2, 1024, 0.1, batch_first=True, dtype=dtype)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(3):
        x = torch.randn(1, 512, 128, dtype=dtype)
        layer(x, src_mask=mask, is_causal=True).square().mean().backward()
        optimizer.step()
    for p in layer.parameters():
        digest.update(p.detach().float().numpy().tobytes())
print(digest.hexdigest())
"""


def test_training_has_the_same_bits_in_every_process(monkeypatch):
    """With the choice by processor, which the tests otherwise override."""
    monkeypatch.setenv(PRODUCTS, "")
    monkeypatch.setenv(ATTENTION, "")
    assert printed("-c", TRAIN) == printed("-c", TRAIN)


@pytest.mark.parametrize("value", ["measure", "flash"])
def test_an_unknown_setting_is_an_error(settings, value):
    settings(attention=value)
    q = torch.randn(1, 2, 200, 16)
    expected = f"{ATTENTION} is '{value}', which names no .* set it to 'aten' or 'blocks'"
    with pytest.raises(ValueError, match=expected):
        ops.attention(q, q, q, is_causal=True)
    settings(products=value)
    with pytest.raises(ValueError, match=f"{PRODUCTS} is '{value}'"):
        ops.mlp(*torch.randn(2, 4, 4), None, torch.randn(4, 4), None)


# --- any backend


@pytest.fixture
def mine(monkeypatch):
    """Return the calls of a backend "mine" that implements RMSNorm."""
    calls = []

    def unsupported_reason(key):
        return None if key[0] == "rms_norm" else f"no {key[0]}"

    def my_norm(spec, x, weight, bias, out=None, stats=None):
        calls.append(spec)
        return norm_fwd(spec, x, weight, bias, out, stats)

    monkeypatch.setitem(choose.BACKENDS, "mine", choose.Backend)
    faster(norm_fwd, "mine", unsupported_reason=unsupported_reason, description="my norm")(my_norm)
    choose.forget()
    yield calls
    del OPERATIONS[norm_fwd].faster["mine"]
    choose.forget()


def test_one_operation_of_one_backend(mine):
    table, x = choose.ops_for("mine", torch.ones(1)), torch.randn(3, 8)
    assert table[bias_grad] is bias_grad and table[norm_fwd] is not norm_fwd
    for kind, served in (("layer_norm", 0), ("rms_norm", 1), ("rms_norm", 2)):
        spec = NormSpec(kind=kind)
        found, exact = table[norm_fwd](spec, x, None, None), norm_fwd(spec, x, None, None)
        assert len(mine) == served
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


def test_a_layer_takes_it_and_explain_says_why(mine):
    class Norms(nn.Module):
        def forward(self, x):
            y = ops.rms_norm(x, torch.ones(8), backend="mine")
            return ops.layer_norm(y, backend="mine")

    first, second = explain(Norms(), torch.randn(3, 8, requires_grad=True))
    assert dict(first.forward)["output"] == "my norm" and mine
    said = "ATen's native_layer_norm; not mine: no layer_norm"
    assert dict(second.forward)["output"] == said


def test_a_choice_is_made_once_for_a_key(mine, monkeypatch):
    asked = []
    row = OPERATIONS[norm_fwd].faster["mine"]
    counted = dataclasses.replace(row, unsupported_reason=lambda key: asked.append(key))
    monkeypatch.setitem(OPERATIONS[norm_fwd].faster, "mine", counted)
    norm, spec = choose.ops_for("mine", torch.ones(1))[norm_fwd], NormSpec()
    for shape in ((3, 8), (5, 8), (3, 4)):
        norm(spec, torch.ones(shape), None, None)
    assert [key[-1] for key in asked] == [8, 4]


def test_parameters_that_are_not_the_operations():
    def other(grad):
        return grad.sum(0)

    expected = r"other\(grad\) cannot implement bias_grad: its parameters must be \(dy\)"
    with pytest.raises(TypeError, match=expected):
        faster(bias_grad, "mine", description="")(other)


def test_an_option_that_library_kernels_do_not_know_is_refused():
    """An option that is new in `AttentionSpec` must not be ignored."""
    call = attention_call((1, 2, 2, 4, 4, 8))
    q = torch.randn(1, 2, 4, 8)
    assert attention_aten.unsupported_call_reason(q, q, call) is None
    assert call.spec.options == ()
    spec = dataclasses.replace(call.spec)
    spec.__dict__["options"] = ("bias",)
    call = dataclasses.replace(call, spec=spec)
    assert attention_aten.unsupported_call_reason(q, q, call) == "they have no bias"


def test_an_operator_with_other_arguments_is_not_called(monkeypatch):
    q = torch.randn(1, 2, 4, 8)
    monkeypatch.setattr(attention_aten, "has", lambda kernel: False)
    found = attention_aten.unsupported_call_reason(q, q, attention_call((1, 2, 2, 4, 4, 8)))
    assert found == "this version of PyTorch has another operator"

"""Implementations for CPUs of which a timing decides: oneDNN's products, attention in blocks."""

import functools
import time

import pytest
import torch
from attention_calls import attention_call
from torch.utils.flop_counter import FlopCounterMode

from fused_remat import FusedRematLayer, ops
from fused_remat.execution import choose
from fused_remat.random import DropoutMask, site_keys
from fused_remat.steps import attention_library, linear, timing
from fused_remat.steps import onednn as onednn_products
from fused_remat.steps.operations import OPERATIONS

PRODUCTS, ATTENTION = "FUSED_REMAT_CPU_PRODUCTS", "FUSED_REMAT_CPU_ATTENTION"
needs_onednn = pytest.mark.skipif(
    onednn_products._ONEDNN is None, reason="this PyTorch has no oneDNN"
)


@pytest.fixture
def settings(monkeypatch):
    """A function that sets what decides, and has every choice made anew."""

    def settings(products="aten", attention="aten"):
        monkeypatch.setenv(PRODUCTS, products)
        monkeypatch.setenv(ATTENTION, attention)
        choose.forget()

    yield settings
    choose.forget()


@pytest.fixture
def onednn(monkeypatch):
    """The shapes of oneDNN's products."""
    shapes = []

    def product(x, weight, *rest, run=onednn_products._ONEDNN):
        shapes.append((*x.shape, weight.shape[0]))
        return run(x, weight, *rest)

    monkeypatch.setattr(onednn_products, "_ONEDNN", product)
    return shapes


def gradients(layer, x):
    """The output, and all gradients."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], x.detach().cos())


def check_close(found, exact):
    for a, b in zip(found, exact, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


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
    layer = FusedRematLayer(128, 2, 1024)
    with torch.backends.mkldnn.flags(enabled=False):
        layer(torch.randn(256, 1, 128)).sum().backward()
    assert onednn == []
    product(x, weight, None)
    assert onednn == [(256, 256, 512)]


@needs_onednn
def test_flop_counters_count_onednn_products(settings):
    layer, x = FusedRematLayer(128, 2, 1024), torch.randn(256, 1, 128)
    flops = {}
    for implementation in ("aten", "onednn"):
        settings(implementation)
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        flops[implementation] = counter.get_total_flops()
    assert flops["aten"] == flops["onednn"]


@pytest.fixture
def halves(monkeypatch):
    """Widths of products of 16 bits, whole (above 0) or halves; of any CPU."""
    widths = []

    def whole(x, weight, *rest, out=None, run=linear.F.linear):
        widths.append(weight.shape[0])
        return run(x, weight, *rest)

    def half(*operands, out, run=torch.addmm):
        widths.append(-out.shape[1])
        return run(*operands, out=out)

    def product(*operands, out=None, run=torch.mm):
        widths.append(operands[1].shape[1] if out is None else -out.shape[1])
        return run(*operands, out=out)

    monkeypatch.setattr(linear, "cpu_has_native", lambda dtype: True)
    monkeypatch.setattr(linear.F, "linear", whole)
    monkeypatch.setattr(torch, "addmm", half)
    monkeypatch.setattr(torch, "mm", product)
    return widths


@pytest.mark.parametrize("width", [2, 129, 512])
def test_products_of_16_bits_in_halves_of_columns_are_right(width):
    x, weight, bias = (
        torch.randn(*sizes, dtype=torch.bfloat16) for sizes in ((300, 64), (width, 64), (width,))
    )
    dy, residual = torch.randn(2, 300, width, dtype=torch.bfloat16)
    mask = DropoutMask(site_keys(torch.tensor(0))[0], 0, 300, width, 0.5, torch.bfloat16)
    columns = torch.empty(300, 2 * width, dtype=torch.bfloat16)[:, width:]
    forward, backward = onednn_products.linear_fwd_timed, onednn_products.linear_dx_timed
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


@pytest.mark.parametrize("faster", [True, False])
def test_products_of_16_bits_are_timed_by_their_sizes(settings, halves, monkeypatch, faster):
    timed = []

    def is_faster(make):
        timed.append([run().shape for run in make()])
        return faster

    monkeypatch.setattr(timing, "_is_faster", is_faster)
    settings("measure")
    product, dx = (
        choose.ops_for("eager", torch.empty(0, dtype=torch.bfloat16))[operation]
        for operation in (linear.linear_fwd, linear.linear_dx)
    )
    weight, bias = torch.ones(256, 512).bfloat16(), torch.ones(256).bfloat16()
    for tokens, others in ((600, [(512, 256)] * 2), (700, None), (2048, None), (255, None)):
        x = torch.ones(tokens, 512).bfloat16()
        timed.clear(), halves.clear()
        y = product(x, weight, bias)
        assert timed == ([others] if others else [])
        in_halves = faster and 256 <= tokens < 2048
        assert halves[-1] == (-128 if in_halves else 256)
        assert y.shape == (tokens, 256) and dx(y, weight).shape == x.shape
        assert halves[-1] == (-256 if in_halves else 512)


@pytest.mark.parametrize("recorded", [False, True])
def test_halves_are_the_same_in_every_preset(settings, halves, recorded):
    """Of two sequences and of one, by steps and by a record, which calls no Python."""
    settings("onednn")
    layer = FusedRematLayer(128, 2, 2048, 0.1, batch_first=True, dtype=torch.bfloat16)
    x, found = torch.randn(3, 350, 128, dtype=torch.bfloat16), []
    for preset in ("full", "none"):
        layer.policy = preset
        for _ in range(10 if recorded else 1):
            torch.manual_seed(1)
            halves.clear()
            last = gradients(layer, x)
        found.append(last)
        assert (halves == []) if recorded else halves.count(-1024) >= 4
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_operator_with_other_arguments_is_not_called(settings, monkeypatch):
    monkeypatch.setattr(onednn_products, "_ONEDNN", None)
    settings("onednn")
    x, weight = torch.randn(256, 256), torch.randn(256, 512)
    product = choose.ops_for("eager", x)[linear.linear_dx]
    assert torch.equal(product(x, weight), torch.mm(x, weight))


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
            attention_library.unsupported_call_reason(heads[0], heads[2], call)
            == "faster on this machine"
        )
        assert faster == (implementation == "blocks")
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float64: 1e-12}[dtype]
    for a, b in zip(*grads.values(), strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("faster", [True, False])
def test_a_timing_is_made_once_for_sizes_and_decides(settings, monkeypatch, faster):
    made = []

    def is_faster(make):
        for run in make():
            run()  # what is timed can run
        made.append(make)
        return faster

    monkeypatch.setattr(timing, "_is_faster", is_faster)
    settings("measure", "measure")
    q, k = torch.randn(1, 4, 200, 16), torch.randn(1, 2, 200, 16)
    x, weight = torch.randn(256, 256), torch.randn(512, 256)
    table = choose.ops_for("eager", x)
    for _ in range(2):
        ops.attention(q, k, k)
        ops.attention(q[:, :, :190], k, k)  # about as long
        table[linear.linear_fwd](x, weight, None)
        table[linear.linear_fwd](torch.randn(300, 256), weight, None)  # about as large
        table[linear.linear_dx](torch.randn(256, 512), weight)
    assert len(made) == (1 if onednn_products._ONEDNN is None else 3)
    call = attention_call((1, 4, 2, 200, 200, 16))
    assert (attention_library.unsupported_call_reason(q, k, call) is not None) == faster
    if onednn_products._ONEDNN is not None:
        key = OPERATIONS[linear.linear_fwd].key(x, weight, None)
        said = choose.choose(linear.linear_fwd, "eager", key).reason()
        slower = "ATen's addmm; not oneDNN: slower on this machine"
        assert said == ("oneDNN's linear" if faster else slower)


def test_deterministic_algorithms_are_not_timed(settings, monkeypatch):
    monkeypatch.setattr(timing, "_is_faster", pytest.fail)
    settings("measure", "measure")
    torch.use_deterministic_algorithms(True)
    try:
        q = torch.randn(1, 2, 200, 16)
        ops.attention(q, q, q, is_causal=True)
        FusedRematLayer(128, 2, 1024)(torch.randn(256, 1, 128)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_faster_of_two_by_the_clock():
    assert timing._is_faster(lambda: (lambda: time.sleep(0.02), lambda: None))
    assert not timing._is_faster(lambda: (lambda: None, lambda: time.sleep(0.02)))
    with FlopCounterMode(display=False) as counter:
        timing._is_faster(lambda: (lambda: torch.ones(2, 2) @ torch.ones(2, 2), lambda: None))
    assert counter.get_total_flops() == 0


def test_another_setting_is_an_error(settings):
    settings(attention="flash")
    q = torch.randn(1, 2, 200, 16)
    said = f"{ATTENTION} is 'flash'; valid: 'measure', 'aten', 'blocks'"
    with pytest.raises(ValueError, match=said):
        ops.attention(q, q, q, is_causal=True)

"""Gradients of biases and norms are rounded to 16 bits together: the bits that autograd gives."""

import pytest
import torch
from torch.func import functional_call

from fused_remat import FusedRematLayer
from fused_remat.autograd import gradients, operators

LOW = (torch.bfloat16, torch.float16)


def layer_of(dtype=torch.bfloat16, **rest):
    torch.manual_seed(0)
    return FusedRematLayer(16, 2, 24, 0.0, batch_first=True, **rest).to(dtype)


def grads_of(layer, dtype=torch.bfloat16):
    layer.zero_grad()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    layer(x).square().sum().backward()
    return {"x": x.grad} | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}


def assert_autograd_gives(found, layer, monkeypatch, where=gradients):
    """The same gradients, also in dtype, where autograd rounds them."""
    asked = []
    monkeypatch.setattr(where, "round_vectors", lambda *given: asked.append(given))
    expected = grads_of(layer, found["x"].dtype)
    assert list(found) == list(expected) and asked
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", LOW)
def test_the_bits_that_autograd_gives(dtype, norm_first, monkeypatch):
    layer = layer_of(dtype, norm_first=norm_first)
    found = grads_of(layer, dtype)
    assert {g.dtype for g in found.values()} == {dtype}
    assert_autograd_gives(found, layer, monkeypatch)


def test_what_autograd_takes_in_float32_stays_so(monkeypatch):
    """Or in whatever dtype it comes: `grad_dtype`."""
    layer = layer_of()
    layer.linear1.bias.grad_dtype = torch.float32
    layer.norm2.weight.grad_dtype = None
    found = grads_of(layer)
    assert found["linear1.bias"].dtype is found["norm2.weight"].dtype is torch.float32
    assert found["norm2.bias"].dtype is torch.bfloat16
    assert_autograd_gives(found, layer, monkeypatch)


@pytest.mark.parametrize("asked", [torch.float32, None])
def test_nor_is_what_autograd_takes_wide_since_forward(asked):
    layer, x = layer_of(), torch.ones(2, 5, 16, dtype=torch.bfloat16).cumsum(1)
    grads, bias = [], layer.linear1.bias
    for in_forward in (asked, torch.bfloat16):
        layer.zero_grad()
        bias.grad_dtype = in_forward
        loss = layer(x).square().sum()
        bias.grad_dtype = asked
        loss.backward()
        assert bias.grad.dtype is torch.float32
        grads.append(bias.grad)
    assert torch.equal(*grads)


def test_parameters_that_are_no_leaves(monkeypatch):
    layer, x = layer_of(), torch.ones(2, 5, 16, dtype=torch.bfloat16).cumsum(1)
    wide = {n: p.detach().float().requires_grad_() for n, p in layer.named_parameters()}

    def grads():
        given = {n: p.to(torch.bfloat16) for n, p in wide.items()}
        loss = functional_call(layer, given, (x,)).square().sum()
        return torch.autograd.grad(loss, list(wide.values()))

    found = grads()
    monkeypatch.setattr(gradients, "round_vectors", lambda *given: None)
    assert all(map(torch.equal, found, grads()))


def test_in_the_operator_too(monkeypatch):
    compiled = torch.compile(layer_of(), backend="aot_eager")
    assert_autograd_gives(grads_of(compiled), compiled, monkeypatch, operators)

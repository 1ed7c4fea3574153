"""Gradients of biases and norms are rounded to 16 bits together: the bits that autograd gives."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fused_remat import FusedRematLayer
from fused_remat.autograd import operators, partial

LOW = (torch.bfloat16, torch.float16)


def layer_of(dtype: torch.dtype, **rest: bool) -> FusedRematLayer:
    torch.manual_seed(0)
    return FusedRematLayer(16, 2, 24, 0.0, batch_first=True, **rest).to(dtype)


def grads_of(layer: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    layer.zero_grad()
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    return {"x": x.grad} | {n: p.grad for n, p in layer.named_parameters() if p.grad is not None}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    same = [torch.equal(found[n], g) and found[n].dtype is g.dtype for n, g in expected.items()]
    return list(found) == list(expected) and all(same)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", LOW)
def test_the_bits_that_autograd_gives(
    dtype: torch.dtype, norm_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(dtype, norm_first=norm_first)
    found = grads_of(layer, dtype)
    assert {g.dtype for g in found.values()} == {dtype}
    monkeypatch.setattr(partial, "round_vectors", lambda *given: None)
    assert equal(found, grads_of(layer, dtype))


def test_autograd_rounds_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Tensor | None]] = []
    rounds = partial.round_vectors

    def spy(grads: list[Tensor | None], *given: Any) -> None:
        rounds(grads, *given)
        seen.append(grads)

    monkeypatch.setattr(partial, "round_vectors", spy)
    grads_of(layer_of(torch.bfloat16), torch.bfloat16)
    (grads,) = seen
    assert [g.dtype for g in grads if g is not None and g.dim() == 1] == 8 * [torch.bfloat16]


def test_what_autograd_takes_in_float32_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or in whatever dtype it comes: `grad_dtype`."""
    layer = layer_of(torch.bfloat16)
    layer.linear1.bias.grad_dtype = torch.float32
    layer.norm2.weight.grad_dtype = None
    found = grads_of(layer, torch.bfloat16)
    assert found["linear1.bias"].dtype is found["norm2.weight"].dtype is torch.float32
    assert found["norm2.bias"].dtype is torch.bfloat16
    monkeypatch.setattr(partial, "round_vectors", lambda *given: None)
    assert equal(found, grads_of(layer, torch.bfloat16))


@pytest.mark.parametrize("asked", [torch.float32, None])
def test_nor_is_what_autograd_takes_wide_since_forward(asked: torch.dtype | None) -> None:
    layer, x = layer_of(torch.bfloat16), torch.ones(2, 5, 16, dtype=torch.bfloat16).cumsum(1)
    grads = []
    for when in ("before", "after"):
        layer.zero_grad()
        bias = layer.linear1.bias
        bias.grad_dtype = asked if when == "before" else torch.bfloat16
        loss = layer(x).square().sum()
        bias.grad_dtype = asked
        loss.backward()
        assert bias.grad is not None and bias.grad.dtype is torch.float32
        grads.append(bias.grad)
    assert torch.equal(*grads)


def test_parameters_that_are_no_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(torch.bfloat16)
    wide = {n: p.detach().float().requires_grad_() for n, p in layer.named_parameters()}

    def grads() -> list[Tensor]:
        given = {n: p.to(torch.bfloat16) for n, p in wide.items()}
        x = torch.ones(2, 5, 16, dtype=torch.bfloat16).cumsum(1)
        loss = functional_call(layer, given, (x,)).square().sum()
        return list(torch.autograd.grad(loss, list(wide.values())))

    found = grads()
    monkeypatch.setattr(partial, "round_vectors", lambda *given: None)
    assert all(map(torch.equal, found, grads()))


def test_weights_of_other_dtypes_than_the_input() -> None:
    """Only gradients that are taken in the input's dtype are rounded together."""
    grads: list[Tensor | None] = [torch.ones(3) / 3, torch.ones(3) / 3, torch.ones(3).double()]
    partial.round_vectors(grads, LOW[0], [LOW[1], LOW[0], LOW[0]])
    assert [g.dtype for g in grads if g is not None] == [torch.float32, LOW[0], torch.float64]


def test_in_the_operator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager")
    found, asked = grads_of(compiled, torch.bfloat16), []
    monkeypatch.setattr(operators, "round_vectors", lambda *given: asked.append(given))
    assert equal(found, grads_of(compiled, torch.bfloat16)) and len(asked) == 1

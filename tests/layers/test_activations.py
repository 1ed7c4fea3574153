"""Activation functions without a row: served by the fused path, with what they capture."""

import contextlib
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_bits, assert_close
from layer_kinds import run
from reference import pair
from tiers import pairwise
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, FusedRematWarning, memory_report
from fused_remat.steps import activation as activations

D, H, FF = 12, 3, 20
DOUBLE = torch.float64
X = torch.randn(4, 5, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))

pytestmark = pytest.mark.usefixtures("served")


def capturing(act):
    w = nn.Parameter(torch.tensor(0.3, dtype=DOUBLE))
    return (lambda x: act(x, w)), [w]


FUNCTIONS = {
    "a function of torch's": lambda: (torch.sin, []),
    "a scalar captured": lambda: capturing(lambda x, w: torch.where(x > 0, x, w * x)),
    "a product of what is captured": lambda: capturing(lambda x, w: x.sigmoid() * (w * 2).exp()),
    "a module with a parameter": lambda: (nn.PReLU(dtype=DOUBLE), []),
    "a module of modules": lambda: (nn.Sequential(nn.Tanh(), nn.Linear(FF, FF, dtype=DOUBLE)), []),
    "across all tokens": lambda: (lambda x: x - x.mean((0, 1), keepdim=True), []),
    # It gets a contiguous tensor, as in the stock layer.
    "of a view": lambda: (lambda x: x.view(-1, FF).relu().view(x.shape), []),
}


@pytest.mark.parametrize(
    "name, batch_first, norm_first, policy",
    pairwise(list(FUNCTIONS), [True, False], [True, False], ["full", "none"]),
)
def test_any_function_trains_as_in_the_stock_layer(name, batch_first, norm_first, policy):
    """And where what it captures alone wants a gradient."""
    activation, captured = FUNCTIONS[name]()
    layers = pair(
        D, H, FF, 0.0, activation, batch_first=batch_first, norm_first=norm_first, dtype=DOUBLE,
        policy=policy,
    )  # fmt: skip
    found = []
    for layer in layers:
        x = X.clone().requires_grad_()
        leaves = [x, *layer.parameters(), *captured]
        y = layer(x)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, X.cos(), allow_unused=True)])
        if captured:
            alone = layer.requires_grad_(False)(X)
            found[-1] += torch.autograd.grad(alone, captured, X.cos())
    for got, expected in zip(*found, strict=True):
        assert (got is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(got, expected)


def test_an_unbatched_sequence_reaches_the_function_as_two_dimensions():
    shapes = []
    layer = FusedRematLayer(D, H, FF, 0.0, lambda x: shapes.append(tuple(x.shape)) or x.sin())
    layer(torch.randn(5, D)).sum().backward()
    assert set(shapes[1:]) == {(5, FF)}  # the first call is the probe, on one token


W, B = torch.full((FF, FF), 0.3), torch.full((FF,), 0.3)
NOT_A_LEAF, PARAMETER = torch.full((FF,), 0.3, requires_grad=True) * 2, nn.Parameter(B.clone())
MODULE = nn.PReLU().requires_grad_(False)


@pytest.mark.parametrize(
    ("activation", "captured"),
    {
        "a parameter": (lambda x: torch.where(x > 0, x, PARAMETER * x), PARAMETER),
        "frozen": (lambda x: x * W[0], W),
        "not a leaf": (lambda x: x * NOT_A_LEAF, NOT_A_LEAF),
        "a module's": (MODULE, MODULE.weight),
        # What only the value depends on is watched, too.
        "of a product": (lambda x: x * (B * 2), B),
        "compared": (lambda x: torch.where(x > B, x, 0.1 * x), B),
    }.values(),
)
def test_whatever_is_captured_and_changed_in_place_raises(activation, captured):
    y = FusedRematLayer(D, H, FF, 0.0, activation)(X.float())
    with torch.no_grad():
        captured.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["a module with a parameter", "a scalar captured"])
def test_captured_parameters_under_hooks_on_saved_tensors(name):
    layer = FusedRematLayer(D, H, FF, 0.0, FUNCTIONS[name]()[0], dtype=DOUBLE)
    expected = run(layer, X, X)
    for context in (save_on_cpu(), saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)):
        with context:
            assert_bits(run(layer, X, X), expected)
    inner = layer.forward
    layer.forward = functools.partial(checkpoint, inner, use_reentrant=False)
    assert_bits(run(layer, X, X), expected)
    layer.forward = inner
    assert memory_report(layer, X).kept_bytes > 0


class Heated(nn.Module):
    temperature = 1.0

    def forward(self, x):
        return x * torch.sigmoid(x * self.temperature) * (2.0 if self.training else 1.0)


def test_a_module_keeps_its_attributes_and_mode_of_forward():
    layer = FusedRematLayer(D, H, FF, 0.0, Heated(), dtype=DOUBLE)
    expected = torch.autograd.grad(layer(X).sum(), layer.linear1.weight)
    for change in (layer.eval, lambda: setattr(layer.activation, "temperature", 5.0)):
        layer.train().activation.temperature = 1.0
        y = layer(X)
        change()
        assert_bits(torch.autograd.grad(y.sum(), layer.linear1.weight), expected)
    assert layer.activation.temperature == 5.0


def test_a_call_in_backward_leaves_the_module_as_other_threads_use_it():
    seen = []

    class Looking(Heated):
        def forward(self, x):
            seen.append((self.temperature, layer.activation.temperature))
            return super().forward(x)

    layer = FusedRematLayer(D, H, FF, 0.0, Looking(), dtype=DOUBLE)
    y = layer(X)
    layer.activation.temperature = 5.0
    y.sum().backward()
    assert seen[-1] == (1.0, 5.0)


class Moving(nn.Module):
    mean = 0.0

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
        return x.sin()


def hooked():
    module = nn.ELU()
    module.register_forward_hook(lambda *_: None)
    return module


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x.sin()


@contextlib.contextmanager
def told():
    """What warnings say inside."""
    texts = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in seen if w.category is FusedRematWarning]


@pytest.mark.parametrize(
    ("activation", "reason"),
    [
        (nn.RReLU(), "draws random numbers"),
        (Counter(), "has buffers"),
        (Moving(), "changes its own attributes"),
        (hooked(), "has hooks"),
        (nn.PReLU(num_parameters=5), "fails on an input of shape"),  # one a token of a sequence
    ],
)
def test_what_cannot_be_called_again_falls_back_with_the_reason(activation, reason):
    layer = FusedRematLayer(D, H, FF, 0.0, activation, batch_first=True)
    with told() as texts:
        layer(X.float()).sum().backward()
    assert len(texts) == 1 and reason in texts[0]
    assert layer.linear1.weight.grad is not None
    if isinstance(activation, Counter):
        assert activation.calls == 1  # its layer's forward is not repeated


def test_a_new_activation_is_a_row(monkeypatch):
    """mish's ATen derivative has no overload that writes to `out`."""
    backward = torch.ops.aten.mish_backward
    bwd = lambda dy, x, out: activations._into(backward, dy, out, x)  # noqa: E731
    row = activations.Activation(F.mish, bwd, modules=(nn.Mish,))
    monkeypatch.setitem(activations.ACTIVATIONS, "mish", row)
    stock, fused = pair(D, H, FF, 0.0, nn.Mish(), dtype=DOUBLE)
    assert_close(run(fused, X, X.cos()), run(stock, X, X.cos()))

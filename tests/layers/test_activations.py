"""Activation functions without an entry run on the fused path, with what they capture."""

import pytest
import torch
from accuracy import assert_bits
from reference import pair
from tiers import pairwise
from torch import nn

from fused_remat import FusedRematLayer, FusedRematWarning

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
    """And where what it captures alone requires a gradient."""
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
    with pytest.warns(FusedRematWarning, match=reason):
        layer(X.float()).sum().backward()
    assert layer.linear1.weight.grad is not None
    if isinstance(activation, Counter):
        assert activation.calls == 1  # its layer's forward is not repeated

"""Activation functions without a row: served by the fused path, with what they capture."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_bits
from reference import pair
from tiers import pairwise
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, FusedRematWarning, memory_report
from fused_remat.autograd import run_block
from fused_remat.graph.graph import Graph
from fused_remat.spec import USER_FUNCTION
from fused_remat.steps import activation as activations
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.residual import Add

D, H, FF = 12, 3, 20
DOUBLE = torch.float64


@pytest.fixture(autouse=True)
def no_fallback():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        yield


def captures(shape):
    w = nn.Parameter(torch.full(shape, 0.3, dtype=DOUBLE))
    return (lambda x: torch.where(x > 0, x, w * x)), [w]


def captures_non_leaf():
    w = nn.Parameter(torch.tensor(0.3, dtype=DOUBLE))
    return (lambda x: x * torch.sigmoid(x) * (w * 2).exp()), [w]


FUNCTIONS = {
    "a function of torch's": lambda: (torch.sin, []),
    "leaky relu": lambda: (F.leaky_relu, []),
    "a scalar captured": lambda: captures(()),
    "a vector captured": lambda: captures((FF,)),
    "a product of what is captured": captures_non_leaf,
    "a module": lambda: (nn.ELU(), []),
    "a module with a parameter": lambda: (nn.PReLU(dtype=DOUBLE), []),
    "a module of modules": lambda: (nn.Sequential(nn.Tanh(), nn.Linear(FF, FF, dtype=DOUBLE)), []),
    "across the batch": lambda: (lambda x: x.softmax(1), []),
    "across all tokens": lambda: (lambda x: x - x.mean((0, 1), keepdim=True), []),
    "in place": lambda: (F.relu_, []),
    "identity": lambda: (lambda x: x, []),
    # It gets a contiguous tensor, as in the stock layer.
    "of a view": lambda: (lambda x: x.view(-1, FF).relu().view(x.shape), []),
}


def gradients(layer, x, dy, captured):
    x = x.clone().requires_grad_()
    y = layer(x)
    grads = torch.autograd.grad(y, [x, *layer.parameters(), *captured], dy, allow_unused=True)
    return [y, *grads]


@pytest.mark.parametrize(
    "name, batch_first, norm_first, policy",
    pairwise(list(FUNCTIONS), [True, False], [True, False], ["full", "none"]),
)
def test_any_function_trains_as_in_the_stock_layer(name, batch_first, norm_first, policy):
    activation, captured = FUNCTIONS[name]()
    stock, fused = pair(
        D, H, FF, 0.0, activation, batch_first=batch_first, norm_first=norm_first, dtype=DOUBLE,
        policy=policy,
    )  # fmt: skip
    x, dy = torch.randn(2, 4, 5, D, dtype=DOUBLE)
    expected = gradients(stock, x, dy, captured)
    for got, truth in zip(gradients(fused, x, dy, captured), expected, strict=True):
        assert (got is None) == (truth is None)
        if truth is not None:
            torch.testing.assert_close(got, truth)


def test_an_unbatched_sequence_reaches_the_function_as_two_dimensions():
    shapes = []
    layer = FusedRematLayer(D, H, FF, 0.0, lambda x: shapes.append(tuple(x.shape)) or x.sin())
    layer(torch.randn(5, D)).sum().backward()
    assert set(shapes[1:]) == {(5, FF)}  # the first call is the probe, on one token


def test_only_the_captured_parameter_wants_a_gradient():
    activation, (w,) = captures(())
    layer = FusedRematLayer(D, H, FF, 0.0, activation, dtype=DOUBLE).requires_grad_(False)
    stock = copy.deepcopy(nn.TransformerEncoderLayer(D, H, FF, 0.0, activation, dtype=DOUBLE))
    stock.load_state_dict(layer.state_dict())
    stock.activation = activation
    x = torch.randn(4, 5, D, dtype=DOUBLE)
    layer(x).square().sum().backward()
    got, w.grad = w.grad, None
    stock(x).square().sum().backward()
    torch.testing.assert_close(got, w.grad)


W, B = torch.full((FF, FF), 0.3), torch.full((FF,), 0.3)
NOT_A_LEAF, PARAMETER = torch.full((FF,), 0.3, requires_grad=True) * 2, nn.Parameter(B.clone())
MODULE = nn.PReLU().requires_grad_(False)


@pytest.mark.parametrize(
    ("activation", "captured"),
    {
        "a parameter": (lambda x: torch.where(x > 0, x, PARAMETER * x), PARAMETER),
        "frozen": (lambda x: x * W[0], W),
        "not a leaf": (lambda x: x * NOT_A_LEAF, NOT_A_LEAF),
        "through a view": (lambda x: F.linear(x, W.t()), W),
        "a module's": (MODULE, MODULE.weight),
        # What only the value depends on is watched, too.
        "of a product": (lambda x: x * (B * 2), B),
        "added": (lambda x: x + B, B),
        "of a function": (lambda x: x * torch.sigmoid(B), B),
        "compared": (lambda x: torch.where(x > B, x, 0.1 * x), B),
    }.values(),
)
def test_whatever_is_captured_and_changed_in_place_raises(activation, captured):
    y = FusedRematLayer(D, H, FF, 0.0, activation)(torch.randn(4, 5, D))
    with torch.no_grad():
        captured.mul_(1.5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_function_that_reads_another_tensor_in_backward_raises():
    holder = {"w": nn.Parameter(torch.tensor(0.3))}
    layer = FusedRematLayer(D, H, FF, 0.0, lambda x: x * holder["w"])
    y = layer(torch.randn(4, 5, D))
    holder["w"] = nn.Parameter(torch.tensor(0.4))
    with pytest.raises(RuntimeError, match="did not read in forward"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["a module with a parameter", "a scalar captured"])
@pytest.mark.parametrize("around", ["save_on_cpu", "own hooks", "checkpoint", "memory_report"])
def test_captured_parameters_under_hooks_on_saved_tensors(name, around):
    layer = FusedRematLayer(D, H, FF, 0.0, FUNCTIONS[name]()[0], dtype=DOUBLE)
    x = torch.randn(4, 5, D, dtype=DOUBLE, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    if around == "memory_report":
        assert memory_report(layer, x).kept_bytes > 0
        return
    if around == "checkpoint":
        y = checkpoint(layer, x, use_reentrant=False)
    else:
        hooks = torch.autograd.graph
        own = hooks.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
        with hooks.save_on_cpu() if around == "save_on_cpu" else own:
            y = layer(x)
    got = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    assert_bits(got, expected)


class Heated(nn.Module):
    temperature = 1.0

    def forward(self, x):
        return x * torch.sigmoid(x * self.temperature) * (2.0 if self.training else 1.0)


def test_a_module_keeps_its_attributes_and_mode_of_forward():
    layer = FusedRematLayer(D, H, FF, 0.0, Heated(), dtype=DOUBLE)
    x = torch.randn(4, 5, D, dtype=DOUBLE)
    expected = torch.autograd.grad(layer(x).sum(), layer.linear1.weight)
    for change in (layer.eval, lambda: setattr(layer.activation, "temperature", 5.0)):
        layer.train().activation.temperature = 1.0
        y = layer(x)
        change()
        assert torch.equal(torch.autograd.grad(y.sum(), layer.linear1.weight)[0], expected[0])
    assert layer.activation.temperature == 5.0


@pytest.mark.parametrize("fn", [lambda t: t, lambda t: t.sum(-1, keepdim=True).expand_as(t)])
def test_the_callers_gradient_is_never_written_to(fn):
    act = MLPActivation(name="a", up="input", act=USER_FUNCTION)
    nodes = (act, Add(name="output", x="a", residual="input"))
    graph = Graph("custom", nodes, ())
    x = torch.randn(2, 3, D, requires_grad=True)
    y = run_block(graph, "full", {"input": x}, functions={"activation": fn})
    dy = torch.ones_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(dy, torch.ones_like(dy))
    torch.testing.assert_close(dx, torch.autograd.grad((fn(x) + x).sum(), x)[0])


def test_functional_call_reaches_a_modules_parameters():
    stock, fused = pair(D, H, FF, 0.0, nn.PReLU(dtype=DOUBLE), dtype=DOUBLE)
    params = {n: (p.detach() * 1.5).requires_grad_() for n, p in fused.named_parameters()}
    x = torch.randn(4, 5, D, dtype=DOUBLE)
    grads = []
    for layer in (stock, fused):
        y = torch.func.functional_call(layer, params, (x,))
        grads.append(torch.autograd.grad(y.square().sum(), list(params.values())))
    torch.testing.assert_close(*grads)


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
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        layer(torch.randn(4, 5, D)).sum().backward()
    updates, told = "updates buffers in forward", [str(w.message) for w in seen]
    assert sum(reason in text for text in told if updates not in text) == 1
    assert layer.linear1.weight.grad is not None
    if isinstance(activation, Counter):
        assert len(told) == 2 and any(updates in text for text in told)
        assert activation.calls == 2  # as under torch.utils.checkpoint: once more in backward


def test_the_probe_draws_nothing_from_torchs_generator():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)
        FusedRematLayer.why_not_fused(
            FusedRematLayer(D, H, FF, 0.0, nn.RReLU(), device="meta").to_empty(device="cpu"),
            torch.zeros(4, 5, D),
        )
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_new_activation_is_a_row(dropout, monkeypatch):
    """mish's ATen derivative has no overload that writes to `out`."""
    row = activations.Activation(
        F.mish,
        lambda dy, x, out: activations._into(torch.ops.aten.mish_backward, dy, out, x),
        modules=(nn.Mish,),
    )
    monkeypatch.setitem(activations.ACTIVATIONS, "mish", row)
    x = torch.randn(5, 2, D, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    results = []
    for activation in (nn.Mish(), nn.SiLU()):
        _, fused = pair(D, H, FF, dropout=dropout, activation=activation, dtype=DOUBLE)
        torch.manual_seed(1)
        results.append(fused(x))
    assert not torch.equal(*results)
    stock, fused = pair(D, H, FF, dropout=0.0, activation=nn.Mish(), dtype=DOUBLE)
    expected = gradients(stock, x, x.cos(), [])
    for a, b in zip(gradients(fused, x, x.cos(), []), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    _, fused = pair(D, H, FF, dropout=dropout, activation=nn.Mish(), dtype=DOUBLE)

    def f(x):
        torch.manual_seed(1)
        return fused(x)

    assert torch.autograd.gradcheck(f, (x.clone().requires_grad_(),), fast_mode=True)

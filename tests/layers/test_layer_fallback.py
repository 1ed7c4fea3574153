"""What the fused path cannot serve: PyTorch's own forward, the same numbers, and one warning."""

import itertools
import warnings

import pytest
import torch
from reference import X, make, pair, run
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, FusedRematWarning

FALLBACKS = {
    "activation": lambda m: setattr(m, "activation", nn.RReLU()),
    "hook": lambda m: m.linear1.register_forward_hook(lambda *a: None),
    "child": lambda m: setattr(m, "linear1", nn.Sequential(m.linear1)),
    "forward": lambda m: setattr(m.self_attn, "forward", m.self_attn.forward),
    "_ff_block": lambda m: setattr(m, "_ff_block", m._ff_block),
    "norm of another shape": lambda m: setattr(m, "norm1", nn.LayerNorm((5, 2, 8)).double()),
    "norm": lambda m: setattr(m, "norm1", nn.LayerNorm((2, 8), dtype=torch.float64)),
    "parametrized": lambda m: nn.utils.parametrizations.weight_norm(m.linear2),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_what_the_fused_path_cannot_serve_runs_under_checkpoint_with_one_warning(name):
    stock, fused = make(dropout=0.2)
    FALLBACKS[name](stock), FALLBACKS[name](fused)
    x = X.clone().requires_grad_()
    torch.manual_seed(0)
    with pytest.warns(FusedRematWarning, match="checkpoint") as caught:
        y = fused(x)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused(x)  # once
    got = torch.autograd.grad(y.sum(), [x, *fused.parameters()])
    torch.manual_seed(0)
    expected = run(stock, X)
    assert torch.equal(y.detach(), expected[0])
    for a, b in zip(got, expected[1:], strict=True):
        assert torch.equal(a, b)


def with_hook(*layers):
    for layer in layers:
        layer.linear1.register_forward_hook(lambda *a: None)


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_the_fallback_replays_what_the_first_run_read():
    """Parameters passed by functional_call, and training flags."""
    stock, fused = make()
    with_hook(stock, fused)
    params = {n: (2 * p).detach().requires_grad_() for n, p in fused.named_parameters()}
    grads = []
    for layer in (stock, fused):
        y = torch.func.functional_call(layer, params, (X,))
        grads.append(torch.autograd.grad(y.square().sum(), list(params.values())))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    stock, fused = make(dropout=0.3)
    with_hook(stock, fused)
    grads = []
    for layer in (stock, fused):
        torch.manual_seed(0)
        y = layer(X).sum()
        layer.eval()
        grads.append(torch.autograd.grad(y, list(layer.parameters())))
        assert not any(m.training for m in layer.modules())
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_buffers_are_updated_as_under_pytorchs_checkpoint():
    """Again in backward: the gradients are those that torch.utils.checkpoint gives, bit for bit."""
    stock, fused = make()
    torch.manual_seed(0)
    for layer in (stock, fused):
        nn.utils.parametrizations.spectral_norm(layer.linear1)
    fused.load_state_dict(stock.state_dict())
    stock_checkpointed = lambda x: checkpoint(stock, x, use_reentrant=False)  # noqa: E731
    for _ in range(2):
        found = []
        for forward, layer in ((stock_checkpointed, stock), (fused, fused)):
            x = X.clone().requires_grad_()
            y = forward(x)
            found.append([y, *torch.autograd.grad(y.sum(), [x, *layer.parameters()])])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    for a, b in zip(fused.state_dict().values(), stock.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_the_fallback_raises_when_a_parameter_or_the_input_changed():
    for change in ("linear2.weight", "norm1.bias", "x"):
        _, fused = make()
        with_hook(fused)
        x = X.clone()
        y = fused(x).sum()
        with torch.no_grad():
            (x if change == "x" else fused.get_parameter(change)).mul_(3.0)
        with pytest.raises(RuntimeError, match="inplace"):
            y.backward()


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_the_fallback_raises_when_a_parameter_became_another_tensor():
    """Cast or resized through `.data`, which has no version."""
    for change in (torch.Tensor.float, lambda p: p[:1].clone()):
        _, fused = make()
        with_hook(fused)
        y = fused(X).sum()
        fused.norm1.weight.data = change(fused.norm1.weight.data)
        with pytest.raises(RuntimeError, match=r"'norm1\.weight' again"):
            y.backward()


def test_patched_classes_and_function_modes_are_noticed(monkeypatch):
    from torch.overrides import TorchFunctionMode

    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 2 if func is torch.nn.functional.linear else out

    stock, fused = make()
    with Doubled(), pytest.warns(FusedRematWarning, match="Doubled"):
        got = fused(X)
    with Doubled():
        assert torch.equal(got, stock(X))
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: original(self, x) * 2)
    with pytest.warns(FusedRematWarning, match="forward was replaced"):
        got = fused(X)
    assert torch.equal(got, stock(X))


def test_tracing_is_pytorchs_own():
    stock, fused = make()
    traced = torch.jit.trace(fused, (X,), check_trace=False)
    torch.testing.assert_close(traced(X), stock(X))


def test_nested_vmap_over_backward():
    _, fused = make()
    x = X.clone().requires_grad_()
    y = fused(x)
    dys = torch.randn(2, 3, *y.shape, dtype=y.dtype)

    def vjp(dy):
        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    got = torch.vmap(torch.vmap(vjp))(dys)
    for i, j in itertools.product(range(2), range(3)):
        assert torch.equal(got[i, j], vjp(dys[i, j]))


def test_fallback_keeps_the_input_only():
    from fused_remat.report.allocations import SavedBytes

    _, fused = make()
    fused.activation = nn.RReLU()
    x = X.clone().requires_grad_()
    with warnings.catch_warnings(), SavedBytes(exclude=fused.parameters()) as saved:
        warnings.simplefilter("ignore", FusedRematWarning)
        fused(x)
    assert saved.total <= X.nbytes


def test_transforms_run_pytorchs_own_forward():
    _, fused = pair(8, 2, 12, dropout=0.0)
    x = X.float()
    params = dict(fused.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(fused, params, (x,)).square().sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grads = torch.func.grad(loss)(params, x)
    expected = torch.autograd.grad(loss(params, x), list(params.values()))
    for a, b in zip(grads.values(), expected, strict=True):
        # float32; the two orders of summation meet in squares
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_functional_call_is_served():
    stock, fused = make()
    params = {n: p.detach().clone().mul_(1.5).requires_grad_() for n, p in fused.named_parameters()}
    y = torch.func.functional_call(fused, params, (X,))
    torch.testing.assert_close(y, torch.func.functional_call(stock, params, (X,)))
    grads = torch.autograd.grad(y.sum(), list(params.values()))
    expected = torch.autograd.grad(
        torch.func.functional_call(stock, params, (X,)).sum(), list(params.values())
    )
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("policy, count", [("full", 1), ("none", 0)])
def test_a_buffer_that_forward_updates_is_told(policy, count):
    layer = FusedRematLayer(16, 2, 32, 0.0, batch_first=True, policy=policy)
    nn.utils.parametrizations.spectral_norm(layer.linear1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(torch.randn(2, 3, 16, requires_grad=True)).sum().backward()
    told = [str(w.message) for w in seen if "updates buffers in forward" in str(w.message)]
    assert len(told) == count and all("linear1.parametrizations.weight.0._u, " in t for t in told)

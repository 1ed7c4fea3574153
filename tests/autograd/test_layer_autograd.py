"""Gradients of the layer: items 24 to 28 of the drop-in contract, and life after an exception."""

import copy
import gc

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from reference import EXACT_PRESETS, X, make, run
from tiers import pairwise
from torch import nn
from torch.testing import assert_close

from fused_remat import FusedRematLayer
from fused_remat.report.allocations import measure_allocations

#: Parts of parameters' names: each parameter by itself, and kinds of them.
PARTS = [n for n, _ in FusedRematLayer(8, 2, 12).named_parameters()]
PARTS += ["self_attn", "linear", "norm", "bias", "weight"]


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("trained", [True, False], ids=["trained alone", "frozen alone"])
def test_parts_of_the_parameters(trained, norm_first):
    """The input wants a gradient by turns; without any that does, neither does the output."""
    stock, fused = make("full" if trained else "fast", norm_first=norm_first)
    for i, part in enumerate(PARTS):
        for layer in (stock, fused):
            layer.zero_grad()
            for name, p in layer.named_parameters():
                p.requires_grad_((part in name) == trained)
            layer(X.clone().requires_grad_(i % 2 == 0)).square().sum().backward()
        assert_close(*([p.grad for p in layer.parameters()] for layer in (fused, stock)))
    assert not fused.requires_grad_(False)(X).requires_grad


def test_post_accumulate_hooks_fire_once_each():
    _, fused = make()
    fired = []
    for name, p in fused.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    fused(X).sum().backward()
    assert sorted(fired) == sorted(n for n, _ in fused.named_parameters())


@pytest.mark.parametrize(
    "policy, norm_first, dropout", pairwise(list(EXACT_PRESETS), [True, False], [0.0, 0.3])
)
def test_gradcheck(policy, norm_first, dropout):
    _, fused = make(policy, dropout, norm_first, activation="gelu")
    names = [n for n, _ in fused.named_parameters()]
    mask = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)

    def f(x, mask, *params):
        torch.manual_seed(1)  # the same dropout at every evaluation
        for name, value in zip(names, params, strict=True):
            owner, _, attribute = name.rpartition(".")
            module = fused.get_submodule(owner)
            module._parameters[attribute] = value
        return fused(x, mask)

    params = [p.detach().clone().requires_grad_() for p in fused.parameters()]
    x = X[:, :1].clone().requires_grad_()
    assert torch.autograd.gradcheck(f, (x, mask, *params), fast_mode=True)


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.square().sum()])
def test_double_backward_raises(loss):
    """Also where the first gradient (of a sum) needs none itself: never a silent constant."""
    _, fused = make()
    x = X.clone().requires_grad_()
    y = fused(x)
    (g,) = torch.autograd.grad(loss(y), x, create_graph=True)
    (expected,) = torch.autograd.grad(loss(fused(x)), x)
    assert torch.equal(g.detach(), expected)
    with pytest.raises(RuntimeError, match="double backward"):
        (y.sum() + g.square().sum()).backward()


def test_forward_mode_raises():
    _, fused = make()
    with fwAD.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        fused(fwAD.make_dual(X, torch.ones_like(X)))


def test_layer_applied_twice_and_tied_weights():
    stock, fused = make()
    for layer in (stock, fused):
        layer.linear2.weight = nn.Parameter(layer.linear1.weight.detach().t().clone())
    grads = []
    for layer in (stock, fused):
        x = X.clone().requires_grad_()
        grads.append(torch.autograd.grad(layer(layer(x)).sum(), [x, *layer.parameters()]))
    assert_close(*grads)
    stock, fused = make()
    for layer in (stock, fused):
        layer.norm2.weight = layer.norm1.weight  # one parameter in two places
        layer(X).sum().backward()
    assert_close(fused.norm1.weight.grad, stock.norm1.weight.grad)


def test_the_output_may_be_changed_in_place_by_the_caller():
    stock, fused = make()
    for x in (X, X[:, 0]):
        grads = []
        for layer in (stock, fused):
            leaf = x.clone().requires_grad_()
            y = layer(leaf).mul_(2.0).relu_()
            grads.append(torch.autograd.grad(y.sum(), [leaf, *layer.parameters()]))
        assert_close(*grads)


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("policy", ["full", "none"])
def test_changing_what_backward_needs_raises(norm_first, policy):
    """A tensor that is read again must be unchanged; one that is not may change (as in PyTorch)."""
    _, fused = make(policy, norm_first=norm_first)
    mask = torch.zeros(5, 5, dtype=torch.float64)
    expected = run(fused, X)
    targets = ["x", "mask", *(n for n, _ in fused.named_parameters())]
    raised = set()
    for name in targets:
        layer = copy.deepcopy(fused)
        x = X.clone().requires_grad_()
        base = x * 1.0
        given = {"x": base, "mask": mask.clone(), **dict(layer.named_parameters())}
        y = layer(base, given["mask"])
        with torch.no_grad():
            given[name].add_(1.0)
        try:
            got = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            raised.add(name)
            continue
        for a, b in zip(got, expected[1:], strict=True):
            assert torch.equal(a, b), f"{name} changed, and the gradients with it"
    weights = {n for n in targets if n.endswith("weight")}
    assert {"x", "mask"} | weights <= raised
    if policy == "full":  # a rebuild reads these biases again: raising is the only right answer
        assert {"self_attn.in_proj_bias", "self_attn.out_proj.bias", "linear1.bias"} <= raised


def test_three_hundred_steps_leave_no_growth():
    layer = FusedRematLayer(32, 4, 64, dropout=0.1, policy="lean")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    x = torch.randn(7, 2, 32)

    def steps(n):
        for _ in range(n):
            optimizer.zero_grad(set_to_none=False)
            layer(x).square().mean().backward()
            optimizer.step()

    def objects():
        gc.collect()
        return len(gc.get_objects())

    steps(5)
    before = objects()
    steps(300)
    assert objects() - before < 150  # other threads' own; one object a step would be 300
    assert measure_allocations(lambda: steps(20)).net == 0

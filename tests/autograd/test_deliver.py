"""Weight gradients that autograd gets while a block's backward runs: the same, and not together."""

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, FusedRematWarning
from fused_remat.autograd import deliver, run_block
from fused_remat.execution import executor, prepare
from fused_remat.graph.graph import Graph
from fused_remat.report.allocations import measure_allocations
from fused_remat.steps.replay import Replay

B, S, D, H, FF = 2, 3, 16, 2, 64


@pytest.fixture
def small(monkeypatch):
    """Small weights count as large ones."""
    monkeypatch.setattr(prepare, "_DELIVERED", 0)
    prepare._prepare.cache_clear()
    yield
    prepare._prepare.cache_clear()


def layer_of(kind):
    torch.manual_seed(0)
    return FusedRematLayer(D, H, FF, 0.0, batch_first=True, norm_first=kind == "pre-norm")


def inputs():
    return torch.randn(B, S, D, requires_grad=True), torch.randn(B, S, D)


def expected_and(layer, x, dy, monkeypatch):
    """Gradients with none delivered."""
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_delivers", lambda *_: {})
        prepare._prepare.cache_clear()
        expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], dy)
    prepare._prepare.cache_clear()
    return expected


def nodes_of(y):
    return deliver._chain(y.grad_fn)


@pytest.mark.parametrize("kind", ["pre-norm", "post-norm"])
def test_gradients_are_the_same_bits(kind, small, monkeypatch):
    layer, x, dy = layer_of(kind), torch.randn(B, S, D, requires_grad=True), torch.randn(B, S, D)
    expected, params = expected_and(layer, x, dy, monkeypatch), [*layer.parameters()]
    y = layer(x)
    assert len(nodes_of(y)) > 2
    calls = [torch.autograd.grad(y, [x, *params], dy, retain_graph=True)]
    for p in (x, *params):
        p.grad = None
    y.backward(dy, retain_graph=True)
    y.backward(dy, retain_graph=True)
    calls.append([p.grad / 2 for p in (x, *params)])
    for p, other in zip((x, *params), expected, strict=True):  # ATen's norms: in another order
        torch.testing.assert_close(torch.autograd.grad(y, p, dy, retain_graph=True)[0], other)
    for reentrant in (True, False):
        z = checkpoint(layer, x, use_reentrant=reentrant)
        for p in (x, *params):
            p.grad = None
        z.backward(dy)
        calls.append([p.grad for p in (x, *params)])
    batch = torch.stack([dy, dy])
    batched = torch.autograd.grad(y, [x, *params], batch, is_grads_batched=True, retain_graph=True)
    calls.append([g[1] for g in batched])
    for p in params[::2]:
        p.requires_grad_(False)
    wanted = [x, *params[1::2]]
    some = iter(torch.autograd.grad(layer(x), wanted, dy))
    pairs = zip((x, *params), expected, strict=True)
    calls.append([next(some) if p.requires_grad else e for p, e in pairs])
    for i, got in enumerate(calls):
        for j, (mine, other) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(mine, other), (i, j)


def test_hooks_are_called_once_and_in_place_changes_are_allowed(small):
    layer, x = layer_of("pre-norm"), torch.randn(B, S, D, requires_grad=True)
    called, y = [], layer(x)
    assert len(nodes_of(y)) > 2
    for name, p in layer.named_parameters():
        p.register_hook(lambda g, name=name: called.append(name))
        p.register_post_accumulate_grad_hook(lambda p, name=name: called.append(name))
    y.register_hook(lambda dy: called.append("y") or 2 * dy)
    y += 1
    y.sum().backward()
    assert sorted(called) == sorted(["y", *2 * [n for n, _ in layer.named_parameters()]])


def test_an_optimizer_may_step_in_backward(small, monkeypatch):
    """Weights with hooks are not delivered: later gradients are computed from their values."""
    layer, x, dy = layer_of("pre-norm"), *inputs()
    params = [*layer.parameters()]
    expected, found = expected_and(layer, x, dy, monkeypatch), {}

    def step(p):
        found[p], p.grad = p.grad, None
        with torch.no_grad():
            p.add_(1.0)

    for p in params:
        p.register_post_accumulate_grad_hook(step)
    y = layer(x)
    assert not isinstance(y.grad_fn, deliver._NODE)
    y.backward(dy)
    for got, other in zip([x.grad, *(found[p] for p in params)], expected, strict=True):
        assert torch.equal(got, other)


def test_rare_passes_inside_of_a_checkpoint(small, monkeypatch):
    """A checkpoint lets what a pass saved be unpacked once."""
    layer, x, dy = layer_of("pre-norm"), *inputs()
    expected, some = expected_and(layer, x, dy, monkeypatch), [1, 5, 7]
    leaves = [x, *layer.parameters()]
    wanted = [leaves[i] for i in some]
    checkpoint(layer, x, use_reentrant=False).backward(dy, inputs=wanted)
    found = [p.grad for p in wanted]
    y = checkpoint(layer, x, use_reentrant=False)
    found += torch.autograd.grad(y, wanted, dy, create_graph=True)
    for got, i in zip(found, [*some, *some], strict=True):
        torch.testing.assert_close(got.detach(), expected[i])  # ATen's norms: in another order


def test_a_pass_that_fails_after_a_delivery(small, monkeypatch):
    """The layer's own forward gives the gradients that were not delivered yet, each once."""
    monkeypatch.setenv("FUSED_REMAT_STRICT", "0")
    layer, x, dy = layer_of("pre-norm"), *inputs()
    expected = expected_and(layer, x, dy, monkeypatch)
    stages = executor.stages

    def fails(*args, **kwargs):
        yield next(stages(*args, **kwargs))
        raise KeyError("up")

    monkeypatch.setattr(executor, "stages", fails)
    y = layer(x)
    with pytest.warns(FusedRematWarning, match="its block raised KeyError: 'up'"):
        y.backward(dy)
    for p, other in zip((x, *layer.parameters()), expected, strict=True):
        torch.testing.assert_close(p.grad, other, rtol=1e-4, atol=1e-5)  # of another program


@pytest.mark.parametrize("around_forward", [True, False])
def test_compiled_autograd(around_forward, small):
    """It frees the saved tensors of all nodes first, so a call under it delivers nothing."""
    layer, (x, dy) = layer_of("pre-norm"), inputs()
    leaves = x, *layer.parameters()
    expected, y = torch.autograd.grad(layer(x), leaves, dy), layer(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        if around_forward:
            layer(x).backward(dy)
            assert all(torch.equal(t.grad, g) for t, g in zip(leaves, expected, strict=True))
        else:
            with pytest.raises(RuntimeError, match="enable it around forward too"):
                y.backward(dy)


@pytest.mark.parametrize("transposed", [False, True])
def test_weights_are_freed_before_the_next_ones(transposed):
    """A layer of 12 D² holds the gradients of the largest product alone, 4 D².

    GPT-2 stores the transposes of its weights.
    """
    D, tokens = 512, 16
    torch.manual_seed(0)
    layer = FusedRematLayer(D, 8, 4 * D, 0.0, batch_first=True, norm_first=True)
    x = torch.randn(1, tokens, D, requires_grad=True)
    matrices = {n: p.detach().t().clone() for n, p in layer.named_parameters() if p.dim() == 2}
    leaves = {n: t.requires_grad_() for n, t in matrices.items() if transposed}

    def backward():
        weights = {n: t.t() for n, t in leaves.items()}
        functional_call(layer, weights, (x,)).sum().backward()

    backward()  # allocates .grad
    unit = D * D * 4
    assert measure_allocations(backward).peak < 6 * unit  # 12 together


def test_a_replay_gives_each_weight_as_it_is_made():
    """Experts: the gradient of the last product is freed before that of the first is made."""
    D, FF = 512, 2048
    stages = ("down",), ("up",)
    replay = Replay(
        name="output", xs=("input",), tensors=("up", "down"), function="f", what="f", columns=D,
        needed_for=(("input", "up", "down"),), stages=stages,
    )  # fmt: skip
    graph = Graph("experts", (replay,), ("up", "down"))
    torch.manual_seed(0)
    x = torch.randn(1, 4, D, requires_grad=True)
    weights = {"up": torch.randn(D, FF) / 20, "down": torch.randn(FF, D) / 20}
    leaves = [x, *(w.requires_grad_() for w in weights.values())]

    def experts(at, xs, ws):
        return torch.relu(xs[0] @ ws[0]) @ ws[1]

    def backward():
        y = run_block(graph, "full", {"input": x, **weights}, functions={"f": experts})
        assert len(nodes_of(y)) == 2
        y.backward(dy)

    dy = torch.randn(1, 4, D)
    expected = torch.autograd.grad(experts(None, [x], [*weights.values()]), leaves, dy)
    backward()
    for t, other in zip(leaves, expected, strict=True):
        torch.testing.assert_close(t.grad, other)
    assert measure_allocations(backward).peak < 1.2 * D * FF * 4
    y = run_block(graph, "full", {"input": x, **weights}, functions={"f": experts})
    for i in (1, 2):  # one of them alone
        (got,) = torch.autograd.grad(y, leaves[i], dy, retain_graph=True)
        torch.testing.assert_close(got, expected[i])

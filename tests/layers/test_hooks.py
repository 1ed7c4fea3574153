"""Hooks on submodules: they act as on the stock layer, under torch.utils.checkpoint.

A hook sends a layer to PyTorch's own forward. Where gradients are wanted that runs under
`torch.utils.checkpoint`, whose contract is pinned here: backward calls the submodules again, so
their forward hooks fire again, and buffers are updated again. The policy "none" avoids it. Hooks
that change results are rows of `changes.py`.
"""

import pytest
import torch
from reference import X, make, run
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")

CALLED = ("self_attn", "dropout1", "norm1", "linear1", "dropout", "linear2", "dropout2", "norm2")


def step(layer, x=X, **kwargs):
    """`run`, with a loss that is not linear in the output, from the same random numbers."""
    torch.manual_seed(0)
    with torch.no_grad():
        dy = torch.randn(layer(x, **kwargs).shape, dtype=x.dtype)
    torch.manual_seed(1)
    return run(layer, x, dy, **kwargs)


def assert_same(got, expected):
    torch.testing.assert_close(got, expected)


def assert_same_steps(stock, fused, x=X, **kwargs):
    assert_same(step(fused, x, **kwargs), step(stock, x, **kwargs))


def recorder(fired, seen, name):
    def hook(module, grad_input, grad_output):
        fired.append((name, "backward"))
        seen[name] = (*grad_input, *grad_output)

    return hook


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_forward_hooks_fire_again_in_backward_unless_the_policy_is_none(policy, norm_first):
    stock, fused = make(policy, 0.3, norm_first)
    fired, grads = {}, {}
    for layer in (stock, fused):
        names = fired[layer] = []
        seen = grads[layer] = {}
        for name in (*CALLED, "self_attn.out_proj"):
            module = layer.get_submodule(name)
            keys = [(name, kind) for kind in ("pre", "forward", "backward pre")]
            module.register_forward_pre_hook(lambda m, a, n=names, k=keys[0]: n.append(k))
            module.register_forward_hook(lambda m, a, out, n=names, k=keys[1]: n.append(k))
            module.register_full_backward_pre_hook(lambda m, g, n=names, k=keys[2]: n.append(k))
            module.register_full_backward_hook(recorder(names, seen, name))
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        checkpointed = layer is stock and policy == "full"
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        y.square().sum().backward()
    assert fired[fused] == fired[stock]  # in order, and as often as under PyTorch's checkpoint
    assert len(set(fired[fused])) == 4 * len(CALLED)
    again = [key for key in set(fired[fused]) if fired[fused].count(key) == 2]
    assert {kind for _, kind in again} == (set() if policy == "none" else {"pre", "forward"})
    for name, expected in grads[stock].items():
        for a, b in zip(grads[fused][name], expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert_same([p.grad for p in fused.parameters()], [p.grad for p in stock.parameters()])


def counted(layer):
    def hook(module, args, y):
        module.calls.add_(1)
        module.last = y.detach()

    layer.norm1.register_buffer("calls", torch.zeros(()))
    layer.norm1.register_forward_hook(hook)


def test_buffers_and_attributes_are_set_again_in_backward():
    _, fused = make()
    counted(fused)
    y = fused(X).sum()
    first = fused.norm1.last
    y.backward()
    assert fused.norm1.calls == 2 and fused.norm1.last is not first
    _, fused = make("none")
    counted(fused)
    fused(X).sum().backward()
    assert fused.norm1.calls == 1


def test_what_hooks_see():
    _, fused = make()
    seen = {}
    for name in CALLED:
        fused.get_submodule(name).register_forward_hook(
            lambda m, args, out, name=name: seen.update({name: (args, out)})
        )
    y = fused(X)
    args, out = seen["self_attn"]
    assert len(args) == 3 and isinstance(out, tuple) and len(out) == 2 and out[1] is None
    assert torch.equal(seen["linear2"][1], seen["dropout2"][0][0])
    mid = X + seen["dropout1"][1]
    assert torch.equal(y, mid + seen["dropout2"][1])


def test_a_hook_that_draws_random_numbers_leaves_dropout_the_same():
    stock, fused = make(dropout=0.4)
    for layer in (stock, fused):
        layer.linear1.register_forward_pre_hook(lambda m, args: print(torch.rand(3)))
    assert_same_steps(stock, fused)


def test_hooks_that_switch_gradients_off_and_on():
    stock, fused = make()
    for layer in (stock, fused):
        layer.linear1.register_forward_pre_hook(lambda m, args: set_grad(False))
        layer.linear1.register_forward_hook(lambda m, args, y: set_grad(True))
        x = X.clone().requires_grad_()
        layer(x).square().sum().backward()
        assert layer.linear1.weight.grad is None
    assert_same([fused.linear2.weight.grad], [stock.linear2.weight.grad])


def set_grad(mode):
    torch.set_grad_enabled(mode)


def test_hooks_on_the_layer_itself_keep_the_fused_path(recwarn):
    stock, fused = make()
    fired = []
    for layer in (stock, fused):
        layer.register_forward_hook(lambda m, a, y: (fired.append("forward"), y * 2)[1])
        layer.register_full_backward_hook(lambda m, g_in, g_out: fired.append("backward"))
        x = X.clone().requires_grad_()
        layer(x).sum().backward()
    assert fired == ["forward", "backward"] * 2 and not recwarn
    assert_same([p.grad for p in fused.parameters()], [p.grad for p in stock.parameters()])

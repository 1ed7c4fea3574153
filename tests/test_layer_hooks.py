"""Hooks on submodules (item 31): as often, and to the same effect, as on the stock layer."""

import copy
import gc
import weakref

import pytest
import torch
from reference import X, make, run
from torch import nn
from torch.nn.utils import prune

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
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def assert_same_steps(stock, fused, x=X, **kwargs):
    assert_same(step(fused, x, **kwargs), step(stock, x, **kwargs))


def recorder(fired, seen, name):
    def hook(module, grad_input, grad_output):
        fired.append((name, "backward"))
        seen[name] = (*grad_input, *grad_output)

    return hook


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("norm_first", [True, False])
def test_every_hook_fires_once(policy, dropout, norm_first):
    stock, fused = make(policy, dropout, norm_first)
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
        layer(X.clone().requires_grad_()).square().sum().backward()
    assert fired[fused] == fired[stock]  # also in order
    assert len(set(fired[fused])) == len(fired[fused]) == 4 * len(CALLED)
    for name, expected in grads[stock].items():
        for a, b in zip(grads[fused][name], expected, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert_same([p.grad for p in fused.parameters()], [p.grad for p in stock.parameters()])


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


def replaced_output(layer):
    layer.linear1.register_forward_hook(lambda m, args, y: y * y)


def replaced_attention(layer):
    layer.self_attn.register_forward_hook(lambda m, args, y: (y[0].sin(), y[1]))


def replaced_input(layer):
    layer.linear1.register_forward_pre_hook(lambda m, args: args[0].exp())


def output_in_place(layer):
    def hook(module, args, y):
        y.mul_(0.5).add_(0.3)

    layer.linear1.register_forward_hook(hook)


def input_in_place(layer):
    def hook(module, args):
        args[0].mul_(0.5).add_(0.3)

    layer.linear2.register_forward_pre_hook(hook)


def need_weights(layer):
    def hook(module, args, kwargs):
        return args, {**kwargs, "need_weights": True}

    layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def kwargs_in_place(layer):
    def hook(module, args, kwargs):
        kwargs["need_weights"] = True  # other kernels, which keep other tensors

    layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def attribute(layer):
    def hook(module, args):
        layer.dropout2.scale = args[0].mean()

    layer.linear1.register_forward_pre_hook(hook)
    layer.dropout2.register_forward_hook(lambda m, args, y: y * m.scale)


def activation_in_an_attribute(layer):
    """A hook hands a tensor to the module's forward."""

    def hook(module, args):
        module.scale = args[0].mean()

    linear = layer.linear1
    linear.register_forward_pre_hook(hook)
    linear.forward = lambda x: nn.Linear.forward(linear, x) * linear.scale


def handed_on(layer):
    stash = {}

    def keep(module, args, y):
        stash["h"] = y

    layer.norm1.register_forward_hook(keep)
    layer.dropout2.register_forward_hook(lambda m, args, y: y * stash["h"])


#: Hooks that change the function; the later ones return None.
EFFECTS = (
    replaced_output, replaced_attention, replaced_input, need_weights,
    output_in_place, input_in_place, kwargs_in_place, attribute,
    activation_in_an_attribute, handed_on,
)  # fmt: skip


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("policy", ["full", "none"])
def test_what_hooks_change_is_honoured(effect, policy):
    stock, fused = make(policy, dropout=0.2)
    plain = step(copy.deepcopy(stock))[0]
    for layer in (stock, fused):
        effect(layer)
    assert_same_steps(stock, fused)
    if effect not in (need_weights, kwargs_in_place):
        assert not torch.allclose(step(fused)[0], plain)  # the hook does something


@pytest.mark.parametrize("effect", EFFECTS)
def test_a_second_application_does_not_mix_with_the_first(effect):
    """The first one's backward comes last, when hooks have seen the second."""
    grads = []
    for layer in make(dropout=0.2):
        effect(layer)
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        y = layer(layer(x)).square().sum()
        grads.append(torch.autograd.grad(y, [x, *layer.parameters()]))
    assert_same(*grads)


def once(module):
    def hook(module, args, y):
        handle.remove()
        return y.sin()

    handle = module.register_forward_hook(hook)


def test_a_hook_that_removes_itself_counts_in_backward():
    grads = []
    for layer in make():
        once(layer.linear1)
        x = X.clone().requires_grad_()
        y = layer(x).square().sum()
        assert not layer.linear1._forward_hooks
        grads.append(torch.autograd.grad(y, [x, *layer.parameters()]))
    assert_same(grads[1], grads[0])


def test_hooks_removed_or_added_before_backward():
    """Those of the forward count: gradients are of the function that was computed."""
    stock, fused = make()
    grads = []
    for layer in (stock, fused):
        handles = [
            layer.linear1.register_forward_hook(lambda m, a, y: y.sin()),
            layer.linear1.register_forward_hook(lambda m, a, k, y: y * 2, with_kwargs=True),
        ]
        x = X.clone().requires_grad_()
        y = layer(x).square().sum()
        for handle in handles:
            handle.remove()
        added = layer.linear1.register_forward_hook(lambda m, a, y: y * 7.0)
        grads.append(torch.autograd.grad(y, [x, *layer.parameters()]))
        assert list(layer.linear1._forward_hooks) == [added.id]
    assert_same(grads[1], grads[0])


def test_which_hooks_fire_again():
    """What acted, and what came before it; nothing after."""
    _, fused = make()
    fired = []

    def note(name, result=None):
        return lambda m, args, *out: (fired.append(name), result and out[0] * result)[1]

    fused.linear1.register_forward_hook(note("linear1"))
    fused.dropout.register_forward_hook(note("dropout", 2.0))
    fused.linear2.register_forward_hook(note("linear2"))
    fused.norm2.register_forward_pre_hook(note("norm2"))
    y = fused(X)
    assert fired == ["norm2", "linear1", "dropout", "linear2"]
    y.sum().backward()
    assert fired[4:] == ["norm2", "linear1", "dropout"]


def test_pytorchs_own_hooks_make_no_others_fire_again():
    _, fused = make()
    fired = []
    fused.linear1.register_forward_hook(lambda m, args, y: fired.append("linear1"))
    prune.l1_unstructured(fused.linear2, "weight", 0.5)  # a pre-hook that sets an attribute
    fused(X).sum().backward()
    assert fired == ["linear1"]


@pytest.mark.filterwarnings("error:module forward hook")
def test_hooks_to_call_on_errors_are_not_called_when_the_replay_stops():
    """Checkpoint ends a replay by raising, here in linear2, whose hook would see no output."""
    stock, fused = make()
    for layer in (stock, fused):
        layer.linear2.register_forward_hook(lambda m, args, y: y * 2.0, always_call=True)
    assert_same_steps(stock, fused)


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


def test_a_hook_that_raises_leaves_the_hooks_in_place():
    _, fused = make()

    def boom(module, args):
        raise ValueError("boom")

    fused.norm2.register_forward_hook(look := lambda m, a, y: None)
    handle = fused.linear2.register_forward_pre_hook(boom)
    with pytest.raises(ValueError, match="boom"):
        fused(X)
    assert list(fused.norm2._forward_hooks.values()) == [look]
    assert list(fused.linear2._forward_pre_hooks.values()) == [boom]
    handle.remove()
    fused.linear2.register_full_backward_hook(boom)
    with pytest.raises(TypeError):
        fused(X).sum().backward()
    assert list(fused.norm2._forward_hooks.values()) == [look]


def test_hooks_leave_nothing_behind():
    _, fused = make()
    seen = []
    fused.linear1.register_forward_hook(lambda m, a, y: seen.append(weakref.ref(y)))
    fused.dropout.register_forward_hook(lambda m, a, y: y * 2)
    y = fused(X).sum()
    y.backward()
    del y
    gc.collect()
    assert seen and not any(ref() is not None for ref in seen)


def test_retain_graph_with_hooks():
    _, fused = make(dropout=0.3)
    fired = []
    fused.linear1.register_forward_hook(lambda m, a, y: fired.append(1))
    y = fused(X).sum()
    leaves = list(fused.parameters())
    first = torch.autograd.grad(y, leaves, retain_graph=True)
    assert_same(torch.autograd.grad(y, leaves), first)
    assert fired == [1]


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

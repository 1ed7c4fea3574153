"""Hooks on submodules: they act as on the stock layer, under torch.utils.checkpoint.

There backward calls submodules again, so that forward hooks fire again, but with policy "none".
Hooks that change results are entries of `changes.py`.
"""

import functools

import pytest
import torch
from accuracy import assert_bits, assert_close
from reference import X, make, run
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")

CALLED = ("self_attn", "dropout1", "norm1", "linear1", "dropout", "linear2", "dropout2", "norm2")


def record(layer):
    """All that hooks of all kinds on all submodules see: in order, and the gradients by name."""
    fired, seen = [], {}

    def hook(name, kind, module, *given):
        fired.append((name, kind))
        if kind == "backward":
            seen[name] = (*given[0], *given[1])

    for name in (*CALLED, "self_attn.out_proj"):
        module = layer.get_submodule(name)
        for kind, register in {
            "pre": module.register_forward_pre_hook,
            "forward": module.register_forward_hook,
            "backward pre": module.register_full_backward_pre_hook,
            "backward": module.register_full_backward_hook,
        }.items():
            register(functools.partial(hook, name, kind))
    return fired, seen


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_forward_hooks_fire_again_in_backward_unless_the_policy_is_none(policy, norm_first):
    stock, fused = make(policy, 0.3, norm_first)
    recorded, grads = [], []
    for layer in (stock, fused):
        recorded.append(record(layer))
        if layer is stock and policy == "full":
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        torch.manual_seed(0)
        grads.append(run(layer, X, X))
    (expected, seen_by_stock), (fired, seen) = recorded
    assert fired == expected  # in order, and as often as under PyTorch's checkpoint
    assert len(set(fired)) == 4 * len(CALLED)
    again = {kind for name, kind in fired if fired.count((name, kind)) == 2}
    assert again == (set() if policy == "none" else {"pre", "forward"})
    for name, gradients in seen_by_stock.items():
        for a, b in zip(seen[name], gradients, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert_bits(*grads)


@pytest.mark.parametrize("policy", ["full", "none"])
def test_a_forward_that_updates_a_buffer_is_not_repeated_and_others_are(policy):
    def hook(module, args, y):
        if counts:
            module.calls.add_(1)
        module.last = y.detach()

    for counts in (True, False):
        _, fused = make(policy)
        fused.norm1.register_buffer("calls", torch.zeros(()))
        fused.norm1.register_forward_hook(hook)
        for step in (1, 2):
            y = fused(X).sum()
            first = fused.norm1.last
            y.backward()
            assert fused.norm1.calls == step * counts
            assert (fused.norm1.last is first) == (counts or policy == "none")


@pytest.mark.usefixtures("served")
def test_hooks_on_the_layer_itself_keep_the_fused_path():
    fired, found = [], []
    for layer in make():
        layer.register_forward_hook(lambda m, a, y: (fired.append("forward"), y * 2)[1])
        layer.register_full_backward_hook(lambda m, g_in, g_out: fired.append("backward"))
        found.append(run(layer, X))
    assert fired == ["forward", "backward"] * 2
    assert_close(*found)

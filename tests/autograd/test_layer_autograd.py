"""Gradients of the layer: items 24 to 28 of the drop-in contract.

What else they say is tested of every operation, in tests/ops/test_every_op.py.
"""

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from reference import X, make
from torch.testing import assert_close


def test_post_accumulate_hooks_fire_once_each():
    _, fused = make()
    fired = []
    for name, p in fused.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    fused(X).sum().backward()
    assert sorted(fired) == sorted(n for n, _ in fused.named_parameters())


def test_forward_mode_raises():
    _, fused = make()
    with fwAD.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        fused(fwAD.make_dual(X, torch.ones_like(X)))


@pytest.mark.parametrize("x", [X, X[:, 0]], ids=["batch", "unbatched"])
def test_the_output_may_be_changed_in_place_by_the_caller(x):
    grads = []
    for layer in make():
        leaf = x.clone().requires_grad_()
        y = layer(leaf).mul_(2.0).relu_()
        grads.append(torch.autograd.grad(y.sum(), [leaf, *layer.parameters()]))
    assert_close(*grads)

"""Gradients of the layer: items 24 to 28 of the drop-in contract.

What else they say is tested of every operation, in tests/ops/test_every_op.py.
"""

import gc

import pytest
import torch
import torch.autograd.forward_ad as fwAD
from reference import X, make
from torch.testing import assert_close

from fused_remat import FusedRematLayer
from fused_remat.report.allocations import measure_allocations


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

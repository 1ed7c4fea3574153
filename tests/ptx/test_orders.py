"""Kernels of ours give the same bits in whatever order warps and blocks run."""

import pytest
import torch

from fused_remat import FusedRematCausalLayer
from fused_remat.execution import choose

from .driver import installed


def step(order, arch):
    """A training step of a small block: products, norms, rotary, attention."""
    torch.manual_seed(0)
    layer = FusedRematCausalLayer(
        64, 2, 96, kv_heads=1, softcap=5.0, policy="full", backend="triton", dtype=torch.bfloat16
    )
    x = torch.randn(1, 40, 64, dtype=torch.bfloat16, requires_grad=True)
    angle = torch.randn(40, 16)
    with installed(arch, order=order) as driver:
        choose.forget()
        y = layer(x, rope=(angle.cos(), angle.sin()))
        y.float().square().sum().backward()
    choose.forget()
    return driver, [y, x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("arch", [80, 90])
def test_orders(arch):
    (driver, expected), *others = [step(order, arch) for order in (0, 1, -1)]
    assert len({launch.kernel for launch in driver.launches}) > 8
    for _, found in others:
        assert all(map(torch.equal, found, expected))

"""Programs that launch kernels: the bits of the steps, and only where the launches are the same."""

import pytest
import torch
import triton
from places import DEVICE, EXECUTED, INTERPRETED, ON_GPU
from ptx.driver import installed
from torch import nn

from fused_remat import FusedRematCausalLayer, FusedRematLayer, explain
from fused_remat.execution import program

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
    pytest.mark.usefixtures("launches"),
]
BATCH, SEQ, WIDTH = 1, 16, 32


@pytest.fixture(autouse=True)
def after_one(monkeypatch):
    monkeypatch.setattr(program, "FEW", 1)


def encoder(dropout=0.1, **options):
    layer = nn.TransformerEncoderLayer(
        WIDTH, 2, 64, dropout, "gelu", batch_first=True, norm_first=True
    )
    return FusedRematLayer.from_layer(layer, backend="triton", **options).to(DEVICE)


def llama(**options):
    layer = FusedRematCausalLayer(WIDTH, 2, 48, kv_heads=1, backend="triton", **options)
    return layer.to(DEVICE)


def batch(dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(BATCH, SEQ, WIDTH, device=DEVICE, dtype=dtype)


def step(layer, x):
    torch.manual_seed(3)  # of dropout
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))]


def programs(layer, x):
    found = layer(x.detach().requires_grad_()).grad_fn.execution.programs
    assert not found.reason
    return [run for run in found.passes.values() if not isinstance(run, int)]


def check(layer, x):
    """Run the steps, a recorded pass, a compared program, and one that is not compared."""
    expected = step(layer, x)
    for _ in range(4):
        for a, b in zip(step(layer, x), expected, strict=True):
            assert a.equal(b)
            assert a.stride() == b.stride()
    return programs(layer, x)


@pytest.mark.executed
@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("make", [encoder, llama])
def test_equal_bits(make, policy, described):
    layer, x = make(policy=policy).to(torch.bfloat16), batch(torch.bfloat16)
    found = check(layer, x)
    assert len(found) == 2 and all(run.calls is None for run in found)
    assert all(run.launches for run in found)
    assert "norm_fwd(stream, " in found[0].source.text
    if not ON_GPU and make is encoder:
        described.clear()
        (block,) = explain(layer, x.requires_grad_(), code=True)
        assert block.code == "\n".join([run.source.text for run in found])


def test_hooks_on_launches_see_every_kernel(described):
    layer, x = encoder(), batch()
    check(layer, x)
    described.clear()
    step(layer, x)
    assert not described
    seen, chain = [], triton.knobs.runtime.launch_enter_hook
    chain.add(seen.append)
    try:
        expected = step(layer, x)
    finally:
        chain.remove(seen.append)
    assert "norm_fwd_kernel" in described
    described.clear()
    assert all(a.equal(b) for a, b in zip(step(layer, x), expected, strict=True))
    assert not described
    (first, *_) = programs(layer, x)
    first.hooks[0].append(lambda *args, **kwargs: seen.append(args))
    try:
        step(layer, x)
    finally:
        first.hooks[0].clear()
    assert described


def test_each_alignment_has_its_own_programs():
    layer, x = encoder(0.0), batch()
    assert len(check(layer, x)) == 2
    off = torch.empty(x.numel() + 1, device=DEVICE)[1:].view(x.shape).copy_(x)
    assert len(check(layer, off)) == 4
    assert len(check(layer, x)) == 4


@pytest.mark.skipif(ON_GPU or EXECUTED > 0, reason="installs drivers")
def test_each_driver_has_its_own_programs():
    layer, x = encoder(0.0), batch()
    assert len(check(layer, x)) == 2
    with installed(90):
        assert len(check(layer, x)) == 4
    assert len(check(layer, x)) == 4

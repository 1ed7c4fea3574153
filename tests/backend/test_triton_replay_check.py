"""The replay check on the triton backend: the routines of deterministic mode, and no difference."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, ReplayError, check_replay
from fused_remat.autograd import replay_check


@pytest.mark.composes("Replay check", "the triton backend, by the routines of deterministic mode")
@pytest.mark.parametrize("policy", ["full", "none"])
def test_gradients_are_those_of_deterministic_mode(policy):
    layer = FusedRematLayer(32, 2, 32, 0.2, policy=policy, backend="triton", norm_first=True)
    x = torch.randn(9, 1, 32, requires_grad=True)

    def gradients():
        torch.manual_seed(0)
        y = layer(x)
        assert y.grad_fn.execution.ops.name == "triton"
        return torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])

    with check_replay():
        got = gradients()
        y = layer(x)
    torch.use_deterministic_algorithms(True)
    try:
        expected = gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    layer.norm2.weight.data[4] = 2.0
    with pytest.raises(ReplayError, match=r"'norm2.weight' differs at \(index 4\): .* read 1, "):
        y.sum().backward()


@pytest.mark.parametrize("norm_first", [True, False])
def test_backward_outside_of_it_and_of_a_checkpoint(norm_first):
    """The checkpoint's replay takes the routines that the first forward took."""
    layer = FusedRematLayer(128, 2, 256, 0.2, backend="triton", norm_first=norm_first)
    x = torch.randn(5, 2, 128, requires_grad=True)
    with check_replay():
        y = checkpoint(layer, x, use_reentrant=False)
    y.square().sum().backward()
    assert not replay_check.RECORDED

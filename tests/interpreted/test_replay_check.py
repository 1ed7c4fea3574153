"""The replay check on the triton backend: the routines of deterministic mode, and no difference."""

import pytest
import torch

from fused_remat import FusedRematLayer, ReplayError, check_replay


@pytest.mark.composes("Replay check", "the triton backend, by the routines of deterministic mode")
@pytest.mark.parametrize("policy", ["full", "none"])
def test_gradients_are_those_of_deterministic_mode(policy):
    layer = FusedRematLayer(32, 2, 32, 0.2, policy=policy, backend="triton", norm_first=True)
    x = torch.randn(9, 1, 32, requires_grad=True)

    def gradients():
        torch.manual_seed(0)
        y = layer(x)
        assert y.grad_fn.prepared.backend.name == "triton"
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

"""FSDP2 and accumulation on a GPU, in a process group of one."""

import warnings

import pytest
import torch
import torch.distributed as dist
from places import BF16, DEVICE, ON_GPU, normal, sized
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fused_remat import FusedRematLayer, FusedRematWarning

pytestmark = pytest.mark.gpu
B, S, D, H = sized(4, 512, 1024, 8) if ON_GPU else (2, 9, 24, 3)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo",
        init_method=f"file://{tmp_path / 'rendezvous'}",
        rank=0,
        world_size=1,
        device_id=DEVICE if ON_GPU else None,
    )
    yield
    dist.destroy_process_group()


def layers(cls, count=2, dtype=torch.float32):
    torch.manual_seed(0)
    made = (cls(D, H, 4 * D, 0.0, batch_first=True, norm_first=True) for _ in range(count))
    return nn.Sequential(*made).to(DEVICE, dtype)


def gradients(model, x):
    model(x).float().square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


@pytest.mark.gpu
@pytest.mark.composes("FSDP2", "per layer on a GPU, MixedPrecisionPolicy in 16 bits, NCCL")
def test_fsdp2_per_layer(group):
    x = normal(torch.float32, B, S, D)
    exact = gradients(layers(nn.TransformerEncoderLayer).double(), x.double())
    errors = []
    for cls in (nn.TransformerEncoderLayer, FusedRematLayer):
        model = layers(cls)
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FusedRematWarning)
            grads = gradients(model, x)
        pairs = zip(grads, exact, strict=True)
        errors.append([float((g - e).norm() / e.norm()) for g, e in pairs])
    for stock, fused in zip(*errors, strict=True):
        assert fused <= 1.5 * stock + 1e-3, errors  # the rule and floor of the layer's tests


@pytest.mark.parametrize("backend", ["triton", "eager"])
def test_16_bit_gradients_go_in_unrounded(backend):
    layer = layers(FusedRematLayer, 1, BF16)[0]
    layer.backend = backend
    xs = [normal(BF16, B, S, D) for _ in range(3)]
    layer.accumulate_into = "main_grad"

    def total(batches):
        for p in layer.parameters():
            p.main_grad = torch.zeros_like(p, dtype=torch.float32)
        for x in batches:
            layer(x).float().square().mean().backward()
        return [p.main_grad.double() for p in layer.parameters()]

    found, each = total(xs), [total([x]) for x in xs]
    for name, whole, *parts in zip(dict(layer.named_parameters()), found, *each, strict=True):
        expected = sum(parts)
        assert not torch.equal(parts[0], parts[0].to(BF16).double()), name
        # Sums in float32, in another order; attention's own backward may use atomics.
        assert (whole - expected).norm() <= 1e-4 * expected.norm(), name

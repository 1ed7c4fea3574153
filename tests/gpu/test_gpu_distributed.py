"""FSDP2 and tensor parallel on a GPU, in a process group of one: NCCL and our kernels."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from gpu_layers import B, D, H, S, data
from places import BF16, DEVICE, ON_GPU, error_of, normal
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fused_remat import FusedRematCausalLayer, FusedRematLayer, FusedRematWarning
from fused_remat.parallel import pack_attention, tensor_parallel_plan

pytestmark = pytest.mark.gpu
ENCODER = {"dropout": 0.0, "batch_first": True, "norm_first": True}


@pytest.fixture(autouse=True)
def mesh(tmp_path):
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo",
        init_method=f"file://{tmp_path / 'rendezvous'}",
        rank=0,
        world_size=1,
        device_id=DEVICE if ON_GPU else None,
    )
    yield init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


def layers(cls, dtype=torch.float32, **options):
    torch.manual_seed(0)
    return nn.Sequential(*(cls(D, H, 4 * D, **options) for _ in "12")).to(DEVICE, dtype)


def step(model, x):
    """Output, and gradients by name, of the input too."""
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().mean().backward()
    named = {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}
    gathered = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in named.items()}
    return y.detach(), gathered


@pytest.mark.composes("FSDP2", "per layer on a GPU, MixedPrecisionPolicy in 16 bits, NCCL")
def test_fsdp2_per_layer():
    x, errors = normal(torch.float32, B, S, D), []
    _, exact = step(layers(nn.TransformerEncoderLayer, **ENCODER).double(), x.double())
    for cls in (nn.TransformerEncoderLayer, FusedRematLayer):
        model = layers(cls, **ENCODER)
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        for part in (*model, model):
            fully_shard(part, mp_policy=policy)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FusedRematWarning)
            _, grads = step(model, x)
        errors.append([error_of(grads[name], true) for name, true in exact.items()])
    for stock, fused in zip(*errors, strict=True):
        assert fused <= 1.5 * stock + 1e-3, errors  # the rule and floor of the layer's tests


@pytest.mark.composes("Tensor parallel", "on a GPU, NCCL, a group of one")
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "cls, options", [(FusedRematCausalLayer, {"policy": "lean"}), (FusedRematLayer, ENCODER)],
    ids=["causal", "encoder"],
)  # fmt: skip
def test_tensor_parallel(mesh, cls, options, sequence):
    model, x = layers(cls, BF16, **options), data()
    other = copy.deepcopy(model)
    parallelize_module(other, mesh, tensor_parallel_plan(other, sequence=sequence))
    (y, expected), (same, found) = step(model, x), step(other, x)
    # A bias and a residual are added after the sum over ranks, which is rounded again.
    assert error_of(same, y) < 2e-2
    expected, found = pack_attention(expected), pack_attention(found)
    for name, grad in expected.items():
        assert error_of(found[name], grad) < (2e-2 if name == "x" else 5e-2), name

"""Divided layers on a GPU, in a group of one: NCCL's collectives, the fused path's kernels."""

import copy

import pytest
import torch
import torch.distributed as dist
from places import BF16, DEVICE, ON_GPU, normal, sized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from fused_remat import FusedRematCausalLayer, FusedRematLayer, ops
from fused_remat.parallel import VocabularyParallel, pack_attention, tensor_parallel_plan

pytestmark = pytest.mark.gpu
B, S, D, H = sized(2, 1024, 1024, 8) if ON_GPU else (2, 8, 24, 3)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo",
        init_method=f"file://{tmp_path / 'rendezvous'}",
        rank=0,
        world_size=1,
        device_id=DEVICE if ON_GPU else None,
    )
    kind = "cuda" if ON_GPU else "cpu"
    yield init_device_mesh(kind, (1,), mesh_dim_names=("tensor",))
    dist.destroy_process_group()


def layers(kind):
    torch.manual_seed(0)
    if kind == "causal":
        made = [FusedRematCausalLayer(D, H, 4 * D, policy="lean") for _ in range(2)]
    else:
        made = [FusedRematLayer(D, H, 4 * D, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(*made).to(DEVICE, BF16)


def step(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    torch.manual_seed(1)
    y.backward(torch.randn_like(y))
    named = ((name, p.grad) for name, p in model.named_parameters())
    grads = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in named}
    return y.detach(), x.grad, pack_attention(grads)


@pytest.mark.composes("Tensor parallel", "on a GPU, NCCL, a group of one")
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["causal", "encoder"])
def test_as_undivided(mesh, kind, sequence):
    model, x = layers(kind), normal(BF16, B, S, D)
    other = copy.deepcopy(model)
    parallelize_module(other, mesh, tensor_parallel_plan(other, sequence=sequence))
    expected, found = step(model, x), step(other, x)
    # A bias and a residual are added after the sum over ranks, which is rounded once more.
    for a, b in [(expected[i], found[i]) for i in (0, 1)]:
        assert (a - b).float().norm() < 2e-2 * a.float().norm()
    for name, grad in expected[2].items():
        assert (grad - found[2][name]).float().norm() < 5e-2 * grad.float().norm(), name


def test_vocabulary(mesh):
    head = nn.Linear(D, 4096, bias=False, device=DEVICE, dtype=BF16)
    other = parallelize_module(copy.deepcopy(head), mesh, VocabularyParallel())
    x = normal(BF16, B, S, D)
    labels = torch.randint(0, 4096, (B, S), device=DEVICE)
    losses = [ops.linear_cross_entropy(x, m.weight, labels) for m in (head, other)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-4)

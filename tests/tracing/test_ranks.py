"""Layers that are read, under DDP and FSDP2: as one process on the whole batch."""

import copy

import models
import pytest
import torch
import torch.distributed as dist
from hf_models import all_served
from processes import in_two_processes
from tensor_parallel_steps import whole
from test_sweep import FLOAT32, WIDE, built
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

from fused_remat import convert
from fused_remat.layers.fused_layer import FusedLayer


def step(model, batch, scale=1.0):
    model.zero_grad(set_to_none=True)
    output = models.main_output(model(**batch))
    loss = (output.square().sum() + output.sum()) * scale
    loss.backward()
    named = [(n.removeprefix("module."), p.grad) for n, p in model.named_parameters()]
    return loss.detach(), {n: whole(grad) for n, grad in named if grad is not None}


def mine(batch):
    rank = dist.get_rank()
    return {k: v[rank : rank + 1] if isinstance(v, Tensor) else v for k, v in batch.items()}


@pytest.mark.parametrize("keeps", [False, True], ids=["flat", "original"])
@in_two_processes
def test_fsdp1_around_the_root(keeps):
    """The attributes of all modules are plain tensors, views of one."""
    model, batch = built("olmo2")
    loss, expected = step(model, batch)
    fused, device = convert(copy.deepcopy(model)), torch.device("cpu")
    wrapped = FSDP(fused, use_orig_params=keeps, device_id=device)
    with all_served():
        found, grads = step(wrapped, mine(batch), dist.get_world_size())
    square = sum(g.square().sum() for g in grads.values())
    for total in (found, square):
        dist.all_reduce(total)
    torch.testing.assert_close(found / 2, loss, rtol=20 * WIDE, atol=0)
    squares = sum(g.square().sum() for g in expected.values())
    torch.testing.assert_close(square, squares, rtol=20 * WIDE, atol=0)


def per_layer(model):
    for layer in [m for m in model.modules() if isinstance(m, FusedLayer)]:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.composes("DDP", "layers that are read: experts and a scan as pieces, a modulation")
@pytest.mark.composes("FSDP2", "layers that are read, fully_shard per layer")
@pytest.mark.parametrize("wrap", [DDP, per_layer])
@pytest.mark.parametrize("name", ["olmo2", "mixtral", "jamba", "t5", "dit"])
@in_two_processes
def test_as_one_process(name, wrap):
    """The first call of a wrapped model reads; the second knows."""
    model, batch = built(name)
    loss, expected = step(model, batch)
    slack = 20 * (3e-5 if name in FLOAT32 else WIDE)  # another loss than the sweep's
    wrapped = wrap(convert(copy.deepcopy(model), policy="balanced"))
    for _ in range(2):
        with all_served():
            found, grads = step(wrapped, mine(batch), dist.get_world_size())
        dist.all_reduce(found)
        torch.testing.assert_close(found / 2, loss, rtol=slack, atol=0)
        assert grads.keys() == expected.keys()
        largest = max(g.norm() for g in expected.values())
        for n, g in expected.items():
            assert (grads[n] - g).norm() <= slack * (g.norm() + 1e-3 * largest), n

"""Converted models of transformers in two processes: as in one."""

import copy

import pytest
import torch
from distributed_steps import mine, whole
from hf_models import VOCAB, S, build, reasons
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fused_remat import convert


def wrapped(model, way):
    if way == "DDP":
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def as_one_process(way):
    model = convert(build("llama"), policy="lean")
    ids = torch.randint(3, VOCAB, (4, S), generator=torch.Generator().manual_seed(1))
    other = wrapped(copy.deepcopy(model), way)
    inner = getattr(other, "module", other).model.layers[0]
    assert type(inner).__name__.endswith("LlamaDecoderLayer")
    with reasons() as why:
        other(input_ids=mine(ids)).logits.square().mean().backward()
    assert not why
    model(input_ids=ids).logits.square().mean().backward()
    got = dict(getattr(other, "module", other).named_parameters())
    for name, p in model.named_parameters():
        # Sums over tokens in another order; transformers' RMSNorm after the last layer is float32.
        torch.testing.assert_close(whole(got[name].grad), p.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.composes("FSDP2", "a Hugging Face model, `fully_shard` per layer")
def test_fsdp2(two_processes):
    two_processes.run(as_one_process, "FSDP2")


@pytest.mark.composes("DDP", "a Hugging Face model")
def test_ddp(two_processes):
    two_processes.run(as_one_process, "DDP")

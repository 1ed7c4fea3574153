"""Layers under DistributedDataParallel: what one process on the whole batch would compute."""

import pytest
import torch
import torch.distributed as dist
from distributed_steps import (
    CLOSE,
    batches,
    compare,
    encoder,
    freeze,
    loss_of,
    mean_over_ranks,
    mine,
    train,
)
from reference import EXACT_PRESETS
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from fused_remat import convert


class WithUnused(nn.Sequential):
    """Its last layer is never called."""

    def forward(self, x):
        for layer in self[:-1]:
            x = layer(x)
        return x


def as_one_process(policy="full", norm_first=True, part=None, unused=False, **kwargs):
    model = encoder(policy, norm_first, layers=3 if unused else 2)
    if unused:
        model = WithUnused(*model)
    compare(freeze(model, part) if part else model, lambda m: DDP(m, **kwargs))


@pytest.mark.composes("DDP", "losses and gradients of one process on the whole batch, every policy")
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_policies(two_processes, policy):
    two_processes.run(as_one_process, policy, norm_first=policy != "lean")


@pytest.mark.composes("DDP", "static_graph=True")
def test_static_graph(two_processes):
    two_processes.run(as_one_process, static_graph=True)


@pytest.mark.composes("DDP", "find_unused_parameters=True, with a layer that is not called")
def test_unused_layer(two_processes):
    two_processes.run(as_one_process, unused=True, find_unused_parameters=True)


@pytest.mark.composes("DDP", "gradient_as_bucket_view=True")
def test_gradients_are_views_of_buckets(two_processes):
    two_processes.run(as_one_process, gradient_as_bucket_view=True)


@pytest.mark.composes("DDP", "frozen parameters")
@pytest.mark.parametrize("part", ["linear1", "norm", "0.self_attn"])
def test_frozen(two_processes, part):
    two_processes.run(as_one_process, part=part)


def reproduces():
    results = []
    for _ in range(2):
        model = DDP(encoder(dropout=0.2, policy="fast"))
        torch.manual_seed(dist.get_rank())
        results.append(train(model, [mine(x) for x in batches()]))
    torch.manual_seed(5)
    other, _ = train(model, [mine(x) for x in batches()])
    (losses, grads), (again, grads_again) = results
    assert losses == again and losses != other
    for a, b in zip(grads, grads_again, strict=True):
        assert torch.equal(a, b)
    return grads


@pytest.mark.composes("DDP", "dropout, reproducible from each rank's seed")
def test_dropout(two_processes):
    first, second = two_processes.run(reproduces)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)  # averaged: the same in both


def accumulates():
    model = encoder()
    wrapped = DDP(model)
    for x in batches()[:-1]:
        with wrapped.no_sync():
            loss_of(wrapped(mine(x))).backward()
    loss_of(wrapped(mine(batches()[-1]))).backward()
    alone = encoder()
    for x in batches():
        loss_of(alone(x)).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **CLOSE)


@pytest.mark.composes("DDP", "gradient accumulation with no_sync()")
def test_no_sync(two_processes):
    two_processes.run(accumulates)


def converted():
    stock = encoder(cls=nn.TransformerEncoderLayer, dropout=0.0)
    before = stock.state_dict()
    losses, _ = train(encoder(cls=nn.TransformerEncoderLayer), batches())
    wrapped = DDP(convert(stock, policy="balanced"))
    state = wrapped.module.state_dict()
    assert [*state] == [*before]
    found, _ = train(wrapped, [mine(x) for x in batches()])
    torch.testing.assert_close(mean_over_ranks(found), torch.stack(losses), **CLOSE)


@pytest.mark.composes("DDP", "convert(model) before wrapping; state_dict as before")
def test_convert(two_processes):
    two_processes.run(converted)


def refuses_to_accumulate():
    model = encoder()
    for layer in model:
        layer.accumulate_into = "grad"
    wrapped = DDP(model)
    with pytest.raises(RuntimeError, match="by DistributedDataParallel, which waits"):
        wrapped(mine(batches()[0]))
    with torch.no_grad():
        wrapped(mine(batches()[0]))


def refuses_under_a_reentrant_checkpoint():
    model = encoder("full")
    for layer in model:
        layer.accumulate_into = "main_grad"
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=True)

    wrapped = DDP(Checkpointed(), static_graph=True)
    loss = loss_of(wrapped(mine(batches()[0]).requires_grad_()))
    with pytest.raises(RuntimeError, match="called by DistributedDataParallel"):
        loss.backward()


def test_accumulation_is_refused_under_a_reentrant_checkpoint(two_processes):
    two_processes.run(refuses_under_a_reentrant_checkpoint)


def reduces_main_grads():
    """Data parallelism as who keeps `main_grad` writes it: micro-batches, then one all-reduce."""
    model, alone = encoder(), encoder()
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    for layer in model:
        layer.accumulate_into = "main_grad"
    for x in batches():
        loss_of(model(mine(x))).backward()
        loss_of(alone(x)).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(p.main_grad)
        torch.testing.assert_close(p.main_grad / dist.get_world_size(), q.grad, **CLOSE)


@pytest.mark.composes(
    "DDP",
    "accumulate_into",
    limits="RuntimeError under the wrapper; main_grad reduced by hand works",
)
def test_accumulation(two_processes):
    two_processes.run(refuses_to_accumulate)
    two_processes.run(reduces_main_grads)


def compiled(layer_by_layer):
    torch._dynamo.reset()

    def wrap(model):
        for layer in model if layer_by_layer else ():
            layer.compile(fullgraph=True, backend="aot_eager")
        wrapped = DDP(model)
        return wrapped if layer_by_layer else torch.compile(wrapped, backend="aot_eager")

    compare(encoder("lean"), wrap)


@pytest.mark.composes("DDP", "torch.compile of each layer, or of the wrapped model")
@pytest.mark.parametrize("layer_by_layer", [True, False])
def test_compiled(two_processes, layer_by_layer):
    two_processes.run(compiled, layer_by_layer)

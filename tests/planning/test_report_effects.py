"""`memory_report`: all is as before afterwards, and nothing stays alive."""

import gc

import pytest
import torch
from report_models import TOKENS, D, H, LanguageModel, Model, data, encoder, ids
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, convert, memory_report
from fused_remat.autograd.function import OBSERVERS
from fused_remat.report.allocations import measure_allocations


class Stateful(nn.Module):
    """Draws random numbers, updates buffers, changes modes; raises in the pass `fail`."""

    def __init__(self, fail=None):
        super().__init__()
        self.norm = nn.BatchNorm1d(D)
        self.layer = FusedRematLayer(D, H, 4 * D, 0.1)
        self.register_buffer("steps", torch.zeros(()))
        self.fail = fail

    def forward(self, x):
        self.steps = self.steps + 1
        self.norm.eval()
        self.norm.train()
        self.layer.linear1.training = False
        y = self.layer(self.norm(x.flatten(0, 1)).view(x.shape))
        if self.fail == "forward":
            raise RuntimeError("forward failed")
        if self.fail == "backward":
            y.register_hook(self.raise_)
        return y

    def raise_(self, grad):
        raise RuntimeError("backward failed")


@pytest.mark.parametrize("fail", [None, "forward", "backward"])
def test_everything_is_as_before(fail):
    model, x = Stateful(fail), data(requires_grad=True)
    steps, hooks = model.steps, []
    model.layer.eval()
    model.layer.register_forward_hook(lambda *_: hooks.append("forward"))
    grads = [torch.randn_like(p) for p in (x, *model.parameters())]
    for p, grad in zip((x, *model.parameters()), grads, strict=True):
        p.grad = grad
    values = [(b, b.clone()) for b in model.buffers()]
    modes = [m.training for m in model.modules()]
    tables = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    state, seen = torch.get_rng_state(), [g.clone() for g in grads]
    if fail is None:
        memory_report(model, x)
    else:
        with pytest.raises(RuntimeError, match=f"{fail} failed"):
            memory_report(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.steps is steps
    assert all(torch.equal(b, value) for b, value in values)
    assert [m.training for m in model.modules()] == modes
    assert tables == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    for p, grad, value in zip((x, *model.parameters()), grads, seen, strict=True):
        assert p.grad is grad and torch.equal(grad, value)
    assert not x._backward_hooks and not OBSERVERS
    assert hooks == ["forward"]
    assert measure_allocations(lambda: None).net == 0  # the profiler can start again


def test_optimizers_in_backward_do_not_step():
    model = convert(encoder(1))
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: pytest.fail("stepped"))
    memory_report(model, data())
    assert all(p.grad is None for p in model.parameters())


def test_nothing_stays_alive():
    def tensors():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    model, x = convert(LanguageModel(2)), ids()
    memory_report(model, x)
    before = tensors()
    report = memory_report(model, x)
    assert tensors() == before and report.kept_bytes


def test_kept_storages_are_freed_as_backward_goes():
    """Nobody but the graph holds them: backward of many layers needs little above what is kept."""
    report = memory_report(nn.Sequential(*(nn.Tanh() for _ in range(50))), data(requires_grad=True))
    assert report.peak_bytes <= report.kept_bytes + 5 * TOKENS * D * 4


def test_reentrant_checkpoint_raises_pytorchs_error():
    def forward(self, x):
        return checkpoint(self.linear, x, use_reentrant=True)

    with pytest.raises(RuntimeError, match="use_reentrant"):
        memory_report(Model(forward, linear=nn.Linear(D, D)), data(requires_grad=True))

"""Shared by tests of plans: models, plans of them, and a comparison of a step with its plan."""

import functools

import pytest
import torch
from report_models import Model, encoder, traced
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, convert, plan
from fused_remat.autograd.function import OBSERVERS
from fused_remat.planner.calibration import Example
from fused_remat.report.step import run_step

WITHIN = 0.03  # of the peak; what the planner promises


class Mixed(nn.Module):
    """Two kinds of layers of two widths, with what cannot be converted in between."""

    def __init__(self, dropout=0.1):
        super().__init__()
        post = {"dropout": dropout, "batch_first": True}
        self.first = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 128, **post) for _ in range(3))
        self.between = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64))
        pre = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.second = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 200, **pre) for _ in range(3))
        self.head = nn.Linear(64, 50)

    def forward(self, x):
        for layer in self.first:
            x = layer(x)
        x = self.between(x)
        for i, layer in enumerate(self.second):
            x = layer(x) * 1.5 if i == 1 else layer(x)
        return self.head(x)


def fused(**kwargs):
    return FusedRematLayer(32, 4, 128, 0.0, batch_first=True, **kwargs)


def shared():
    """Return a layer called three times, and another called two times with ReLU in between."""

    def forward(self, x):
        for _ in range(3):
            x = self.often(x)
        return self.twice(self.twice(x).relu())

    return Model(forward, often=fused(), twice=fused(norm_first=True))


def partly_checkpointed():
    """One layer under a checkpoint of the user's own, which no plan may touch."""

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if i == 1 else layer(x)
        return x

    return Model(forward, layers=nn.ModuleList(fused() for _ in range(4)))


def transformer(layers):
    return nn.Transformer(32, 4, layers, layers, 128, 0.0, batch_first=True)


def llama():
    pytest.importorskip("transformers")
    from hf_models import build

    return build("llama", torch.float32, num_hidden_layers=4)


def with_fused_loss():
    return convert(llama(), loss=True)


def with_adapters():
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def detached():
    """The loss depends on two of four layers."""

    def forward(self, x):
        x = self.layers[1](self.layers[0](x)).detach()
        return self.layers[3](self.layers[2](x))

    return Model(forward, layers=encoder(4).layers)


def squared(output):
    return output.square().mean()


def hf_loss(output):
    return output.loss


X = torch.randn(4, 64, 32)
BOTH = X, torch.randn(4, 48, 32)
TOKENS = torch.randint(50, (4, 64))
LABELLED = {"input_ids": TOKENS, "labels": TOKENS}
#: By name: the model, its inputs and its loss.
CASES = {
    "pre-norm": (lambda: encoder(6), (X,), squared),
    "post-norm dropout": (lambda: encoder(6, 0.1, False), (X,), squared),
    "mixed": (Mixed, (X,), squared),
    "encoder-decoder": (lambda: transformer(2), BOTH, squared),
    "shared": (shared, (X,), squared),
    "checkpointed": (partly_checkpointed, (X,), squared),
    "detached": (detached, (X,), squared),
    "llama": (llama, LABELLED, hf_loss),
    "llama with a fused loss": (with_fused_loss, LABELLED, hf_loss),
    "llama with adapters": (with_adapters, LABELLED, hf_loss),
    "traced": (traced, (X,), squared),
    "traced, one checkpointed": (lambda: traced([1]), (X,), squared),
}


def given(case):
    """The model, its positional and keyword inputs, and its loss."""
    torch.manual_seed(0)
    build, inputs, loss = CASES[case]
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    return build(), args, kwargs, loss


@functools.cache
def planned(case):
    """Return the fastest plan of a case."""
    model, args, kwargs, loss = given(case)
    return plan(model, *args, loss=loss, costs="analytic", **kwargs)


def budgets(fastest, parts=3):
    """From the least possible peak to the fastest plan's."""
    least, most = fastest.frontier[0].peak_bytes, fastest.peak_bytes
    return [least + (most - least) * i // parts for i in range(parts + 1)]


def example_of(layer, x):
    """A call of the layer, as the planner measures it."""
    ran = []
    OBSERVERS.append(ran.append)
    try:
        layer(x)
    finally:
        OBSERVERS.remove(ran.append)
    tensors = tuple(None if t is None else t.detach() for t in ran[0].tensors)
    return Example(ran[0].call, tensors, ran[0].functions)


def assert_holds(found, model, args, kwargs, loss):
    """Assert that a step keeps what its plan predicts to the byte, and peaks within 3%."""
    step = run_step(found.apply(model), [], args, kwargs, loss)
    assert found.kept_bytes == sum(saved.nbytes for saved in step.saved)
    assert found.peak_bytes == pytest.approx(step.peak + found.chain.rests, rel=WITHIN)

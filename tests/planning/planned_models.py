"""What the tests of plans share: models, plans of them, and whether a step is as its plan says."""

import functools

import pytest
import torch
from report_models import Model
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, plan
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
    """A layer called three times, another twice with something in between."""

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


def encoder(layers=6, norm_first=True, width=32, dropout=0.0, hidden=None):
    layer = nn.TransformerEncoderLayer(
        width, 4, hidden or 4 * width, dropout, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def transformer(layers):
    return nn.Transformer(32, 4, layers, layers, 128, 0.0, batch_first=True)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=88, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def squared(output):
    return output.square().mean()


def hf_loss(output):
    return output.loss


def x_of():
    return (torch.randn(4, 64, 32),)


def both():
    return torch.randn(4, 64, 32), torch.randn(4, 48, 32)


def labelled():
    tokens = torch.randint(64, (4, 64))
    return {"input_ids": tokens, "labels": tokens}


# A width whose feed-forward rows are not whole blocks: their last scales are counted.
uneven = functools.partial(encoder, 3, hidden=5 * 32)
#: By name: the model, its inputs, its loss, and whether plans of it may keep lossy formats.
CASES = {
    "pre-norm": (encoder, x_of, squared, False),
    "post-norm dropout": (lambda: encoder(6, False, dropout=0.1), x_of, squared, False),
    "mixed": (Mixed, x_of, squared, False),
    "encoder-decoder": (lambda: transformer(2), both, squared, False),
    "shared": (shared, x_of, squared, False),
    "checkpointed": (partly_checkpointed, x_of, squared, False),
    "llama": (llama, labelled, hf_loss, False),
    "pre-norm, lossy": (uneven, x_of, squared, True),
    "post-norm dropout, lossy": (lambda: uneven(False, dropout=0.1), x_of, squared, True),
    "encoder-decoder, lossy": (lambda: transformer(1), both, squared, True),
}
LOSSY = [name for name, (*_, lossy) in CASES.items() if lossy]


def given(case):
    """The model, its positional and keyword inputs, and its loss."""
    torch.manual_seed(0)
    build, inputs, loss, _ = CASES[case]
    made = inputs()
    args, kwargs = ((), made) if isinstance(made, dict) else (made, {})
    return build(), args, kwargs, loss


@functools.cache
def planned(case, lossy=None):
    """The fastest plan, of a model and inputs like those that are given."""
    model, args, kwargs, loss = given(case)
    lossy = CASES[case][-1] if lossy is None else lossy
    return plan(model, *args, loss=loss, costs="analytic", lossy=lossy, **kwargs)


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


def is_lossy(found):
    return any(":" in name for policy in found.policies.values() for name in policy.save)


def assert_holds(found, model, args, kwargs, loss):
    """With the plan applied, a step keeps what it says to the byte, and peaks near enough."""
    step = run_step(found.apply(model), [], args, kwargs, loss)
    assert found.kept_bytes == sum(saved.nbytes for saved in step.saved)
    assert found.peak_bytes == pytest.approx(step.peak + found.chain.rests, rel=WITHIN)

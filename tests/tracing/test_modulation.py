"""Modulation by a condition of each sequence: norms and gated sums are steps of the block."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from altered_layers import HEADS, MLP, WIDTH, Attention
from test_recorder import assert_same, graphs, normal
from torch import Tensor, nn

from fused_remat import FusedRematWarning, conversion, convert
from fused_remat.execution.prepare import chunks_of
from fused_remat.steps.linear import Linear
from fused_remat.steps.modulation import GatedAdd, GatedLinear, ModulatedNorm, Rows
from fused_remat.steps.replay import Replay
from fused_remat.tracing.layer import KNOWN

S = 20
#: Of float64, where the block adds in another order; of float32, in which some code insists.
EXACT, SINGLE = 1e-9, 2e-5
POLICIES = ("full", "lean", "balanced", "none")


@pytest.fixture(autouse=True)
def _nothing_known():
    KNOWN.clear()


class Own(nn.Module):
    """Pre-norm attention and MLP with a modulation; subclasses spell it otherwise."""

    norm: type[nn.Module] = nn.LayerNorm

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = self.norm(WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attn, self.mlp = Attention(), MLP()
        self.condition = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, c, d, e, f = self.condition(torch.nn.functional.silu(c)).chunk(6, -1)
        h = self.norm1(x) * (1 + a[:, None]) + b[:, None]
        x = x + c[:, None] * self.attn(h)
        return x + f.unsqueeze(1) * self.mlp(self.norm2(x) * (d.unsqueeze(1) + 1) + e.unsqueeze(1))


class Table(Own):
    """PixArt's: a table, and the condition for six rows at a time."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        rows = self.table[None] + self.condition(c).reshape(len(x), 6, -1)
        a, b, c, d, e, f = rows.chunk(6, dim=1)
        x = self.attn(self.norm1(x) * (1 + a) + b) * c + x
        return self.mlp(self.norm2(x) * (1 + d) + e) * f + x


class Sandwich(Own):
    """Z-Image's: a scale alone, and tanh of a gate times a norm."""

    norm = nn.RMSNorm

    def __init__(self):
        super().__init__()
        self.after1, self.after2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, c, d = self.condition(c)[:, None, : 4 * WIDTH].chunk(4, dim=2)
        x = x + b.tanh() * self.after1(self.attn(self.norm1(x) * (1.0 + a)))
        return x + d.tanh() * self.after2(self.mlp(self.norm2(x) * (1.0 + c)))


class Wide(Own):
    """Wan's: float32 outside of products."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b, c, d, e, f = self.condition(c).float()[:, None].chunk(6, -1)
        h = (self.norm1(x).float() * (1 + a) + b).type_as(x)
        x = (x.float() + self.attn(h) * c).type_as(x)
        h = (self.norm2(x.float()) * (1 + d) + e).to(x.dtype)
        return (x.float() + self.mlp(h).float() * f).type_as(x)


class Dropped(Own):
    """Dropout before the gate, and a drop path, which draws a gate."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        c = self.condition(c)[:, None, :WIDTH]
        x = x + c * nn.functional.dropout(self.attn(self.norm1(x) + c), 0.2, self.training)
        return x + self.mlp(self.norm2(x)) * x.new_empty(len(x), 1, 1).bernoulli_(0.5) / 0.5


class PerToken(Own):
    """A condition of each token is replayed."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b = self.condition(x)[..., : 2 * WIDTH].chunk(2, -1)
        return x + b * self.mlp(self.norm2(x) * (1 + a))


class Model(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


def step(model: nn.Module, x: Tensor, *args, **kwargs) -> dict[str, Tensor | None]:
    """The result and all gradients of a training step, also those of the arguments."""
    given = {"x": x, **{str(i): a for i, a in enumerate(args)}, **kwargs}
    tensors = {name: t for name, t in given.items() if isinstance(t, Tensor) and t.requires_grad}
    tensors |= dict(model.named_parameters())
    for t in tensors.values():
        t.grad = None
    torch.manual_seed(3)
    y = model(x, *args, **kwargs)
    (y * normal(*y.shape, seed=2).to(y.dtype)).sum().backward()
    grads = {f"d {name}": None if t.grad is None else t.grad.clone() for name, t in tensors.items()}
    return {"the result": y.detach().clone(), **grads}


def call(batch: int, dtype=torch.float64) -> tuple[Tensor, Tensor]:
    x, c = normal(batch, S, WIDTH), normal(batch, WIDTH, seed=5)
    return x.to(dtype).requires_grad_(), c.to(dtype).requires_grad_()


def kinds(model: nn.Module) -> dict[type, int]:
    """How many steps of each kind the first layer's block has."""
    nodes = graphs(model)[0].nodes
    counted = (ModulatedNorm, GatedLinear, GatedAdd, Replay)
    return {kind: sum(type(node) is kind for node in nodes) for kind in counted}


def converted(stock: nn.Module, **kwargs) -> nn.Module:
    return convert(copy.deepcopy(stock), **kwargs)


def stock_of(layer: type[nn.Module], dtype=torch.float64) -> Model:
    torch.manual_seed(0)
    model = Model(layer(), layer()).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


#: By layer, how many modulated norms, gated linear layers, gated sums and replays its block has.
LAYERS = {
    Own: (2, 2, 0, 0), Table: (2, 2, 0, 0), Sandwich: (4, 0, 0, 0), Wide: (2, 2, 0, 0),
    Dropped: (1, 1, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [None, 20, 7], ids=["one", "groups", "tiles"])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_modulation_is_made_of_steps(layer, batch, chunk):
    stock = stock_of(layer)
    tolerance = SINGLE if layer is Wide else EXACT
    expected, models = step(stock, *call(batch)), [converted(stock, policy=p) for p in POLICIES]
    with chunks_of(chunk) if chunk else warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        found = [step(model, *call(batch)) for model in models]
    for one in found:
        assert_same(one, expected, tolerance)
        for name, value in found[0].items():
            assert value is None or value.equal(one[name]), name
    assert tuple(kinds(models[0]).values()) == LAYERS[layer]


def test_the_condition_of_a_token_is_replayed():
    stock = stock_of(PerToken)
    model = converted(stock)
    assert_same(step(model, *call(2)), step(stock, *call(2)), EXACT, strict=False)
    assert not kinds(model)[ModulatedNorm] and kinds(model)[Replay]

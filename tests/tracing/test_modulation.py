"""Modulation by a condition of each sequence or token: norms and gated sums are steps."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from altered_layers import HEADS, MLP, WIDTH, Attention
from test_recorder import assert_same, graphs, normal
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fused_remat import FusedRematWarning, conversion, convert
from fused_remat.execution.prepare import chunks_of
from fused_remat.steps import modulation
from fused_remat.steps.modulation import GatedAdd, GatedLinear, ModulatedNorm
from fused_remat.steps.modulation_aten import Rows
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


class DropPath(Own):
    """A drop path draws a gate."""

    p = 0.0

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        c = self.condition(c)[:, None, :WIDTH]
        x = x + c * nn.functional.dropout(self.attn(self.norm1(x) + c), self.p, self.training)
        return x + self.mlp(self.norm2(x)) * x.new_empty(len(x), 1, 1).bernoulli_(0.5) / 0.5


class Dropped(DropPath):
    """Dropout before the gate."""

    p = 0.2


class ByToken(Own):
    """Each token has a condition of its own, as in Wan 2.2's image to video."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        places = torch.linspace(-1, 1, x.shape[1], dtype=c.dtype)[:, None]
        a, b, c, d, e, f = self.condition(c[:, None] * places + c[:, None]).chunk(6, 2)
        x = x + c * self.attn(self.norm1(x) * (1 + a) + b[:, :1])
        return x + f * self.mlp(self.norm2(x) * (1 + d) + e)


class WideByToken(Own):
    """In float32 outside of products."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        places = torch.linspace(-1, 1, x.shape[1], dtype=c.dtype)[:, None]
        a, b, c, d, e, f = self.condition(c[:, None] * places).float().chunk(6, 2)
        h = (self.norm1(x).float() * (1 + a) + b).type_as(x)
        x = (x.float() + self.attn(h) * c).type_as(x)
        h = (self.norm2(x.float()) * (1 + d) + e).type_as(x)
        return (x.float() + self.mlp(h).float() * f).type_as(x)


class Shifted(nn.Module):
    """Of the condition of each token, the shift alone is trained."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH, elementwise_affine=False), MLP()
        self.shift, self.scale = (nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x) * (1 + c * self.scale) + c * self.shift)


class Placed(nn.Module):
    """A norm that is scaled for each sequence, and places that are added."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.places = nn.Parameter(torch.ones(S, WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x) * (1 + c[:, :1]) + self.places)


class OfItself(Own):
    """A condition that the stream itself gives is replayed."""

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
    """Return the result and all gradients of a training step, also those of the arguments."""
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
    DropPath: (1, 2, 0, 0), Dropped: (1, 1, 1, 0), ByToken: (2, 2, 0, 0),
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
        if layer is not Dropped:  # whose block draws other numbers than the layer
            assert_same(one, expected, tolerance)
        for name, value in found[0].items():
            assert value is None or value.equal(one[name]), name
    assert tuple(kinds(models[0]).values()) == LAYERS[layer]


def test_a_condition_from_the_stream_is_replayed():
    stock = stock_of(OfItself)
    model = converted(stock)
    assert_same(step(model, *call(2)), step(stock, *call(2)), EXACT, strict=False)
    assert not kinds(model)[ModulatedNorm] and kinds(model)[Replay]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layer, trained", [(Shifted, "shift"), (Placed, "")])
def test_given_conditions_of_tokens(layer, trained, policy):
    torch.manual_seed(0)
    stock = Model(layer()).double()
    _frozen(stock, trained)
    fused = converted(stock, policy=policy)
    x, c = normal(3, S, WIDTH).double(), normal(3, S, WIDTH, seed=5).double()
    with chunks_of(7):
        assert_same(step(fused, x, c), step(stock, x, c), EXACT)
    nodes = graphs(fused)[0].nodes
    assert [n.by_token for n in nodes if isinstance(n, ModulatedNorm)] == [layer is Shifted]


class Conditioned(nn.Module):
    """An MLP with a modulation by a condition of each sequence."""

    width = 256

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(self.width, elementwise_affine=False)
        self.condition = nn.Linear(self.width, 3 * self.width)
        self.up = nn.Linear(self.width, 2 * self.width)
        self.down = nn.Linear(2 * self.width, self.width)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.condition(nn.functional.silu(c))[:, None].chunk(3, -1)
        h = self.norm(x) * (1 + scale) + shift
        return x + gate * self.down(nn.functional.gelu(self.up(h)))


def train(model: nn.Module, x: Tensor, c: Tensor) -> None:
    for layer in model:
        x = layer(x, c)
    x.sum().backward()


def test_the_condition_is_computed_once_in_backward():
    """Under autograd, which differentiates it later; not once for each of its parts."""
    torch.manual_seed(0)
    model = convert(nn.ModuleList([Conditioned() for _ in range(2)]))
    x, c = torch.randn(2, 24, 256), torch.randn(2, 256)
    train(model, x, c)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        train(model, x, c)
    calls = {event.key: event.count for event in profiler.key_averages()}
    assert calls["aten::silu"] == 2 * 2


@pytest.mark.parametrize("which", ["condition", ""])
def test_parameters_are_frozen_between_forward_and_backward(which):
    """Autograd decides in forward which gradients there are."""
    torch.manual_seed(0)
    stock = nn.ModuleList([Conditioned()]).double()
    model, found = convert(copy.deepcopy(stock)), []
    x, c = normal(2, 24, 256), normal(2, 256)
    train(model, x, c)
    for layers in (stock, model):
        layers.zero_grad()
        y = layers[0](x, c.requires_grad_())
        for name, p in layers.named_parameters():
            p.requires_grad_(which not in name)
        (grad,) = torch.autograd.grad(y.sum(), [c])
        found.append(grad)
    torch.testing.assert_close(found[1], found[0])


def test_a_dropped_branch_has_the_gradient_of_what_is_left():
    """A numerical derivative, since the stock layer draws other numbers."""
    model, (x, c) = converted(stock_of(Dropped)), call(2)
    grad = step(model, x, c)["d 0"]
    move = 1e-6 * normal(*c.shape, seed=8)
    ends = [step(model, x, (c + s * move).detach().requires_grad_()) for s in (1, -1)]
    weights = normal(*ends[0]["the result"].shape, seed=2)
    change = ((ends[0]["the result"] - ends[1]["the result"]) * weights).sum()
    torch.testing.assert_close(2 * (grad * move).sum(), change, rtol=1e-5, atol=0.0)


def _frozen(model: nn.Module, which: str) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(which in name)


@pytest.mark.parametrize("trained", ["mlp", "condition", "norm1", "down.bias", "none"])
@pytest.mark.parametrize("chunk", [20, 7], ids=["groups", "tiles"])
@pytest.mark.parametrize("layer", [Own, Sandwich, ByToken], ids=lambda layer: layer.__name__)
def test_frozen_parameters(layer, trained, chunk):
    stock = stock_of(layer)
    _frozen(stock, trained)
    expected = step(stock, *call(3))
    with chunks_of(chunk):
        for policy in POLICIES:
            model = converted(stock, policy=policy)
            assert_same(step(model, *call(3)), expected, EXACT)
    node = next(n for n in graphs(model)[0].nodes if n.name == "output")
    if layer is not Sandwich and trained in ("condition", "none"):  # the gate, but no weight
        assert node.needs({node.gate}) == (node.x,)


@pytest.mark.parametrize("long", [1, 1 << 20], ids=["by sequence", "by product"])
def test_both_gradients_of_a_gate(long, monkeypatch):
    monkeypatch.setattr(modulation, "_LONG_CPU", long)
    monkeypatch.setattr(modulation, "_CPU_ELEMENTS", 50)  # a few rows of a weight at a time
    stock = stock_of(Own)
    fused = converted(stock)
    with chunks_of(7):
        assert_same(step(fused, *call(3)), step(stock, *call(3)), EXACT)
    assert {each.state for each in conversion(fused)} == {"converted"}


@pytest.mark.parametrize(
    "layer, wide",
    [(Own, False), (Table, False), (Wide, False), (Wide, True), (WideByToken, False),
     (WideByToken, True)],
)  # fmt: skip
def test_bfloat16(layer, wide):
    """Errors are those of the stock layer, with a condition of float32, too."""
    exact = stock_of(layer)
    stock = copy.deepcopy(exact).bfloat16()
    if wide:
        for own in stock.layers:
            own.condition.float()
    (x, c), calls = call(3), []
    for model in (exact, stock):
        given = c if model is exact else c.to(torch.float32 if wide else torch.bfloat16)
        like = x if model is exact else x.bfloat16()
        calls.append((like.detach().requires_grad_(), given.detach().requires_grad_()))
    expected, theirs = step(exact, *calls[0]), step(stock, *calls[1])
    with chunks_of(40):
        models = [converted(stock, policy=policy) for policy in POLICIES]
        found = [step(model, *calls[1]) for model in models]
    for name, value in expected.items():
        if value is None:
            continue
        mine, other = ((each[name].double() - value).norm() for each in (found[0], theirs))
        # Of few numbers, rounded independently: up to 1.9 times as much was seen.
        assert mine <= 3 * other + 5e-3 * value.norm(), f"{name}: {mine} and {other}"
        assert all(found[0][name].equal(each[name]) for each in found), name
    assert kinds(models[0])[ModulatedNorm] == kinds(models[0])[GatedLinear] == 2


@pytest.mark.parametrize(
    "layer", [Own, Table, Sandwich, Wide, WideByToken], ids=lambda layer: layer.__name__
)
def test_autocast(layer):
    exact = stock_of(layer)
    stock, (x, c) = copy.deepcopy(exact).float(), call(3)
    low = [t.detach().float().requires_grad_() for t in (x, c)]
    model = converted(stock)
    expected = step(exact, x, c)
    with torch.autocast("cpu", torch.bfloat16), chunks_of(40):
        theirs, mine = step(stock, *low), step(model, *low)
    for name, value in expected.items():
        if value is not None:
            error, other = ((each[name].double() - value).norm() for each in (mine, theirs))
            assert error <= 3 * other + 5e-3 * value.norm(), f"{name}: {error} and {other}"
    assert kinds(model)[Replay] == 0


def test_adapters_leave_the_gate_to_a_sum():
    peft = pytest.importorskip("peft")
    stock = stock_of(Own)
    config = peft.LoraConfig(r=2, target_modules=["down", "o"], init_lora_weights=False)
    stock = peft.inject_adapter_in_model(config, stock)
    model = converted(stock)
    assert_same(step(model, *call(2)), step(stock, *call(2)), EXACT)
    assert kinds(model)[GatedAdd] == 2 and not kinds(model)[GatedLinear]


def test_rows_of_sequences():
    rows = Rows(first=3, tokens=5)
    assert rows.spans(9) == [(0, 0, 2), (1, 2, 7), (2, 7, 9)]
    assert rows.parts(12) == [(slice(0, 2), slice(0, 1)), (slice(2, 12), slice(1, 3))]
    assert Rows(10, 5).parts(15) == [(slice(0, 15), slice(2, 5))]


# Layers of diffusers.


def _dit(width: int) -> tuple[nn.Module, dict]:
    blocks = pytest.importorskip("diffusers.models.attention")
    layers = [
        blocks.BasicTransformerBlock(
            width, HEADS, width // HEADS, norm_type="ada_norm_zero", num_embeds_ada_norm=10,
            attention_bias=True, norm_elementwise_affine=False,
        ) for _ in range(2)
    ]  # fmt: skip
    labels = {"timestep": torch.tensor([3, 700]), "class_labels": torch.tensor([1, 4])}
    return Model(*layers), labels


def _pixart(width: int) -> tuple[nn.Module, dict]:
    blocks = pytest.importorskip("diffusers.models.attention")
    layers = [
        blocks.BasicTransformerBlock(
            width, HEADS, width // HEADS, norm_type="ada_norm_single", cross_attention_dim=width,
            attention_bias=True, norm_elementwise_affine=False,
        ) for _ in range(2)
    ]  # fmt: skip
    texts, c = normal(2, 9, width, seed=4), normal(2, 6 * width, seed=5)
    return Model(*layers), {"encoder_hidden_states": texts, "timestep": c.requires_grad_()}


def _wan(width: int) -> tuple[nn.Module, dict]:
    wan = pytest.importorskip("diffusers.models.transformers.transformer_wan")
    layers = [wan.WanTransformerBlock(width, 24, HEADS, cross_attn_norm=True) for _ in range(2)]
    angles = normal(1, S, 1, width // HEADS // 2, seed=6).repeat_interleave(2, -1)
    texts, c = normal(2, 9, width, seed=4), normal(2, 6, width, seed=5)
    tables = angles.cos().float(), angles.sin().float()
    arguments = {"encoder_hidden_states": texts, "temb": c.requires_grad_(), "rotary_emb": tables}
    return Model(*layers), arguments


def _sd3(width: int) -> tuple[nn.Module, dict]:
    sd3 = pytest.importorskip("diffusers.models.transformers.transformer_sd3")
    layers = [sd3.SD3SingleTransformerBlock(width, HEADS, width // HEADS) for _ in range(2)]
    return Model(*layers), {"temb": normal(2, width, seed=5).requires_grad_()}


def _lumina(width: int) -> tuple[nn.Module, dict]:
    lumina = pytest.importorskip("diffusers.models.transformers.transformer_lumina2")
    layers = [lumina.Lumina2TransformerBlock(width, HEADS, HEADS, 8, 4.0, 1e-5) for _ in range(2)]
    angles = normal(1, S, width // HEADS // 2, seed=6)
    arguments = {
        "attention_mask": None, "image_rotary_emb": torch.polar(torch.ones_like(angles), angles),
        "temb": normal(2, min(width, 1024), seed=5).requires_grad_(),
    }  # fmt: skip
    return Model(*layers), arguments


def _z_image(width: int) -> tuple[nn.Module, dict]:
    z_image = pytest.importorskip("diffusers.models.transformers.transformer_z_image")
    layers = [z_image.ZImageTransformerBlock(i, width, HEADS, HEADS, 1e-5, True) for i in range(2)]
    angles = normal(2, S, width // HEADS // 2, seed=6)
    c = normal(2, min(width, 256), seed=5)
    arguments = {
        "attn_mask": torch.ones(2, S, dtype=torch.bool), "adaln_input": c.requires_grad_(),
        "freqs_cis": torch.polar(torch.ones_like(angles), angles),
    }  # fmt: skip
    return Model(*layers), arguments


#: As `LAYERS`, but without replays, which rotations and heads may have.
DIFFUSERS = {
    _dit: (2, 2, 0), _pixart: (2, 2, 0), _sd3: (2, 2, 0), _wan: (2, 2, 0), _lumina: (4, 0, 0),
    _z_image: (4, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("chunk", [None, 12], ids=["one", "tiles"])
@pytest.mark.parametrize("make", DIFFUSERS, ids=lambda make: make.__name__[1:])
def test_layers_of_diffusers(make, chunk):
    torch.manual_seed(0)
    stock, arguments = make(32)
    stock = stock.double()
    x = normal(2, S, 32).requires_grad_()
    expected = step(stock, x, **arguments)
    models = [converted(stock, policy=policy) for policy in POLICIES]
    with chunks_of(chunk) if chunk else warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        found = [step(model, x, **arguments) for model in models]
    for one in found:
        assert_same(one, expected, SINGLE)
        assert all(v is None or v.equal(one[name]) for name, v in found[0].items())
    assert tuple(kinds(models[0]).values())[:3] == DIFFUSERS[make], conversion(models[0])

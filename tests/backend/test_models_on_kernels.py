"""Models on kernels: traced layers, with a rotation and a replayed step, and Hugging Face's."""

import copy

import pytest
import torch
import torch.nn.functional as F
from places import BF16, COMPILED, DEVICE, ON_GPU, ROUTES, at
from torch import nn

from bench.subjects.diffusion import DIFFUSERS
from fused_remat import convert
from fused_remat.execution.observe import OBSERVERS
from fused_remat.steps import modulation
from fused_remat.steps.fused import MlpBackward
from fused_remat.steps.modulation import GatedLinear
from fused_remat.steps.replay import Replay
from fused_remat.steps.rotary import Rotary
from fused_remat.steps.streams import Join

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, D, H, HKV = at((4, 512, 1024, 16, 4), (2, 9, 32, 4, 2), (2, 40, 128, 4, 2))


def heads(x):
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


class Rotated(nn.Module):
    """Heads of queries and keys are rotated."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(D), nn.RMSNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def mixed(self, h, cos, sin):
        q, k, v = map(heads, self.qkv(h).chunk(3, -1))

        def rotated(x):
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, cos, sin):
        x = x + self.mixed(self.norm1(x), cos, sin)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gated(Rotated):
    """The branch of attention has a gate, which is a step of its own."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, D)

    def mixed(self, h, cos, sin):
        return super().mixed(h, cos, sin) * torch.sigmoid(self.gate(h)) ** 2


class Modulated(Rotated):
    """A condition of each sequence scales and shifts the norm, and gates the branch of the MLP."""

    def __init__(self):
        super().__init__()
        self.condition = nn.Embedding(8, 3 * D)

    def forward(self, x, cos, sin):
        c = self.condition(torch.arange(x.shape[0], device=x.device))
        shift, scale, gate = c[:, None].chunk(3, -1)
        x = x + self.mixed(self.norm1(x), cos, sin)
        return x + gate * self.down(F.gelu(self.up(self.norm2(x) * (1 + scale) + shift)))


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x):
        angles = torch.arange(x.shape[1], device=x.device)[:, None] / torch.logspace(
            0, 2, D // H // 2, device=x.device
        )
        angles = torch.cat([angles, angles], -1)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return x


def train_on_both(stock, policy, step):
    """Return results of `step` of the stock model and of both backends, and the blocks that ran."""
    ran, found = [], []
    OBSERVERS.append(ran.append)
    for backend in (None, "eager", "triton"):
        model = copy.deepcopy(stock)
        if backend is not None:
            convert(model, policy=policy, backend=backend)
        ran.clear()
        found.append(step(model))
    OBSERVERS.remove(ran.append)
    assert ran and all(run.execution.ops.name == "triton" for run in ran)
    for mine in found[1:]:
        for a, b in zip(mine, found[0], strict=True):
            # Three float32 computations of one thing.
            assert (a - b).norm() <= 3e-5 * b.norm()
    return ran


@pytest.mark.skipif(COMPILED, reason="in float32 products and attention are ATen's there")
@pytest.mark.parametrize("policy", ["full", "fast"])
@pytest.mark.parametrize(
    "layer, kind", [(Rotated, Rotary), (Gated, Replay), (Modulated, GatedLinear)]
)
def test_traced_layers_train_as_eager(layer, kind, policy):
    torch.manual_seed(0)
    x = torch.randn(B, S, D, device=DEVICE, requires_grad=True)

    def step(model):
        y = model(x)
        return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]

    ran = train_on_both(Model(layer).to(DEVICE), policy, step)
    assert len(ran) == 2
    assert all(any(isinstance(node, kind) for node in run.call.graph.nodes) for run in ran)


@pytest.mark.skipif(COMPILED, reason="in float32 products are ATen's there")
@pytest.mark.parametrize("trained", ["all", "condition", "layers", "up"])
@pytest.mark.parametrize("long", [1, 1 << 20], ids=["by sequence", "by product"])
@pytest.mark.parametrize("routes", ROUTES, indirect=True)
def test_an_mlp_with_a_gate_is_fused(long, trained, routes, monkeypatch):
    monkeypatch.setattr(modulation, "_LONG_DEVICE" if ON_GPU else "_LONG_CPU", long)
    torch.manual_seed(0)
    stock = Model(Modulated).to(DEVICE)
    for name, p in stock.named_parameters():
        kind = "condition" if "condition" in name else "layers"
        p.requires_grad_(trained in ("all", kind) or trained in name)
    x = torch.randn(B, S, D, device=DEVICE)

    def step(model):
        y = model(x)
        wanted = [p for p in model.parameters() if p.requires_grad]
        return [y, *torch.autograd.grad(y.square().sum(), wanted)]

    for run in train_on_both(stock, "full", step):
        assert any(isinstance(s.node, MlpBackward) for s in run.execution.plan.steps("backward"))


@pytest.mark.skipif(COMPILED, reason="in float32 products and attention are ATen's there")
@pytest.mark.parametrize("name, policy", [("sd3", "full"), ("flux", "balanced"), ("wan", "lean")])
def test_a_diffusion_model_trains_as_eager(name, policy):
    """Blocks of two streams, and of one."""
    pytest.importorskip("diffusers")
    diffuser = DIFFUSERS[name]
    batch = {
        key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for key, value in diffuser.batch(48).items()
    }

    def step(model):
        (y,) = model(**batch)
        wanted = list(model.parameters())
        return [y, *torch.autograd.grad(y.square().sum(), wanted, materialize_grads=True)]

    ran = train_on_both(diffuser.make().to(DEVICE), policy, step)
    joins = [isinstance(node, Join) for run in ran for node in run.call.graph.nodes]
    assert any(joins) == (name != "wan")


@pytest.mark.parametrize("padded", [False, True])
def test_a_hugging_face_model_trains_as_it_does_unconverted(padded):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=D, intermediate_size=3 * D, num_attention_heads=H, num_key_value_heads=HKV,
        num_hidden_layers=2, vocab_size=1000 if ON_GPU else 50, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.LlamaForCausalLM(config).to(DEVICE, BF16).train()
    fused = convert(copy.deepcopy(stock), policy="lean", backend="triton", loss=True)
    tokens = torch.randint(config.vocab_size, (B, S), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, : S // 2 if padded else 0] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)}
    losses = []
    for model in (stock, fused):
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 2e-2  # roundings of logits to 16 bits
    for (name, p), q in zip(stock.named_parameters(), fused.parameters(), strict=True):
        difference = (p.grad.double() - q.grad.double()).norm() / p.grad.double().norm()
        assert difference < 5e-2, name  # of two results in 16 bits, each some roundings off

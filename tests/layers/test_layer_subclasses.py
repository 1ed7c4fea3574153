"""Subclasses and model code as people write it around this layer (items 32 and 38)."""

import copy
import io
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from reference import X, randomize, run
from tiers import pairwise
from torch import nn

from fused_remat import FusedRematLayer, FusedRematWarning

STOCK = nn.TransformerEncoderLayer
CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


def keeps_weights(base):
    class KeepsWeights(base):
        """Attention maps for plotting."""

        weights = None

        def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
            x, self.weights = self.self_attn(
                x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=True
            )
            return self.dropout1(x)

    return KeepsWeights


class DropPath(nn.Module):
    """Stochastic depth: whole samples skip the branch."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        keep = torch.rand(1, x.shape[1], 1, dtype=x.dtype) >= self.p
        return x * keep / (1 - self.p)


def drop_path_blocks(base):
    class DropPathBlocks(base):
        """DropPath and LayerScale on both branches, by the blocks."""

        def __init__(self, d_model, nhead, dim_feedforward, drop_path=0.3, **kwargs):
            super().__init__(d_model, nhead, dim_feedforward, **kwargs)
            self.drop_path = DropPath(drop_path)
            self.gamma = nn.Parameter(torch.full((2, d_model), 0.1, dtype=torch.float64))

        def _sa_block(self, *args, **kwargs):
            return self.drop_path(self.gamma[0] * super()._sa_block(*args, **kwargs))

        def _ff_block(self, x):
            return self.drop_path(self.gamma[1] * super()._ff_block(x))

    return DropPathBlocks


def drop_path_forward(base):
    class DropPathForward(base):
        """The same on the residual of the whole layer, by forward."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.drop_path = DropPath(0.3)

        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            out = super().forward(src, src_mask, src_key_padding_mask, is_causal)
            return src + self.drop_path(out - src)

    return DropPathForward


def own_forward(base):
    class OwnForward(base):
        """Calls the blocks itself, with a scale between."""

        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            x = src
            x = x + 0.5 * self._sa_block(self.norm1(x), src_mask, src_key_padding_mask)
            return x + 0.5 * self._ff_block(self.norm2(x))

    return OwnForward


def rotate(x):
    """Rotary embedding, x (B, H, S, E)."""
    seq_len, dim = x.shape[-2:]
    freqs = torch.exp(torch.arange(0, dim, 2, dtype=x.dtype) * (-math.log(1e4) / dim))
    angles = torch.arange(seq_len, dtype=x.dtype)[:, None] * freqs
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def rotary(base):
    class Rotary(base):
        """Own attention on the stock module's weights."""

        def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
            attn = self.self_attn
            seq_len, batch, width = x.shape
            packed = F.linear(x, attn.in_proj_weight, attn.in_proj_bias)
            q, k, v = packed.view(seq_len, batch, 3, attn.num_heads, -1).permute(2, 1, 3, 0, 4)
            p = attn.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask, p)
            out = out.permute(2, 0, 1, 3).reshape(seq_len, batch, width)
            return self.dropout1(attn.out_proj(out))

    return Rotary


def extra_module(base):
    class ExtraModule(base):
        """A gate beside the stock children, used by forward."""

        def __init__(self, d_model, *args, **kwargs):
            super().__init__(d_model, *args, **kwargs)
            self.gate = nn.Linear(d_model, d_model, dtype=torch.float64)

        def forward(self, src, *args, **kwargs):
            return super().forward(src * self.gate(src).sigmoid(), *args, **kwargs)

    return ExtraModule


class ConditionalNorm(nn.Module):
    """A norm whose shift comes from outside, set before the call."""

    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.LayerNorm(d_model, dtype=torch.float64)
        self.shift = nn.Linear(3, d_model, dtype=torch.float64)
        self.condition = torch.zeros(3, dtype=torch.float64)

    def forward(self, x):
        return self.norm(x) + self.shift(self.condition)


def conditional_norm(base):
    class Conditional(base):
        """As diffusion models have it: both norms take a condition."""

        def __init__(self, d_model, *args, **kwargs):
            super().__init__(d_model, *args, **kwargs)
            self.norm1, self.norm2 = ConditionalNorm(d_model), ConditionalNorm(d_model)

        def forward(self, src, *args, **kwargs):
            for norm in (self.norm1, self.norm2):
                norm.condition = src.mean((0, 1))[:3]
            return super().forward(src, *args, **kwargs)

    return Conditional


def own_defaults(base):
    class OwnDefaults(base):
        """Only other defaults: stays on the fused path."""

        def __init__(self, d_model=8, nhead=2, dim_feedforward=12, norm_first=True, **kwargs):
            kwargs = {"dropout": 0.0, "activation": "gelu", **kwargs}
            super().__init__(d_model, nhead, dim_feedforward, norm_first=norm_first, **kwargs)

    return OwnDefaults


SUBCLASSES = {
    f.__name__: f
    for f in (
        keeps_weights, drop_path_blocks, drop_path_forward, own_forward, rotary, extra_module,
        conditional_norm, own_defaults,
    )
}  # fmt: skip
#: Those whose call of the stock forward the fused path still serves.
SERVED = {"own_defaults", "drop_path_forward", "extra_module"}


def layers(name, policy="full", **kwargs):
    """The subclass over the stock layer and over ours, with equal random parameters."""
    made = []
    for base in (STOCK, FusedRematLayer):
        kwargs = {"dropout": 0.0, "norm_first": True, "dtype": torch.float64, **kwargs}
        torch.manual_seed(0)
        layer = SUBCLASSES[name](base)(8, 2, 12, **kwargs)
        made.append(randomize(layer))
    made[1].policy = policy
    return made


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def seeded(layer, **kwargs):
    torch.manual_seed(0)
    return run(layer, X, X.cos(), **kwargs)


@pytest.mark.parametrize(
    "name, policy, training", pairwise(list(SUBCLASSES), ["full", "none"], [True, False])
)
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_subclasses_compute_what_they_do_over_the_stock_layer(name, policy, training):
    stock, fused = (m.train(training) for m in layers(name, policy))
    for kwargs in (
        {},
        {"src_mask": torch.zeros(5, 5, dtype=torch.float64).masked_fill(CAUSAL, -1)},
    ):
        expected = seeded(stock, **kwargs)
        assert_same(seeded(fused, **kwargs), expected)
        with torch.no_grad():
            torch.manual_seed(0)
            assert_same([fused(X, **kwargs)], expected[:1])
    if name == "keeps_weights":
        torch.testing.assert_close(fused.weights, stock.weights)
        assert fused.weights.shape == (2, 5, 5)
    assert list(fused.state_dict()) == list(stock.state_dict())


@pytest.mark.parametrize("name", sorted(SUBCLASSES.keys() - SERVED))  # those draw other bits
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_subclasses_with_dropout_draw_the_same(name):
    stock, fused = layers(name, dropout=0.3)
    assert_same(seeded(fused), seeded(stock))


@pytest.mark.parametrize("name", SUBCLASSES)
def test_which_subclasses_stay_on_the_fused_path(name):
    _, fused = layers(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fused(X)
    warned = [w.category for w in caught]
    if name in SERVED | {"own_forward"}:  # which calls the submodules itself
        assert warned == []
    else:
        assert warned == [FusedRematWarning] and type(fused).__name__ in str(caught[0].message)


def test_a_subclass_with_other_defaults_saves_memory():
    from fused_remat.report.allocations import SavedBytes

    layer = own_defaults(FusedRematLayer)(dtype=torch.float64)
    assert repr(layer).startswith("OwnDefaults(") and layer.policy == "full"
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(X.clone().requires_grad_())
    assert saved.total < 2 * X.nbytes


@pytest.mark.parametrize("name", SUBCLASSES)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings(
    "ignore::fused_remat.FusedRematWarning", "ignore:enable_nested_tensor", "ignore:The PyTorch API"
)
def test_stacks_of_copies(name, norm_first):
    """nn.TransformerEncoder deep-copies the layer; so do models of their own."""
    for kind in ("encoder", "copies"):
        results = []
        for layer in layers(name, norm_first=norm_first):
            with torch.no_grad():
                layer(X)
            if kind == "encoder":
                model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            else:
                model = nn.Sequential(*(copy.deepcopy(layer) for _ in range(2)))
            assert len(list(model.parameters())) == 2 * len(list(layer.parameters()))
            results.append(seeded(model))
        assert_same(*results)


# Model code that looks at types


class Model(nn.Module):
    def __init__(self, layer, depth=2):
        super().__init__()
        self.embed = nn.Linear(8, 8, dtype=torch.float64)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)

    def forward(self, x):
        return self.norm(self.encoder(self.embed(x)))


def models():
    kwargs = {"dropout": 0.0, "norm_first": True, "activation": nn.GELU(), "dtype": torch.float64}
    return [Model(cls(8, 2, 12, **kwargs)) for cls in (STOCK, FusedRematLayer)]


def strict_init(module):
    """An initialiser that knows every type or raises."""
    generator = torch.Generator().manual_seed(0)
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02, generator=generator)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.MultiheadAttention):
        nn.init.xavier_uniform_(module.in_proj_weight, generator=generator)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(module.weight)
    elif not isinstance(
        module,
        (STOCK, nn.TransformerEncoder, nn.ModuleList, nn.Dropout, nn.GELU, Model),
    ):
        raise TypeError(f"no initialisation for {type(module).__name__}")


def test_initialisers_that_raise_on_unknown_types():
    a, b = models()
    for model in (a, b):
        for module in model.modules():
            strict_init(module)
    assert_same(b.state_dict().values(), a.state_dict().values())
    assert_same(run(b, X), run(a, X))
    assert [type(m).__name__ for m in b.modules()] == [
        "FusedRematLayer" if type(m) is STOCK else type(m).__name__ for m in a.modules()
    ]


def mingpt_groups(model):
    """minGPT's configure_optimizers: every parameter is in exactly one of two groups."""
    decay, no_decay = set(), set()
    for module_name, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            if name.endswith("bias"):
                no_decay.add(full)
            elif isinstance(module, (nn.Linear, nn.MultiheadAttention)):
                decay.add(full)
            elif isinstance(module, nn.LayerNorm):
                no_decay.add(full)
    names = {name for name, _ in model.named_parameters()}
    assert not decay & no_decay and decay | no_decay == names
    params = dict(model.named_parameters())
    return [
        {"params": [params[n] for n in sorted(decay)], "weight_decay": 0.1},
        {"params": [params[n] for n in sorted(no_decay)], "weight_decay": 0.0},
    ]


def test_optimizer_groups_by_module_type():
    a, b = models()
    b.load_state_dict(a.state_dict())
    groups = []
    for model in (a, b):
        optimizer = torch.optim.AdamW(mingpt_groups(model), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        groups.append([len(g["params"]) for g in optimizer.param_groups])
    assert groups[0] == groups[1]
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-6, atol=1e-8)  # Adam divides by tiny gradients


SAFE = [
    FusedRematLayer, nn.MultiheadAttention, nn.Linear, nn.Dropout, nn.LayerNorm, nn.ReLU, F.relu,
    torch.nn.modules.linear.NonDynamicallyQuantizableLinear, set,
]  # fmt: skip


@pytest.mark.parametrize("policy", ["full", "lean"])
def test_whole_module_loads_with_a_list_of_safe_globals(policy):
    layer = FusedRematLayer(8, 2, 12, activation=nn.ReLU(), dtype=torch.float64, policy=policy)
    layer.eval()
    layer(X).sum().backward()
    layer.zero_grad()
    file = io.BytesIO()
    torch.save(layer, file)
    with torch.serialization.safe_globals(SAFE):
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
    assert type(loaded) is FusedRematLayer and loaded.policy == policy and not loaded.training
    assert torch.equal(loaded(X), layer(X))
    stock = io.BytesIO()
    torch.save(STOCK(8, 2, 12, activation=nn.ReLU()), stock)
    file.seek(0), stock.seek(0)
    needed = [set(torch.serialization.get_unsafe_globals_in_checkpoint(f)) for f in (file, stock)]
    ours, theirs = "FusedRematLayer", "TransformerEncoderLayer"
    assert {n.split(".")[-1] for n in needed[0]} - {ours} == {
        n.split(".")[-1] for n in needed[1]
    } - {theirs}


def test_isinstance_and_name_lists():
    layer = FusedRematLayer(8, 2)
    assert isinstance(layer, STOCK) and issubclass(FusedRematLayer, STOCK)
    assert {type(m) for m in layer.modules()} - {FusedRematLayer} == {
        type(m) for m in STOCK(8, 2).modules()
    } - {STOCK}

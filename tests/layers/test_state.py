"""Construction, state, copies and files of the layers, and model code that looks at types."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_bits
from layer_kinds import KINDS, MODELS, TORCH_NN, run
from reference import PARAM_NAMES, X, pair
from torch import nn

from fused_remat import FusedRematLayer, Policy

STOCK = nn.TransformerEncoderLayer


def parameters(call):
    return dict(inspect.signature(call).parameters)


@pytest.mark.parametrize("name", KINDS)
def test_signature_is_the_stock_one_plus_three_keywords(name):
    kind = KINDS[name]
    stock, ours = parameters(kind.stock.__init__), parameters(kind.fused.__init__)
    for option in ("policy", "backend", "accumulate_into"):
        assert ours.pop(option).kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours) == list(stock)
    assert all(ours[n].default == stock[n].default for n in stock)
    if not kind.is_causal:
        forward, expected = parameters(kind.fused.forward), parameters(kind.stock.forward)
        assert [(p.name, p.default) for p in forward.values()] == [
            (p.name, p.default) for p in expected.values()
        ]


@pytest.mark.parametrize("name", KINDS)
def test_initial_parameters_and_children_are_the_stock_layers(name):
    kind, made = KINDS[name], []
    for cls, options in ((kind.stock, {}), (kind.fused, {"policy": "fast"})):
        torch.manual_seed(3)
        made.append(cls(**kind.sizes | kind.options, **options))
    stock, fused = made
    assert list(fused.state_dict()) == list(stock.state_dict())
    assert [(n, type(m)) for n, m in fused.named_children()] == [
        (n, type(m)) for n, m in stock.named_children()
    ]
    assert_bits(stock.parameters(), fused.parameters())
    from_stock = kind.fused.from_layer(stock) if not kind.is_causal else fused
    assert kind.is_causal or from_stock.linear1 is stock.linear1
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert other.policy == "fast" and isinstance(other, kind.fused.stock)
        assert torch.equal(*(m.eval()(*kind.data(torch.float32)[:-1]) for m in (other, fused)))


def test_the_causal_layers_parameters_by_name():
    both = ("q", "k", "v", "proj", "up", "down", "norm1", "norm2")
    more = {"gemma": ("gate", "post1", "post2", "q_norm", "k_norm"), "llama": ("gate",)}
    for name in more:
        names = {f"{module}.weight" for module in (*both, *more[name])}
        assert set(KINDS[name].pair()[1].state_dict()) == names
    assert set(MODELS) > set(more) and set(TORCH_NN).isdisjoint(more)


@pytest.mark.parametrize("dropout", [0, 1.0])
@pytest.mark.parametrize("ff", [0, 5])
def test_unusual_but_accepted_arguments_train(dropout, ff):
    for norm_first in (True, False):
        layer = FusedRematLayer(8, 2, ff, dropout=dropout, norm_first=norm_first)
        x = torch.randn(3, 2, 8, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize(
    ("activation", "flag"),
    [("relu", 1), (F.relu, 1), (nn.ReLU(), 1), ("gelu", 2), (F.gelu, 2), (nn.GELU(), 2),
     (nn.GELU("tanh"), 2), (F.silu, 0), (nn.SiLU(), 0), (torch.tanh, 0)],
)  # fmt: skip
def test_activation_flag_and_child(activation, flag):
    layer = FusedRematLayer(8, 2, activation=activation)
    stock = nn.TransformerEncoderLayer(8, 2, activation=activation)
    assert layer.activation_relu_or_gelu == stock.activation_relu_or_gelu == flag
    assert [n for n, _ in layer.named_children()] == [n for n, _ in stock.named_children()]


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_parameters_children_and_attributes(bias):
    stock, fused = pair(16, 4, 32, bias=bias)
    names = [n for n in PARAM_NAMES if bias or not n.endswith("bias")]
    assert [n for n, _ in fused.named_parameters()] == names
    assert list(fused.state_dict()) == list(stock.state_dict())
    assert not list(fused.buffers())
    fused.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(fused.state_dict(), strict=True)
    assert [(n, type(m)) for n, m in fused.named_children()] == [
        (n, type(m)) for n, m in stock.named_children()
    ]
    assert type(fused.self_attn.out_proj) is type(stock.self_attn.out_proj)
    assert fused.__constants__ == stock.__constants__
    for name in ("embed_dim", "num_heads", "head_dim", "dropout", "batch_first", "bias_k", "bias_v",
                 "_qkv_same_embed_dim"):  # fmt: skip
        assert getattr(fused.self_attn, name) == getattr(stock.self_attn, name)


def test_setstate_restores_activation_and_policy():
    layer = FusedRematLayer(8, 2, policy="lean")
    state = layer.__dict__.copy()
    del state["activation"]
    old = FusedRematLayer.__new__(FusedRematLayer)
    old.__setstate__(state)
    assert old.activation is F.relu and old.policy == "lean"
    stock_state = nn.TransformerEncoderLayer(8, 2).__dict__.copy()
    from_stock = FusedRematLayer.__new__(FusedRematLayer)
    from_stock.__setstate__(stock_state)
    assert (from_stock.policy, from_stock.backend) == ("full", "auto")


def test_copies_and_files_keep_values_policy_and_gradients():
    layer = FusedRematLayer(8, 2, 16, dropout=0.0, policy=Policy(save={"attn"}))
    x = torch.randn(5, 2, 8)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(file, weights_only=False),
    ]
    for other in copies:
        assert other.policy == layer.policy and torch.equal(other(x), expected)
        other(x).sum().backward()
    assert all(p.grad is None for p in layer.parameters())


def test_load_with_assign_and_meta_device():
    layer = FusedRematLayer(8, 2, 16, dropout=0.0)
    x = torch.randn(5, 2, 8)
    with torch.device("meta"):
        other = FusedRematLayer(8, 2, 16, dropout=0.0)
    assert other.linear1.weight.device.type == "meta"
    assert other(torch.empty(5, 2, 8, device="meta")).shape == x.shape
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other(x), layer(x))
    third = FusedRematLayer(8, 2, 16, dropout=0.0, device="meta").to_empty(device="cpu")
    third.load_state_dict(layer.state_dict())
    assert torch.equal(third(x), layer(x))


def test_policy_and_backend_can_be_set_and_are_shown():
    layer = FusedRematLayer(8, 2)
    layer.policy = "fast"
    assert "policy='fast'" in repr(layer) and layer.policy == "fast"
    with pytest.raises(ValueError, match="slow"):
        layer.policy = "slow"
    with pytest.raises(ValueError, match="numpy"):
        layer.backend = "numpy"
    assert layer.policy == "fast"


def test_from_layer_shares_parameters_mode_and_hooks():
    stock = nn.TransformerEncoderLayer(8, 2, 16).eval()
    calls = []
    stock.register_forward_hook(lambda *a: calls.append(1))
    fused = FusedRematLayer.from_layer(stock, policy="lean")
    assert type(stock) is nn.TransformerEncoderLayer and fused.policy == "lean"
    assert all(a is b for a, b in zip(stock.parameters(), fused.parameters(), strict=True))
    assert not fused.training
    fused(torch.randn(3, 2, 8))
    assert calls == [1]
    fused.train()
    assert not stock.training  # a module of its own, though its children are shared


def test_a_layer_without_biases_is_fused():
    layer = FusedRematLayer(8, 2, 12, bias=False)
    assert layer.why_not_fused(torch.zeros(3, 2, 8, requires_grad=True)) is None


def test_from_layer_makes_a_module_of_its_own():
    stock = nn.TransformerEncoderLayer(8, 2, 12)
    fused = FusedRematLayer.from_layer(stock)
    fused.norm1 = nn.Identity()
    fused.register_forward_hook(lambda *_: None)
    assert type(stock.norm1) is nn.LayerNorm and not stock._forward_hooks


# --- model code that looks at types


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
    assert_bits(b.state_dict().values(), a.state_dict().values())
    for p, q in zip(run(b, X, X.cos()), run(a, X, X.cos()), strict=True):
        torch.testing.assert_close(p, q)
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

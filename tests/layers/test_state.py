"""Construction, state, copies and files of the layers."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from accuracy import assert_bits
from layer_kinds import KINDS, MODELS, TORCH_NN
from reference import X
from torch import nn

from fused_remat import FusedRematLayer

STOCK = nn.TransformerEncoderLayer


def parameters(call):
    return dict(inspect.signature(call).parameters)


@pytest.mark.parametrize("name", KINDS)
def test_signature_is_the_stock_one_plus_three_keywords(name):
    kind = KINDS[name]
    stock, ours = parameters(kind.stock.__init__), parameters(kind.fused.__init__)
    for option in ("policy", "backend", "accumulate_into"):
        assert ours.pop(option).kind is inspect.Parameter.KEYWORD_ONLY
        stock.pop(option, None)
    assert list(ours) == list(stock)
    assert all(ours[n].default == stock[n].default for n in stock)
    if not kind.is_causal:
        forward, expected = parameters(kind.fused.forward), parameters(kind.stock.forward)
        assert [(p.name, p.default) for p in forward.values()] == [
            (p.name, p.default) for p in expected.values()
        ]


def saved(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("name", KINDS)
def test_initial_parameters_and_children_are_the_stock_layers(name):
    """So that code which looks at types, as initialisers and optimizers' groups do, goes on."""
    kind, made = KINDS[name], []
    for cls, options in ((kind.stock, {}), (kind.fused, {"policy": "fast"})):
        torch.manual_seed(3)
        made.append(cls(**kind.sizes | kind.options, **options))
    stock, fused = made
    assert list(fused.state_dict()) == list(stock.state_dict())
    assert_bits(stock.parameters(), fused.parameters())
    (_, *expected), (mine, *within) = ([(n, type(m)) for n, m in m.named_modules()] for m in made)
    assert within == expected and mine == ("", kind.fused) and isinstance(fused, kind.fused.stock)
    fused.eval()
    x = kind.data(torch.float32)[:-1]
    copies = copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))
    for other in (*copies, torch.load(saved(fused), weights_only=False)):
        assert other.policy == "fast" and repr(other) == repr(fused) and not other.training
        assert torch.equal(other(*x), fused(*x))
        other.train()(*x).sum().backward()
    assert all(p.grad is None for p in fused.parameters())


def test_the_causal_layers_parameters_by_name():
    both = ("q", "k", "v", "proj", "up", "down", "norm1", "norm2")
    more = {"gemma": ("gate", "post1", "post2", "q_norm", "k_norm"), "llama": ("gate",)}
    for name in more:
        names = {f"{module}.weight" for module in (*both, *more[name])}
        assert set(KINDS[name].pair()[1].state_dict()) == names
    assert set(MODELS) > set(more) and set(TORCH_NN).isdisjoint(more)


def test_moves_and_the_meta_device():
    layer = FusedRematLayer(8, 2, 16, dropout=0.0, dtype=torch.float64)
    expected = layer(X)
    with torch.device("meta"):
        other = FusedRematLayer(8, 2, 16, dropout=0.0, dtype=torch.float64)
    assert all(p.is_meta for p in other.parameters())
    assert other(torch.empty_like(X, device="meta")).shape == X.shape
    other.load_state_dict(layer.state_dict(), assign=True)
    third = FusedRematLayer(8, 2, 16, dropout=0.0, device="meta", dtype=torch.float64)
    third.to_empty(device="cpu").load_state_dict(layer.state_dict())
    for same in (other, third, layer.share_memory()):
        assert torch.equal(same(X), expected)


def test_from_layer_shares_parameters_and_is_a_module_of_its_own():
    stock, calls = STOCK(8, 2, 16).eval(), []
    stock.register_forward_hook(lambda *a: calls.append(1))
    fused = FusedRematLayer.from_layer(stock, policy="lean")
    assert type(stock) is STOCK and fused.policy == "lean"
    assert all(a is b for a, b in zip(stock.parameters(), fused.parameters(), strict=True))
    assert fused.linear1 is stock.linear1 and not fused.training
    fused(torch.randn(3, 2, 8))
    assert calls == [1]
    fused.train()
    fused.norm1 = nn.Identity()
    fused.register_forward_hook(lambda *_: None)
    assert not stock.training and type(stock.norm1) is nn.LayerNorm
    assert len(stock._forward_hooks) == 1

"""Construction, state and surgery-free life of the layer: items 1 to 8 of the drop-in contract."""

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from reference import PARAM_NAMES, pair
from torch import nn

from fused_remat import FusedRematLayer, Policy


def assert_both_raise(error, *args, **kwargs):
    with pytest.raises(error):
        nn.TransformerEncoderLayer(*args, **kwargs)
    with pytest.raises(error):
        FusedRematLayer(*args, **kwargs)


def test_signature_is_the_stock_one_plus_three_keywords():
    stock = inspect.signature(nn.TransformerEncoderLayer.__init__).parameters
    ours = dict(inspect.signature(FusedRematLayer.__init__).parameters)
    for name in ("policy", "backend", "accumulate_into"):
        assert ours.pop(name).kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours) == list(stock)
    assert all(ours[n].default == stock[n].default for n in stock)
    forward = inspect.signature(FusedRematLayer.forward).parameters
    expected = inspect.signature(nn.TransformerEncoderLayer.forward).parameters
    assert [(p.name, p.default) for p in forward.values()] == [
        (p.name, p.default) for p in expected.values()
    ]


@pytest.mark.parametrize(
    ("error", "args", "kwargs"),
    [
        (ValueError, (0, 1), {}),
        (ValueError, (8, 0), {}),
        (ValueError, (8, -2), {}),
        (ValueError, (8, 2), {"dropout": 1.5}),
        (ValueError, (8, 2), {"dropout": -0.1}),
        (AssertionError, (8, 3), {}),
        (RuntimeError, (8, 2), {"activation": "silu"}),
        (RuntimeError, (8, 2, -1), {}),
        (RuntimeError, (8, 2), {"dtype": torch.int32}),
        (TypeError, (8.0, 2), {}),
        (TypeError, (8, 2), {"nonsense": 1}),
    ],
)
def test_bad_constructor_arguments_raise_what_pytorch_raises(error, args, kwargs):
    assert_both_raise(error, *args, **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "word"),
    [({"policy": "ful"}, "full"), ({"policy": Policy(save={"sum2"})}, "norm1"),
     ({"backend": "cuda"}, "eager")],
)  # fmt: skip
def test_unknown_policy_or_backend_raises_and_lists_the_valid_ones(kwargs, word):
    with pytest.raises(ValueError, match=word) as info:
        FusedRematLayer(8, 2, norm_first=True, **kwargs)
    bad = next(iter(kwargs.values()))
    assert (next(iter(bad.save)) if isinstance(bad, Policy) else bad) in str(info.value)


@pytest.mark.parametrize("bad", [3, None, {"attn"}])
def test_a_policy_of_another_type_raises_type_error(bad):
    with pytest.raises(TypeError, match="Policy"):
        FusedRematLayer(8, 2, policy=bad)


def test_policy_takes_names_not_a_string():
    with pytest.raises(TypeError, match="attn"):
        Policy(save="attn")
    with pytest.raises(TypeError, match="3"):
        Policy(save=[3])
    assert Policy(save=["attn", "attn"]) == Policy(save={"attn"})


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


def test_same_seed_same_initial_parameters():
    torch.manual_seed(3)
    stock = nn.TransformerEncoderLayer(16, 4)
    torch.manual_seed(3)
    fused = FusedRematLayer(16, 4)
    for a, b in zip(stock.parameters(), fused.parameters(), strict=True):
        assert torch.equal(a, b)


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

    class Mine(nn.TransformerEncoderLayer):
        pass

    with pytest.raises(TypeError, match="Mine"):
        FusedRematLayer.from_layer(Mine(8, 2))

"""convert, revert and set_policy on existing models."""

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch
from accuracy import assert_bits, assert_close
from layer_kinds import run as run_layer
from reference import randomize, run
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import (
    FusedRematDecoderLayer,
    FusedRematLayer,
    FusedRematWarning,
    Policy,
    conversion,
    convert,
    explain,
    memory_report,
    plan,
    revert,
    set_policy,
)

FP64, STOCK = torch.float64, nn.TransformerEncoderLayer


def encoder(layers=4, **kwargs):
    torch.manual_seed(0)
    layer = STOCK(16, 4, 32, dropout=0.0, batch_first=True, **kwargs)
    return randomize(nn.TransformerEncoder(layer, layers))


def kinds(model):
    return [type(m) for m in model.layers]


def test_convert_in_place_keeps_identity_mode_hooks_and_results():
    model, calls = encoder(dtype=FP64), []
    layers, params = list(model.layers), list(model.parameters())
    before = [set(m.__dict__) for m in layers]
    model.layers[1].register_forward_hook(lambda *a: calls.append(1))
    model.layers[2].eval()
    x = torch.randn(2, 5, 16, dtype=FP64)
    expected = run(model, x)
    assert convert(model, policy="lean") is model
    assert kinds(model) == [FusedRematLayer] * 4
    assert all(a is b for a, b in zip(layers, model.layers, strict=True))
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert [m.training for m in model.layers] == [True, True, False, True]
    assert all(m.policy == "lean" for m in model.layers)
    calls.clear()
    assert_close(run(model, x), expected)
    assert calls == [1]
    assert revert(model) is model and kinds(model) == [STOCK] * 4
    assert [set(m.__dict__) for m in model.layers] == before
    assert_bits(run(model, x), expected)


@pytest.mark.parametrize(
    ("every", "expected"), [(1, "FFFF"), (2, "F.F."), (3, "F..F"), (9, "F...")]
)
def test_every(every, expected):
    model = convert(encoder(), every=every)
    assert "".join("F" if k is FusedRematLayer else "." for k in kinds(model)) == expected


@pytest.mark.parametrize("every", [0, -1, 1.0, True, "2"])
def test_bad_every_raises(every):
    with pytest.raises(ValueError, match="every"):
        convert(encoder(), every=every)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_root_and_shared_layers_and_nested_models():
    layer = STOCK(16, 4)
    assert type(convert(layer)) is FusedRematLayer and revert(layer) is layer
    assert type(layer) is STOCK
    shared = convert(nn.Sequential(layer, nn.Sequential(nn.Linear(16, 16), layer)))
    assert type(shared[0]) is FusedRematLayer and shared[1][1] is shared[0]
    full = convert(nn.Transformer(16, 4, 2, 2, 32))
    assert kinds(full.encoder) == [FusedRematLayer] * 2
    assert kinds(full.decoder) == [FusedRematDecoderLayer] * 2


def test_a_whole_transformer_trains_as_the_stock_one():
    """Encoder and decoder, masks and padding as `nn.Transformer` hands them on."""
    options = {"dropout": 0.0, "batch_first": True, "dtype": FP64}
    stock = randomize(nn.Transformer(16, 4, 1, 2, 32, **options))
    fused = convert(copy.deepcopy(stock), policy="lean")
    set_policy(fused, "decoder.layers.1", "fast")
    assert [layer.policy for layer in fused.decoder.layers] == ["lean", "fast"]
    src, tgt, dy = (torch.randn(3, n, 16, dtype=FP64) for n in (9, 6, 6))
    padding = torch.arange(9).expand(3, 9) > torch.tensor([[8], [6], [4]])
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    given = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding, "tgt_mask": later}
    assert_close(*(run_layer(model, src, tgt, dy, **given) for model in (fused, stock)))
    assert kinds(revert(fused).decoder) == [nn.TransformerDecoderLayer] * 2


def test_what_cannot_be_converted_raises():
    with pytest.raises(ValueError, match="4 are fused already"):
        convert(convert(encoder()), "lean")
    for model in (nn.Linear(2, 2), convert(STOCK(8, 2))):
        with pytest.raises(ValueError, match=type(model).__name__):
            convert(model)


class Block(nn.Sequential):
    pass


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)


def test_a_subclass_of_a_fused_layer_whose_own_forward_rebuilds_nothing_is_read():
    class Mine(FusedRematLayer):
        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            h = self.norm1(src)
            src = src + self.self_attn(h, h, h, need_weights=False)[0]
            return src + self.linear2(torch.relu(self.linear1(self.norm2(src))))

    options = {"dropout": 0.0, "batch_first": True, "dtype": FP64}
    stock = randomize(nn.Sequential(*[Mine(16, 2, 32, **options) for _ in range(2)]))
    fused, x = convert(copy.deepcopy(stock)), torch.randn(5, 3, 16, dtype=FP64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        found = run(fused, x)
    with pytest.warns(FusedRematWarning, match="Mine saves no memory: .* convert traces it"):
        assert_close(found, run(stock, x))
    assert [(kind.name, kind.state) for kind in conversion(fused)] == [("Mine", "converted")]
    assert type(revert(fused)[0]) is Mine


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "convert; a layer is"),
        (nn.ModuleList([nn.Sequential(Block(), Block(), nn.ReLU()), Block()]), "3 x Block; a la"),
        (
            nn.Sequential(nn.BatchNorm1d(8), nn.ModuleList([Normed()])),
            r"no layer to convert: 1\.0\.bn is torch.nn.BatchNorm1d, whose running .* use a norm",
        ),
    ],
)
def test_the_reason_that_a_model_has_no_layers_to_convert(model, reason):
    with pytest.raises(ValueError, match=reason):
        convert(model)


@pytest.mark.parametrize("kwargs", [{"policy": "ful"}, {"backend": "cuda"},
                                    {"policy": Policy(save={"sum2"})}])  # fmt: skip
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_bad_policy_or_backend_changes_nothing(kwargs):
    model = encoder(norm_first=True)
    before = [m.__dict__.keys() for m in model.layers]
    with pytest.raises(ValueError):
        convert(model, **kwargs)
    assert kinds(model) == [STOCK] * 4
    assert [m.__dict__.keys() for m in model.layers] == before


def test_set_policy_by_pattern():
    model = convert(encoder())
    set_policy(model, "layers.[01]", "fast")
    set_policy(model, "*.3", Policy(save={"qkv"}))
    assert [m.policy for m in model.layers] == ["fast", "fast", "full", Policy(save={"qkv"})]
    with pytest.raises(ValueError, match=r"layers\.0"):
        set_policy(model, "decoder.*", "lean")
    with pytest.raises(ValueError, match="presets"):
        set_policy(model, "*", "lea")


def test_conversion_tells_what_training_calls_ran_as():
    model, x = convert(encoder(4), every=2), torch.randn(2, 5, 16)
    said = conversion(model)
    assert [(kind.state, kind.count) for kind in said] == [("not called", 2), ("stock", 2)]
    model(x).sum().backward()
    assert "converted 2 × FusedRematLayer: 2 fused training calls\n" in str(conversion(model))
    hook = model.layers[2].linear1.register_forward_hook(lambda *_: None)
    with pytest.warns(FusedRematWarning, match="linear1 has hooks"):
        model(x).sum().backward()
    converted, other, _ = conversion(model)
    assert converted.layers == ("layers.0",) and converted.calls == (("block", "", 2),)
    assert (other.state, other.layers) == ("checkpointed", ("layers.2",))
    assert other.reason == "linear1 has hooks"
    assert other.calls == (("block", "", 1), ("checkpoint", "linear1 has hooks", 1))
    counted = "(layers.2): 1 fused training call, 1 checkpointed (linear1 has hooks)"
    assert str(other) == f"checkpointed 1 × FusedRematLayer {counted}"
    set_policy(model, "layers.2", "none")
    with pytest.warns(FusedRematWarning, match="keeps all activations"):
        model(x).sum().backward()
    assert [kind.state for kind in conversion(model)] == ["converted", "plain", "stock"]
    hook.remove()
    model(x).sum().backward()
    assert [kind.state for kind in conversion(model)] == ["converted", "stock"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_conversion_counts_a_call_under_an_outer_checkpoint_once(use_reentrant):
    model, x = convert(encoder(1)), torch.randn(2, 5, 16, requires_grad=True)
    for _ in range(2):
        checkpoint(model.layers[0], x, use_reentrant=use_reentrant).sum().backward()
    assert conversion(model)[0].calls == (("block", "", 2),)


def test_reports_are_no_training_calls():
    model, x = convert(encoder(2), policy="lean"), torch.randn(2, 5, 16)
    for _ in range(2):
        before = str(conversion(model))
        for report in (explain, memory_report, plan):
            report(model, x)
        assert str(conversion(model)) == before
        model(x).sum().backward()
    assert conversion(model)[0].calls == (("block", "", 4),)
    assert [layer.policy for layer in model.layers] == ["lean", "lean"]


class Checkpointing(nn.Module):
    """Layers, and a head, that the model runs under checkpointing as diffusers does."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = encoder(2, dtype=FP64).layers, nn.Linear(16, 16, dtype=FP64)
        self._gradient_checkpointing_func = self.checkpoint
        self.around = []

    def checkpoint(self, part, *args):
        self.around.append(part)
        return checkpoint(part, *args, use_reentrant=False)

    def forward(self, x):
        for layer in self.layers:
            x = self._gradient_checkpointing_func(layer, x)
        return self._gradient_checkpointing_func(self.head, x)


def test_checkpointing_around_layers_leaves_out_fused_ones():
    stock = Checkpointing()
    model, x = convert(copy.deepcopy(stock)), torch.randn(2, 5, 16, dtype=FP64)
    assert_close(run(model, x), run(stock, x))
    assert stock.around == [*stock.layers, stock.head] and model.around == [model.head]
    assert [kind.calls[0].number for kind in conversion(model)] == [2]
    revert(model).around.clear()
    assert model._gradient_checkpointing_func == model.checkpoint
    run(model, x)
    assert model.around == [*model.layers, model.head]


class Enabled(Checkpointing):
    """As models of diffusers do, it replaces the function when checkpointing is enabled."""

    def enable_gradient_checkpointing(self):
        self._gradient_checkpointing_func = self.checkpoint
        self.around.clear()
        return self


def test_checkpointing_enabled_after_conversion_leaves_out_fused_layers():
    model, x = convert(Enabled()), torch.randn(2, 5, 16, dtype=FP64)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert one.enable_gradient_checkpointing() is one
        run(one, x)
        assert one.around == [one.head]
    name = "enable_gradient_checkpointing"
    assert name in vars(model) and name not in vars(revert(model))
    model.enable_gradient_checkpointing = True  # a user's own
    assert convert(model).enable_gradient_checkpointing is True
    assert revert(model).enable_gradient_checkpointing is True


def test_a_converted_model_is_freed_at_once():
    class Model(nn.Sequential):
        def enable_gradient_checkpointing(self):
            raise NotImplementedError

    model = convert(Model(*encoder(2).layers))
    ref = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert ref() is None
    finally:
        gc.enable()

"""convert, revert and set_policy on existing models."""

import copy

import pytest
import torch
from accuracy import assert_bits
from reference import randomize, run
from torch import nn

from fused_remat import FusedRematDecoderLayer, FusedRematLayer, Policy, convert, revert, set_policy


def encoder(layers=4, **kwargs):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **kwargs)
    return randomize(nn.TransformerEncoder(layer, layers))


def kinds(model):
    return [type(m) for m in model.layers]


def test_convert_in_place_keeps_identity_mode_hooks_and_results():
    model = encoder()
    layers, params = list(model.layers), list(model.parameters())
    calls = []
    model.layers[1].register_forward_hook(lambda *a: calls.append(1))
    model.layers[2].eval()
    x = torch.randn(2, 5, 16)
    expected = run(model, x)
    optimizer = torch.optim.Adam(model.parameters())
    assert convert(model, policy="lean") is model
    assert kinds(model) == [FusedRematLayer] * 4
    assert all(a is b for a, b in zip(layers, model.layers, strict=True))
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert [m.training for m in model.layers] == [True, True, False, True]
    assert all(m.policy == "lean" for m in model.layers)
    calls.clear()
    for a, b in zip(run(model, x), expected, strict=True):
        # float32 through four layers, other order of summation
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert calls == [1]
    model(x).sum().backward()
    optimizer.step()


def test_revert_undoes_convert_exactly():
    model = encoder()
    before = [dict(m.__dict__) for m in model.layers]
    x = torch.randn(2, 5, 16)
    expected = run(model, x)
    revert(convert(model, policy=Policy(save={"attn"})))
    assert kinds(model) == [nn.TransformerEncoderLayer] * 4
    assert [m.__dict__.keys() for m in model.layers] == [d.keys() for d in before]
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


def test_root_and_shared_layers_and_nested_models():
    layer = nn.TransformerEncoderLayer(16, 4)
    assert type(convert(layer)) is FusedRematLayer and isinstance(revert(layer), nn.Module)
    assert type(layer) is nn.TransformerEncoderLayer
    shared = nn.Sequential(layer, nn.Sequential(nn.Linear(16, 16), layer))
    convert(shared)
    assert type(shared[0]) is FusedRematLayer and shared[1][1] is shared[0]
    full = nn.Transformer(16, 4, 2, 2, 32)
    convert(full)
    assert kinds(full.encoder) == [FusedRematLayer] * 2
    assert kinds(full.decoder) == [FusedRematDecoderLayer] * 2


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_a_whole_transformer_trains_as_the_stock_one(norm_first):
    """Encoder and decoder, masks and padding as `nn.Transformer` hands them on."""
    torch.manual_seed(0)
    stock = randomize(
        nn.Transformer(
            16, 4, 1, 2, 32, dropout=0.0, batch_first=True, norm_first=norm_first
        ).double()
    )
    fused = convert(copy.deepcopy(stock), policy="lean")
    set_policy(fused, "decoder.layers.1", "fast")
    assert [layer.policy for layer in fused.decoder.layers] == ["lean", "fast"]
    src, tgt, goal = (torch.randn(3, n, 16, dtype=torch.float64) for n in (9, 6, 6))
    padding = torch.arange(9).expand(3, 9) > torch.tensor([[8], [6], [4]])
    kwargs = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64),
        "src_key_padding_mask": padding, "memory_key_padding_mask": padding,
    }  # fmt: skip
    losses = []
    for model in (stock, fused):
        optimizer, losses_of = torch.optim.Adam(model.parameters(), 1e-2), []
        for _ in range(4):
            optimizer.zero_grad()
            loss = (model(src, tgt, **kwargs) - goal).square().mean()
            loss.backward()
            optimizer.step()
            losses_of.append(loss.item())
        losses.append(losses_of)
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)  # float64, other order of sums
    assert losses[0][-1] < losses[0][0]
    revert(fused)
    assert kinds(fused.decoder) == [nn.TransformerDecoderLayer] * 2


def test_converting_twice_says_so():
    with pytest.raises(ValueError, match="4 are fused already"):
        convert(convert(encoder()), "lean")


def test_nothing_to_convert_raises():
    class Mine(nn.TransformerEncoderLayer):
        pass

    for model in (nn.Linear(2, 2), Mine(8, 2), convert(nn.TransformerEncoderLayer(8, 2))):
        with pytest.raises(ValueError, match=type(model).__name__):
            convert(model)


@pytest.mark.parametrize("kwargs", [{"policy": "ful"}, {"backend": "cuda"},
                                    {"policy": Policy(save={"sum2"})}])  # fmt: skip
def test_a_bad_policy_or_backend_changes_nothing(kwargs):
    model = encoder(norm_first=True)
    before = [m.__dict__.keys() for m in model.layers]
    with pytest.raises(ValueError):
        convert(model, **kwargs)
    assert kinds(model) == [nn.TransformerEncoderLayer] * 4
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


def test_the_encoder_around_converted_layers_still_takes_its_nested_path():
    model = encoder().eval()
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        convert(model)
        got = model(x, src_key_padding_mask=padding)
    assert torch.equal(got, expected) and not got[1, 3:].any()

"""Dropout of the layers: masks by their definition, each submodule's own, one draw for a call."""

import itertools

import pytest
import torch
from accuracy import assert_bits, assert_close
from layer_kinds import KINDS, TORCH_NN, run
from reference import EXACT_PRESETS, masked_encoder, pair
from torch import nn

from fused_remat import FusedRematDecoderLayer, FusedRematLayer, random

SITES = {
    "encoder": ("self_attn", "dropout1", "dropout", "dropout2"),
    "decoder": ("self_attn", "dropout1", "multihead_attn", "dropout2", "dropout", "dropout3"),
}
PRESETS = pytest.mark.parametrize("policy", EXACT_PRESETS)


def seed_of(manual_seed):
    """The seed that the next call draws after `torch.manual_seed(manual_seed)`."""
    torch.manual_seed(manual_seed)
    seed = random.draw_seed(torch.device("cpu"))
    torch.manual_seed(manual_seed)
    return seed


def state_after_a_draw(manual_seed):
    torch.manual_seed(manual_seed)
    random.draw_seed(torch.device("cpu"))
    return torch.get_rng_state()


def set_p(layer, site, p):
    """An attention's own number, or that of a dropout module."""
    module = layer.get_submodule(site)
    setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", p)


def expected_of(kind, layer, tensors, seed):
    *inputs, dy = tensors
    leaves = [t.clone().requires_grad_() for t in inputs]
    y = kind.masked(layer, leaves, seed)
    return [y.detach(), *torch.autograd.grad(y, [*leaves, *layer.parameters()], dy)]


@pytest.mark.parametrize("name", KINDS)
@PRESETS
@pytest.mark.parametrize("limit", [4, 512])
def test_forward_and_backward_use_the_masks_of_the_definition(name, policy, limit, monkeypatch):
    """Against plain autograd over explicit masks: any other mask anywhere would show."""
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", limit)
    monkeypatch.setattr("fused_remat.steps.attention_rows._BLOCK", 1)
    kind = KINDS[name]
    _, fused = kind.pair(policy, dropout=0.3, dtype=torch.float64)
    if kind.is_causal:
        fused.attention_dropout = 0.1
    for i, site in enumerate(SITES.get(name.split(",")[0], ())):
        set_p(fused, site, 0.1 * (i + 1))  # each rules its own
    seed, tensors = seed_of(11), kind.data()
    got = run(fused, *tensors)
    assert torch.equal(torch.get_rng_state(), state_after_a_draw(11))
    assert_close(got, expected_of(kind, fused, tensors, seed))


@pytest.mark.parametrize("name", TORCH_NN)
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_do_not_depend_on_the_layout(name, batch_first):
    kind = KINDS[name]
    _, fused = kind.pair(dropout=0.3, batch_first=batch_first, dtype=torch.float64)
    *inputs, _ = kind.data()
    y = kind.masked(fused, inputs, seed_of(3))
    z = fused(*(t if batch_first else t.transpose(0, 1) for t in inputs))
    torch.testing.assert_close(z if batch_first else z.transpose(0, 1), y)


@PRESETS
def test_same_seed_same_result_and_another_seed_another(policy):
    _, fused = pair(16, 4, 32, dropout=0.1, policy=policy)
    x, results = torch.randn(9, 2, 16), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(fused, x, torch.ones_like(x)))
    assert_bits(results[0], results[1])
    assert not torch.equal(results[0][0], results[2][0])
    assert not torch.equal(fused(x), fused(x))


@PRESETS
def test_random_state_advances_once_per_call_and_not_in_backward(policy):
    _, fused = pair(16, 4, 32, dropout=0.1, policy=policy)
    x, once = torch.randn(9, 2, 16, requires_grad=True), state_after_a_draw(5)
    torch.manual_seed(5)
    y = fused(x)
    assert torch.equal(torch.get_rng_state(), once)
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), once)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_nothing_is_drawn_or_dropped_in_eval_or_at_p_zero(name, dropout):
    kind = KINDS[name]
    stock, fused = kind.pair(dropout=dropout, dtype=torch.float64)
    if dropout:
        stock.eval(), fused.eval()
    state = torch.get_rng_state()
    assert_close(run(fused, *kind.data()), run(stock, *kind.data()))
    with torch.no_grad():
        torch.testing.assert_close(fused(*kind.data()[:-1]), stock(*kind.data()[:-1]))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("site", "how"),
    [
        (site, how)
        for site in SITES["encoder"]
        for how in ("p", "eval", *(["identity"] if site != "self_attn" else []))
    ],
)
def test_every_submodule_rules_its_own_dropout(site, how):
    """One site off at a time, by its own p, its own training flag, or replaced by Identity."""
    kind = TORCH_NN["encoder, post-norm"]
    reference, fused = kind.pair(dropout=0.3, dtype=torch.float64)
    if how == "p":
        set_p(fused, site, 0.0)
    elif how == "eval":
        getattr(fused, site).eval()
    else:
        setattr(fused, site, nn.Identity())
    set_p(reference, site, 0.0)
    x, _ = kind.data()
    seed = seed_of(2)
    torch.testing.assert_close(fused(x), masked_encoder(reference, x, seed))


def applied_masks(layer, x, sites):
    """The residuals' masks read off the layer: weights that let one site through at a time."""
    applied, inputs = {}, (x, x) if isinstance(layer, FusedRematDecoderLayer) else (x,)
    for p in layer.parameters():
        p.zero_()
    for site, weights in sites.items():
        weights.bias.fill_(1.0)
        torch.manual_seed(4)
        applied[site] = (layer(*inputs) - x).flatten()
        weights.bias.zero_()
    layer.linear1.bias.fill_(1.0)
    layer.linear2.weight.copy_(torch.eye(x.shape[-1]))
    (layer.dropout3 if len(inputs) == 2 else layer.dropout2).p = 0.0
    torch.manual_seed(4)
    applied["dropout"] = (layer(*inputs) - x).flatten()
    return applied


@pytest.mark.parametrize("cls", [FusedRematLayer, FusedRematDecoderLayer])
@torch.no_grad()
def test_rates_and_independence_of_the_masks_as_applied(cls):
    layer = cls(32, 1, 32, dropout=0.25, batch_first=True, norm_first=True)
    out = layer.self_attn.out_proj
    sites = {"dropout1": out, "dropout2": layer.linear2}
    if cls is FusedRematDecoderLayer:
        cross = layer.multihead_attn.out_proj
        sites = {"dropout1": out, "dropout2": cross, "dropout3": layer.linear2}
    applied = applied_masks(layer, torch.randn(64, 16, 32), sites)
    for site, values in applied.items():
        kept = values > 0.5
        rate = kept.float().mean().item()  # within five standard deviations
        assert abs(rate - 0.75) < 5 * (0.75 * 0.25 / kept.numel()) ** 0.5, site
        torch.testing.assert_close(values[kept], torch.full_like(values[kept], 1 / 0.75))
    for a, b in itertools.combinations(applied.values(), 2):
        product = ((a > 0.5).float() - 0.75) * ((b > 0.5).float() - 0.75) / (0.75 * 0.25)
        assert abs(product.mean().item()) * product.numel() ** 0.5 < 5


def test_attention_dropout_is_applied_to_the_probabilities():
    """64 keys of equal score whose values are unit vectors: the output shows every probability."""
    layer = FusedRematLayer(64, 1, 8, dropout=0.0, batch_first=True, norm_first=True)
    layer.self_attn.dropout = 0.25
    x = torch.eye(64)[None].repeat(8, 1, 1)
    normed = nn.functional.layer_norm(x[0], (64,))
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.norm1.weight.fill_(1.0)
        layer.self_attn.in_proj_weight[128:].copy_(torch.eye(64) / (normed[0, 0] - normed[0, 1]))
        layer.self_attn.in_proj_bias[128:].fill_(-normed[0, 1] / (normed[0, 0] - normed[0, 1]))
        layer.self_attn.out_proj.weight.copy_(torch.eye(64))
    probs = (layer(x) - x) * 64
    survivors = probs > 0.5
    # float32, after a subtraction and times 64
    torch.testing.assert_close(probs, survivors.float() / 0.75, atol=1e-4, rtol=1e-4)
    assert abs(survivors.float().mean().item() - 0.75) < 5 * (0.1875 / probs.numel()) ** 0.5


def test_no_grad_in_training_mode_drops_the_same():
    _, fused = pair(16, 4, 32, dropout=0.1)
    x = torch.randn(9, 2, 16)
    assert fused.why_not_fused(x) is None
    torch.manual_seed(1)
    with torch.no_grad():
        assert fused.why_not_fused(x) is None
        a = fused(x)
        assert not torch.equal(a, fused(x))
    torch.manual_seed(1)
    assert torch.equal(a, fused(x)) and not a.requires_grad

"""Dropout of the layer: items 17 to 19 of the drop-in contract, and what no draw can show."""

import itertools

import pytest
import torch
from reference import EXACT_PRESETS, masked_encoder, pair, run
from torch import nn

from fused_remat import FusedRematLayer, random


def seed_of(manual_seed):
    """The seed that the next call draws after `torch.manual_seed(manual_seed)`."""
    torch.manual_seed(manual_seed)
    seed = random.draw_seed(torch.device("cpu"))
    torch.manual_seed(manual_seed)
    return seed


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("policy", EXACT_PRESETS)
@pytest.mark.parametrize("limit", [4, 512])
def test_forward_and_backward_use_the_masks_of_the_definition(
    norm_first, policy, limit, monkeypatch
):
    """Against plain autograd over explicit masks: any other mask anywhere would show."""
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", limit)
    monkeypatch.setattr("fused_remat.steps.attention_rows._BLOCK", 1)
    stock, fused = pair(
        12, 3, 20, dropout=0.3, norm_first=norm_first, batch_first=True, policy=policy,
        activation="gelu", dtype=torch.float64,
    )  # fmt: skip
    x, dy = torch.randn(2, 4, 7, 12, dtype=torch.float64).unbind()
    seed = seed_of(11)
    got = run(fused, x, dy)
    leaf = x.clone().requires_grad_()
    y = masked_encoder(stock, leaf, seed)
    expected = [y.detach(), *torch.autograd.grad(y, [leaf, *stock.parameters()], dy)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)  # float64, other order of sums


@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_do_not_depend_on_the_layout(batch_first):
    _, fused = pair(12, 3, 20, dropout=0.3, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn(4, 7, 12, dtype=torch.float64)
    y = masked_encoder(fused, x, seed_of(3))
    z = fused(x if batch_first else x.transpose(0, 1))
    torch.testing.assert_close(z if batch_first else z.transpose(0, 1), y)


@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_same_seed_same_result_and_another_seed_another(policy):
    _, fused = pair(16, 4, 32, dropout=0.1, policy=policy)
    x = torch.randn(9, 2, 16)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(run(fused, x))
    assert all(torch.equal(a, b) for a, b in zip(results[0], results[1], strict=True))
    assert not torch.equal(results[0][0], results[2][0])
    assert not torch.equal(fused(x), fused(x))


@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_random_state_advances_once_per_call_and_not_in_backward(policy):
    _, fused = pair(16, 4, 32, dropout=0.1, policy=policy)
    x = torch.randn(9, 2, 16, requires_grad=True)
    torch.manual_seed(5)
    random.draw_seed(x.device)
    once = torch.get_rng_state()
    torch.manual_seed(5)
    y = fused(x)
    assert torch.equal(torch.get_rng_state(), once)
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), once)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nothing_is_drawn_in_eval_or_at_p_zero(dropout):
    _, fused = pair(16, 4, 32, dropout=dropout)
    x = torch.randn(9, 2, 16, requires_grad=True)
    state = torch.get_rng_state()
    if dropout:
        fused.eval()
    fused(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_eval_with_gradients_applies_no_dropout():
    stock, fused = pair(16, 4, 32, dropout=0.5, dtype=torch.float64)
    stock.eval(), fused.eval()
    x = torch.randn(9, 2, 16, dtype=torch.float64)
    for a, b in zip(run(fused, x), run(stock, x), strict=True):
        torch.testing.assert_close(a, b)


SITES = {"self_attn": 0, "dropout1": 1, "dropout": 2, "dropout2": 3}


def set_p(layer, site, p):
    if site == "self_attn":
        layer.self_attn.dropout = p
    else:
        getattr(layer, site).p = p


@pytest.mark.parametrize(
    ("site", "how"),
    [(site, how) for site in SITES for how in ("p", "eval")]
    + [(site, "identity") for site in SITES if site != "self_attn"],
)
def test_every_submodule_rules_its_own_dropout(site, how):
    """One site off at a time, by its own p, its own training flag, or replaced by Identity."""
    _, fused = pair(12, 3, 20, dropout=0.3, batch_first=True, dtype=torch.float64)
    x = torch.randn(4, 7, 12, dtype=torch.float64)
    if how == "p":
        set_p(fused, site, 0.0)
    elif how == "eval":
        getattr(fused, site).eval()
    else:
        setattr(fused, site, nn.Identity())
    seed = seed_of(2)
    y = fused(x)
    reference, _ = pair(12, 3, 20, dropout=0.3, batch_first=True, dtype=torch.float64)
    set_p(reference, site, 0.0)
    torch.testing.assert_close(y, masked_encoder(reference, x, seed))


def test_rates_and_independence_of_the_four_masks_as_applied():
    """Read the masks off the layer itself: weights that let one site through at a time."""
    d, n = 32, 64
    layer = FusedRematLayer(d, 1, d, dropout=0.25, batch_first=True, norm_first=True)
    x = torch.randn(n, 16, d)
    applied = {}
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        for site, weight in (("dropout1", layer.self_attn.out_proj), ("dropout2", layer.linear2)):
            weight.bias.fill_(1.0)
            torch.manual_seed(4)
            applied[site] = (layer(x) - x).reshape(-1)
            weight.bias.zero_()
        layer.linear1.bias.fill_(1.0)
        layer.linear2.weight.copy_(torch.eye(d))
        layer.dropout2.p = 0.0
        torch.manual_seed(4)
        applied["dropout"] = (layer(x) - x).reshape(-1)
    for site, values in applied.items():
        kept = values > 0.5
        rate = kept.float().mean().item()
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
    torch.manual_seed(1)
    with torch.no_grad():
        a = fused(x)
    torch.manual_seed(1)
    assert torch.equal(a, fused(x)) and not a.requires_grad

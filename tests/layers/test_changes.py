"""Layers that people changed compute what the stock layer does with the same changes."""

import warnings

import pytest
import torch
from accuracy import assert_bits, assert_close
from changes import CHANGES, HOOKS, SUBCLASSES, Change, error_of
from layer_kinds import run
from reference import X, make
from tiers import pairwise
from torch import nn

from fused_remat import FusedRematWarning

pytestmark = pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)
MASKS = ({}, {"src_mask": CAUSAL}, {"src_mask": torch.zeros(5, 5).double().masked_fill(CAUSAL, -1)})
POLICIES = pytest.mark.parametrize("policy", ["full", "none"])
IS_2_13 = torch.__version__.startswith("2.13")


def step(layer, x=X, **kwargs):
    torch.manual_seed(0)
    return run(layer, x, x.cos(), **kwargs)


@pytest.mark.parametrize(
    "name, policy, norm_first", pairwise(list(CHANGES), ["full", "none"], [True, False])
)
def test_in_training(name, policy, norm_first):
    """Of a fallback bit for bit, with dropout, of which a block draws other bits."""
    change = CHANGES[name]
    same, dropout = (assert_bits, 0.2) if change.reason else (assert_close, 0.0)
    stock, fused = change.layers(policy, norm_first=norm_first, dropout=dropout)
    assert list(fused.state_dict()) == list(stock.state_dict())
    for kwargs in MASKS:
        same(step(fused, **kwargs), step(stock, **kwargs))
    same(fused.state_dict().values(), stock.state_dict().values())


# In evaluation dropout hands on what ReLU keeps for backward, which that hook overwrites.
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "hook: input_in_place"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_in_evaluation(name, batch_first):
    """With gradients and without, where PyTorch's own kernel does not see many a change.

    Such a defect is shown on the stock layer too, so that we notice when PyTorch mends it.
    """
    change = CHANGES[name]
    batch_first = batch_first and name not in SUBCLASSES and "norm of " not in name
    stock, fused = (m.eval() for m in change.layers(batch_first=batch_first, norm_first=False))
    x = X.transpose(0, 1) if batch_first else X
    for kwargs in MASKS:
        stock.training = True  # of the layer alone: no native kernel
        expected = step(stock, x, **kwargs)
        stock.training = False
        if change.breaks_eval and batch_first and kwargs == {} and IS_2_13:
            found = error_of(stock, x, expected[0])
            assert found > 1e-5, "mended in PyTorch: see layers/fallback.py"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert error_of(fused, x, expected[0], **kwargs) < 1e-12
        assert_close(step(fused, x, **kwargs), expected)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("name", CHANGES)
@POLICIES
def test_the_reason_is_told_once_at_the_users_line(name, policy):
    """However deep in a model the layer is; with what a forward keeps that is not checkpointed."""
    change = CHANGES[name]
    _, fused = change.layers(policy, dropout=0.2)
    if not change.told:
        assert fused.why_not_fused(X) == (change.reason or None)
    x, caught, model = X.clone().requires_grad_(), [], nn.Sequential(nn.Sequential(fused))
    for _ in range(2):
        with warnings.catch_warnings(record=True) as new:
            warnings.simplefilter("always")
            model(x)
        caught.append([(w.category, str(w.message)) for w in new])
        assert {w.filename for w in new} <= {__file__}
    kept = policy == "none" or change.updates
    under = "" if kept else " under torch.utils.checkpoint"
    runs = f"{type(fused).__name__} runs PyTorch's own forward{under}: {change.reason}"
    texts = [f"fused_remat: {change.told or runs}"] if change.reason or change.told else []
    told = [text for _, text in caught[0]]
    assert [text.partition("; it keeps")[0] for text in told] == texts and caught[1] == []
    assert {category for category, _ in caught[0]} <= {FusedRematWarning}
    if change.reason and not change.told and kept:
        policy_keeps = "the policy 'none' keeps all activations"
        updates = "a second forward would update linear2.parametrizations.weight.0._u, "
        assert (policy_keeps if policy == "none" else updates) in told[0]


@pytest.mark.parametrize("name", HOOKS)
@POLICIES
def test_what_hooks_change_is_honoured(name, policy):
    _, changed = CHANGES[name].layers(policy, dropout=0.2)
    _, plain = Change("").layers("none", dropout=0.2)
    assert not torch.allclose(step(changed)[0], step(plain)[0])


# --- parameters and modules that are shared, sharded, swapped


@POLICIES
def test_weights_tied_between_two_layers(policy):
    grads = []
    for first, second in zip(make(policy), make(policy), strict=True):
        second.linear1.weight = first.linear1.weight
        second.self_attn.in_proj_weight = first.self_attn.in_proj_weight
        second.norm1 = first.norm1  # one module of two layers
        grads.append(step(nn.Sequential(first, second)))
    assert_close(*grads)


def test_swapped_parameters_of_the_same_shape_are_read_at_every_call():
    found = []
    for layer in make():
        layer(X)
        layer.linear1.weight = nn.Parameter(layer.linear1.weight.detach() * 2)
        layer.self_attn.in_proj_weight.data = layer.self_attn.in_proj_weight.data * 2
        found.append(step(layer))
    assert_close(*found)

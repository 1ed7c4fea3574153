"""Dropout of the layers: masks by their definition, each submodule's own, one draw for a call."""

import pytest
import torch
from accuracy import assert_close
from block_inputs import in_pieces
from layer_kinds import KINDS, TORCH_NN, run
from reference import EXACT_PRESETS, masked_layer
from torch import nn

from fused_remat import random

SITES = {
    "encoder": ("self_attn", "dropout1", "dropout", "dropout2"),
    "decoder": ("self_attn", "dropout1", "multihead_attn", "dropout2", "dropout", "dropout3"),
}


def drawn(manual_seed):
    """Return the seed that a call draws after `torch.manual_seed`, and the state then."""
    torch.manual_seed(manual_seed)
    found = random.draw_seed(torch.device("cpu")), torch.get_rng_state()
    torch.manual_seed(manual_seed)
    return found


def set_p(layer, site, p):
    """Return an attention's own number, or that of a dropout module."""
    module = layer.get_submodule(site)
    setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", p)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("policy", EXACT_PRESETS)
@pytest.mark.parametrize("limit", [4, 512])
def test_forward_and_backward_use_the_masks_of_the_definition(name, policy, limit):
    """Against plain autograd over explicit masks: any other mask anywhere would show.

    Of 20 queries, in two blocks of attention.
    """
    kind = KINDS[name]
    _, fused = kind.pair(policy, dropout=0.3, dtype=torch.float64)
    if kind.is_causal:
        fused.attention_dropout = 0.1
    for i, site in enumerate(SITES.get(name.split(",")[0], ())):
        set_p(fused, site, 0.1 * (i + 1))  # each rules its own
    (seed, state), (*inputs, dy) = drawn(11), kind.data(seq=20, memory=18, batch=2)
    with in_pieces(limit):
        got = run(fused, *inputs, dy)
    assert torch.equal(torch.get_rng_state(), state)  # one draw a call, none in backward
    leaves = [t.requires_grad_() for t in inputs]
    y = kind.masked(fused, leaves, seed)
    assert_close(got, [y, *torch.autograd.grad(y, [*leaves, *fused.parameters()], dy)])


@pytest.mark.parametrize("name", TORCH_NN)
@pytest.mark.parametrize("batch_first", [True, False])
def test_masks_do_not_depend_on_the_layout(name, batch_first):
    kind = KINDS[name]
    _, fused = kind.pair(dropout=0.3, batch_first=batch_first, dtype=torch.float64)
    *inputs, _ = kind.data()
    y = kind.masked(fused, inputs, drawn(3)[0])
    z = fused(*(t if batch_first else t.transpose(0, 1) for t in inputs))
    torch.testing.assert_close(z if batch_first else z.transpose(0, 1), y)


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


@pytest.mark.parametrize("site", SITES["encoder"])
@pytest.mark.parametrize("how", ["eval", "identity"])
def test_every_submodule_rules_its_own_dropout(site, how):
    """One site off at a time, by its own training flag, or replaced by Identity."""
    kind = TORCH_NN["encoder, post-norm"]
    reference, fused = kind.pair(dropout=0.3, dtype=torch.float64)
    if how == "eval" or site == "self_attn":
        getattr(fused, site).eval()
    else:
        setattr(fused, site, nn.Identity())
    set_p(reference, site, 0.0)
    x, _ = kind.data()
    seed, _ = drawn(2)
    torch.testing.assert_close(fused(x), masked_layer(reference, seed, x))

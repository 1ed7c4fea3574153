"""Inside checkpoints of other makers: ops, fallbacks and what is kept.

That a stack has the same bits in every kind of checkpoint is in test_same_bits_as_without.py.
"""

import functools

import pytest
import torch
from reference import EXACT_PRESETS
from same_bits import assert_same_bits, step
from segment_models import X, stack
from test_same_bits_as_without import FORWARDS, each, plain, reentrant
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer, ops
from fused_remat.report.allocations import measure_allocations

REENTRANT = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reent"])


def mixed(**kwargs):
    return stack(("full", "lean", "balanced"), mixed=True, **kwargs)


def assert_alike(way, forward, module):
    """A step of `way` has the bits of one of `forward`."""
    assert_same_bits(step(way, module, X), step(forward, module, X))


@pytest.mark.composes(
    "Outer checkpointing",
    "preserve_rng_state=False",
    limits="without dropout, or with ops that are given a seed: as everywhere in PyTorch, the "
    "second run draws anew",
)
@REENTRANT
def test_without_the_random_state(use_reentrant):
    way = functools.partial(checkpoint, use_reentrant=use_reentrant, preserve_rng_state=False)
    model = mixed(dropout=0.0)
    assert_alike(each(way)(model), model, model)
    weights = nn.ParameterList(torch.randn(size) for size in ((12, 8), (8, 12)))

    def mlp(x):
        up, down = weights
        return ops.mlp(x, up, None, down, None, dropout_p=0.5, seed=3)

    assert_alike(functools.partial(way, mlp), mlp, weights)


@pytest.mark.composes("Outer checkpointing", "the functional ops")
@pytest.mark.parametrize("policy", EXACT_PRESETS)
@REENTRANT
def test_ops(use_reentrant, policy):
    how = {"policy": policy, "dropout_p": 0.2}
    sizes = (8,), (12, 8), (12, 8), (8, 12)
    weights = nn.ParameterList(torch.randn(size) for size in sizes)

    def forward(x):
        norm, *linears = weights
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        heads = ops.attention(q, q.sin(), q.cos(), is_causal=True, **how)
        mid = ops.dropout_add(heads.transpose(1, 2).flatten(2), x, 0.2)
        return ops.gated_mlp(ops.rms_norm(mid, norm), *linears, **how)

    way = functools.partial(checkpoint, forward, use_reentrant=use_reentrant)
    assert_alike(way, forward, weights)


@pytest.mark.composes("Outer checkpointing", "a layer on its fallback path, itself a checkpoint")
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs:UserWarning")
@pytest.mark.parametrize("way", [way for way in FORWARDS if way != "no determinism check"])
def test_the_fallback(way):
    model = stack(("fast", "none", "full"), mixed=True)
    for layer in model:
        layer.linear1.register_forward_hook(lambda module, args, y: y * 1.5)
    assert_alike(FORWARDS[way](model), model, model)


@pytest.mark.composes(
    "Outer checkpointing", "inside a checkpoint nothing is kept but what goes into it"
)
@pytest.mark.parametrize("policy, dropout", [("full", 0.0), ("full", 0.1), ("none", 0.1)])
@pytest.mark.parametrize("fallback", [False, True], ids=["fused", "fallback"])
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_kept_bytes(dropout, fallback, policy):
    torch.manual_seed(0)
    layer = FusedRematLayer(32, 2, 128, dropout, batch_first=True, policy=policy)
    if fallback:
        layer.linear1.register_forward_hook(lambda module, args, y: y * 1.5)
    x = torch.randn(2, 128, 32, requires_grad=True)
    for way in (plain, reentrant):
        way(layer, x)  # what is set up once
        # Besides the output, the state of torch's generator for the replay (5056 bytes), and that
        # of the fallback's own checkpoint; a few bytes for device indices.
        states = (1 + fallback) * torch.get_rng_state().nbytes
        kept = measure_allocations(lambda way=way: way(layer, x)).net - x.nbytes
        assert 0 <= kept <= states + 64 < x.nbytes

"""A few hundred of the random configurations; ten thousand: `python tests/random_layers.py`."""

import pytest
import torch
from random_layers import EXACT_PRESETS, check, draw, in_pieces_of, inputs, layer_of, results
from tiers import MORE

from fused_remat import FusedRematLayer, Policy

# Past those of the committed run (bench/results/random-layers/), so that each adds something.
FIRST, COUNT, AT_ONCE = 100_000, 220 * MORE, 22


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, AT_ONCE))
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_random_configurations_agree_with_the_stock_layer(first):
    wrong = {seed: found for seed in range(first, first + AT_ONCE) if (found := check(seed))}
    assert not wrong


@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.6])
@pytest.mark.parametrize("first", range(FIRST, FIRST + 15 * MORE, 5))
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_gradients_are_the_same_bits_in_every_policy(dropout, first):
    for seed in range(first, first + 5):
        cfg = draw(seed)
        dtype = getattr(torch, cfg.dtype)
        fused = FusedRematLayer.from_layer(layer_of(cfg, dtype, dropout))
        x, dy, kwargs = inputs(cfg, dtype)
        own = Policy(save=("qkv", "act")) if isinstance(cfg.policy, str) else Policy(cfg.policy)
        expected = None
        for fused.policy in (*EXACT_PRESETS, own):
            torch.manual_seed(seed)
            with in_pieces_of(cfg):
                found = results(fused, x, dy, kwargs, cfg)
            expected = expected or found
            for name, value in found.items():
                assert value is None or torch.equal(value, expected[name]), cfg
                assert value is None or value.isfinite().all(), cfg

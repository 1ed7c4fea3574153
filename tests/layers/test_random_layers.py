"""A few hundred of the random configurations; ten thousand: `python tests/random_layers.py`."""

import warnings

import pytest
from random_layers import check
from tiers import MORE

# Past those of the committed run (bench/results/random-layers/), so that each adds something.
FIRST, COUNT, AT_ONCE = 100_000, 100 * MORE, 25


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, AT_ONCE))
def test_random_configurations_agree_with_the_stock_layer(first):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Support for mismatched")
        wrong = {seed: found for seed in range(first, first + AT_ONCE) if (found := check(seed))}
    assert not wrong

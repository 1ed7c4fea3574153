"""Subclasses with their own forward: a warning that nothing is rebuilt, unless a block runs."""

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from reference import X

from fused_remat import FusedRematLayer, FusedRematWarning, explain

OPTIONS = {"dropout": 0.0, "dtype": torch.float64}
ABOUT = "its own forward does not call FusedRematLayer.forward"


class Mixin:
    def forward(self, src):
        return self.linear2(self.linear1(src))


class Mixed(Mixin, FusedRematLayer):
    pass


class Scaled(FusedRematLayer):
    def forward(self, src, **masks):
        return 0.5 * self.half(src, **masks)

    def half(self, src, **masks):
        return super().forward(src, **masks)


class Skipped(FusedRematLayer):
    """LayerDrop, always."""

    def forward(self, src):
        return src


def texts_of(layer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            layer(X)
        assert not caught
        for _ in range(2):
            layer(X.clone().requires_grad_())
    assert {(w.category, w.filename) for w in caught} <= {(FusedRematWarning, __file__)}
    return [str(w.message) for w in caught]


def test_threads_that_share_a_layer_reach_its_block_each():
    layer = Scaled(8, 2, 12, **OPTIONS, accumulate_into="grad")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:  # a call that reached no block would raise
            assert len(list(pool.map(layer, [X] * 200))) == 200
    finally:
        sys.setswitchinterval(interval)


def test_a_forward_that_reaches_no_block_warns_once():
    layer = Mixed(8, 2, 12, **OPTIONS)
    (text,) = texts_of(layer)
    assert text.startswith(f"fused_remat: Mixed saves no memory: {ABOUT}")
    assert ABOUT in str(explain(layer, X))
    layer.accumulate_into = "main_grad"
    with pytest.raises(RuntimeError, match=f"'main_grad' is not possible: {ABOUT}"):
        layer(X.clone().requires_grad_())


@pytest.mark.parametrize("kind", [Scaled, Skipped, type("Plain", (FusedRematLayer,), {})])
def test_a_forward_that_reaches_a_block_or_skips_the_layer_does_not_warn(kind, blocks_run):
    assert texts_of(kind(8, 2, 12, **OPTIONS)) == []
    assert bool(blocks_run) == (kind is not Skipped)

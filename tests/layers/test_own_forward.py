"""Subclasses with their own forward: told that nothing is rebuilt, unless a block runs inside."""

import warnings

import pytest
import torch
from reference import X

from fused_remat import FusedRematLayer, FusedRematWarning, explain

DOUBLE = torch.float64
OPTIONS = {"dropout": 0.0, "dtype": DOUBLE}
ABOUT = "its own forward does not call"


class Mlp(FusedRematLayer):
    def forward(self, src):
        return src + self._ff_block(self.norm2(src))


class Scaled(FusedRematLayer):
    def forward(self, src, **masks):
        return 0.5 * self.half(src, **masks)

    def half(self, src, **masks):
        return super().forward(src, **masks)


class Skipped(FusedRematLayer):
    """LayerDrop, always."""

    def forward(self, src):
        return src


class Mixin:
    def forward(self, src):
        return self.linear2(self.linear1(src))


class Mixed(Mixin, FusedRematLayer):
    pass


def texts_of(layer, x=X):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            layer(x.clone().requires_grad_())
    assert {(w.category, w.filename) for w in caught} <= {(FusedRematWarning, __file__)}
    return [str(w.message) for w in caught]


@pytest.mark.parametrize("kind", [Mlp, Mixed])
def test_a_forward_that_reaches_no_block_is_told_once(kind):
    layer = kind(8, 2, 12, **OPTIONS)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(X)
    (text,) = texts_of(layer)
    assert text.startswith(f"fused_remat: {kind.__name__} saves no memory: {ABOUT} FusedRematLayer")
    assert f"{ABOUT} FusedRematLayer.forward" in str(explain(layer, X))


@pytest.mark.parametrize("kind", [Scaled, Skipped, type("Plain", (FusedRematLayer,), {})])
def test_a_forward_that_reaches_a_block_or_skips_the_layer_is_not_told(kind, blocks_run):
    assert texts_of(kind(8, 2, 12, **OPTIONS)) == []
    assert bool(blocks_run) == (kind is not Skipped)


def test_gradients_cannot_be_accumulated():
    layer = Mlp(8, 2, 12, **OPTIONS, accumulate_into="main_grad")
    with pytest.raises(RuntimeError, match=f"'main_grad' is not possible: {ABOUT}"):
        layer(X.clone().requires_grad_())

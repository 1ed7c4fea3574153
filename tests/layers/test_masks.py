"""Masks of values, dtypes and hints on which PyTorch's own kernels differ among themselves."""

import pytest
import torch
from accuracy import assert_close
from layer_kinds import TORCH_NN, run
from reference import pair
from torch import nn

FLOAT64 = {"dropout": 0.0, "dtype": torch.float64}
#: If the stock layer's defects are gone, a paragraph of docs/behaviour.md goes, too.
IS_2_13 = torch.__version__.startswith("2.13")


def relative(found, expected):
    return (found - expected).norm() / expected.norm()


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_float32_mask_on_a_float64_layer(dropout):
    """The same as the mask in float64, which the stock layer's flash kernel is not (torch 2.13)."""
    stock, fused = pair(12, 3, 20, **FLOAT64)
    fused.self_attn.dropout = dropout  # 1e-9: the block route, dropping nothing
    x, mask = torch.randn(64, 4, 12, dtype=torch.float64), torch.randn(64, 64)
    found = run(fused, x, x, src_mask=mask), run(stock, x, x, src_mask=mask.double())
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)  # a scale of 1 + 1e-9 is applied
    with torch.no_grad():
        assert not IS_2_13 or relative(stock(x, mask), found[1][0]) > 0.01


@pytest.mark.parametrize("value", [-1e4, -1e9, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("mask_grad, dropout", [(True, 0.0), (False, 0.0), (False, 1e-9)])
def test_large_finite_masks(value, mask_grad, dropout):
    """Rows whose every key is at -1e9 are uniform, in backward too (ATen's flash kernel, which the
    stock layer takes when the mask requires no gradient, is off there by the number of keys)."""
    stock, fused = pair(16, 4, 32, dropout=0.0, batch_first=True)
    fused.self_attn.dropout = dropout
    x, ones, padding = torch.randn(2, 64, 16), torch.ones(2, 64, 16), torch.zeros(2, 64)
    padding[1], padding[0, 5:9] = value, value
    found, exact, flash = (
        run(layer, x, ones, src_key_padding_mask=padding.clone().requires_grad_(wants))
        for layer, wants in ((fused, mask_grad), (stock, True), (stock, False))
    )
    assert not IS_2_13 or value > -1e5 or relative(flash[1], exact[1]) > 0.1
    for a, b in zip(found, exact, strict=False):
        # Next to -1e4, float32 holds a score to 2**-11; two paths, each forward and backward.
        assert (a - b).norm() <= 4 * 2**-10 * b.norm() + 1e-5


def test_causal_hint():
    stock, fused = pair(12, 3, 20, **FLOAT64)
    x, dy = torch.randn(2, 6, 4, 12, dtype=torch.float64).unbind()
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for given in (
        {"src_mask": causal},
        # with a mask and no padding the mask is discarded unchecked and causal used
        {"src_mask": torch.zeros(6, 6, dtype=torch.bool)},
        # with padding the mask is used and the hint dropped
        {"src_mask": torch.rand(6, 6) < 0.3, "src_key_padding_mask": torch.rand(4, 6) < 0.3},
    ):
        assert_close(*(run(m, x, dy, is_causal=True, **given) for m in (fused, stock)))
    torch.testing.assert_close(
        fused(x, torch.zeros(2, 3, dtype=torch.bool), is_causal=True), fused(x, causal)
    )
    for layer in (stock, fused):
        with pytest.raises(RuntimeError, match="attn_mask"):
            layer(x, is_causal=True)


def test_fully_masked_rows_contribute_zero_to_a_masks_gradient_too():
    """Where the stock layer has NaN."""
    _, fused = TORCH_NN["encoder, post-norm"].pair(dtype=torch.float64)
    x, dy = torch.randn(2, 2, 6, 12, dtype=torch.float64).unbind()
    mask, padding = torch.zeros(6, 6, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.float64)
    mask[2], padding[1] = -torch.inf, -torch.inf
    found = run(fused, x, dy, src_mask=mask.requires_grad_(), src_key_padding_mask=padding)
    assert all(t.isfinite().all() for t in found)


def test_is_causal_without_a_mask_is_what_the_stock_layer_makes_of_it_in_eval():
    stock = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    layer, x = TORCH_NN["encoder, post-norm"].fused.from_layer(stock), torch.randn(2, 5, 16)
    with torch.no_grad():
        assert torch.equal(layer(x, is_causal=True), stock(x, is_causal=True))

"""The decoder layer on the triton backend, interpreted, against PyTorch's layer and eager."""

import torch
from decoder_cases import data, pair, run
from poisoned import check_error

SIZES = {"d_model": 24, "nhead": 3, "dim_feedforward": 40}


def test_matches_pytorchs_layer():
    stock, fused = pair("full", norm_first=True, **SIZES)
    fused.backend = "triton"
    tensors = data(torch.float32, 11, 5, 2, 24)
    padding = torch.arange(5).expand(2, 5) > 3
    kwargs = {"memory_key_padding_mask": padding}
    exact = run(stock.double(), *(t.double() for t in tensors), **kwargs)
    for a, b in zip(run(fused, *tensors, **kwargs), exact, strict=True):
        # float32: a layer's sums, in another order; a key's bias has a gradient of 0.
        assert (a.double() - b).norm() <= 2e-5 * max(b.norm(), 1.0)


def test_matches_eager_with_dropout_and_causal_hints():
    _, fused = pair("lean", dropout=0.2, **SIZES)
    hint, results = torch.zeros(1, 1), []
    for backend in ("triton", "eager"):
        fused.backend = backend
        torch.manual_seed(3)
        masks = {"tgt_mask": hint, "memory_mask": hint}
        hints = {"tgt_is_causal": True, "memory_is_causal": True}
        results.append(run(fused, *data(torch.float32, 6, 9, 2, 24), **masks, **hints))
    for a, b in zip(*results, strict=True):
        check_error(a, b, torch.float32, factor=10)

"""Rotary positions that a model is given."""

import copy
import warnings

import torch
from hf_models import IDS, build

from fused_remat import FusedRematWarning, convert


def test_sequences_have_their_own_positions():
    stock = build("llama")
    fused = convert(copy.deepcopy(stock))
    tokens = IDS["input_ids"].shape[1]
    # Of any distance: without a mask transformers would take a gap for the next packed sequence.
    places = torch.arange(tokens) * torch.tensor([[1], [4]])
    given = {**IDS, "attention_mask": torch.ones_like(IDS["input_ids"]), "position_ids": places}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        found = fused(**given).logits
    # transformers' RMSNorm is float32 in a float64 model
    torch.testing.assert_close(found, stock(**given).logits, rtol=1e-6, atol=1e-6)

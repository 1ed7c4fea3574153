"""Layers of transformers on the triton backend: transposed weights, strided tables, masks."""

import pytest
import torch
from hf_models import build, distance, inputs_of, reasons, step

from fused_remat import convert


@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_layers_of_transformers(name):
    model, given = build(name, torch.float32), inputs_of(name)
    expected = step(model, given)
    convert(model, policy="lean", backend="triton")
    with reasons() as why:
        got = step(model, given)
    assert not why
    # Two float32 computations of one thing.
    assert max(distance(got, expected).values()) < 3e-5

"""The functional form of the encoder block: what its callers outside the layer can get wrong."""

import pytest
import torch

from fused_remat.blocks.encoder import EncoderConfig
from fused_remat.ops import encoder_block

D, F = 8, 16
SHAPES = {"qkv": (3 * D, D), "proj": (D, D), "fc1": (F, D), "fc2": (D, F)}
CONFIG = dict(norm_first=True, nhead=2, head_dim=4, activation="gelu", eps1=1e-5, eps2=1e-5)


def tensors(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    named = {
        f"{k}.weight": torch.randn(s, generator=generator, dtype=dtype, requires_grad=True)
        for k, s in SHAPES.items()
    }
    return named | {f"norm{i}.weight": torch.ones(D, dtype=dtype) for i in (1, 2)}


@pytest.mark.parametrize("shape", [(5, D), (2, 5, 5, D), (0, 5, D), (2, 0, D)])
def test_bad_shapes_raise(shape):
    with pytest.raises(ValueError, match="shape"):
        encoder_block(torch.zeros(shape, dtype=torch.float64), tensors(), EncoderConfig(**CONFIG))


@pytest.mark.parametrize("has", ["mask", "padding"])
def test_config_and_tensors_must_agree_on_masks(has):
    x = torch.randn(2, 5, D, dtype=torch.float64)
    mask = torch.zeros(5, 5) if has == "mask" else torch.zeros(2, 5)
    with pytest.raises(ValueError, match=f"has_{has} is False"):
        encoder_block(x, tensors() | {has: mask}, EncoderConfig(**CONFIG))
    with pytest.raises(ValueError, match=f"has_{has} is True"):
        encoder_block(x, tensors(), EncoderConfig(**CONFIG, **{f"has_{has}": True}))


@pytest.mark.parametrize("norm_first", [True, False])
def test_seed_makes_a_call_repeatable(norm_first):
    config = EncoderConfig(
        **{**CONFIG, "norm_first": norm_first}, p_attention=0.3, p_residual1=0.3, p_mlp=0.3
    )
    x = torch.randn(2, 5, D, dtype=torch.float64)
    state = torch.get_rng_state()
    seeded = tensors() | {"seed": torch.tensor(3)}
    a, b = (encoder_block(x, seeded, config, policy=p) for p in ("full", "none"))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(a, encoder_block(x, seeded | {"seed": torch.tensor(4)}, config))


def test_causal_beside_masks_excludes_both():
    x = torch.randn(2, 5, D, dtype=torch.float64)
    mask = torch.rand(5, 5) < 0.3
    mask.fill_diagonal_(False)
    config = EncoderConfig(**CONFIG, causal=True, has_mask=True)
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    merged = EncoderConfig(**CONFIG, has_mask=True)
    got = encoder_block(x, tensors() | {"mask": mask}, config)
    expected = encoder_block(x, tensors() | {"mask": mask | later}, merged)
    torch.testing.assert_close(got, expected)

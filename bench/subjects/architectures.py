"""The models of `bench architectures`: language models, image towers, diffusion models, own code.

Names of language models are those of their classes. All are random, of width 256 or more, in two
layers or one of each type, and drop nothing.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.subjects import generic
from tests.tracing import models

B, WIDTH = models.B, generic.WIDTH
Batch = dict[str, Any]
#: Attributes of transformers' mappings from configurations to classes.
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
#: More parameters are no small model: what a generic configuration did not make small.
MOST_PARAMETERS = 100_000_000
_PIXELS = {"image_size": 64, "patch_size": 8, "num_channels": 3}


class Architecture(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int], Batch]  #: For a model, of so many tokens.
    needs: str = ""  #: The module that it comes from.
    #: Whether it is converted with its own checkpointing, which most of its modules keep.
    keeps_own: bool = False


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _ids(tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(generic.FIRST, generic.VOCAB, (B, tokens), generator=generator)


# Transformers.


def _transformers(model: str, config: str, **given: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, config)
    made = kind(**generic.arguments(kind, **given))
    built: nn.Module = getattr(transformers, model)._from_config(made)
    return built


def _text(model: Any, tokens: int) -> Batch:
    batch: Batch = {"input_ids": _ids(tokens)}
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = _ids(tokens).flip(1)
    return batch


def _images(model: nn.Module, tokens: int) -> Batch:
    return {"pixel_values": _normal(B, 3, _PIXELS["image_size"], _PIXELS["image_size"])}


def language_models() -> dict[str, Architecture]:
    """Return every causal, masked and sequence-to-sequence model of the installed transformers."""
    try:
        auto = importlib.import_module("transformers.models.auto")
    except ImportError:
        return {}
    configs = auto.configuration_auto.CONFIG_MAPPING_NAMES
    found = dict[str, str]()
    for task in TASKS:
        mapping = getattr(auto.modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
        for kind in sorted(mapping, key=lambda kind: not kind.endswith("_text")):
            found.setdefault(mapping[kind], configs[kind])
    return {
        name: Architecture(functools.partial(_transformers, name, config), _text, "transformers")
        for name, config in sorted(found.items())
    }


def _tower(prefix: str, model: str, **given: Any) -> Architecture:
    make = functools.partial(_transformers, prefix + model, f"{prefix}Config", **_PIXELS, **given)
    return Architecture(make, _images, "transformers")


TOWERS = {
    "vit": _tower("ViT", "ForImageClassification"),
    "deit": _tower("DeiT", "ForImageClassification"),
    "beit": _tower("Beit", "ForImageClassification"),
    "dinov2": _tower("Dinov2", "ForImageClassification"),
    "dinov3": _tower("DINOv3ViT", "Model", pos_embed_rescale=None),
    "clip_vision": _tower("CLIPVision", "Model"),
    "siglip_vision": _tower("SiglipVision", "Model"),
    "swin": _tower(
        "Swin", "ForImageClassification", depths=[2, 2], num_heads=[4, 8], window_size=4
    ),
    "swinv2": _tower(
        "Swinv2", "ForImageClassification", depths=[2, 2], num_heads=[4, 8], window_size=4
    ),
}  # fmt: skip


# Diffusers.


def _diffuser(name: str, batch: Callable[[], Batch], **options: Any) -> Architecture:
    def make() -> nn.Module:
        kind: type[nn.Module] = getattr(importlib.import_module("diffusers"), name)
        return kind(**options)

    return Architecture(make, lambda model, tokens: {**batch(), "return_dict": False}, "diffusers")


_HEADS: Batch = {"num_attention_heads": 4, "attention_head_dim": WIDTH // 4}
_TIME = torch.tensor([100, 700])
_LONG = torch.tensor([0.1, 0.7])


def _coordinates(*sizes: int) -> Tensor:
    """Return the coordinates of every token of a grid."""
    return torch.cartesian_prod(torch.zeros(1), *(torch.arange(float(n)) for n in sizes))


DIFFUSERS = {
    "flux": _diffuser(
        "FluxTransformer2DModel",
        lambda: {
            "hidden_states": _normal(B, 64, 16), "encoder_hidden_states": _normal(B, 16, 32),
            "pooled_projections": _normal(B, 32), "timestep": _LONG, "img_ids": _coordinates(8, 8),
            "txt_ids": torch.zeros(16, 3),
        },
        in_channels=16, num_layers=1, num_single_layers=1, joint_attention_dim=32,
        pooled_projection_dim=32, axes_dims_rope=(16, 24, 24), **_HEADS,
    ),
    "sd3": _diffuser(
        "SD3Transformer2DModel",
        lambda: {
            "hidden_states": _normal(B, 4, 16, 16), "encoder_hidden_states": _normal(B, 16, 32),
            "pooled_projections": _normal(B, 64), "timestep": _TIME,
        },
        sample_size=16, patch_size=2, in_channels=4, num_layers=2, joint_attention_dim=32,
        caption_projection_dim=WIDTH, pooled_projection_dim=64, out_channels=4,
        pos_embed_max_size=8, **_HEADS,
    ),
    "wan": _diffuser(
        "WanTransformer3DModel",
        lambda: {
            "hidden_states": _normal(B, 4, 2, 16, 16), "encoder_hidden_states": _normal(B, 16, 32),
            "timestep": _TIME,
        },
        patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=32, freq_dim=64, ffn_dim=512,
        num_layers=2, cross_attn_norm=True, **_HEADS,
    ),
    "qwen_image": _diffuser(
        "QwenImageTransformer2DModel",
        lambda: {
            "hidden_states": _normal(B, 64, 16), "encoder_hidden_states": _normal(B, 16, 32),
            "encoder_hidden_states_mask": torch.ones(B, 16, dtype=torch.long), "timestep": _LONG,
            "img_shapes": [[(1, 8, 8)]] * B,
        },
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, joint_attention_dim=32,
        axes_dims_rope=(16, 24, 24), **_HEADS,
    ),
    "pixart": _diffuser(
        "PixArtTransformer2DModel",
        lambda: {
            "hidden_states": _normal(B, 4, 16, 16), "encoder_hidden_states": _normal(B, 16, 32),
            "timestep": _TIME,
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
        sample_size=16, num_layers=2, in_channels=4, out_channels=8, patch_size=2,
        cross_attention_dim=WIDTH, caption_channels=32, **_HEADS,
    ),
    "dit": _diffuser(
        "DiTTransformer2DModel",
        lambda: {
            "hidden_states": _normal(B, 4, 16, 16), "timestep": _TIME,
            "class_labels": torch.tensor([1, 2]),
        },
        sample_size=16, num_layers=2, in_channels=4, out_channels=8, patch_size=2,
        num_embeds_ada_norm=1000, **_HEADS,
    ),
    "transformer_2d": _diffuser(
        "Transformer2DModel",
        lambda: {
            "hidden_states": _normal(B, 64, 8, 8), "encoder_hidden_states": _normal(B, 16, 32),
        },
        in_channels=64, num_layers=2, cross_attention_dim=32, **_HEADS,
    ),
    "unet": _diffuser(
        "UNet2DConditionModel",
        lambda: {
            "sample": _normal(B, 4, 16, 16), "encoder_hidden_states": _normal(B, 16, 32),
            "timestep": _TIME,
        },
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(256, 256),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), layers_per_block=1,
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=32,
        attention_head_dim=64,
    )._replace(keeps_own=True),
}  # fmt: skip


# Of other libraries.


def _other(name: str, make: Callable[[int], nn.Module]) -> Architecture:
    """Return a model of the tests' table in this width."""
    row = models.MODELS[name]
    batch = row.batch
    return Architecture(
        lambda: make(WIDTH), lambda model, tokens: batch(min(tokens, 64)), row.needs
    )


OTHERS = {
    "timm_vit": _other("timm_vit", models.timm_vit),
    "torchvision_vit": _other("torchvision_vit", models.torchvision_vit),
    "openai_whisper": _other("openai_whisper", models.openai_whisper),
    "x_transformers": _other(
        "x_transformers_flash",
        lambda width: models.x_transformer("Decoder", width, attn_flash=True, ff_glu=True),
    ),
}


# As users write them.


class ComplexRotaryBlock(nn.Module):
    """A Llama's block whose rotary embedding is a product of complex numbers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w1, self.w3 = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            w(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = turned(q, turns), turned(k, turns)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of numbers, as complex ones, by the angles of their position."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


class ComplexRotary(nn.Module):
    """A language model of those blocks."""

    def __init__(self, width: int = WIDTH, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.half = width // heads // 2
        self.tok_embeddings = nn.Embedding(generic.VOCAB, width)
        self.layers = nn.ModuleList(ComplexRotaryBlock(width, heads) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, generic.VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        steps = torch.arange(self.half, dtype=x.dtype) / self.half
        angles = torch.outer(torch.arange(tokens.shape[1], dtype=x.dtype), math.e ** (-9.2 * steps))
        turns = torch.polar(torch.ones_like(angles), angles)
        for layer in self.layers:
            x = layer(x, turns)
        logits: Tensor = self.output(self.norm(x))
        return logits


def _own(name: str, make: Callable[[], nn.Module]) -> Architecture:
    return Architecture(make, lambda model, tokens: {name: _ids(min(tokens, 64)) % models.VOCAB})


OWN = {
    "nanogpt": _own("idx", lambda: models.LanguageModel(models.NanoBlock, WIDTH)),
    "mingpt": _own("idx", lambda: models.LanguageModel(models.MiniBlock, WIDTH)),
    "complex_rotary": _own("tokens", ComplexRotary),
    "adaln_dit": Architecture(
        lambda: models.DiT(WIDTH),
        lambda model, tokens: {"x": _normal(B, tokens, WIDTH), "c": _normal(B, WIDTH)},
    ),
}
ARCHITECTURES = {**language_models(), **TOWERS, **DIFFUSERS, **OTHERS, **OWN}


def build(name: str, tokens: int) -> tuple[nn.Module, Batch]:
    """Build a model in training mode, every parameter random, and the arguments to call it with.

    Raises: ImportError without the package that it comes from; ValueError if it is not small.
    """
    row = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = row.make()
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it has {size:,} parameters in generic sizes")
    model = model.float().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape), alpha=0.02)
    batch = row.batch(model, tokens)
    if "use_cache" in inspect.signature(model.forward).parameters:
        batch["use_cache"] = False
    return model, batch

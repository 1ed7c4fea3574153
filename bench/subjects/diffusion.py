"""Small diffusion models of diffusers, with random weights and an image of any size.

Each has width 256, a batch of 2 and a text of 16 tokens. It has two blocks of each kind, or three
where the last one differs, and no parameter is zero: a gate that is initialized to zero would hide
a wrong gradient of what it multiplies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
B, WIDTH, FRAMES, TEXT, TEXT_WIDTH = 2, 256, 2, 16, 32
#: The standard deviation of parameters that diffusers initializes to zero.
STD = 0.05


class Diffuser(NamedTuple):
    kind: str  #: The name of its class.
    options: dict[str, Any]
    inputs: Callable[[int], Batch]  #: For about so many image tokens.
    #: Whether it is converted with its own checkpointing, which most of its modules keep.
    keeps_own: bool = False

    def make(self) -> nn.Module:
        """Build the model in training mode, without a parameter that is zero."""
        kind: type[nn.Module] = getattr(importlib.import_module("diffusers"), self.kind)
        torch.manual_seed(0)
        model = kind(**self.options).train()
        for p in model.parameters():
            if not p.any():
                nn.init.normal_(p, std=STD)
        return model

    def batch(self, tokens: int) -> Batch:
        """Return the arguments of a call with about `tokens` image tokens."""
        return self.inputs(tokens) | {"return_dict": False}


def _normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def grid(tokens: int) -> tuple[int, int]:
    """Return the height and width of an image of about so many tokens, both even."""
    height = 1 << max(2, tokens.bit_length() - 1) // 2
    return height, max(2, tokens // height // 2 * 2)


def _image(tokens: int, channels: int, patch: int = 2) -> Tensor:
    height, width = grid(tokens)
    return _normal(B, channels, height * patch, width * patch)


def _video(tokens: int, channels: int) -> Tensor:
    height, width = grid(tokens // FRAMES)
    return _normal(B, channels, FRAMES, height * 2, width * 2)


def _packed(tokens: int, channels: int) -> Tensor:
    height, width = grid(tokens)
    return _normal(B, height * width, channels)


def _text(width: int = TEXT_WIDTH) -> Tensor:
    return _normal(B, TEXT, width, seed=2)


def _mask(dtype: torch.dtype = torch.long) -> Tensor:
    """Return the mask of a batch whose second text is padded."""
    mask = torch.ones(B, TEXT, dtype=dtype)
    mask[1, -4:] = 0
    return mask


def _positions(tokens: int, axes: int) -> Tensor:
    """Return positions of image tokens, whose last axes are height and width."""
    height, width = grid(tokens)
    sizes = (1,) * (axes - 2 - (axes == 4)) + (height, width) + (1,) * (axes == 4)
    return torch.cartesian_prod(*(torch.arange(float(n)) for n in sizes))


def _time() -> Tensor:
    return torch.tensor([100, 700])


def _fraction() -> Tensor:
    return torch.tensor([0.1, 0.7])


def _flux(tokens: int) -> Batch:
    return {
        "hidden_states": _packed(tokens, 16), "encoder_hidden_states": _text(),
        "pooled_projections": _normal(B, TEXT_WIDTH), "timestep": _fraction(),
        "img_ids": _positions(tokens, 3), "txt_ids": torch.zeros(TEXT, 3),
    }  # fmt: skip


def _flux2(tokens: int) -> Batch:
    return {
        "hidden_states": _packed(tokens, 16), "encoder_hidden_states": _text(),
        "timestep": _fraction(), "guidance": torch.tensor([4.0, 3.0]),
        "img_ids": _positions(tokens, 4),
        "txt_ids": torch.cat([torch.zeros(TEXT, 3), torch.arange(TEXT)[:, None]], 1),
    }  # fmt: skip


def _sd3(tokens: int) -> Batch:
    return {
        "hidden_states": _image(tokens, 4), "encoder_hidden_states": _text(),
        "pooled_projections": _normal(B, 64), "timestep": _time(),
    }  # fmt: skip


def _auraflow(tokens: int) -> Batch:
    return {
        "hidden_states": _image(tokens, 4), "encoder_hidden_states": _text(),
        "timestep": _fraction(),
    }  # fmt: skip


def _qwen_image(tokens: int) -> Batch:
    return {
        "hidden_states": _packed(tokens, 16), "encoder_hidden_states": _text(),
        "encoder_hidden_states_mask": torch.ones(B, TEXT, dtype=torch.long),
        "timestep": _fraction(), "img_shapes": [[(1, *grid(tokens))]] * B,
    }  # fmt: skip


def _wan(tokens: int) -> Batch:
    return {
        "hidden_states": _video(tokens, 4), "encoder_hidden_states": _text(), "timestep": _time(),
    }  # fmt: skip


def _wan_ti2v(tokens: int) -> Batch:
    """Return a video whose first frame is clean: each token has its own time."""
    height, width = grid(tokens // FRAMES)
    times = _time()[:, None].repeat(1, FRAMES * height * width)
    times[:, : height * width] = 0
    return _wan(tokens) | {"timestep": times}


def _hunyuan_video(tokens: int) -> Batch:
    return {
        "hidden_states": _video(tokens, 4), "encoder_hidden_states": _text(), "timestep": _time(),
        "encoder_attention_mask": _mask(), "pooled_projections": _normal(B, TEXT_WIDTH),
        "guidance": torch.tensor([6000.0, 5000.0]),
    }  # fmt: skip


def _ltx(tokens: int) -> Batch:
    height, width = grid(tokens // FRAMES)
    return {
        "hidden_states": _normal(B, FRAMES * height * width, 16),
        "encoder_hidden_states": _text(), "encoder_attention_mask": _mask(), "timestep": _time(),
        "num_frames": FRAMES, "height": height, "width": width,
    }  # fmt: skip


def _cogvideox(tokens: int) -> Batch:
    height, width = grid(tokens // FRAMES)
    angles = _normal(FRAMES * height * width, WIDTH // HEADS // 2).repeat_interleave(2, 1)
    return {
        "hidden_states": _normal(B, FRAMES, 4, height * 2, width * 2),
        "encoder_hidden_states": _text(), "timestep": _time(),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }  # fmt: skip


def _sana(tokens: int) -> Batch:
    return {
        "hidden_states": _image(tokens, 8, patch=1), "encoder_hidden_states": _text(),
        "encoder_attention_mask": _mask(), "timestep": _time(),
    }  # fmt: skip


def _pixart(tokens: int) -> Batch:
    return {
        "hidden_states": _image(tokens, 4), "encoder_hidden_states": _text(),
        "encoder_attention_mask": _mask(), "timestep": _time(),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


def _lumina2(tokens: int) -> Batch:
    return {
        "hidden_states": _image(tokens, 4), "encoder_hidden_states": _text(),
        "encoder_attention_mask": _mask(torch.bool), "timestep": _fraction(),
    }  # fmt: skip


def _z_image(tokens: int) -> Batch:
    """Return lists of images and of texts of two lengths; the model pads them."""
    first, second = _text()
    return {"x": [*_image(tokens, 4)[:, :, None]], "cap_feats": [first, second[:-4]],
            "t": _fraction()}  # fmt: skip


def _dit(tokens: int) -> Batch:
    side = round(tokens**0.5) * 2
    return {
        "hidden_states": _normal(B, 4, side, side), "timestep": _time(),
        "class_labels": torch.tensor([1, 2]),
    }  # fmt: skip


def _transformer_2d(tokens: int) -> Batch:
    return {"hidden_states": _image(tokens, 64, patch=1), "encoder_hidden_states": _text()}


def _unet(tokens: int) -> Batch:
    return {
        "sample": _image(tokens, 4, patch=1), "encoder_hidden_states": _text(), "timestep": _time(),
    }  # fmt: skip


HEADS = 4
_SIZES: Batch = {"num_attention_heads": HEADS, "attention_head_dim": WIDTH // HEADS}
_ROTARY = (16, 24, 24)
_SD3 = _SIZES | {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2,
    "joint_attention_dim": TEXT_WIDTH, "caption_projection_dim": WIDTH,
    "pooled_projection_dim": 64, "pos_embed_max_size": 32,
}  # fmt: skip
_WAN = _SIZES | {
    "patch_size": (1, 2, 2), "in_channels": 4, "out_channels": 4, "text_dim": TEXT_WIDTH,
    "freq_dim": 64, "ffn_dim": 512, "num_layers": 2,
}  # fmt: skip
_PATCHES = _SIZES | {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 8, "num_layers": 2,
}  # fmt: skip

DIFFUSERS = {
    "flux": Diffuser("FluxTransformer2DModel", _SIZES | {
        "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": _ROTARY,
        "joint_attention_dim": TEXT_WIDTH, "pooled_projection_dim": TEXT_WIDTH,
    }, _flux),
    "flux2": Diffuser("Flux2Transformer2DModel", _SIZES | {
        "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "axes_dims_rope": (16,) * 4,
        "joint_attention_dim": TEXT_WIDTH,
    }, _flux2),
    "sd3": Diffuser("SD3Transformer2DModel", _SD3, _sd3),
    "sd35": Diffuser("SD3Transformer2DModel", _SD3 | {
        "num_layers": 3, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    }, _sd3),
    "auraflow": Diffuser("AuraFlowTransformer2DModel", _SIZES | {
        "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 2,
        "num_single_dit_layers": 2, "joint_attention_dim": TEXT_WIDTH,
        "caption_projection_dim": WIDTH, "pos_embed_max_size": 1024,
    }, _auraflow),
    "qwen_image": Diffuser("QwenImageTransformer2DModel", _SIZES | {
        "patch_size": 2, "in_channels": 16, "out_channels": 4, "num_layers": 2,
        "joint_attention_dim": TEXT_WIDTH, "axes_dims_rope": _ROTARY,
    }, _qwen_image),
    "wan": Diffuser("WanTransformer3DModel", _WAN, _wan),
    "wan_ti2v": Diffuser("WanTransformer3DModel", _WAN, _wan_ti2v),
    "hunyuan_video": Diffuser("HunyuanVideoTransformer3DModel", _SIZES | {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2,
        "text_embed_dim": TEXT_WIDTH, "pooled_projection_dim": TEXT_WIDTH,
        "rope_axes_dim": _ROTARY,
    }, _hunyuan_video),
    "ltx": Diffuser("LTXVideoTransformer3DModel", _SIZES | {
        "in_channels": 16, "out_channels": 16, "num_layers": 2, "cross_attention_dim": WIDTH,
        "caption_channels": TEXT_WIDTH,
    }, _ltx),
    "cogvideox": Diffuser("CogVideoXTransformer3DModel", _SIZES | {
        "in_channels": 4, "out_channels": 4, "time_embed_dim": 64, "num_layers": 2,
        "text_embed_dim": TEXT_WIDTH, "max_text_seq_length": TEXT, "sample_width": 16,
        "sample_height": 16, "sample_frames": 5, "use_rotary_positional_embeddings": True,
    }, _cogvideox),
    "sana": Diffuser("SanaTransformer2DModel", {
        "in_channels": 8, "out_channels": 8, "num_attention_heads": 8, "attention_head_dim": 32,
        "num_cross_attention_heads": HEADS, "cross_attention_head_dim": WIDTH // HEADS,
        "cross_attention_dim": WIDTH, "caption_channels": TEXT_WIDTH, "num_layers": 2,
    }, _sana),
    "pixart": Diffuser("PixArtTransformer2DModel", _PATCHES | {
        "cross_attention_dim": WIDTH, "caption_channels": TEXT_WIDTH,
    }, _pixart),
    "lumina2": Diffuser("Lumina2Transformer2DModel", {
        "in_channels": 4, "hidden_size": WIDTH, "num_layers": 2, "num_refiner_layers": 2,
        "num_attention_heads": HEADS, "num_kv_heads": HEADS // 2, "axes_dim_rope": (32, 16, 16),
        "axes_lens": (64, 64, 64), "cap_feat_dim": TEXT_WIDTH,
    }, _lumina2),
    "z_image": Diffuser("ZImageTransformer2DModel", {
        "in_channels": 4, "dim": WIDTH, "n_layers": 2, "n_refiner_layers": 2, "n_heads": HEADS,
        "n_kv_heads": HEADS, "cap_feat_dim": TEXT_WIDTH, "axes_dims": [32, 16, 16],
        "axes_lens": [64, 64, 64],
    }, _z_image),
    "dit": Diffuser("DiTTransformer2DModel", _PATCHES | {"num_embeds_ada_norm": 1000}, _dit),
    "transformer_2d": Diffuser("Transformer2DModel", _SIZES | {
        "in_channels": 64, "num_layers": 2, "cross_attention_dim": TEXT_WIDTH,
    }, _transformer_2d),
    "unet": Diffuser("UNet2DConditionModel", {
        "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1,
        "block_out_channels": (WIDTH, WIDTH), "cross_attention_dim": TEXT_WIDTH,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "attention_head_dim": 64,
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }, _unet, keeps_own=True),
}  # fmt: skip

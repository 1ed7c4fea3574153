"""The models of `bench architectures`, by what people train, as `GROUPS` lists it.

Names of language models are those of their classes. All are random, of width 256 or more, in two
layers or one of each type, and drop nothing. No model of transformers has sizes of its own: each
size goes to whichever attributes of a configuration bear one of its names, also in configurations
within configurations.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.subjects import diffusion
from tests.tracing import models

B = models.B
Batch = dict[str, Any]
#: Attributes of transformers' mappings from configurations to classes.
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM")
#: More parameters are no small model: what a generic configuration did not make small.
MOST_PARAMETERS = 100_000_000
_PIXELS = {"image_size": 64, "patch_size": 8, "num_channels": 3}


WIDTH, LAYERS, HEADS, EXPERTS, VOCAB, POSITIONS = 256, 2, 4, 4, 96, 256
#: Ids from here to VOCAB are plain tokens: none marks padding, an image or a sound.
FIRST = 24
_HEAD = WIDTH // HEADS
_MAMBA_HEADS = 16
#: Sizes, each with the names of the attributes that get it.
_NAMES: list[tuple[int, str]] = [
    (WIDTH, """hidden_size d_model n_embd dim embed_dim embedding_size true_hidden_size
        intra_bottleneck_size word_embed_proj_dim lru_width d_latents prediction_head_size
        ple_embed_dim backbone_hidden_size entity_emb_size embedding_rank emb_dim
        mamba_d_ssm"""),
    (2 * WIDTH, """intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dim_ff dff
        hidden_dim ffn_hidden_size intermediate_size_mlp dense_intermediate_size"""),
    (WIDTH // 2, """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
        shared_intermediate_size shared_experts_intermediate_size kv_lora_rank q_lora_rank
        moe_shared_expert_intermediate_size o_lora_rank router_hidden_size ffn_size"""),
    (LAYERS, """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth
        num_decoder_layers num_encoder_layers num_layers_per_stack num_self_attends_per_block
        num_key_value_heads num_kv_heads n_groups mamba_n_groups mamba_ngroups n_group
        expert_layer_period attn_layer_period o_groups num_global_key_value_heads
        swa_num_key_value_heads t2u_encoder_layers t2u_decoder_layers speech_encoder_layers"""),
    (HEADS, """num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads
        decoder_attention_heads linear_num_key_heads linear_num_value_heads index_n_heads
        num_self_attention_heads num_cross_attention_heads swa_num_attention_heads
        num_query_groups num_landmarks"""),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok top_k_experts moe_topk moe_k index_topk_blocks"),
    (1, """topk_group num_shared_experts n_shared_experts moe_num_shared_experts
        first_k_dense_replace attn_layer_offset expert_layer_offset mamba_expand expand"""),
    (_HEAD, """head_dim d_kv v_head_dim global_head_dim linear_key_head_dim linear_value_head_dim
        qk_nope_head_dim dim_head index_head_dim swa_head_dim swa_v_head_dim attention_head_dim
        attention_hidden_size"""),
    (_HEAD // 2, "qk_rope_head_dim rotary_dim laurel_rank hidden_size_per_layer_input"),
    (_MAMBA_HEADS, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    (WIDTH // _MAMBA_HEADS, "mamba_d_head mamba_head_dim mamba_headdim"),
    (16, """mamba_d_state state_size ssm_state_size sliding_window attention_chunk_size chunk_size
        attention_window_size window_size mamba_chunk_size index_topk block_size
        index_block_size attention_window"""),
    (VOCAB, """vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input
        entity_vocab_size unpadded_vocab_size ngram_vocab_size_base t2u_vocab_size
        char_vocab_size unit_hifi_gan_vocab_size encoder_hash_byte_group_vocab"""),
    (POSITIONS, """max_position_embeddings n_positions n_ctx max_seq_len max_source_positions
        max_target_positions context_length max_encoder_position_embeddings
        max_decoder_position_embeddings original_max_position_embeddings"""),
    (0, "num_kv_shared_layers zero_expert_num"),
]  # fmt: skip
_SIZES = {name: size for size, names in _NAMES for name in names.split()}
#: Of latent attention, whose heads share no keys, and are described by their rotary part.
_LATENT = {"num_key_value_heads": HEADS, "head_dim": _HEAD // 2}
_MARKS = ("_token_id", "_token_index")
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def _arguments(config: type, **given: Any) -> dict[str, Any]:
    """Return arguments of a configuration class: generic sizes, but for those given."""
    sample: Any = config()
    usuals, found = sample.to_dict(), dict[str, Any]()
    sizes = _SIZES | (_LATENT if "kv_lora_rank" in usuals else {})
    types = _types(usuals.get("layer_types") or usuals.get("layers_block_type") or ())
    if usuals.get("num_kv_shared_layers"):
        found["num_kv_shared_layers"], types = len(types), types * 2
    for name, usual in usuals.items():
        inner = getattr(sample, name, None) if isinstance(usual, dict) else None
        if hasattr(inner, "model_type"):
            found[name] = {"model_type": inner.model_type, **_arguments(type(inner))}
        elif name in ("layer_types", "layers_block_type") and types:
            found[name] = types
        elif isinstance(usual, list) and len(usual) == usuals.get("num_hidden_layers", 0) > 2:
            count = len(types) or LAYERS
            found[name] = [sizes[name]] * count if name in sizes else usual[:count]
        elif name in sizes and isinstance(usual, int | None) and not isinstance(usual, bool):
            found.setdefault(name, sizes[name])
        elif name.endswith(_MARKS) and isinstance(usual, int | None):
            mark = 3 + sum(other.endswith(_MARKS) for other in found)
            found[name] = _SPECIAL.get(name, mark % FIRST)
        elif isinstance(usual, float) and any(part in name for part in ("drop", "mask_")):
            found[name] = 0.0
        elif name == "attention_types":
            found[name] = [[kinds, LAYERS // len(kinds)] for kinds, _ in usual]
    if types:
        found["num_hidden_layers"] = len(types)
    return found | {name: value for name, value in given.items() if name in usuals}


def _types(usual: Sequence[str]) -> list[str]:
    """Return types in their usual order up to the first of the last type, two in a row at most."""
    found = list[str]()
    for kind in usual:
        if found[-2:] != [kind, kind]:
            found.append(kind)
        if set(found) == set(usual) and len(found) >= LAYERS:
            break
    return found


class Architecture(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[nn.Module, int], Batch]  #: For a model, of so many tokens.
    needs: str = ""  #: The module that it comes from.
    #: Whether it is converted with its own checkpointing, which most of its modules keep.
    keeps_own: bool = False
    group: str = "language"  #: Of `GROUPS`, unless its configuration decides.
    config: str = ""  #: The class of its configuration in transformers.


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _ids(tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(FIRST, VOCAB, (B, tokens), generator=generator)


# Transformers.


def _transformers(model: str, config: str, **given: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    kind = getattr(transformers, config)
    made = kind(**_arguments(kind, **given))
    built: nn.Module = getattr(transformers, model)._from_config(made)
    return built


def _text(model: Any, tokens: int) -> Batch:
    batch: Batch = {"input_ids": _ids(tokens)}
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = _ids(tokens).flip(1)
    return batch


def _images(model: nn.Module, tokens: int) -> Batch:
    return {"pixel_values": _normal(B, 3, _PIXELS["image_size"], _PIXELS["image_size"])}


def _videos(model: nn.Module, tokens: int) -> Batch:
    size = _PIXELS["image_size"]
    return {"pixel_values_videos": _normal(B, 4, 3, size, size)}


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
        name: Architecture(
            functools.partial(_transformers, name, config), _text, "transformers", config=config
        )
        for name, config in sorted(found.items())
    }


def _tower(prefix: str, model: str, **given: Any) -> Architecture:
    given = _PIXELS | given
    make = functools.partial(_transformers, prefix + model, f"{prefix}Config", **given)
    inputs = _videos if "frames_per_clip" in given else _images
    return Architecture(make, inputs, "transformers", group="vision")


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
    "vjepa2": _tower(
        "VJEPA2", "Model", crop_size=_PIXELS["image_size"], frames_per_clip=4, mlp_ratio=2.0,
        pred_hidden_size=WIDTH, pred_num_attention_heads=4, pred_num_hidden_layers=2,
    ),
}  # fmt: skip


# Diffusers.


def _diffuser(one: diffusion.Diffuser) -> Architecture:
    def batch(model: nn.Module, tokens: int) -> Batch:
        return one.batch(tokens)

    return Architecture(one.make, batch, "diffusers", one.keeps_own, "diffusion")


DIFFUSERS = {name: _diffuser(one) for name, one in diffusion.DIFFUSERS.items()}


# Of other libraries.


def _other(name: str, make: Callable[[int], nn.Module], group: str = "vision") -> Architecture:
    """Return a model of the tests' table in this width."""
    row = models.MODELS[name]
    batch = row.batch
    return Architecture(
        lambda: make(WIDTH), lambda model, tokens: batch(min(tokens, 64)), row.needs, group=group
    )


OTHERS = {
    "timm_vit": _other("timm_vit", models.timm_vit),
    "torchvision_vit": _other("torchvision_vit", models.torchvision_vit),
    "openai_whisper": _other("openai_whisper", models.openai_whisper, "speech"),
    "x_transformers": _other(
        "x_transformers_flash",
        lambda width: models.x_transformer("Decoder", width, attn_flash=True, ff_glu=True),
        group="language",
    ),
}


# As users write them.


class ComplexRotaryBlock(models.NanoBlock):
    """nanoGPT's block with a rotary embedding that is a product of complex numbers."""

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        heads, qkv = self.attn.heads, self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv)
        q, k = turned(q, turns), turned(k, turns)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


def turned(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of numbers, as complex ones, by the angles of their position."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2)


class ComplexRotary(models.LanguageModel):
    """A language model of those blocks, which get the turns of all positions."""

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        half = x.shape[-1] // self.h[0].attn.heads // 2
        speeds = math.e ** (-9.2 * torch.arange(half, dtype=x.dtype) / half)
        angles = torch.outer(torch.arange(idx.shape[1], dtype=x.dtype), speeds)
        turns = torch.polar(torch.ones_like(angles), angles)
        for block in self.h:
            x = block(x, turns)
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def _own(name: str, make: Callable[[], nn.Module]) -> Architecture:
    return Architecture(make, lambda model, tokens: {name: _ids(min(tokens, 64)) % models.VOCAB})


OWN = {
    "nanogpt": _own("idx", lambda: models.LanguageModel(models.NanoBlock, WIDTH)),
    "mingpt": _own("idx", lambda: models.LanguageModel(models.MiniBlock, WIDTH)),
    "complex_rotary": _own("idx", lambda: ComplexRotary(ComplexRotaryBlock, WIDTH)),
    "adaln_dit": Architecture(
        lambda: models.DiT(WIDTH),
        lambda model, tokens: {"x": _normal(B, tokens, WIDTH), "c": _normal(B, WIDTH)},
        group="diffusion",
    ),
}
ARCHITECTURES = {**language_models(), **TOWERS, **DIFFUSERS, **OTHERS, **OWN}


# By what people train.

GROUPS = ("language", "mixtures", "vision", "diffusion", "speech")
#: Attributes of a configuration by which a model is one of speech, unless it sees images, and by
#: which it is a mixture.
_SPEECH = re.compile(r"\b(audio_(?!samples)|speech_)|_mel_bins\b")
_MIXTURES = re.compile(r"\b(n|num|num_local|n_routed|moe_num)(_routed)?_experts\b")


def group(name: str) -> str:
    """Return what people train an architecture for, one of `GROUPS`; "language" if unknown."""
    row = ARCHITECTURES.get(name)
    if row is None or not row.config:
        return row.group if row else "language"
    config = getattr(importlib.import_module("transformers"), row.config)
    names = " ".join([*config.__dataclass_fields__, *config.attribute_map])
    if _SPEECH.search(names) and "vision_" not in names:
        return "speech"
    return "mixtures" if _MIXTURES.search(names) else "language"


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

"""Tiny random models of many architectures, one row of a table for each.

Every parameter is random, no layer drops anything, and what a model gives is a function of its
parameters and its batch alone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, S, VOCAB = 2, 12, 64
IMAGE, VIDEO, VISION_START, VISION_END = 3, 4, 5, 6  # tokens of the models that see images
_TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
_SIZES = {**_WIDTHS, "num_hidden_layers": 2}
_DECODER = {
    **_TEXT, **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
_LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_GEMMA = {**_DECODER, "head_dim": 16}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
_ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {**_TEXT, **_SIZES, **_NO_DROPOUT, "max_position_embeddings": 70}
_GPT2 = {
    **_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_SEQ2SEQ = {
    **_TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "decoder_start_token_id": 1,
}  # fmt: skip
_T5 = {**_TEXT, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
_WAV2VEC2 = {
    **_TEXT, **_SIZES, "hidden_dropout": 0.0, "activation_dropout": 0.0, "attention_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False, "conv_dim": [16, 16],
    "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_PIXELS = {"image_size": 16, "patch_size": 4, "num_channels": 3}
_VIT = {**_SIZES, **_PIXELS}
_FALCON = {**_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TOWERS = {
    "text_config": {**_TEXT, **_SIZES, "max_position_embeddings": 64, "projection_dim": 32},
    "vision_config": {**_VIT, "projection_dim": 32},
}  # fmt: skip
_QWEN_VISION = {
    "depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip


def _qwen_vl(vision: dict, **rope) -> dict:
    """Of all Qwens that see: the text's positions have three parts, on 4 pairs of a head."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], **rope}
    return {
        "text_config": {**_DECODER, "head_dim": 8, "rope_parameters": rope},
        "vision_config": {**_QWEN_VISION, **vision},
        "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
    }  # fmt: skip


# Batches.


def _random() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _tokens(tokens: int) -> Tensor:
    return torch.randint(VISION_END + 1, VOCAB, (B, tokens), generator=_random())


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_random())


def _ids(tokens: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(tokens)}


def _pairs(tokens: int) -> dict[str, Tensor]:
    return {"input_ids": _tokens(tokens), "decoder_input_ids": _tokens(tokens).flip(1)}


def _images(tokens: int) -> dict[str, Tensor]:
    return {"pixel_values": _normal(B, 3, 16, 16)}


def _pixels(tokens: int) -> dict[str, Tensor]:
    return {"x": _normal(B, 3, 16, 16)}


def _images_and_ids(tokens: int) -> dict[str, Tensor]:
    return {**_images(tokens), **_ids(tokens)}


def _sound(tokens: int) -> dict[str, Tensor]:
    """Ten samples are one token of Wav2Vec2's, and three more come from the rest."""
    return {"input_values": _normal(B, 10 * tokens + 40)}


def _spectrum_and_ids(tokens: int) -> dict[str, Tensor]:
    return {"input_features": _normal(B, 8, 2 * S), "decoder_input_ids": _tokens(tokens)}


def _images_in_text(tokens: int) -> dict[str, Tensor]:
    """Sixteen patches are sixteen tokens of LLaVA's, two of the text before them."""
    images, text = torch.full((B, 16), IMAGE), _tokens(max(6, tokens - 16))
    ids = torch.cat([text[:, :2], images, text[:, 2:]], 1)
    return {**_images(tokens), "input_ids": ids, "use_cache": False}


def _patches_in_text(tokens: int) -> dict[str, Tensor]:
    """Four by four patches of 3 · 2 · 4 · 4 numbers are four tokens of Qwen's."""
    ids = _tokens(tokens)
    ids[:, 2], ids[:, 3:7], ids[:, 7] = VISION_START, IMAGE, VISION_END
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": _normal(B * 16, 96),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * B),
        "use_cache": False,
    }


# Models.


class Row(NamedTuple):
    layers: tuple[str, ...]  #: The classes of its repeated layers.
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]  #: Of so many tokens of text or sound.
    needs: str = ""  #: The module that it comes from.


def _torchvision() -> None:
    """Imports it, also where its operators cannot be loaded: a CUDA build beside a CPU torch.

    Their schemas are all that its modules need; transformers and timm import them, too.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
        importlib.import_module("torchvision")


def _hf(prefix, options, layers="{}DecoderLayer", model="{}ForCausalLM", config="{}Config",
        batch=_ids):  # fmt: skip
    """A row of transformers: {} in the names of classes is the architecture's prefix."""

    def make() -> nn.Module:
        with contextlib.suppress(ImportError):
            _torchvision()
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, config.format(prefix))(**options)
        return getattr(transformers, model.format(prefix))._from_config(made)

    return Row(tuple(layers.format(prefix).split()), make, batch, "transformers")


def _masked(prefix, options, layers="{}Layer"):
    return _hf(prefix, options, layers, "{}ForMaskedLM")


def _seq2seq(prefix, options, layers="{0}EncoderLayer {0}DecoderLayer", batch=_pairs):
    return _hf(prefix, options, layers, "{}ForConditionalGeneration", batch=batch)


def _vision(prefix, options, layers="{}Layer", model="{}ForImageClassification"):
    return _hf(prefix, options, layers, model, batch=_images)


def torchvision_vit(width: int = 32) -> nn.Module:
    _torchvision()
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=16, patch_size=4, num_layers=2, num_heads=4, hidden_dim=width,
        mlp_dim=width * 3 // 2, num_classes=5,
    )  # fmt: skip


def timm_vit(width: int = 32) -> nn.Module:
    _torchvision()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=16, patch_size=4, embed_dim=width, depth=2, num_heads=4, mlp_ratio=2, num_classes=5
    )


def openai_whisper(width: int = 32) -> nn.Module:
    from whisper.model import ModelDimensions, Whisper

    # Mel bands; then positions, width, heads and layers of sound; tokens; the same of text.
    model = Whisper(ModelDimensions(8, S, width, 4, 2, VOCAB, 64, width, 4, 2))
    nn.init.zeros_(model.decoder.positional_embedding)  # not initialised
    return model


def _diffusers() -> nn.Module:
    from diffusers import Transformer2DModel

    return Transformer2DModel(
        num_attention_heads=4, attention_head_dim=8, in_channels=32, num_layers=2,
        cross_attention_dim=24, norm_num_groups=4,
    )  # fmt: skip


def x_transformer(kind: str, width: int = 32, **options) -> nn.Module:
    import x_transformers

    layers = getattr(x_transformers, kind)(
        dim=width, depth=2, heads=4, attn_dim_head=width // 2, **options
    )
    return x_transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=64, attn_layers=layers)


def _heads(x: Tensor, n: int) -> Tensor:
    return x.view(*x.shape[:2], n, -1).transpose(1, 2)


class NanoAttention(nn.Module):
    """nanoGPT's: one projection for queries, keys and values; PyTorch's attention."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.c_attn(x).split(x.shape[2], dim=2))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(x.shape)))


class NanoMLP(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), NanoAttention(width, heads)
        self.ln_2, self.mlp = nn.LayerNorm(width), NanoMLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class MiniAttention(nn.Module):
    """minGPT's: the causal mask is a buffer, and each step of attention is written out."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, longest: int = 64):
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(longest, longest).tril()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[1:]
        q, k, v = (_heads(part, self.heads) for part in self.c_attn(x).split(width, dim=2))
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        scores = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = torch.matmul(self.attn_dropout(F.softmax(scores, dim=-1)), v)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(x.shape)))


class TanhGELU(nn.Module):
    """GELU's approximation by tanh, written out."""

    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class MiniBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = MiniAttention(width, heads)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.ModuleDict({"up": up, "act": TanhGELU(), "down": down})
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        hidden = self.mlp["act"](self.mlp["up"](self.ln_2(x)))
        return x + self.dropout(self.mlp["down"](hidden))


class LanguageModel(nn.Module):
    """What is around the blocks of both."""

    def __init__(self, block: type[nn.Module], width: int = 32, heads: int = 4, layers: int = 2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, width), nn.Embedding(64, width)
        self.drop = nn.Dropout(0.0)
        self.h = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class DiTAttention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class DiTBlock(nn.Module):
    """adaLN-Zero: shifts, scales and gates of both branches come from a condition."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attn = DiTAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(up, nn.GELU(approximate="tanh"), down)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate1.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift1, scale1))
        return x + gate2.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    """Its blocks and its last layer; x and c are embedded already."""

    def __init__(self, width: int = 32, heads: int = 4, layers: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(layers))
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.linear = nn.Linear(width, 24)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


# fmt: off
MODELS = {
    # Decoders.
    "llama": _hf("Llama", _DECODER),
    "llama4": _hf(
        "Llama4",
        {**_DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
         "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2, "no_rope_layers": [1, 0],
         "attention_chunk_size": 5},
        "{}TextDecoderLayer",
        config="{}TextConfig",
    ),
    "ministral": _hf("Ministral", {**_DECODER, **_LOCAL, "head_dim": 8}),
    "qwen3": _hf("Qwen3", {**_DECODER, "head_dim": 16}),
    "gemma": _hf("Gemma", _GEMMA),
    "gemma2": _hf(
        "Gemma2", {**_GEMMA, **_LOCAL, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0}
    ),
    "gemma3": _hf(
        "Gemma3", {**_GEMMA, **_LOCAL, "query_pre_attn_scalar": 9}, config="{}TextConfig"
    ),
    "gemma3n": _hf(
        "Gemma3n",
        {**_GEMMA, **_LOCAL, **_PER_LAYER, "intermediate_size": [48, 48], "laurel_rank": 8,
         "activation_sparsity_pattern": [0.5, 0.0], "num_kv_shared_layers": 0},
        "{}TextDecoderLayer",
        config="{}TextConfig",
    ),
    "gemma4": _hf(
        "Gemma4",
        {**_GEMMA, **_LOCAL, **_PER_LAYER, "global_head_dim": 24, "final_logit_softcapping": 3.0},
        "{}TextDecoderLayer",
        config="{}TextConfig",
    ),
    "gemma4_moe": _hf(
        "Gemma4",
        {**_GEMMA, **_LOCAL, "global_head_dim": 24, "num_global_key_value_heads": 1,
         "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "enable_moe_block": True,
         "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
        "{}TextDecoderLayer",
        config="{}TextConfig",
    ),
    "phi": _hf("Phi", _DECODER),
    "phi3": _hf("Phi3", {**_DECODER, "original_max_position_embeddings": 64}),
    "olmo2": _hf("Olmo2", _DECODER),
    "olmo3": _hf("Olmo3", {**_DECODER, **_LOCAL}),
    "granite": _hf(
        "Granite",
        {**_DECODER, "embedding_multiplier": 3.0, "residual_multiplier": 0.4,
         "attention_multiplier": 0.2, "logits_scaling": 2.0},
    ),
    "cohere2": _hf("Cohere2", {**_DECODER, **_LOCAL, "logit_scale": 0.5}),
    "glm4": _hf("Glm4", {**_DECODER, "head_dim": 8}),
    "starcoder2": _hf("Starcoder2", {**_DECODER, "sliding_window": 5}),
    "falcon": _hf("Falcon", _FALCON),
    "falcon_alibi": _hf(
        "Falcon",
        {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "gpt_neox": _hf("GPTNeoX", {**_TEXT, **_SIZES, "max_position_embeddings": 64}, "{}Layer"),
    "opt": _hf(
        "OPT",
        {**_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "ffn_dim": 48, "max_position_embeddings": 64, "dropout": 0.0},
    ),
    "bloom": _hf("Bloom", {**_TEXT, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "{}Block"),
    "gpt2": _hf("GPT2", _GPT2, "{}Block", "{}LMHeadModel"),
    # Mixtures of experts, recurrent layers.
    "mixtral": _hf("Mixtral", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": _hf("Qwen3Moe", {**_DECODER, **_ROUTED, "head_dim": 16, "num_experts": 4}),
    "gpt_oss": _hf(
        "GptOss",
        {**_DECODER, **_LOCAL, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
         "max_position_embeddings": 32 * 4096},
    ),
    "deepseek_v3": _hf(
        "DeepseekV3",
        {**_DECODER, **_ROUTED, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2,
         "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
         "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
    ),
    "qwen3_next": _hf(
        "Qwen3Next",
        {**_DECODER, **_ROUTED, "head_dim": 16, "num_experts": 4, "linear_num_key_heads": 2,
         "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "shared_expert_intermediate_size": 24},
    ),
    "jamba": _hf(
        "Jamba",
        {**_DECODER, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4,
         "mamba_d_state": 8},
        "{0}MambaDecoderLayer {0}AttentionDecoderLayer",
    ),
    "mamba2": _hf(
        "Mamba2",
        {**_TEXT, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16,
         "n_groups": 2, "state_size": 8, "chunk_size": 8},
        "{}Block",
    ),
    # Encoders of text.
    "bert": _masked("Bert", _ENCODER),
    "distilbert": _masked(
        "DistilBert",
        {**_TEXT, "dim": 32, "hidden_dim": 48, "n_heads": 4, "n_layers": 2, "dropout": 0.0,
         "attention_dropout": 0.0, "max_position_embeddings": 64},
        "TransformerBlock",
    ),
    "deberta_v2": _masked(
        "DebertaV2",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
         "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
         "position_biased_input": False},
    ),
    "modernbert": _masked(
        "ModernBert",
        {**_TEXT, **_SIZES, "max_position_embeddings": 64, "local_attention": 6,
         "cls_token_id": 1, "sep_token_id": 2,
         "layer_types": ["full_attention", "sliding_attention"]},
        "{}EncoderLayer",
    ),
    # Encoders and decoders; sound.
    "t5": _seq2seq("T5", {**_T5, "dropout_rate": 0.0}, "{}Block"),
    "t5_gated": _seq2seq(
        "T5", {**_T5, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}, "{}Block"
    ),
    "bart": _seq2seq("Bart", {**_SEQ2SEQ, "max_position_embeddings": 64}),
    "whisper": _seq2seq(
        "Whisper",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": S, "max_target_positions": 64,
         "begin_suppress_tokens": None},
        batch=_spectrum_and_ids,
    ),
    "wav2vec2": _hf("Wav2Vec2", _WAV2VEC2, "{}EncoderLayer", "{}Model", batch=_sound),
    # Images, and images with text.
    "vit": _vision("ViT", {**_VIT, **_NO_DROPOUT, "num_labels": 5}),
    "dinov2": _vision("Dinov2", {**_VIT, **_NO_DROPOUT, "mlp_ratio": 2, "num_labels": 5}),
    # The rescaling of positions is random.
    "dinov3": _vision(
        "DINOv3ViT",
        {**_VIT, "num_register_tokens": 2, "pos_embed_rescale": None},
        model="{}Model",
    ),
    "siglip": _hf("Siglip", _TOWERS, "{}EncoderLayer", "{}Model", batch=_images_and_ids),
    "swin": _vision(
        "Swin",
        {**_PIXELS, **_NO_DROPOUT, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4],
         "window_size": 2, "drop_path_rate": 0.0, "num_labels": 5},
    ),
    # The features are those before the last layer.
    "llava": _hf(
        "Llava",
        {"text_config": {"model_type": "llama", **_DECODER},
         "vision_config": {"model_type": "clip_vision_model", **_VIT, "num_hidden_layers": 3},
         "image_token_index": IMAGE, "image_seq_length": 16},
        "LlamaDecoderLayer CLIPEncoderLayer",
        "{}ForConditionalGeneration",
        batch=_images_in_text,
    ),
    "qwen2_vl": _seq2seq(
        "Qwen2VL",
        _qwen_vl({"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}),
        "{0}DecoderLayer {0}VisionBlock",
        _patches_in_text,
    ),
    "qwen3_vl": _seq2seq(
        "Qwen3VL",
        _qwen_vl({"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32,
                  "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
                 mrope_interleaved=True),
        "{0}TextDecoderLayer {0}VisionBlock",
        _patches_in_text,
    ),
    # Of other libraries.
    "timm_vit": Row(("Block",), timm_vit, _pixels, "timm"),
    "torchvision_vit": Row(("EncoderBlock",), torchvision_vit, _pixels, "torchvision"),
    "openai_whisper": Row(
        ("ResidualAttentionBlock",),
        openai_whisper,
        lambda tokens: {"mel": _normal(B, 8, 2 * S), "tokens": _tokens(tokens)},
        "whisper",
    ),
    "diffusers": Row(
        ("BasicTransformerBlock",),
        _diffusers,
        lambda tokens: {
            "hidden_states": _normal(B, 32, 4, 4), "encoder_hidden_states": _normal(B, 5, 24),
        },
        "diffusers",
    ),
    # Its layers have no class of their own.
    "x_transformers_flash": Row(
        ("Attention", "FeedForward"),
        lambda: x_transformer("Decoder", attn_flash=True, ff_glu=True),
        lambda tokens: {"x": _tokens(tokens)},
        "x_transformers",
    ),
    "x_transformers_rotary": Row(
        ("Attention", "FeedForward"),
        lambda: x_transformer("Encoder", rotary_pos_emb=True, rotary_emb_dim=8),
        lambda tokens: {"x": _tokens(tokens)},
        "x_transformers",
    ),
    # As users write them.
    "nanogpt": Row(
        ("NanoBlock",),
        lambda: LanguageModel(NanoBlock),
        lambda tokens: {"idx": _tokens(tokens)},
    ),
    "mingpt": Row(
        ("MiniBlock",),
        lambda: LanguageModel(MiniBlock),
        lambda tokens: {"idx": _tokens(tokens)},
    ),
    "dit": Row(("DiTBlock",), DiT, lambda tokens: {"x": _normal(B, 16, 32), "c": _normal(B, 32)}),
}
# fmt: on


def build(name: str, tokens: int = S) -> tuple[nn.Module, dict]:
    """A model in training mode, every parameter random, and the arguments to call it with.

    tokens: of each sequence, 64 at most.

    ImportError without the package that it comes from.
    """
    row = MODELS[name]
    torch.manual_seed(0)
    model = row.make().float().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape))
    batch = row.batch(tokens)
    if "use_cache" in inspect.signature(model.forward).parameters:
        batch["use_cache"] = False
    return model, batch


def main_output(output) -> Tensor:
    """The tensor that a model is called for."""
    if isinstance(output, Tensor):
        return output
    names = ("logits", "logits_per_image", "last_hidden_state", "sample")
    return next(output[name] for name in names if name in output)


def loss_of(output) -> Tensor:
    """A fixed random projection of the main output."""
    output = main_output(output)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return (output * weights.to(output)).sum()

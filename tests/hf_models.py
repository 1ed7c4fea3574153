"""Tiny random models of transformers, one for each architecture, and what a step of one gives."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.layers.fused_layer import DECISIONS, FusedLayer

transformers = pytest.importorskip("transformers")

B, S, VOCAB = 2, 12, 50
_TEXT = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_DECODER = {
    **_TEXT, **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
_ENCODER = {
    **_TEXT, **_SIZES, "max_position_embeddings": 70, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
_GPT2 = {
    **_TEXT, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_VIT = {**_ENCODER, "image_size": 16, "patch_size": 4, "num_channels": 1, "num_labels": 5}
_LOCAL = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
_GEMMA = {**_DECODER, "head_dim": 16, "query_pre_attn_scalar": 9, **_LOCAL}

#: Name: the config's class, the model's class, the config.
MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_DECODER, "attention_bias": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_DECODER, "sliding_window": 5}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_DECODER, "head_dim": 16}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**_DECODER, "no_rope_layers": [1, 0]}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "bert": ("BertConfig", "BertForMaskedLM", _ENCODER),
    "roberta": ("RobertaConfig", "RobertaForMaskedLM", _ENCODER),
    "vit": ("ViTConfig", "ViTForImageClassification", _VIT),
}


def build(name: str, dtype: torch.dtype = torch.float64, how: str = "", **differences):
    """Return a model in training mode, every parameter random; with sdpa where it can."""
    config, model, options = MODELS[name]
    how = how or ("eager" if name == "gemma2" else "sdpa")
    torch.manual_seed(0)
    made = getattr(transformers, model)._from_config(
        getattr(transformers, config)(**{**options, **differences}), attn_implementation=how
    )
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=torch.float64).to(p.dtype))
    return made.to(dtype).train()


def inputs_of(name: str, padded: bool = True, dtype: torch.dtype = torch.float64) -> dict:
    """Return what the model is called with: one row padded on the left, one on the right.

    Not on the left for Gemma-2: eager attention of float64 has NaN in rows without any key.
    """
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(B, 1, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels.to(dtype)}
    ids = torch.randint(3, VOCAB, (B, S), generator=generator)
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    if name != "gemma2":
        mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def step(model: nn.Module, given: dict) -> dict[str, Tensor]:
    """Logits where there is a token, and the gradients of all parameters."""
    model.zero_grad(set_to_none=True)
    logits = model(**given).logits
    mask = given.get("attention_mask")
    if mask is not None and mask.dim() == 2:
        logits = logits[mask.bool()]
    torch.manual_seed(2)
    dy = torch.randn(logits.shape, dtype=torch.float64)
    logits.backward(dy.to(logits.dtype))
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def in_float64(model: nn.Module) -> nn.Module:
    """Return the model with RMSNorms in its dtype; those of transformers are float32 always."""
    inside = {m for layer in fused_layers(model) for m in layer.modules()}
    for module in set(model.modules()) - inside:
        if type(module).__name__.endswith("RMSNorm"):
            offset = 1.0 if "Gemma" in type(module).__name__ else 0.0
            eps = getattr(module, "variance_epsilon", None) or module.eps
            module.forward = _rms_norm(module, offset, eps)
    return model


def _rms_norm(module, offset, eps):
    return lambda x: F.rms_norm(x, x.shape[-1:], module.weight + offset, eps)


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """L2 errors, relative: of what is 0 but for rounding (biases of keys), to the largest."""
    assert got.keys() == expected.keys()
    norms = {n: e.double().norm().item() for n, e in expected.items()}
    whole = max(norms.values())
    scale = {n: max(x, 1e-3 * whole) if x > 1e-6 * whole else whole for n, x in norms.items()}
    return {n: (got[n].double() - e.double()).norm().item() / scale[n] for n, e in expected.items()}


@contextlib.contextmanager
def reasons():
    found: list[str] = []
    observe = lambda layer, reason: found.append(reason)  # noqa: E731
    DECISIONS.append(observe)
    try:
        yield found
    finally:
        DECISIONS.remove(observe)


@contextlib.contextmanager
def all_served():
    with reasons() as why:
        yield
    assert not why, why


def served(model: nn.Module, given: dict) -> dict[str, Tensor]:
    """Return a step of a converted model, all of whose layers run as blocks."""
    with all_served():
        return step(model, given)


def fused_layers(model: nn.Module) -> list[FusedLayer]:
    return [module for module in model.modules() if isinstance(module, FusedLayer)]


def allowed(name):
    """float64 rounding (RoPE's tables are the same float32 numbers in both); but the softmax of
    eager attention, which Gemma-2 needs for its soft-cap, is float32 in transformers: a hundred
    roundings, of gradients much smaller than the largest."""
    return 1e-5 if name == "gemma2" else 1e-10


def packed(name: str) -> tuple[dict, list[Tensor]]:
    """Two sequences in one row, which their positions separate; and each by itself."""
    ids = inputs_of(name, padded=False)["input_ids"][:1]
    positions = torch.cat([torch.arange(5), torch.arange(S - 5)])[None]
    both = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    return both, [ids[:, :5], ids[:, 5:]]


#: For the language models.
IDS = inputs_of("llama", padded=False)


def close(got, expected):
    errors = distance(got, expected)
    # transformers' RMSNorm is float32 in float64, too: a hundred roundings.
    assert max(errors.values()) < 1e-5, errors

"""A call of a transformers layer as a block: its tensors and its plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.huggingface import eligibility
from fused_remat.huggingface.masks import Masks, masks_of
from fused_remat.huggingface.rows import Architecture, at
from fused_remat.layers.causal import why_not_weights
from fused_remat.layers.eligibility import why_not_context
from fused_remat.layers.linears import (
    LinearParts,
    block_tensors,
    dropout_p,
    read_linear,
    tensor_of,
)
from fused_remat.layers.precision import low_dtype, precision_of
from fused_remat.layers.read import LayerCall
from fused_remat.spec import BlockSpec, LoraSpec, transformer_spec

#: Arguments of a layer that a block reads, and those that do not change what it computes.
_READ = ("hidden_states", "attention_mask", "position_embeddings", "is_causal")
_IGNORED = (
    "position_ids", "cache_position", "use_cache", "output_hidden_states", "output_attentions",
    "output_router_logits", "return_dict", "num_items_in_batch", "ignore_index", "shift_labels",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
)  # fmt: skip
_KNOWN = frozenset((*_READ, *_IGNORED))


def call_of(layer: nn.Module, row: Architecture, given: Mapping[str, Any]) -> LayerCall | str:
    """The block that serves a call of `layer` with the arguments `given`, or why none does."""
    x = given["hidden_states"]
    reason = (
        eligibility.why_not_input(x)
        or _why_not_arguments(given)
        or eligibility.why_not_modules(layer, row)
        or why_not_context(x)
    )
    if reason is not None:
        return reason
    attention, low = at(layer, row.attention), low_dtype(x)
    linears = _linears(layer, row)
    if isinstance(linears, str):
        return linears
    masks = masks_of(attention, given, x, _window(attention, row), low)
    if isinstance(masks, str):
        return masks
    rope = _rope(attention, row, given, low)
    if isinstance(rope, str):
        return rope
    tensors, loras = block_tensors(linears, x.dtype if low is None else None)
    tensors |= _norm_weights(layer, row)
    spec = _spec(layer, row, linears, masks, bool(rope), loras)
    if isinstance(spec, str):
        return spec
    reason = why_not_weights(x, tensors, spec, low, "hidden_states")
    if reason is not None:
        return reason
    precision = None
    if low is not None:
        precision = precision_of(x, tensors, low, spec.norm_first)
    given_tensors = {"input": x, **tensors, **rope, **masks.tensors}
    return LayerCall(spec, given_tensors, {}, False, False, precision)


def example_spec(layer: nn.Module, row: Architecture) -> BlockSpec:
    """A spec whose graph has the kind and the names of the layer's."""
    return transformer_spec(
        row.norm, 1e-6, "relu", placement=row.placement, gated=row.gated, num_heads=1,
        num_kv_heads=1, head_dim=1, scale=1.0,
        projection="split" if "q" in row.linears else "packed",
        rotary=_rotates(at(layer, row.attention), row),
        qk_norm_eps=1e-6 if row.head_norms else None,
    )  # fmt: skip


def _why_not_arguments(given: Mapping[str, Any]) -> str | None:
    if given.get("output_attentions"):
        return "it is asked for its attention weights"
    for name, value in given.items():
        if name not in _KNOWN and value is not None and value is not False:
            return f"it is called with {name}"
    return None


def _linears(layer: nn.Module, row: Architecture) -> dict[str, LinearParts] | str:
    found = {}
    for name, path in row.linears.items():
        parts = read_linear(at(layer, path))
        if isinstance(parts, str):
            return f"its {path} {parts}"
        found[name] = parts
    return found


def _norm_weights(layer: nn.Module, row: Architecture) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, path in row.norms.items():
        module = at(layer, path)
        found[f"{name}.weight"] = tensor_of(module, "weight")
        found[f"{name}.bias"] = tensor_of(module, "bias")
    for name, path in row.head_norms.items():
        found[f"{name}.weight"] = tensor_of(at(layer, path), "weight")
    return found


def _rotates(attention: Any, row: Architecture) -> bool:
    """Whether the layer rotates its heads; some of SmolLM3's do not."""
    return row.rotary and bool(getattr(attention, "use_rope", True))


def _rope(
    attention: Any, row: Architecture, given: Mapping[str, Any], low: torch.dtype | None
) -> dict[str, Tensor] | str:
    """The tables, (S, R/2) or (B, S, R/2); transformers has them twice, side by side."""
    if not _rotates(attention, row):
        return {}
    x, pair = given["hidden_states"], given.get("position_embeddings")
    if not isinstance(pair, tuple) or len(pair) != 2:
        return f"position_embeddings is a {type(pair).__name__}, not (cos, sin)"
    width = getattr(attention, row.head_dim)
    tables = {}
    for name, table in zip(("cos", "sin"), pair, strict=True):
        if not isinstance(table, Tensor) or table.requires_grad or table.device != x.device:
            return f"{name} is no constant tensor on {x.device}"
        shape = tuple(table.shape)
        if len(shape) != 3 or shape[0] not in (1, x.shape[0]) or shape[1:] != (x.shape[1], width):
            return f"{name} has shape {shape}, expected {(1, x.shape[1], width)}"
        if table.dtype not in (torch.float32, low or x.dtype):
            return f"{name} is {table.dtype} beside {low or x.dtype}"
        half = table[..., : width // 2]
        tables[name] = half[0] if shape[0] == 1 else half
    return tables


def _spec(
    layer: nn.Module,
    row: Architecture,
    linears: Mapping[str, LinearParts],
    masks: Masks,
    rotary: bool,
    loras: tuple[LoraSpec, ...],
) -> BlockSpec | str:
    attention: Any = at(layer, row.attention)
    head_dim = int(getattr(attention, row.head_dim))
    heads = _heads(attention, row, linears, head_dim)
    reason = heads if isinstance(heads, str) else masks.why_not(heads[0])
    if reason is not None or isinstance(heads, str):
        return reason or ""
    eps = {_eps(at(layer, path)) for path in row.norms.values()}
    if len(eps) > 1:
        return f"its norms differ in eps: {sorted(eps)}"
    qk_eps = {_eps(at(layer, path)) for path in row.head_norms.values()}
    if len(qk_eps) > 1:
        return f"its head norms differ in eps: {sorted(qk_eps)}"
    softcap = getattr(attention, row.softcap) if row.softcap else None
    if softcap is not None and attention.config._attn_implementation == "sdpa":
        return "sdpa attention has no softcap"  # transformers raises
    ps = {name: dropout_p(at(layer, path)) for name, path in row.dropouts.items()}
    p_first, p_second = ps.get("p_residual1", 0.0), ps.get("p_residual2", 0.0)
    dropout = (_p_attention(attention, row), p_first, 0.0, p_second)
    if not all(0.0 <= p <= 1.0 for p in dropout):
        return f"a dropout probability is outside [0, 1]: {dropout}"
    return transformer_spec(
        row.norm,
        eps.pop(),
        eligibility.name_of_activation(layer, row) or "",
        offset=row.offset,
        placement=row.placement,
        gated=row.gated,
        dropout=dropout,
        loras=loras,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        scale=float(attention.scaling),
        softcap=float(softcap or 0.0),
        window=masks.window,
        masks=masks.kinds,
        projection="split" if "q" in row.linears else "packed",
        rotary=rotary,
        qk_norm_eps=qk_eps.pop() if qk_eps else None,
    )


def _heads(
    attention: Any, row: Architecture, linears: Mapping[str, LinearParts], head_dim: int
) -> tuple[int, int] | str:
    """Query heads, and key and value heads; transformers has as many as the weights make."""
    if "qkv" in linears:
        return attention.num_heads, attention.num_heads
    nhead, kv_heads = (linears[name].weight.shape[0] // head_dim for name in ("q", "k"))
    groups = getattr(attention, "num_key_value_groups", 1)
    if nhead != kv_heads * groups:
        return f"it has {nhead} query heads and {kv_heads} key heads in groups of {groups}"
    return nhead, kv_heads


def _window(attention: Any, row: Architecture) -> int | None:
    if not row.window:
        return None
    holder = attention if hasattr(attention, row.window) else attention.config
    window = getattr(holder, row.window, None)
    return None if window is None else int(window)


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _p_attention(attention: Any, row: Architecture) -> float:
    """transformers drops probabilities if the attention module trains, whatever its child does."""
    p = getattr(attention, row.p_attention)
    if isinstance(p, nn.Module):
        p = getattr(p, "p", 0.0)
    return float(p) if attention.training else 0.0

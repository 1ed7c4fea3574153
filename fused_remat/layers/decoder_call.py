"""A call of a decoder layer as a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fused_remat.autograd.shards import is_dtensor
from fused_remat.layers import eligibility
from fused_remat.layers.eligibility import DECODER
from fused_remat.layers.linears import dropout_p
from fused_remat.layers.precision import low_dtype, precision_of
from fused_remat.layers.read import (
    LayerCall,
    Place,
    adapters_of,
    batched,
    in_attention,
    in_module,
    in_split_attention,
    tensors_at,
    with_own_biases,
)
from fused_remat.spec import nn_layer_spec

_CROSS = ("cross_q", "cross_k", "cross_v")
_OTHERS = (
    in_module("fc1", "linear1"),
    in_module("fc2", "linear2"),
    in_module("norm1", "norm1"),
    in_module("norm2", "norm2"),
    in_module("norm3", "norm3"),
)
_PLACES = (
    *in_attention("self_attn", "qkv", "proj"),
    *in_attention("multihead_attn", "cross", "cross_proj"),
    *_OTHERS,
)
#: Of a layer whose attentions have three weights each.
_SPLIT = (
    *in_split_attention("self_attn", "qkv", "proj", ("q", "k", "v")),
    *in_split_attention("multihead_attn", "cross", "cross_proj", _CROSS),
    *_OTHERS,
)
_TGT_MASKS = ("tgt_mask", "tgt_key_padding_mask")
_MEMORY_MASKS = ("memory_mask", "memory_key_padding_mask")


def places_of(layer: Any) -> tuple[Place, ...]:
    """Where the layer has its block's weights.

    >>> places_of(nn.TransformerDecoderLayer(8, 2))[2][0]
    ('multihead_attn',)
    """
    attn = layer._modules.get("self_attn")
    return _PLACES if getattr(attn, "_qkv_same_embed_dim", True) else _SPLIT


def tensors_of(layer: nn.TransformerDecoderLayer) -> dict[str, Tensor | None]:
    """The block's weights by its own names.

    >>> sorted(tensors_of(nn.TransformerDecoderLayer(8, 2)))[:3]
    ['cross.bias', 'cross.weight', 'cross_proj.bias']
    """
    return tensors_at(layer, places_of(layer))


def dropout_ps(layer: nn.TransformerDecoderLayer) -> tuple[float, ...]:
    """What applies now, in order: as `nn_layer_spec` takes them.

    >>> dropout_ps(nn.TransformerDecoderLayer(8, 2, dropout=0.5))
    (0.5, 0.5, 0.5, 0.5, 0.5, 0.5)
    """
    children: Any = layer._modules
    attn, cross = children["self_attn"], children["multihead_attn"]
    p = dropout_p
    return (
        float(attn.dropout) if attn.training else 0.0,
        p(children["dropout1"]),
        float(cross.dropout) if cross.training else 0.0,
        p(children["dropout2"]),
        p(children["dropout"]),
        p(children["dropout3"]),
    )


def call_of(
    layer: nn.TransformerDecoderLayer,
    tgt: Tensor,
    memory: Tensor,
    tgt_mask: Tensor | None = None,
    memory_mask: Tensor | None = None,
    tgt_padding: Tensor | None = None,
    memory_padding: Tensor | None = None,
    tgt_is_causal: bool = False,
    memory_is_causal: bool = False,
) -> LayerCall | str:
    """The block that serves this call of `layer.forward`, or why the fused path cannot.

    >>> import torch
    >>> layer = nn.TransformerDecoderLayer(8, 2)
    >>> call_of(layer, torch.zeros(3, 2, 8), torch.zeros(5, 2, 8)).spec.kind
    'decoder_postnorm'
    """
    params = tensors_of(layer)
    masks = (tgt_mask, tgt_padding, bool(tgt_is_causal))
    memory_masks = (memory_mask, memory_padding, bool(memory_is_causal))
    reason = _why_not(layer, params, tgt, memory, masks, memory_masks)
    if reason is not None:
        return reason
    low, batch_first = low_dtype(tgt), layer.self_attn.batch_first
    adapters = adapters_of(layer, tgt, low)
    if isinstance(adapters, str):
        return adapters
    given = {**params, **adapters[0], "memory": memory}
    precision = None if low is None else precision_of(tgt, given, low, layer.norm_first)
    unbatched = tgt.dim() == 2
    seq_first = not unbatched and not batch_first
    activation = eligibility.of_layer(layer, tgt, seq_first, precision)
    if isinstance(activation, str):
        return activation
    # As in PyTorch: a hint stands for its mask where there is no padding.
    causal = masks[2] and tgt_padding is None
    memory_causal = memory_masks[2] and memory_padding is None
    tensors = {
        **given, **activation.captured, "input": batched(tgt, unbatched),
        "memory": batched(memory, unbatched), "mask": None if causal else tgt_mask,
        "padding": batched(tgt_padding, unbatched),
        "memory_mask": None if memory_causal else memory_mask,
        "memory_padding": batched(memory_padding, unbatched),
    }  # fmt: skip
    attn, ps = layer.self_attn, dropout_ps(layer)
    norms = (layer.norm1, layer.norm2, layer.norm3)
    spec = nn_layer_spec(
        bool(layer.norm_first),
        int(attn.num_heads),
        int(attn.embed_dim // attn.num_heads),
        activation.name,
        tuple([float(norm.eps) for norm in norms]),
        ps,
        causal=causal,
        masks=_masks_of(tensors, "mask", "padding"),
        memory_causal=memory_causal,
        memory_masks=_masks_of(tensors, "memory_mask", "memory_padding"),
        projection="packed" if attn._qkv_same_embed_dim else "split",
        captured=len(activation.captured),
        loras=adapters[1],
    )
    if not attn._qkv_same_embed_dim and not is_dtensor(params["qkv.bias"]):
        tensors = with_own_biases(tensors)
    return eligibility.why_not_dropout(ps) or LayerCall(
        spec, tensors, activation.functions, seq_first, unbatched, precision
    )


def _masks_of(tensors: Mapping[str, Tensor | None], *names: str) -> tuple[str, ...]:
    """Those of a mask and a padding that are there, as an `AttentionSpec` names them."""
    return tuple([n.removeprefix("memory_") for n in names if tensors[n] is not None])


def _why_not(
    layer: nn.TransformerDecoderLayer,
    params: Mapping[str, Tensor | None],
    tgt: Tensor,
    memory: Tensor,
    masks: tuple[Any, Any, bool],
    memory_masks: tuple[Any, Any, bool],
) -> str | None:
    attn = layer.self_attn
    reason = eligibility.why_not_module(
        layer, DECODER, adapters=True
    ) or eligibility.why_not_context(tgt, "tgt")
    if reason is not None:
        return reason
    low = low_dtype(tgt)
    return (
        eligibility.why_not_tensors(tgt, attn.embed_dim, params, low, "tgt")
        or eligibility.why_not_memory(tgt, memory, attn.batch_first, low)
        or eligibility.why_not_masks(tgt, attn, *masks, low, names=_TGT_MASKS)
        or eligibility.why_not_masks(tgt, attn, *memory_masks, low, memory, _MEMORY_MASKS)
    )

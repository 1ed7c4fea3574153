"""A call of an encoder layer as a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fused_remat.autograd.shards import is_dtensor
from fused_remat.layers import eligibility
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

_OTHERS = (
    in_module("fc1", "linear1"),
    in_module("fc2", "linear2"),
    in_module("norm1", "norm1"),
    in_module("norm2", "norm2"),
)
_PLACES = (*in_attention("self_attn", "qkv", "proj"), *_OTHERS)
#: Of a layer whose attention has three weights.
_SPLIT = (*in_split_attention("self_attn", "qkv", "proj", ("q", "k", "v")), *_OTHERS)


def places_of(layer: Any) -> tuple[Place, ...]:
    """Where the layer has its block's weights.

    >>> places_of(nn.TransformerEncoderLayer(8, 2))[0]
    (('self_attn',), (('qkv.weight', 'in_proj_weight'), ('qkv.bias', 'in_proj_bias')))
    """
    attn = layer._modules.get("self_attn")
    return _PLACES if getattr(attn, "_qkv_same_embed_dim", True) else _SPLIT


def tensors_of(layer: nn.TransformerEncoderLayer) -> dict[str, Tensor | None]:
    """The block's weights by its own names.

    >>> sorted(tensors_of(nn.TransformerEncoderLayer(8, 2)))[:3]
    ['fc1.bias', 'fc1.weight', 'fc2.bias']
    """
    return tensors_at(layer, places_of(layer))


def call_of(
    layer: nn.TransformerEncoderLayer,
    params: Mapping[str, Tensor | None],
    src: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> LayerCall | str:
    """The block that serves this call of `layer.forward`, or why the fused path cannot.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> call_of(layer, tensors_of(layer), torch.zeros(3, 2, 8), None, None, False).spec.kind
    'encoder_postnorm'
    """
    reason = eligibility.why_not_module(layer, adapters=True) or eligibility.why_not_context(src)
    if reason is not None:
        return reason
    children: Any = layer._modules
    attn = children["self_attn"]
    low = low_dtype(src)
    reason = eligibility.why_not_tensors(
        src, attn.embed_dim, params, low
    ) or eligibility.why_not_masks(src, attn, mask, padding, is_causal, low)
    if reason is not None:
        return reason
    adapters = adapters_of(layer, src, low)
    if isinstance(adapters, str):
        return adapters
    if adapters[0]:
        params = {**params, **adapters[0]}
    precision = None if low is None else precision_of(src, params, low, layer.norm_first)
    unbatched = src.dim() == 2
    seq_first = not unbatched and not attn.batch_first
    activation = eligibility.of_layer(layer, src, seq_first, precision)
    if isinstance(activation, str):
        return activation
    causal = is_causal and padding is None  # as in PyTorch: the hint stands for the mask
    ps = eligibility.dropout_ps(layer)
    masks = ("mask",) if mask is not None and not causal else ()
    spec = nn_layer_spec(
        bool(layer.norm_first),
        int(attn.num_heads),
        int(attn.embed_dim // attn.num_heads),
        activation.name,
        (float(children["norm1"].eps), float(children["norm2"].eps)),
        ps,
        causal=causal,
        masks=masks if padding is None else (*masks, "padding"),
        projection="packed" if attn._qkv_same_embed_dim else "split",
        captured=len(activation.captured),
        loras=adapters[1],
    )
    tensors = {
        **params, **activation.captured, "input": batched(src, unbatched),
        "mask": None if causal else mask, "padding": batched(padding, unbatched),
    }  # fmt: skip
    if not attn._qkv_same_embed_dim and not is_dtensor(params["qkv.bias"]):
        tensors = with_own_biases(tensors)
    return eligibility.why_not_dropout(ps) or LayerCall(
        spec, tensors, activation.functions, seq_first, unbatched, precision
    )

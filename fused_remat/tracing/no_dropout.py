"""PyTorch's functions with dropout, replaced while a layer is recorded or proved."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fused_remat.tracing.values import Untraceable

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


class WithoutDropout(TorchFunctionMode):
    """A context in which dropout of any probability does nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dropout(func):
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            return attention_without_dropout(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention(*args, **kwargs)
        return func(*args, **kwargs)


def is_dropout(func: Any) -> bool:
    """Return whether a function drops single elements; `F.dropout2d` is a random operation."""
    name = getattr(func, "__name__", "")
    return func in (F.dropout, torch.dropout, torch.dropout_) or name in ("dropout", "dropout_")


def attention_without_dropout(*args: Any, **kwargs: Any) -> Tensor:
    """Compute `F.scaled_dot_product_attention` with a dropout probability of 0."""
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    if "dropout_p" in kwargs:
        kwargs = {**kwargs, "dropout_p": 0.0}
    return F.scaled_dot_product_attention(*args, **kwargs)


def has_dropout(*args: Any, **kwargs: Any) -> bool:
    """Return whether a call of `F.scaled_dot_product_attention` has dropout."""
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute `F.multi_head_attention_forward` by linear layers and one call of attention.

    Weights that are requested are computed apart.
    """
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    if not (call.bias_k is call.bias_v is call.static_k is call.static_v is None) or (
        call.add_zero_attn
    ):
        raise Untraceable("nn.MultiheadAttention with bias_k, add_zero_attn or static keys")
    query, packed, bias = call.query, call.in_proj_weight, call.in_proj_bias
    tokens, batch, width = query.shape
    head_dim = width // call.num_heads
    if query is call.key is call.value and not call.use_separate_proj_weight:
        heads: Any = F.linear(query, packed, bias).chunk(3, -1)
    else:
        weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
        if not call.use_separate_proj_weight:
            weights = packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        heads = map(F.linear, (query, call.key, call.value), weights, biases)
    q, k, v = (x.reshape(-1, batch, call.num_heads, head_dim).permute(1, 2, 0, 3) for x in heads)
    mask = call.attn_mask
    if mask is not None and mask.dim() == 3:
        mask = mask.view(batch, call.num_heads, *mask.shape[1:])
    if call.key_padding_mask is not None:
        padding = _added(call.key_padding_mask.view(batch, 1, 1, -1), query)
        mask = padding if mask is None else padding + _added(mask, query)
    elif mask is not None and mask.dtype == torch.bool:
        mask = mask.logical_not()
    p = call.dropout_p if call.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    out = out.permute(2, 0, 1, 3).reshape(tokens, batch, width)
    y = F.linear(out, call.out_proj_weight, call.out_proj_bias)
    if not call.need_weights:
        return y, None
    scores = q @ k.transpose(-1, -2) * head_dim**-0.5
    if mask is not None:
        scores = scores + _added(~mask if mask.dtype == torch.bool else mask, q)
    probabilities = scores.softmax(-1)
    return y, probabilities.mean(1) if call.average_attn_weights else probabilities


def _added(hidden: Tensor, like: Tensor) -> Tensor:
    """Return a mask of hidden keys as the values that are added to scores."""
    if hidden.dtype != torch.bool:
        return hidden
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill(hidden, -torch.inf)

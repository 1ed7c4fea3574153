"""A call of an encoder layer as a block: its tensors, its plain numbers, its own functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fused_remat.blocks.custom import Function
from fused_remat.blocks.encoder import EncoderConfig
from fused_remat.blocks.sketch import CUSTOM, captured_params
from fused_remat.layers import custom_activation, eligibility
from fused_remat.layers.autocast import Precision, low_dtype, precision_of
from fused_remat.ops.activation import activation_name


@dataclass(frozen=True)
class EncoderCall:
    """What `ops.run_encoder` takes besides src and padding; `tensors` by the block's names.

    `precision`: the dtypes under autocast, None if it is off.
    """

    config: EncoderConfig
    tensors: Mapping[str, Tensor | None]
    functions: Mapping[str, Function]
    seq_first: bool
    precision: Precision | None = None


_NAMES = tuple((f"{n}.weight", f"{n}.bias") for n in ("proj", "fc1", "fc2", "norm1", "norm2"))


def tensors_of(layer: nn.TransformerEncoderLayer) -> dict[str, Tensor | None]:
    """The block's tensors by its own names, read through the submodules at every call.

    >>> sorted(tensors_of(nn.TransformerEncoderLayer(8, 2)))[:3]
    ['fc1.bias', 'fc1.weight', 'fc2.bias']
    """
    child = layer._modules.get
    attn = child("self_attn")
    params: dict[str, Tensor | None] = {
        "qkv.weight": _tensor(attn, "in_proj_weight"),
        "qkv.bias": _tensor(attn, "in_proj_bias"),
    }
    proj = None if attn is None else attn._modules.get("out_proj")
    modules = (proj, child("linear1"), child("linear2"), child("norm1"), child("norm2"))
    for (weight, bias), module in zip(_NAMES, modules, strict=True):
        params[weight] = _tensor(module, "weight")
        params[bias] = _tensor(module, "bias")
    return params


def _tensor(module: Any, name: str) -> Tensor | None:
    """`module.name` if there is such a tensor: a parameter, or what replaced it."""
    if module is None:
        return None
    own = module._parameters.get(name)
    if own is not None:
        return own  # type: ignore[no-any-return]
    # Not getattr: a parametrization would compute, and update its buffers.
    for where in (module._buffers, module.__dict__):
        own = where.get(name)
        if own is not None:
            return own if isinstance(own, Tensor) else None
    return None


def call_of(
    layer: nn.TransformerEncoderLayer,
    params: Mapping[str, Tensor | None],
    src: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> EncoderCall | str:
    """The block that serves this call of `layer.forward`, or why the fused path cannot.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> call_of(layer, tensors_of(layer), torch.zeros(3, 2, 8), None, None, False).config.nhead
    2
    """
    attn: Any = layer.self_attn
    reason = eligibility.why_not_module(layer) or eligibility.why_not_context(src)
    if reason is not None:
        return reason
    low = low_dtype(src)
    reason = eligibility.why_not_tensors(
        src, attn.embed_dim, params, low
    ) or eligibility.why_not_masks(src, attn, mask, padding, is_causal, low)
    if reason is not None:
        return reason
    precision = None if low is None else precision_of(src, params, low, layer.norm_first)
    seq_first = src.dim() == 3 and not attn.batch_first
    tensors, functions = dict(params), {}
    activation, captured = activation_name(layer.activation), 0
    if activation is None:
        width = layer.linear1.weight.shape[0]
        found = custom_activation.prepare_for(src, layer.activation, width, seq_first, precision)
        if isinstance(found, str):
            return found
        activation, captured = CUSTOM, len(found.captured)
        tensors.update(zip(captured_params(captured), found.captured, strict=True))
        functions["activation"] = found.fn
    causal = is_causal and padding is None  # as in PyTorch: the hint stands for the mask
    tensors["mask"] = None if causal else mask
    p_attention, p_residual1, p_mlp, p_residual2 = eligibility.dropout_ps(layer)
    config = EncoderConfig(
        norm_first=bool(layer.norm_first),
        nhead=int(attn.num_heads),
        head_dim=int(attn.embed_dim // attn.num_heads),
        activation=activation,
        captured=captured,
        eps1=float(layer.norm1.eps),
        eps2=float(layer.norm2.eps),
        p_attention=p_attention,
        p_residual1=p_residual1,
        p_mlp=p_mlp,
        p_residual2=p_residual2,
        causal=causal,
        has_mask=tensors["mask"] is not None,
        has_padding=padding is not None,
    )
    return eligibility.why_not_dropout(config) or EncoderCall(
        config, tensors, functions, seq_first, precision
    )

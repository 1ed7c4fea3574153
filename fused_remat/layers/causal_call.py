"""A call of a causal layer as a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fused_remat.layers import autocast, eligibility
from fused_remat.layers.causal_weights import why_not_weights
from fused_remat.layers.layer_call import LayerCall, in_module
from fused_remat.layers.linears import LinearParts, block_tensors, read_linear, tensor_of, unwrapped
from fused_remat.layers.plain_causal import check_window
from fused_remat.ops.activation import has_hooks
from fused_remat.ops.inputs import check_p
from fused_remat.ops.masks import lengths_of, mask_of, masks_given, padding_of
from fused_remat.ops.rotary import rotary_tensors
from fused_remat.spec import (
    AttentionOptions,
    BlockSpec,
    LoraSpec,
    score_fields,
    transformer_spec,
)
from fused_remat.steps.norm import NORMS

#: The block's names of the linear layers, and the layer's own.
_LINEARS = {
    "q": "q", "k": "k", "v": "v", "proj": "proj", "gate": "gate", "fc1": "up", "fc2": "down",
}  # fmt: skip
_NORMS = ("norm1", "norm2", "post1", "post2", "q_norm", "k_norm")
#: Where a layer may have its block's weights.
PLACES = (
    *(in_module(name, own) for name, own in _LINEARS.items()),
    *(in_module(name, name) for name in _NORMS),
)
_KINDS = {row.module: kind for kind, row in NORMS.items()}
_FORWARDS: dict[Any, Any] = {module: module.forward for module in _KINDS}
_PLAIN = (Tensor, nn.Parameter)


def call_of(
    layer: Any,
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> LayerCall | str:
    """The block that serves this call of a `CausalLayer`, or why the fused path cannot.

    Raises: TypeError, ValueError, RuntimeError for inputs that do not fit.

    >>> import torch
    >>> from fused_remat.layers.plain_causal import CausalLayer
    >>> call_of(CausalLayer(8, 2, 16), torch.zeros(1, 3, 8)).spec.linears
    ('q', 'k', 'v', 'proj', 'gate', 'fc1', 'fc2')
    """
    inputs = inputs_of(layer, x, cos, sin, attn_mask, key_padding_mask, key_lengths, cu_seqlens)
    reason = eligibility.why_not_context(x, "x") or eligibility.why_not_global_hooks()
    if reason is not None:
        return reason
    if type(x) not in _PLAIN:
        return f"x is a {type(x).__name__}"
    linears = _linears(layer)
    if isinstance(linears, str):
        return linears
    norms = _norms(layer)
    if isinstance(norms, str):
        return norms
    kind, eps, qk_eps, affine = norms
    low = autocast.low_dtype(x)
    weights, loras = block_tensors(linears, x.dtype if low is None else None)
    params = {**weights, **affine}
    spec = _spec(layer, kind, eps, qk_eps, inputs, loras)
    reason = why_not_weights(x, params, spec, low, "x")
    if reason is not None:
        return reason
    precision = None
    if low is not None:
        precision = autocast.precision_of(x, params, low, layer.placement != "post")
    return LayerCall(spec, {**params, **inputs}, {}, False, False, precision)


def inputs_of(
    layer: Any,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> dict[str, Tensor | None]:
    """What a call is given, by the block's names, checked."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got {type(x).__name__}")
    if x.dim() != 3 or x.shape[-1] != layer.d_model or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}, expected floating (B, S, {layer.d_model})"
        )
    grid = (x.shape[0], layer.nhead, x.shape[1], x.shape[1])
    rope = None if cos is None and sin is None else (cos, sin)
    return {
        "input": x,
        **rotary_tensors(x, layer.head_dim, rope, None, None),
        "mask": mask_of(attn_mask, grid, x),
        "padding": padding_of(key_padding_mask, grid, x),
        **lengths_of(key_lengths, cu_seqlens, None, grid, x, "cu_seqlens"),
    }


def _linears(layer: Any) -> dict[str, LinearParts] | str:
    """The linear layers by the block's names, or why one of them cannot be read."""
    found = {}
    for name, own in _LINEARS.items():
        if own == "gate" and layer.gate is None:
            continue
        parts = read_linear(layer._modules.get(own))
        if isinstance(parts, str):
            return f"its {own} {parts}"
        found[name] = parts
    return found


def _norms(layer: Any) -> tuple[str, float, float, dict[str, Tensor | None]] | str:
    """The kind and eps of the norms, the eps of the heads', and their tensors; or why not."""
    names = ["norm1", "norm2", *(["post1", "post2"] if layer.placement == "sandwich" else [])]
    heads = ["q_norm", "k_norm"] if layer.q_norm is not None else []
    eps: dict[str, set[Any]] = {"": set(), "heads": set()}
    kinds, affine = set(), {}
    for name in names + heads:
        norm: Any = unwrapped(layer._modules.get(name))
        if isinstance(norm, str):
            return f"its {name} {norm}"
        kind = type(norm)
        if kind not in _KINDS or (name in heads and kind is not nn.RMSNorm):
            return f"its {name} is a {kind.__name__}, not a norm that a block has there"
        if has_hooks(norm):
            return f"its {name} has hooks"
        if "forward" in norm.__dict__ or kind.forward is not _FORWARDS[kind]:
            return f"its {name}.forward was replaced"
        width = (layer.head_dim if name in heads else layer.d_model,)
        if tuple(norm.normalized_shape) != width:
            return f"its {name} is over {tuple(norm.normalized_shape)}, not {width}"
        eps["heads" if name in heads else ""].add(norm.eps)
        kinds |= set() if name in heads else {kind}
        affine[f"{name}.weight"], bias = tensor_of(norm, "weight"), tensor_of(norm, "bias")
        if name not in heads:
            affine[f"{name}.bias"] = bias
    if len(kinds) > 1 or any(len(found) > 1 or None in found for found in eps.values()):
        return "its norms differ in kind or eps, or have no eps"
    if any(affine[f"{name}.weight"] is None for name in heads):
        return "its q_norm or k_norm has no weight"
    (block_eps,) = eps[""]
    (head_eps,) = eps["heads"] or (block_eps,)
    return _KINDS[kinds.pop()], float(block_eps), float(head_eps), affine


def _spec(
    layer: Any,
    norm: str,
    eps: float,
    qk_eps: float,
    inputs: Mapping[str, Tensor | None],
    loras: tuple[LoraSpec, ...],
) -> BlockSpec:
    """What a call computes.

    Raises: ValueError for what the layer was set to and no layer has.
    """
    p = check_p("dropout", layer.dropout) if layer.training else 0.0
    p_attention = check_p("attention_dropout", layer.attention_dropout)
    check_window(layer.window)  # -1 would be none to a block
    options: AttentionOptions = {"softcap": float(layer.softcap)}
    if layer.window is not None:
        options["window"] = (layer.window, layer.window)
    return transformer_spec(
        norm,
        eps,
        layer.activation,
        placement=layer.placement,
        gated=layer.gate is not None,
        dropout=(p_attention if layer.training else 0.0, p, p, p),
        loras=loras,
        num_heads=layer.nhead,
        num_kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        **score_fields(layer.head_dim, layer.is_causal, options),
        projection="split",
        rotary="cos" in inputs,
        interleaved=layer.rope_interleaved,
        qk_norm_eps=None if layer.q_norm is None else qk_eps,
        masks=masks_given(inputs),
    )

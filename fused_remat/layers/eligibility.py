"""When the fused path can serve an `nn.TransformerEncoderLayer` call, and why not.

The fused path reads parameters instead of calling submodules, so it runs only where nobody could
tell: children of exactly the stock types, without hooks, parametrizations or overrides. Every
function here returns None for "yes" or the reason for "no", as a phrase. Bad input is a reason too:
PyTorch's own forward then raises PyTorch's own error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._device import DeviceContext

from fused_remat.blocks.encoder import EncoderConfig
from fused_remat.layers import autocast
from fused_remat.ops.activation import has_hooks

_STOCK = nn.TransformerEncoderLayer
_PLAIN = (Tensor, nn.Parameter)
_CHILDREN: dict[str, tuple[type[nn.Module], ...]] = {
    "self_attn": (nn.MultiheadAttention,),
    "linear1": (nn.Linear,),
    "dropout": (nn.Dropout, nn.Identity),
    "linear2": (nn.Linear,),
    "norm1": (nn.LayerNorm,),
    "norm2": (nn.LayerNorm,),
    "dropout1": (nn.Dropout, nn.Identity),
    "dropout2": (nn.Dropout, nn.Identity),
}
_FORWARDS: dict[type, Any] = {t: t.forward for ts in _CHILDREN.values() for t in ts}
_GLOBAL_HOOKS = tuple(
    getattr(_module, name)
    for name in (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
)
# Observers that change nothing: FlopCounterMode and its module tracker, CommDebugMode.
_KNOWN_GLOBAL_HOOKS = (
    "torch.utils.module_tracker",
    "torch.utils.flop_counter",
    "torch.distributed.tensor.debug._comm_mode",
)


def why_not_module(layer: nn.TransformerEncoderLayer) -> str | None:
    """Why the fused path cannot stand in for the layer's submodules and methods.

    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> layer.norm1 = nn.Identity()
    >>> why_not_module(layer)
    'its norm1 is a Identity, not a LayerNorm'
    """
    cls = type(layer)
    for method in ("_sa_block", "_ff_block"):
        if getattr(cls, method) is not getattr(_STOCK, method) or method in layer.__dict__:
            return f"{method} is overridden"
    children = layer._modules
    for name, types in _CHILDREN.items():
        child = children.get(name)
        if child is None or type(child) not in types:
            return f"its {name} is a {type(child).__name__}, not a {types[0].__name__}"
        if has_hooks(child):
            return f"its {name} has hooks"
        if "forward" in child.__dict__ or type(child).forward is not _FORWARDS[type(child)]:
            return f"its {name}.forward was replaced"
    for hooks in _GLOBAL_HOOKS:
        for hook in hooks.values():
            if getattr(hook, "__module__", None) not in _KNOWN_GLOBAL_HOOKS:
                shown = getattr(hook, "__qualname__", type(hook).__name__)
                return f"a global module hook is registered ({shown})"
    return _why_not_parts(children)


def _why_not_parts(children: Any) -> str | None:
    attn = children["self_attn"]
    if not attn._qkv_same_embed_dim or attn.bias_k is not None or attn.add_zero_attn:
        return "its self_attn has kdim/vdim, bias_kv or add_zero_attn"
    if type(attn._modules["out_proj"]) is not NonDynamicallyQuantizableLinear:
        return f"its self_attn.out_proj is a {type(attn._modules['out_proj']).__name__}"
    width = attn.embed_dim
    if width % attn.num_heads:
        return f"its self_attn has {attn.num_heads} heads for width {width}"
    for name in ("norm1", "norm2"):
        shape = children[name].normalized_shape
        if shape != (width,):
            return f"its {name} is over {shape}, not {(width,)}"
    return None


def why_not_tensors(
    src: Tensor,
    width: int,
    params: Mapping[str, Tensor | None],
    low: torch.dtype | None = None,
) -> str | None:
    """Why the fused path cannot take `src` with these parameters in a layer of `width`.

    `low` is the dtype of autocast, None if it is off.

    >>> why_not_tensors(torch.zeros(3), 3, {})
    'src has shape (3,), expected 2 or 3 dimensions'
    """
    if type(src) not in _PLAIN:
        return f"src is a {type(src).__name__}"
    shape = src.shape
    if len(shape) not in (2, 3):
        return f"src has shape {tuple(shape)}, expected 2 or 3 dimensions"
    if shape[-1] != width:
        return f"src has width {shape[-1]}, expected {width}"
    dtype, device = src.dtype, src.device
    shapes: list[torch.Size | None] = []
    for name, p in params.items():
        if p is None:
            shapes.append(None)
            continue
        if type(p) not in _PLAIN:
            return f"{name} is a {type(p).__name__}"
        if (p.dtype is not dtype and low is None) or p.device != device:
            return f"src is {dtype} on {device} but {name} is {p.dtype} on {p.device}"
        shapes.append(p.shape)
    reason = None if low is None else autocast.why_not(src, params, low)
    # Dynamo would see through the cache, and say so.
    why_not = _why_not_shapes.__wrapped__ if torch.compiler.is_compiling() else _why_not_shapes
    return reason or why_not(dtype, width, tuple(params), tuple(shapes))


@functools.lru_cache(maxsize=1024)
def _why_not_shapes(
    dtype: torch.dtype,
    width: int,
    names: tuple[str, ...],
    shapes: tuple[torch.Size | None, ...],
) -> str | None:
    if not dtype.is_floating_point:
        return f"src has dtype {dtype}"
    named = dict(zip(names, shapes, strict=True))
    ff = named["fc1.weight"]
    for name, shape in named.items():
        head, kind = name.split(".")
        norm = head.startswith("norm")
        if shape is None:
            if kind == "weight" and not norm:
                return f"{name} is None"
            continue
        rows = {"qkv": 3 * width, "fc1": ff[0] if ff else 0}.get(head, width)
        columns = rows if norm else (ff[0] if ff else 0) if head == "fc2" else width
        expected = (rows,) if norm or kind == "bias" else (rows, columns)
        if tuple(shape) != expected:
            return f"{name} has shape {tuple(shape)}, expected {expected} for src's width {width}"
    return None


def why_not_masks(
    src: Tensor,
    attn: nn.MultiheadAttention,
    mask: Any,
    padding: Any,
    is_causal: bool,
    low: torch.dtype | None = None,
) -> str | None:
    """Why the fused path cannot take these masks, in the shapes that the stock layer takes.

    `low` is the dtype of autocast, None if it is off.

    >>> attn = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> why_not_masks(torch.zeros(2, 5, 8), attn, torch.zeros(4, 4), None, False)
    'src_mask has shape (4, 4), expected (5, 5) or (4, 5, 5)'
    """
    if mask is None and padding is None:
        return "is_causal=True needs a src_mask" if is_causal else None
    if is_causal and mask is None:
        return "is_causal=True needs a src_mask"
    for name, m in (("src_mask", mask), ("src_key_padding_mask", padding)):
        if m is None:
            continue
        if type(m) not in _PLAIN:
            return f"{name} is a {type(m).__name__}"
        if m.dtype not in (torch.bool, src.dtype, torch.float32, low):
            return f"{name} has dtype {m.dtype}, expected bool, {src.dtype} or torch.float32"
        if m.device != src.device:
            return f"{name} is on {m.device}, src on {src.device}"
    if src.dim() == 2:  # one sequence, whatever batch_first
        batch, seq_len = 1, src.shape[0]
    else:
        batch, seq_len = src.shape[:2] if attn.batch_first else src.shape[1::-1]
    if mask is not None and not (is_causal and padding is None):
        square = (seq_len, seq_len)
        per_head = (batch * attn.num_heads, *square)
        if tuple(mask.shape) not in (square, per_head):
            return f"src_mask has shape {tuple(mask.shape)}, expected {square} or {per_head}"
    if padding is not None:
        expected = (batch, seq_len) if src.dim() == 3 else (seq_len,)
        if tuple(padding.shape) != expected:
            return f"src_key_padding_mask has shape {tuple(padding.shape)}, expected {expected}"
    return None


def why_not_context(src: Any) -> str | None:
    """Why the fused path cannot run in the present context.

    >>> why_not_context(torch.zeros(1)) is None
    True
    """
    if not isinstance(src, Tensor):
        return f"src is a {type(src).__name__}"
    if torch._C._len_torch_function_stack():
        for mode in torch.overrides._get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):
                return f"a {type(mode).__name__} is active"
    return None


def dropout_p(module: Any) -> float:
    """The probability that an `nn.Dropout` or `nn.Identity` applies now.

    >>> dropout_p(nn.Dropout(0.1)), dropout_p(nn.Dropout(0.1).eval()), dropout_p(nn.Identity())
    (0.1, 0.0, 0.0)
    """
    state = module.__dict__
    return float(state.get("p", 0.0)) if state["training"] else 0.0


def dropout_ps(layer: nn.TransformerEncoderLayer) -> tuple[float, float, float, float]:
    """What applies now to attention probabilities, after attention, within and after the MLP.

    >>> layer = nn.TransformerEncoderLayer(8, 2, dropout=0.1).eval()
    >>> _ = layer.dropout.train()  # each submodule rules its own
    >>> dropout_ps(layer)
    (0.0, 0.0, 0.1, 0.0)
    """
    children = layer._modules
    attn: Any = children["self_attn"]
    return (
        float(attn.dropout) if attn.training else 0.0,
        dropout_p(children["dropout1"]),
        dropout_p(children["dropout"]),
        dropout_p(children["dropout2"]),
    )


def why_not_dropout(config: EncoderConfig) -> str | None:
    """Why the fused path cannot take the probabilities of `config`.

    >>> why_not_dropout(EncoderConfig(True, 1, 1, "relu", 0.0, 0.0, p_mlp=1.5))
    'a dropout probability is outside [0, 1]: (0.0, 0.0, 1.5, 0.0)'
    """
    ps = (config.p_attention, config.p_residual1, config.p_mlp, config.p_residual2)
    if all(0.0 <= p <= 1.0 for p in ps):
        return None
    return f"a dropout probability is outside [0, 1]: {ps}"

"""When the fused path can serve a call of a `torch.nn` layer, and why not.

The fused path reads parameters instead of calling submodules, so it runs only where nobody could
tell: children of exactly the stock types, without hooks, parametrizations or overrides. Every
function here returns None for "yes" or the reason for "no", as a phrase. Bad input is a reason too:
PyTorch's own forward then raises PyTorch's own error.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._device import DeviceContext

from fused_remat.graph.build import captured_params
from fused_remat.layers.linears import dropout_p, is_readable, without_adapters
from fused_remat.layers.precision import Precision, casts, why_not_autocast
from fused_remat.ops.activation import Recallable, activation_name, has_hooks, prepare
from fused_remat.spec import USER_FUNCTION
from fused_remat.steps.collective import in_context_parallel
from fused_remat.steps.user_function import Function

_PLAIN = (Tensor, nn.Parameter)
_ATTENTION = F.scaled_dot_product_attention
_DROPOUT = (nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Parts:
    """What a stock layer is made of: its class, the methods that it calls, and its children.

    `children` has the types that each may be of; `attentions` and `norms` name some of them.
    """

    stock: type[nn.Module]
    methods: tuple[str, ...]
    attentions: tuple[str, ...]
    norms: tuple[str, ...]
    children: Mapping[str, tuple[type[nn.Module], ...]]


ENCODER = Parts(
    nn.TransformerEncoderLayer,
    methods=("_sa_block", "_ff_block"),
    attentions=("self_attn",),
    norms=("norm1", "norm2"),
    children={
        "self_attn": (nn.MultiheadAttention,),
        "linear1": (nn.Linear,),
        "dropout": _DROPOUT,
        "linear2": (nn.Linear,),
        "norm1": (nn.LayerNorm,),
        "norm2": (nn.LayerNorm,),
        "dropout1": _DROPOUT,
        "dropout2": _DROPOUT,
    },
)
DECODER = Parts(
    nn.TransformerDecoderLayer,
    methods=("_sa_block", "_mha_block", "_ff_block"),
    attentions=("self_attn", "multihead_attn"),
    norms=("norm1", "norm2", "norm3"),
    children={
        **ENCODER.children,
        "multihead_attn": (nn.MultiheadAttention,),
        "norm3": (nn.LayerNorm,),
        "dropout3": _DROPOUT,
    },
)
_FORWARDS: dict[type, Any] = {t: t.forward for ts in DECODER.children.values() for t in ts}
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


def why_not_module(layer: nn.Module, parts: Parts = ENCODER, adapters: bool = False) -> str | None:
    """Why the fused path cannot stand in for the layer's submodules and methods.

    `adapters`: PEFT's LoRA on them is looked through; it has reasons of its own (`linears`).

    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> layer.norm1 = nn.Identity()
    >>> why_not_module(layer)
    'its norm1 is a Identity, not a LayerNorm'
    """
    cls = type(layer)
    for method in parts.methods:
        if getattr(cls, method) is not getattr(parts.stock, method) or method in layer.__dict__:
            return f"{method} is overridden"
    children: Mapping[str, nn.Module | None] = layer._modules
    for name, types in parts.children.items():  # this runs at every call
        child = children.get(name)
        kind = type(child)
        if kind not in types and adapters:
            child = without_adapters(child)
            kind = type(child)
        if child is None or kind not in types:
            found, wanted = kind.__qualname__, types[0].__name__
            found = f"{kind.__module__}.{found}" if found == wanted else found  # PEFT's
            return f"its {name} is a {found}, not a {wanted}"
        if has_hooks(child):
            return f"its {name} has hooks"
        if "forward" in child.__dict__ or kind.forward is not _FORWARDS[kind]:
            return f"its {name}.forward was replaced"
    return why_not_global_hooks() or _why_not_sizes(children, parts)


def why_not_global_hooks() -> str | None:
    """Why hooks on all modules keep the fused path from standing in for any.

    >>> why_not_global_hooks() is None
    True
    """
    for hooks in _GLOBAL_HOOKS:
        for hook in hooks.values():
            if getattr(hook, "__module__", None) not in _KNOWN_GLOBAL_HOOKS:
                shown = getattr(hook, "__qualname__", type(hook).__name__)
                return f"a global module hook is registered ({shown})"
    return None


def _why_not_sizes(children: Any, parts: Parts) -> str | None:
    first = children[parts.attentions[0]]
    width = first.embed_dim
    for name in parts.attentions:
        attn = children[name]
        own = attn._qkv_same_embed_dim or attn.kdim == attn.vdim == width  # three weights
        if not own or attn.bias_k is not None or attn.add_zero_attn:
            return f"its {name} has kdim/vdim, bias_kv or add_zero_attn"
        # PyTorch reads its weight and does not call it: an adapter of its own does not act.
        proj = attn._modules["out_proj"]
        if type(proj) is not NonDynamicallyQuantizableLinear:
            proj = without_adapters(proj)
        if type(proj) is not NonDynamicallyQuantizableLinear:
            return f"its {name}.out_proj is a {type(proj).__name__}"
        if attn.embed_dim != width or width % attn.num_heads:
            return f"its {name} has {attn.num_heads} heads for width {attn.embed_dim}"
        if attn.num_heads != first.num_heads or attn.batch_first != first.batch_first:
            return f"its {name} differs from {parts.attentions[0]} in num_heads or batch_first"
        if attn._qkv_same_embed_dim != first._qkv_same_embed_dim:
            return f"its {name} has in_proj_weight and {parts.attentions[0]} not, or the reverse"
    for name in parts.norms:
        shape = children[name].normalized_shape
        if shape != (width,):
            return f"its {name} is over {shape}, not {(width,)}"
    return None


def why_not_tensors(
    src: Tensor,
    width: int,
    params: Mapping[str, Tensor | None],
    low: torch.dtype | None = None,
    called: str = "src",
) -> str | None:
    """Why the fused path cannot take `src` with these parameters in a layer of `width`.

    `low` is the dtype of autocast, None if it is off; `called`, what the layer calls `src`.

    >>> why_not_tensors(torch.zeros(3), 3, {})
    'src has shape (3,), expected 2 or 3 dimensions'
    """
    if type(src) not in _PLAIN or src.is_nested:
        return f"{called} is a {'nested tensor' if src.is_nested else type(src).__name__}"
    shape = src.shape
    if len(shape) not in (2, 3):
        return f"{called} has shape {tuple(shape)}, expected 2 or 3 dimensions"
    if shape[-1] != width:
        return f"{called} has width {shape[-1]}, expected {width}"
    dtype, device = src.dtype, src.device
    shapes: list[torch.Size | None] = []
    on_cpu = src.is_cpu
    for name, p in params.items():
        if p is None:
            shapes.append(None)
            continue
        if type(p) not in _PLAIN and not is_readable(p):
            return f"{name} is a {type(p).__name__}"
        elsewhere = not p.is_cpu if on_cpu else p.device != device
        if elsewhere or (p.dtype is not dtype and low is None):
            return f"{called} is {dtype} on {device} but {name} is {p.dtype} on {p.device}"
        shapes.append(p.shape)
    reason = None if low is None else why_not_autocast(src, params, low)
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
        return f"the input has dtype {dtype}"
    named = dict(zip(names, shapes, strict=True))
    ff = named["fc1.weight"]
    for name, shape in named.items():
        head, kind = name.split(".")
        norm = head.startswith("norm")
        if shape is None:
            if kind == "weight" and not norm:
                return f"{name} is None"
            continue
        packed = 3 * width
        rows = {"qkv": packed, "cross": packed, "fc1": ff[0] if ff else 0}.get(head, width)
        columns = rows if norm else (ff[0] if ff else 0) if head == "fc2" else width
        expected = (rows,) if norm or kind == "bias" else (rows, columns)
        if tuple(shape) != expected:
            return f"{name} has shape {tuple(shape)}, expected {expected} for the width {width}"
    return None


def why_not_memory(
    tgt: Tensor, memory: Any, batch_first: bool, low: torch.dtype | None = None
) -> str | None:
    """Why the fused path cannot attend from `tgt` to `memory`; `low` as in `why_not_masks`.

    >>> why_not_memory(torch.zeros(5, 2, 8), torch.zeros(7, 3, 8), False)
    'memory has shape (7, 3, 8), tgt (5, 2, 8): one batch and width, and at least one token'
    """
    if type(memory) not in _PLAIN or memory.is_nested:
        return f"memory is a {type(memory).__name__}, not a plain one"
    if memory.device != tgt.device:
        return f"memory is on {memory.device}, tgt on {tgt.device}"
    if memory.dtype is not tgt.dtype and not (low is not None and casts(tgt, memory)):
        return f"memory is {memory.dtype}, tgt {tgt.dtype}"
    shape, other = memory.shape, tgt.shape
    same = len(shape) == len(other) and shape[-1] == other[-1]
    if len(other) == 3:
        batch = 0 if batch_first else 1
        same = same and shape[batch] == other[batch] and shape[1 - batch] > 0
    if not same or (len(other) == 2 and shape[0] == 0):
        shown = f"memory has shape {tuple(shape)}, tgt {tuple(other)}"
        return f"{shown}: one batch and width, and at least one token"
    return None


_SRC_MASKS = ("src_mask", "src_key_padding_mask")


def why_not_masks(
    src: Tensor,
    attn: nn.MultiheadAttention,
    mask: Any,
    padding: Any,
    is_causal: bool,
    low: torch.dtype | None = None,
    keys: Tensor | None = None,
    names: tuple[str, str] = _SRC_MASKS,
) -> str | None:
    """Why the fused path cannot take these masks, in the shapes that the stock layer takes.

    `low` is the dtype of autocast, None if it is off; `keys` what `src` attends to, None for
    itself; `names` what the layer calls the two masks.

    >>> attn = nn.MultiheadAttention(8, 2, batch_first=True)
    >>> why_not_masks(torch.zeros(2, 5, 8), attn, torch.zeros(4, 4), None, False)
    'src_mask has shape (4, 4), expected (5, 5) or (4, 5, 5)'
    """
    if is_causal and mask is None:
        return f"is_causal=True needs a {names[0]}"
    if mask is None and padding is None:
        return None
    for name, m in zip(names, (mask, padding), strict=True):
        if m is None:
            continue
        if type(m) not in _PLAIN:
            return f"{name} is a {type(m).__name__}"
        if m.dtype not in (torch.bool, src.dtype, torch.float32, low):
            return f"{name} has dtype {m.dtype}, expected bool, {src.dtype} or torch.float32"
        if m.device != src.device:
            return f"{name} is on {m.device}, {names[0].partition('_')[0]} on {src.device}"
    keys = src if keys is None else keys
    if src.dim() == 2:  # one sequence, whatever batch_first
        batch, q_len, kv_len = 1, src.shape[0], keys.shape[0]
    else:
        batch, q_len = src.shape[:2] if attn.batch_first else src.shape[1::-1]
        kv_len = keys.shape[1 if attn.batch_first else 0]
    if mask is not None and mask.dim() not in (2, 3):
        return f"{names[0]} has {mask.dim()} dimensions, expected 2 or 3"
    if mask is not None and not (is_causal and padding is None):
        grid = (q_len, kv_len)
        per_head = (batch * attn.num_heads, *grid)
        if tuple(mask.shape) not in (grid, per_head):
            return f"{names[0]} has shape {tuple(mask.shape)}, expected {grid} or {per_head}"
    if padding is not None:
        expected = (batch, kv_len) if src.dim() == 3 else (kv_len,)
        if tuple(padding.shape) != expected:
            return f"{names[1]} has shape {tuple(padding.shape)}, expected {expected}"
    return None


def why_not_context(src: Any, called: str = "src") -> str | None:
    """Why the fused path cannot run in the present context.

    >>> why_not_context(torch.zeros(1)) is None
    True
    """
    if not isinstance(src, Tensor):
        return f"{called} is a {type(src).__name__}"
    if F.scaled_dot_product_attention is not _ATTENTION and in_context_parallel():
        return "context_parallel is active, whose attention a block does not call"
    if torch._C._len_torch_function_stack():
        for mode in torch.overrides._get_current_function_mode_stack():
            if not isinstance(mode, DeviceContext):
                return f"a {type(mode).__name__} is active"
    return None


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


def why_not_dropout(ps: Sequence[float]) -> str | None:
    """Why the fused path cannot take these probabilities.

    >>> why_not_dropout((0.0, 1.5))
    'a dropout probability is outside [0, 1]: (0.0, 1.5)'
    """
    if all(0.0 <= p <= 1.0 for p in ps):
        return None
    return f"a dropout probability is outside [0, 1]: {tuple(ps)}"


@dataclass(frozen=True)
class LayerActivation:
    """A row of the activations, or `USER_FUNCTION` with what it captures and calls."""

    name: str
    captured: Mapping[str, Tensor]
    functions: Mapping[str, Function]


def of_layer(
    layer: Any, src: Tensor, seq_first: bool, precision: Precision | None = None
) -> LayerActivation | str:
    """The activation of a layer with a `linear1`, or why it cannot be called again.

    >>> of_layer(torch.nn.TransformerEncoderLayer(8, 2), torch.zeros(3, 2, 8), True).name
    'relu'
    """
    name = activation_name(layer.activation)
    if name is not None:
        return LayerActivation(name, {}, {})
    width = layer.linear1.weight.shape[0]
    found = prepare_for(src, layer.activation, width, seq_first, precision)
    if isinstance(found, str):
        return found
    names = captured_params(len(found.captured))
    captured = dict(zip(names, found.captured, strict=True))
    return LayerActivation(USER_FUNCTION, captured, {"activation": found.fn})


def prepare_for(
    src: Tensor,
    activation: Any,
    width: int,
    seq_first: bool,
    precision: Precision | None = None,
) -> Recallable | str:
    """`activation` on matrices of tokens and what it captures, or why it cannot be called again.

    `width` is that of the tensor it is applied to, `src` the layer's input, (S, B, D) if
    `seq_first`; `precision` has the dtypes under autocast. It is tried on one token, and given
    whole tensors in the layout in which the stock layer calls it.

    >>> import torch
    >>> prepare_for(torch.zeros(2, 1, 3), lambda x: x.cumsum(0), 4, True).fn(torch.ones(2, 4))
    tensor([[1., 1., 1., 1.],
            [2., 2., 2., 2.]])
    """
    if torch.compiler.is_compiling():
        return "its activation is a function that cannot be called again in a compiled backward"
    dtype = src.dtype if precision is None else precision.compute or precision.stream
    token = src.new_zeros((*(1,) * (src.dim() - 1), width), dtype=dtype)
    found = prepare(activation, token, None if precision is None else precision.autocast)
    if isinstance(found, str):
        return f"its activation {found}"
    return Recallable(_on_matrices(found.fn, tuple(src.shape[:-1]), seq_first), found.captured)


def _on_matrices(fn: Function, lead: tuple[int, ...], seq_first: bool) -> Function:
    def call(up: Tensor) -> Tensor:
        if seq_first:
            made = fn(up.view(lead[1], lead[0], -1).transpose(0, 1).contiguous())
            made = made.transpose(0, 1) if made.dim() == 3 else made
        else:
            made = fn(up.view(*lead, -1))
        return made.reshape(up.shape) if made.numel() == up.numel() else made

    return call

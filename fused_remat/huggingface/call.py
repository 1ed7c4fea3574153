"""Description of a call of a transformers layer: arguments, numbers and activation."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.graph.build import block_graph
from fused_remat.layer_specs import transformer_spec
from fused_remat.layers.eligibility import (
    PLAIN,
    RECORDERS,
    Unsupported,
    check_dropout,
    check_mask,
    qualified,
    recorded,
)
from fused_remat.layers.read import BlockInputs, LayerMap, Parts
from fused_remat.ops.activation import activation_name, has_hooks

#: Arguments that a block uses, and those that do not change the result.
_READ = ("hidden_states", "attention_mask", "position_embeddings", "is_causal")
_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_IGNORED = (
    *_VARLEN, "position_ids", "cache_position", "use_cache", "output_hidden_states",
    "output_attentions", "output_router_logits", "return_dict", "num_items_in_batch",
    "ignore_index", "shift_labels", "seq_idx",
)  # fmt: skip
_KNOWN = frozenset((*_READ, *_IGNORED))
_SDPA = F.scaled_dot_product_attention
#: In older versions of transformers, layers return tuples or have other submodules.
_OLDEST = (5, 17)
#: Activation classes of transformers by the names of `steps.activation`.
ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
}


def check_convertible(layer: nn.Module, layer_map: LayerMap) -> None:
    """Raise `Unsupported` if no call of the layer can run as a block."""
    from transformers import __version__ as version

    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise Unsupported(
            f"transformers is {version}; FusedRemat supports {_OLDEST[0]}.{_OLDEST[1]} and later"
        )
    if "forward" in layer.__dict__:
        raise Unsupported(f"{type(layer).__name__}.forward was replaced")
    check_forward(type(layer), layer_map)
    modules = layer_map.modules(layer)
    for path, attribute, meaning in layer_map.excluded:
        value = None if modules[path] is None else getattr(modules[path], attribute, None)
        if value is not None and value is not False:
            raise Unsupported(f"the layer has {meaning}")
    _activation(layer_map, modules)


def check_forward(stock: type[nn.Module], layer_map: LayerMap) -> None:
    """Raise `Unsupported` unless a class has the forward that transformers wrote."""
    forward: Any = stock.forward  # classes are patched at any time
    if forward.__module__ != layer_map.package:
        raise Unsupported(f"{stock.__name__}.forward was replaced")


def describe(parts: Parts, arguments: Mapping[str, Any]) -> BlockInputs:
    """Return the block of a call with the arguments `arguments`."""
    layer_map, attention = parts.layer_map, parts.modules[parts.layer_map.attention]
    check_forward(type(parts.layer).stock, layer_map)
    _check_arguments(arguments, attention)
    head_dim = int(getattr(attention, layer_map.numbers["head_dim"]))
    heads, kv_heads = _heads(parts, attention, head_dim)
    masks, window, mask_tensors = read_masks(attention, arguments, parts, heads)
    rope = _rope(parts, arguments, head_dim) if rotates(attention, layer_map) else {}
    softcap = (
        getattr(attention, layer_map.numbers["softcap"]) if "softcap" in layer_map.numbers else None
    )
    if softcap is not None and attention.config._attn_implementation == "sdpa":
        raise Unsupported("sdpa attention has no softcap")  # transformers raises
    p_attention, dropout = _p_attention(attention, layer_map), parts.dropout.get
    spec = transformer_spec(
        parts.norm,
        parts.one_eps(),
        _activation(layer_map, parts.modules),
        offset=layer_map.offset,
        placement=layer_map.placement,
        gated="gate" in layer_map.linears,
        dropout=(p_attention, dropout("residual1", 0.0), 0.0, dropout("residual2", 0.0)),
        loras=parts.loras,
        packed=parts.packed,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=float(attention.scaling),
        softcap=float(softcap or 0.0),
        window=window,
        masks=masks,
        projection="split" if "q" in layer_map.linears else "packed",
        rotary=len(rope) > 0,
        qk_norm_eps=parts.one_eps(of_heads=True),
    )
    tensors = {"input": parts.x, **parts.weights, **rope, **mask_tensors}
    return BlockInputs(block_graph(spec), tensors, spec)


def _check_arguments(arguments: Mapping[str, Any], attention: nn.Module) -> None:
    hooks = [hook for hook in attention._forward_hooks.values() if hook.__module__ == RECORDERS]
    if arguments.get("output_attentions") or any(map(recorded, hooks)):
        raise Unsupported("the call returns attention weights, which a block does not compute")
    for name, value in arguments.items():
        if name not in _KNOWN and value is not None and value is not False:
            raise Unsupported(f"the call passes {name}, which a block does not support")


def rotates(attention: Any, layer_map: LayerMap) -> bool:
    """Return whether the layer rotates its heads; some of SmolLM3's do not."""
    return layer_map.rotary and bool(attention.__dict__.get("use_rope", True))


def _rope(parts: Parts, arguments: Mapping[str, Any], width: int) -> dict[str, Tensor]:
    """Return the tables, (S, R/2) or (B, S, R/2): the first half of transformers' columns."""
    x, pair = parts.x, arguments.get("position_embeddings")
    if not isinstance(pair, tuple) or len(pair) != 2:
        kind = qualified(type(pair))
        raise Unsupported(f"position_embeddings is {kind}, expected a tuple (cos, sin)")
    dtypes, tables = (torch.float32, parts.low or x.dtype), {}
    for name, table in zip(("cos", "sin"), pair, strict=True):
        if not isinstance(table, Tensor) or table.requires_grad or table.device != x.device:
            raise Unsupported(f"{name} is not a constant tensor on {x.device}")
        batch, *rest = table.shape or (0,)
        if rest != [x.shape[1], width] or batch not in (1, x.shape[0]) or table.dtype not in dtypes:
            raise Unsupported(
                f"{name} is {table.dtype} of shape {tuple(table.shape)}, expected "
                f"{' or '.join(map(str, dict.fromkeys(dtypes)))} of shape {(1, x.shape[1], width)}"
            )
        half = table[..., : width // 2]
        tables[name] = half[0] if batch == 1 else half
    return tables


def _heads(parts: Parts, attention: Any, head_dim: int) -> tuple[int, int]:
    """Return the numbers of query heads, and of key and value heads, by the shapes of weights."""
    if "qkv" in parts.layer_map.linears:
        return attention.num_heads, attention.num_heads
    heads, kv_heads = parts.rows["q"] // head_dim, parts.rows["k"] // head_dim
    groups = attention.__dict__.get("num_key_value_groups", 1)
    if heads != kv_heads * groups:
        raise Unsupported(f"{heads} query heads share {kv_heads} key heads in groups of {groups}")
    return heads, kv_heads


def _p_attention(attention: Any, layer_map: LayerMap) -> float:
    """Return the probability of dropout, which applies if the attention module itself trains."""
    if not attention.training:
        return 0.0
    p = getattr(attention, layer_map.numbers["dropout"])
    p = float(getattr(p, "p", 0.0) if isinstance(p, nn.Module) else p)
    check_dropout(p)
    return p


def _activation(layer_map: LayerMap, modules: Mapping[str, Any]) -> str:
    path, _, attribute = layer_map.activation.rpartition(".")
    activation: Any = getattr(modules[path], attribute, None)
    kind, name = type(activation), activation_name(activation)
    if kind.__module__ == "transformers.activations" and kind.__name__ in ACTIVATIONS:
        plain = not has_hooks(activation) and "forward" not in activation.__dict__
        name = ACTIVATIONS[kind.__name__] if plain else None
    if name is None:
        shown = getattr(activation, "__name__", qualified(kind))
        raise Unsupported(
            f"the activation {layer_map.activation} is {shown}, unknown or with hooks"
        )
    return name


#: Names of masks, window, and masks by name. The form of a mask depends on the config's attention
#: implementation, and so does the meaning of None: "sdpa" and flash attention are then causal if
#: the module is, and "eager" has no mask at all.
Masks = tuple[tuple[str, ...], tuple[int, int], dict[str, Tensor]]


def read_masks(attention: Any, arguments: Mapping[str, Any], parts: Parts, heads: int) -> Masks:
    """Return the masks of a call with so many `heads`."""
    # No mask's values are read: on a GPU that would wait for the device.
    how = attention.config._attn_implementation
    mask = arguments.get("attention_mask")
    if _is_replaced(how):
        raise Unsupported(f"the attention function {how!r} was replaced")
    if how is not None and how.startswith("flash_attention_"):
        return _flash(attention, arguments, parts)
    if how not in ("sdpa", "eager"):
        raise Unsupported(
            f"the attention implementation is {how!r}; the fused path supports sdpa, eager and "
            "flash attention"
        )
    if mask is None:
        causal = how == "sdpa" and _is_causal(attention, arguments)
        return (), (-1, 0 if causal else -1), {}
    (batch, seq_len, _), bools = parts.x.shape, how == "sdpa"  # "eager" adds the mask to the scores
    shapes = [(b, h, seq_len, seq_len) for b, h in itertools.product((1, batch), (1, heads))]
    check_mask("attention_mask", mask, parts.x, parts.low, *shapes, bools=bools)
    return ("mask",), (-1, -1), {"mask": mask}  # with a sliding window, if there is one


def _is_replaced(how: str | None) -> bool:
    """Return whether another function replaces transformers' own, as sequence parallelism's."""
    # DeepSpeed replaces it in the table of names, PyTorch under SDPA's name.
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(how)
    if function is not None and not function.__module__.startswith("transformers.integrations."):
        return True
    return how == "sdpa" and F.scaled_dot_product_attention is not _SDPA


def _flash(attention: Any, arguments: Mapping[str, Any], parts: Parts) -> Masks:
    """Return the masks of flash attention: padding (B, S), bounds of packed sequences, a window.

    Outputs of padding queries, which nothing uses, are zeros there; a block computes attention.
    """
    batch, seq_len = parts.x.shape[:2]
    causal, name = _is_causal(attention, arguments), parts.layer_map.numbers.get("window", "")
    window = getattr(attention if hasattr(attention, name) else attention.config, name, None)
    left = -1 if window is None or seq_len <= window else window - 1
    limits = (left, 0 if causal else left)
    mask = arguments.get("attention_mask")
    if mask is not None:
        if type(mask) not in PLAIN or tuple(mask.shape) != (batch, seq_len):
            raise Unsupported(f"attention_mask is not a tensor of shape {(batch, seq_len)}")
        return ("padding",), limits, {"padding": mask.eq(0)}
    if all(arguments.get(name) is not None for name in _VARLEN):
        bounds = {"cu_q": arguments["cu_seq_lens_q"], "cu_k": arguments["cu_seq_lens_k"]}
        if batch != 1 or any(type(t) not in PLAIN or t.dim() != 1 for t in bounds.values()):
            raise Unsupported("cu_seq_lens are not those of packed sequences in a batch of 1")
        return ("cu_seqlens",), limits, bounds
    positions = arguments.get("position_ids")
    if batch == 1 and seq_len > 1 and isinstance(positions, Tensor):
        if torch.compiler.is_compiling():
            raise Unsupported("whether sequences are packed depends on the values of position_ids")
        # As transformers does there, in every layer; on a GPU it waits for the device.
        if not bool((positions.diff(dim=-1) == 1).all()):
            raise Unsupported("sequences are packed without cu_seq_lens")
    return (), limits, {}


def _is_causal(attention: Any, arguments: Mapping[str, Any]) -> bool:
    causal = arguments.get("is_causal")
    return bool(getattr(attention, "is_causal", True) if causal is None else causal)

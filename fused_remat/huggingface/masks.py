"""Translation of the mask that transformers passes to a layer.

Its form depends on the attention implementation in the model's config, and so does the meaning of
None: "sdpa" and flash attention are then causal if the module is, and "eager" has no mask at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.layers.eligibility import PLAIN, Unsupported, qualified
from fused_remat.layers.read import Parts

_SDPA = F.scaled_dot_product_attention


@dataclass(frozen=True)
class Masks:
    """The masks of an `AttentionSpec`, and their tensors by the block's names."""

    kinds: tuple[str, ...] = ()
    window: tuple[int, int] = (-1, -1)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


def read_masks(
    attention: Any, arguments: Mapping[str, Any], parts: Parts, window: int | None, heads: int
) -> Masks:
    """Return the masks of a call with the arguments `arguments` to an attention of so many `heads`.

    No mask's values are read: on a GPU that would wait for the device. `window` is the module's
    sliding window, which the masks of "sdpa" and "eager" have already.
    """
    how = attention.config._attn_implementation
    mask = arguments.get("attention_mask")
    if _is_replaced(how):
        raise Unsupported(f"the attention function {how!r} was replaced")
    if how is not None and how.startswith("flash_attention_"):
        return _flash(attention, arguments, parts.x, window)
    if how not in ("sdpa", "eager"):
        raise Unsupported(
            f"the attention implementation is {how!r}; the fused path supports sdpa, eager and "
            "flash attention"
        )
    if mask is None:
        causal = how == "sdpa" and _is_causal(attention, arguments)
        return Masks(window=(-1, 0 if causal else -1))
    _check_mask(mask, how, parts, heads)
    return Masks(("mask",), tensors={"mask": mask})


def _is_replaced(how: str | None) -> bool:
    """Return whether another function replaces transformers' own.

    Sequence parallelism replaces it: DeepSpeed in the table of names, PyTorch under SDPA's name.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(how)
    if function is not None and not function.__module__.startswith("transformers.integrations."):
        return True
    return how == "sdpa" and F.scaled_dot_product_attention is not _SDPA


_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _flash(attention: Any, arguments: Mapping[str, Any], x: Tensor, window: int | None) -> Masks:
    """Return the masks of flash attention: padding (B, S), bounds of packed sequences, a window.

    Outputs of padding queries, which nothing uses, are zeros there; a block computes attention.
    """
    batch, seq_len = x.shape[:2]
    causal = _is_causal(attention, arguments)
    left = -1 if window is None or seq_len <= window else window - 1
    limits = (left, 0 if causal else left)
    mask = arguments.get("attention_mask")
    if mask is not None:
        if type(mask) not in PLAIN or tuple(mask.shape) != (batch, seq_len):
            raise Unsupported(f"attention_mask is not a tensor of shape {(batch, seq_len)}")
        return Masks(("padding",), limits, {"padding": mask.eq(0)})
    if all(arguments.get(name) is not None for name in _VARLEN):
        bounds = {"cu_q": arguments["cu_seq_lens_q"], "cu_k": arguments["cu_seq_lens_k"]}
        if batch != 1 or any(type(t) not in PLAIN or t.dim() != 1 for t in bounds.values()):
            raise Unsupported("cu_seq_lens are not those of packed sequences in a batch of 1")
        return Masks(("cu_seqlens",), limits, bounds)
    positions = arguments.get("position_ids")
    if batch == 1 and seq_len > 1 and isinstance(positions, Tensor):
        if torch.compiler.is_compiling():
            raise Unsupported("whether sequences are packed depends on the values of position_ids")
        # As transformers does there, in every layer; on a GPU it waits for the device.
        if not bool((positions.diff(dim=-1) == 1).all()):
            raise Unsupported("sequences are packed without cu_seq_lens")
    return Masks((), limits)


def _is_causal(attention: Any, arguments: Mapping[str, Any]) -> bool:
    causal = arguments.get("is_causal")
    return bool(getattr(attention, "is_causal", True) if causal is None else causal)


def _check_mask(mask: Any, how: str, parts: Parts, heads: int) -> None:
    x = parts.x
    if type(mask) not in PLAIN:
        raise Unsupported(f"attention_mask is {qualified(type(mask))}, expected torch.Tensor")
    batch, seq_len = x.shape[:2]
    fits = mask.dim() == 4 and mask.shape[2:] == (seq_len, seq_len) and mask.device == x.device
    fits = fits and mask.shape[0] in (1, batch) and mask.shape[1] in (1, heads)
    # Eager attention adds the mask to the scores.
    dtypes = (x.dtype, torch.float32, parts.low, None if how == "eager" else torch.bool)
    if not fits or mask.dtype not in dtypes:
        raise Unsupported(
            f"attention_mask is {mask.dtype} of shape {tuple(mask.shape)} on {mask.device}, "
            f"expected {x.dtype}{'' if how == 'eager' else ' or bool'} of shape "
            f"{(batch, 1, seq_len, seq_len)} or {(batch, heads, seq_len, seq_len)} on {x.device}"
        )

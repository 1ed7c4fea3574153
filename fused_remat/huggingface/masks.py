"""The mask that transformers hands to a layer, as a block takes it.

What it is depends on the attention implementation of the model's config. What None means, too:
"sdpa" is then causal if the module is, as flash attention, "eager" has no mask at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SDPA = F.scaled_dot_product_attention
_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Masks:
    """What an `AttentionSpec` has of masks, and their tensors by the block's names."""

    kinds: tuple[str, ...] = ()
    window: tuple[int, int] = (-1, -1)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def why_not(self, nhead: int) -> str | None:
        """Why a layer of so many heads cannot take them."""
        mask = self.tensors.get("mask")
        if mask is None or mask.shape[1] in (1, nhead):
            return None
        return f"attention_mask is for {mask.shape[1]} heads, and it has {nhead}"


def masks_of(
    attention: Any,
    given: Mapping[str, Any],
    x: Tensor,
    window: int | None = None,
    low: torch.dtype | None = None,
) -> Masks | str:
    """The masks of a call with the arguments `given`, or why the fused path cannot take them.

    No mask's values are read: on a GPU that would wait for the device. `window` is the module's
    sliding window, which is in the masks of "sdpa" and "eager" already; `low` the dtype of
    autocast, None if it is off.
    """
    how = attention.config._attn_implementation
    mask = given.get("attention_mask")
    if _is_replaced(how):
        return f"the attention function {how!r} was replaced"
    if how is not None and how.startswith("flash_attention_"):
        return _flash(attention, given, x, window)
    if how not in ("sdpa", "eager"):
        return f"the attention implementation is {how!r}, not sdpa, eager or flash attention"
    if mask is None:
        causal = how == "sdpa" and _is_causal(attention, given)
        return Masks(window=(-1, 0 if causal else -1))
    reason = _why_not(mask, how, x, low)
    return reason or Masks(("mask",), tensors={"mask": mask})


def _is_replaced(how: str | None) -> bool:
    """Whether somebody has put another function in the place of transformers' own.

    Sequence parallelism does so (DeepSpeed's in the table of names, PyTorch's under SDPA's name).
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function = ALL_ATTENTION_FUNCTIONS.get(how)
    if function is not None and not function.__module__.startswith("transformers.integrations."):
        return True
    return how == "sdpa" and F.scaled_dot_product_attention is not _SDPA


_VARLEN = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _flash(attention: Any, given: Mapping[str, Any], x: Tensor, window: int | None) -> Masks | str:
    """As flash attention has it: padding as (B, S), packed sequences by bounds, a real window.

    What it gives where a query is padding is another thing: zeros there, attention to the other
    tokens here. Nobody reads it.
    """
    batch, seq_len = x.shape[:2]
    causal = _is_causal(attention, given)
    left = -1 if window is None or seq_len <= window else window - 1
    limits = (left, 0 if causal else left)
    mask = given.get("attention_mask")
    if mask is not None:
        if type(mask) not in _PLAIN or tuple(mask.shape) != (batch, seq_len):
            return f"attention_mask is no tensor of shape {(batch, seq_len)}"
        return Masks(("padding",), limits, {"padding": mask.eq(0)})
    if all(given.get(name) is not None for name in _VARLEN):
        bounds = {"cu_q": given["cu_seq_lens_q"], "cu_k": given["cu_seq_lens_k"]}
        if batch != 1 or any(type(t) not in _PLAIN or t.dim() != 1 for t in bounds.values()):
            return "cu_seq_lens are not of packed sequences in a batch of 1"
        return Masks(("cu_seqlens",), limits, bounds)
    positions = given.get("position_ids")
    if batch == 1 and seq_len > 1 and isinstance(positions, Tensor):
        if torch.compiler.is_compiling():
            return "whether its sequences are packed depends on the values of position_ids"
        # As transformers does there, in every layer; on a GPU it waits for the device.
        if not bool((positions.diff(dim=-1) == 1).all()):
            return "its sequences are packed without cu_seq_lens"
    return Masks((), limits)


def _is_causal(attention: Any, given: Mapping[str, Any]) -> bool:
    asked = given.get("is_causal")
    return bool(getattr(attention, "is_causal", True) if asked is None else asked)


def _why_not(mask: Any, how: str, x: Tensor, low: torch.dtype | None) -> str | None:
    if type(mask) not in _PLAIN:
        return f"attention_mask is a {type(mask).__name__}"
    batch, seq_len = x.shape[:2]
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[2:] != (seq_len, seq_len):
        return f"attention_mask has shape {shape}, expected {(batch, 1, seq_len, seq_len)}"
    if mask.dtype == torch.bool and how == "eager":
        return "attention_mask is bool, which eager attention adds to the scores as a number"
    if mask.dtype not in (torch.bool, x.dtype, torch.float32, low) or mask.device != x.device:
        expected = f"bool or {x.dtype} on {x.device}"
        return f"attention_mask is {mask.dtype} on {mask.device}, expected {expected}"
    return None

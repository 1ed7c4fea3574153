"""Attention masks as callers give them: checked, and in the form that the blocks take."""

from __future__ import annotations

import torch
from torch import Tensor


def mask_of(mask: Tensor | None, grid: tuple[int, int, int, int], x: Tensor) -> Tensor | None:
    """`mask` with four dimensions, or (S_q, S_k), if it broadcasts to `grid` (B, H, S_q, S_k).

    Raises: ValueError for another shape; TypeError, RuntimeError for another kind.
    """
    if mask is None:
        return None
    _check_kind("attn_mask", mask, x)
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if len(shape) != 4 or any(m not in (1, g) for m, g in zip(shape, grid, strict=True)):
        raise ValueError(
            f"attn_mask has shape {tuple(mask.shape)}, expected one that broadcasts to {grid}"
        )
    return mask if mask.dim() == 2 else mask.view(shape)


def padding_of(mask: Tensor | None, grid: tuple[int, int, int, int], x: Tensor) -> Tensor | None:
    """`mask` if it is (B, S_k).

    Raises: ValueError for another shape; TypeError, RuntimeError for another kind.
    """
    if mask is None:
        return None
    _check_kind("key_padding_mask", mask, x)
    if tuple(mask.shape) != (grid[0], grid[3]):
        raise ValueError(
            f"key_padding_mask has shape {tuple(mask.shape)}, expected {(grid[0], grid[3])}"
        )
    return mask


def _check_kind(name: str, mask: Tensor, x: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a Tensor or None, got {type(mask).__name__}")
    if mask.dtype not in (torch.bool, x.dtype, torch.float32) or mask.device != x.device:
        raise RuntimeError(
            f"{name} is {mask.dtype} on {mask.device}, expected bool, {x.dtype} or torch.float32 "
            f"on {x.device}"
        )

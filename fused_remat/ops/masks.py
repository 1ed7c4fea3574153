"""Attention masks and lengths as callers give them: checked, in the form that the blocks take."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fused_remat.steps.attention_rows import bounds

#: The tensor that says of each of `spec.MASKS` that a call passes it.
_GIVEN = {"mask": "mask", "padding": "padding", "lengths": "lengths", "cu_seqlens": "cu_q"}


def masks_given(tensors: Mapping[str, Tensor | None]) -> tuple[str, ...]:
    """The masks among a block's tensors, as `AttentionSpec.masks` has them.

    >>> masks_given({"mask": None, "padding": torch.zeros(2, 3), "cu_q": torch.zeros(2)})
    ('padding', 'cu_seqlens')
    """
    return tuple([name for name, key in _GIVEN.items() if tensors.get(key) is not None])


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


def lengths_of(
    key_lengths: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    grid: tuple[int, int, int, int],
    x: Tensor,
    name: str = "cu_seqlens_q",
) -> dict[str, Tensor]:
    """Key lengths (B,), or the bounds of packed sequences (N + 1,), by the blocks' names.

    `cu_k` None is as `cu_q`, which the caller knows as `name`. Values are checked on CPU only: on a
    GPU that would wait for the device; while compiling they are not known.

    Raises: ValueError for shapes or values that do not fit `grid` (B, H, S_q, S_k), or for lengths
        of both kinds; TypeError, RuntimeError for another kind.
    """
    if key_lengths is not None and (cu_q is not None or cu_k is not None):
        raise ValueError(f"key_lengths is for padded sequences, {name} for packed ones: not both")
    if key_lengths is not None:
        return {"lengths": _key_lengths(key_lengths, grid, x)}
    if cu_q is None and cu_k is None:
        return {}
    if cu_q is None:
        raise ValueError(f"cu_seqlens_k needs {name} beside it")
    if grid[0] != 1:
        raise ValueError(f"{name} needs all sequences in a batch of 1, got a batch of {grid[0]}")
    if cu_k is None and grid[2] != grid[3]:
        raise ValueError(
            f"cu_seqlens_k is needed where keys are not as many as queries: {grid[3]}, {grid[2]}"
        )
    _check_bounds(name, cu_q, grid[2], x)
    if cu_k is None:
        return {"cu_q": cu_q, "cu_k": cu_q}
    _check_bounds("cu_seqlens_k", cu_k, grid[3], x)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"{name} has shape {tuple(cu_q.shape)}, cu_seqlens_k {tuple(cu_k.shape)}, expected "
            f"bounds of as many sequences"
        )
    return {"cu_q": cu_q, "cu_k": cu_k}


def _key_lengths(lengths: Tensor, grid: tuple[int, int, int, int], x: Tensor) -> Tensor:
    _check_integers("key_lengths", lengths, x)
    if tuple(lengths.shape) != (grid[0],):
        raise ValueError(f"key_lengths has shape {tuple(lengths.shape)}, expected ({grid[0]},)")
    values = lengths.tolist() if _known(lengths) else []
    for b, value in enumerate(values):
        if not 0 <= value <= grid[3]:
            raise ValueError(
                f"key_lengths[{b}] is {value}, expected 0 to {grid[3]}, the keys there are"
            )
    return lengths


def _check_bounds(name: str, cu: Tensor, tokens: int, x: Tensor) -> None:
    _check_integers(name, cu, x)
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(cu.shape)}, expected (N + 1,) for N sequences")
    if _known(cu):
        bounds(cu, tokens, name)


def _known(t: Tensor) -> bool:
    return t.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_integers(name: str, t: Tensor, x: Tensor) -> None:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
    if t.dtype not in (torch.int32, torch.int64) or t.device != x.device:
        raise RuntimeError(
            f"{name} is {t.dtype} on {t.device}, expected torch.int32 or torch.int64 on {x.device}"
        )

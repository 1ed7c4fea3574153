"""What attention's kernels are told about masks: strides, intervals, shifts, lists of blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_remat.formats import LoadedHeads
from fused_remat.kernels.attention import Masks, Scores
from fused_remat.kernels.attention_masks import (
    attention_blocks_fwd_kernel,
    attention_bounds_fwd_kernel,
    attention_shift_fwd_kernel,
)
from fused_remat.random import scale as dropout_scale
from fused_remat.random import threshold
from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention_rows import AttentionCall
from fused_remat.triton.launch import Launch, Target, cdiv
from fused_remat.triton.tables import AttentionTile

# Masks that add more than this to a whole row are shifted to add 0: scores have no digits beside.
_FAR = 128.0
# Tiles of the kernels that read masks alone.
_TILE = 64
Strides = tuple[int, ...]


def broadcast_strides(x: Tensor) -> Strides:
    """Strides that read a size of 1 as any size."""
    return tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))


def _numbers(mask: Tensor) -> Tensor:
    """A mask as kernels read it: floats, or the bytes of a bool."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def scores_of(spec: AttentionSpec) -> Scores:
    """The options of the scores as kernels take them: None for one that is not set."""
    given = {name: getattr(spec, name) for name in Scores._fields}
    return Scores(**{
        name: value if name == "scale" or name in spec.options else None
        for name, value in given.items()
    })  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A call with its target: what several launches of it share.

    Attributes:
        bounds_q, bounds_k: of packed sequences, the interval of every query and of every key.
    """

    call: AttentionCall
    target: Target
    device: torch.device
    masks: Masks
    bounds_q: Tensor | None = None
    bounds_k: Tensor | None = None

    @property
    def left(self) -> int:
        return self._reach(self.call.spec.window[0])

    @property
    def right(self) -> int:
        return self._reach(self.call.spec.window[1])

    def _reach(self, window: int) -> int:
        """A side of the window, within the places there are: 32 bits hold sums of it."""
        places = self.call.q_len + self.call.kv_len
        return min(window, places) if window >= 0 else places

    @property
    def interval(self) -> tuple[int, int, int]:
        return self.call.offset, self.left, self.right

    @property
    def in_rows(self) -> bool:
        """Whether what lies beyond a sequence is not to be read, not even to be multiplied by 0."""
        return self.call.lengths is not None or self.call.cu_q is not None

    @property
    def listed(self) -> tuple[int, int]:
        """Batches and heads that what masks allow differs in."""
        mask = self.call.mask
        heads = mask.shape[-3] if mask is not None and mask.dim() == 4 else 1
        batches = mask.shape[-4] if mask is not None and mask.dim() == 4 else 1
        if self.call.padding is not None or self.call.lengths is not None:
            batches = self.call.batch
        return batches, heads

    def is_partial(self, length: int, block: int) -> bool:
        """Whether a block may not be seen whole, of `length` keys or queries in blocks."""
        call = self.call
        limited = self.call.spec.window != (-1, -1) or self.in_rows
        return limited or call.masked or length % block != 0

    def scalars(self) -> tuple[Any, ...]:
        """What is called score, offset, left, right, row0, threshold, keep_scale."""
        p = self.call.spec.dropout
        dropout = (self.call.row0, threshold(p), dropout_scale(p)) if p > 0.0 else (0, 0, 0.0)
        return (scores_of(self.call.spec), *self.interval, *dropout)

    @property
    def keeps(self) -> bool:
        """Whether a key takes part where a bool mask is True."""
        return self.call.spec.true_means == "attend"

    def site_key(self) -> Tensor | None:
        return self.call.site_key if self.call.spec.dropout > 0.0 else None

    def launch(self, kernel: Any, programs: int, args: tuple[Any, ...], **constants: Any) -> Launch:
        """A launch of a kernel that has no tile of its own."""
        return Launch(kernel, (programs,), args, constants, 8, 2, self.device)


def _bounds(call: AttentionCall, left: int, right: int, by_keys: bool) -> tuple[Tensor, Launch]:
    """The intervals of packed sequences, and the launch that fills them."""
    assert call.cu_q is not None and call.cu_k is not None
    rows, others = (call.kv_len, call.q_len) if by_keys else (call.q_len, call.kv_len)
    bounds = torch.empty((rows, 2), dtype=torch.int32, device=call.cu_q.device)
    cu = (call.cu_k, call.cu_q) if by_keys else (call.cu_q, call.cu_k)
    window = (right, left) if by_keys else (left, right)
    args = (cu[0].contiguous(), cu[1].contiguous(), bounds, rows, others, cu[0].numel() - 1)
    block = 128
    grid = (cdiv(rows, block),)
    constants = {"BLOCK_M": block}
    return bounds, Launch(
        attention_bounds_fwd_kernel, grid, args + window, constants, 4, 1, bounds.device
    )


def _masks(call: AttentionCall, shift: Tensor | None = None) -> Masks:
    mask = padding = None
    mask_strides: Strides = (0,) * 4
    padding_strides: Strides = (0,) * 2
    if call.mask is not None:
        mask = _numbers(call.mask if call.mask.dim() == 4 else call.mask[None, None])
        mask_strides = broadcast_strides(mask)
    if call.padding is not None:
        padding, padding_strides = _numbers(call.padding), call.padding.stride()
    shift_strides = (0, 0) if shift is None else broadcast_strides(shift)[:2]
    fields = (mask, *mask_strides, padding, *padding_strides, shift, *shift_strides)
    return Masks._make(fields)


def prepare(
    q: LoadedHeads, call: AttentionCall, target: Target, backward: bool
) -> tuple[Problem, list[Launch]]:
    """The problem with intervals and shifts, and what fills them."""
    if call.lengths is not None:
        call = replace(call, lengths=call.lengths.contiguous())
    problem = Problem(call, target, q.device, _masks(call))
    launches: list[Launch] = []
    bounds_q = bounds_k = shift = None
    if call.cu_q is not None:
        bounds_q, launch = _bounds(call, problem.left, problem.right, False)
        launches.append(launch)
        if backward:
            bounds_k, launch = _bounds(call, problem.left, problem.right, True)
            launches.append(launch)
    masks = [m for m in (call.mask, call.padding) if m is not None]
    if any(m.is_floating_point() for m in masks):
        batches, heads = problem.listed
        shift = torch.empty((batches, heads, call.q_len), dtype=torch.float32, device=q.device)
        args = (problem.masks, bounds_q, call.lengths, shift, heads, call.q_len, call.kv_len)
        launches.append(
            problem.launch(
                attention_shift_fwd_kernel, cdiv(call.q_len, _TILE) * batches * heads,
                (*args, *problem.interval, _FAR), KEEPS=problem.keeps, BLOCK_M=_TILE,
                BLOCK_N=_TILE,
            )
        )  # fmt: skip
    made = replace(problem, masks=_masks(call, shift), bounds_q=bounds_q, bounds_k=bounds_k)
    return made, launches


def lists(
    problem: Problem, tile: AttentionTile, by_keys: bool
) -> tuple[Tensor | None, Strides, list[Launch]]:
    """Which blocks are visited, if masks have a say in that; strides of batch and head."""
    call = problem.call
    if not call.masked:
        return None, (0, 0), []
    rows, cols = cdiv(call.q_len, tile.block_m), cdiv(call.kv_len, tile.block_n)
    if by_keys:
        rows, cols = cols, rows
    batches, heads = problem.listed
    blocks = torch.empty((batches, heads, rows, cols + 2), dtype=torch.int32, device=problem.device)
    bounds = problem.bounds_k if by_keys else problem.bounds_q
    args = (problem.masks, bounds, call.lengths, blocks, heads, call.q_len, call.kv_len)
    launch = problem.launch(
        attention_blocks_fwd_kernel, batches * heads * rows, args + problem.interval,
        KEEPS=problem.keeps, BY_KEYS=by_keys, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
    )  # fmt: skip
    return blocks, broadcast_strides(blocks)[:2], [launch]

"""Masks, intervals and lists of blocks of a call of attention, as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fused_remat.kernels.attention import Lists, Masks, Scores
from fused_remat.kernels.attention_masks import (
    attention_blocks_fwd_kernel,
    attention_bounds_fwd_kernel,
    attention_shift_fwd_kernel,
)
from fused_remat.random import scale as dropout_scale
from fused_remat.random import threshold
from fused_remat.steps.attention_call import AttentionArgs
from fused_remat.triton.launch import Launch, Target, scratch
from fused_remat.triton.operands import cdiv
from fused_remat.triton.tables import AttentionTile, ends_early

# Rows whose intervals of variable-length sequences a program finds.
_BOUNDS_ROWS = 128
# A mask that adds more than this to all of a row is shifted to add 0: scores would lose digits.
_FAR = 128.0
# Tiles of the kernels that read masks alone.
_TILE = 64
# Up to so many elements of a mask, four warps list a block in fewer instructions than eight.
_FEW = 4096
_CONSTANT = {known: tl.constexpr(known) for known in (False, True)}
MaskStrides = tuple[int, ...]


@dataclass(eq=False)
class Problem:
    """A call on a target: what its launches share."""

    call: AttentionArgs
    target: Target
    device: torch.device
    masks: Masks  # as kernels take them
    # Of variable-length sequences: the keys that each query sees, the queries that see each key.
    bounds_q: Tensor | None = None
    bounds_k: Tensor | None = None

    @property
    def interval(self) -> tuple[int, int, int]:
        """Offset, left and right, of at most all positions, so that sums fit 32 bits."""
        (left, right), most = self.call.spec.window, self.call.q_len + self.call.kv_len
        left = min(left, most) if left >= 0 else most
        return self.call.offset, left, min(right, most) if right >= 0 else most

    @property
    def listed(self) -> tuple[int, int]:
        """Number of batches and of heads with masks of their own."""
        mask = self.call.mask
        batches, heads = mask.shape[:2] if mask is not None and mask.dim() == 4 else (1, 1)
        if self.call.padding is not None or self.call.lengths is not None:
            batches = self.call.batch
        return batches, heads

    def is_partial(self, length: int, block: int) -> bool:
        """Return whether some block of `length` keys or queries may be seen in part only."""
        limited = self.call.spec.window != (-1, -1) or ends_early(self.call)
        return limited or self.call.masked or length % block != 0

    def scalars(self) -> tuple[Any, ...]:
        """Return the arguments score, offset, left, right, row0, threshold and keep_scale."""
        spec, p = self.call.spec, self.call.spec.dropout
        dropout = (self.call.row0, threshold(p), dropout_scale(p)) if p > 0.0 else (0, 0, 0.0)
        given = {name for name in Scores._fields if name == "scale" or name in spec.options}
        scores = Scores(**{n: getattr(spec, n) if n in given else None for n in Scores._fields})
        return (scores, *self.interval, *dropout)

    def site_key(self) -> Tensor | None:
        return self.call.site_key if self.call.spec.dropout > 0.0 else None

    def launch(
        self, kernel: Any, programs: int, args: tuple[Any, ...], warps: int = 8, stages: int = 2,
        **constants: Any,
    ) -> Launch:  # fmt: skip
        return Launch(kernel, (programs,), args, constants, warps, stages, self.device)


def prepare(
    q: Tensor, call: AttentionArgs, target: Target, backward: bool
) -> tuple[Problem, list[Launch]]:
    """Return the problem with its intervals and shifts, and the launches that fill these."""
    if call.lengths is not None:
        call = replace(call, lengths=call.lengths.contiguous())
    problem = Problem(call, target, q.device, _masks(call))
    launches: list[Launch] = []
    if call.cu_q is not None:
        _, left, right = problem.interval
        problem.bounds_q, launch = _bounds(call, left, right, by_keys=False)
        launches.append(launch)
        if backward:
            problem.bounds_k, launch = _bounds(call, left, right, by_keys=True)
            launches.append(launch)
    added = any(m is not None and m.is_floating_point() for m in (call.mask, call.padding))
    if added and not call.spec.sinks:  # next to which a shift would count
        batches, heads = problem.listed
        like = call.padding if call.mask is None else call.mask
        assert like is not None
        shift = scratch(like, (batches, heads, call.q_len))
        sizes = heads, call.q_len, call.kv_len, *problem.interval, _FAR
        args = (problem.masks, problem.bounds_q, call.lengths, shift, *sizes)
        launches.append(problem.launch(
            attention_shift_fwd_kernel, cdiv(call.q_len, _TILE) * batches * heads, args,
            BLOCK_M=_TILE, BLOCK_N=_TILE,
        ))  # fmt: skip
        problem.masks = _masks(call, shift)
    return problem, launches


def _bounds(call: AttentionArgs, left: int, right: int, by_keys: bool) -> tuple[Tensor, Launch]:
    """Return the intervals of variable-length sequences, and the launch that fills them."""
    assert call.cu_q is not None and call.cu_k is not None
    rows, others = (call.kv_len, call.q_len) if by_keys else (call.q_len, call.kv_len)
    bounds = scratch(call.cu_q, (rows, 2), torch.int32)
    cu = (call.cu_k, call.cu_q) if by_keys else (call.cu_q, call.cu_k)
    window = (right, left) if by_keys else (left, right)
    args = (cu[0].contiguous(), cu[1].contiguous(), bounds, rows, others, cu[0].numel() - 1)
    grid, constants = (cdiv(rows, _BOUNDS_ROWS),), {"BLOCK_M": _BOUNDS_ROWS}
    return bounds, Launch(
        attention_bounds_fwd_kernel, grid, args + window, constants, 4, 1, bounds.device
    )


def _masks(call: AttentionArgs, shift: Tensor | None = None) -> Masks:
    mask = padding = None
    mask_strides: MaskStrides = (0,) * 4
    padding_strides: MaskStrides = (0,) * 2
    if call.mask is not None:
        mask = _numbers(call.mask if call.mask.dim() == 4 else call.mask[None, None])
        mask_strides = broadcast_strides(mask)
    if call.padding is not None:
        padding, padding_strides = _numbers(call.padding), call.padding.stride()
    shift_strides = (0, 0) if shift is None else broadcast_strides(shift)[:2]
    keeps = _CONSTANT[call.spec.true_means == "attend"]
    fields = (mask, *mask_strides, padding, *padding_strides, shift, *shift_strides, keeps)
    return Masks._make(fields)


def lists(
    problem: Problem, tile: AttentionTile, by_keys: bool
) -> tuple[Lists | None, list[Launch]]:
    """Return the blocks that masks let a kernel visit, None for all, and their launches."""
    call = problem.call
    if not call.masked:
        return None, []
    rows, cols = cdiv(call.q_len, tile.block_m), cdiv(call.kv_len, tile.block_n)
    if by_keys:
        rows, cols = cols, rows
    batches, heads = problem.listed
    like = call.padding if call.mask is None else call.mask
    assert like is not None
    blocks = scratch(like, (batches, heads, rows, cols + 2), torch.int32)
    bounds = problem.bounds_k if by_keys else problem.bounds_q
    args = (problem.masks, bounds, call.lengths, blocks, heads, call.q_len, call.kv_len)
    launch = problem.launch(
        attention_blocks_fwd_kernel, batches * heads * rows, args + problem.interval,
        4 if tile.block_m * tile.block_n <= _FEW else 8,
        BY_KEYS=by_keys, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
    )  # fmt: skip
    return Lists(blocks, *broadcast_strides(blocks)[:2]), [launch]


def broadcast_strides(x: Tensor) -> MaskStrides:
    """Return strides by which a dimension of size 1 is read as if it had any size."""
    return tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))


def _numbers(mask: Tensor) -> Tensor:
    """Return a mask as kernels read it: floats, or bytes for bool."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask

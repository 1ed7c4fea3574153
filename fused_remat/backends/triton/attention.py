"""Launches of `kernels.attention`: heads of any strides, every mask, packed sequences, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.backends.base import AttentionCall, LoadedHeads
from fused_remat.backends.triton import int8
from fused_remat.backends.triton.attention_masks import Problem, lists, prepare
from fused_remat.backends.triton.launch import INTERPRETED, Launch, Target, cdiv, power_of_2
from fused_remat.backends.triton.tables import (
    ATTENTION_BY_DESCRIPTORS,
    AttentionTile,
    attention_tile,
    family,
)
from fused_remat.formats import BLOCK
from fused_remat.kernels.attention import Strides, attention_fwd_kernel
from fused_remat.kernels.attention_bwd import (
    attention_delta_bwd_kernel,
    attention_dkdv_bwd_kernel,
    attention_dq_bwd_kernel,
)
from fused_remat.kernels.attention_masks import attention_mask_bwd_kernel

#: The widest head that fits into a tile.
MAX_WIDTH = 256
# Rows of a tile of the sums delta.
_DELTA_ROWS = 64
#: q, k, v, dout, lse, delta.
Given = tuple[LoadedHeads, LoadedHeads, LoadedHeads, Tensor, Tensor, Tensor]


def why_not(q: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    """Why the kernels cannot serve the call, or None if they can."""
    if max(q.shape[-1], v.shape[-1]) > MAX_WIDTH:
        return f"a head of {max(q.shape[-1], v.shape[-1])} elements is wider than {MAX_WIDTH}"
    if q.dtype == torch.float32 and not INTERPRETED:
        return "in float32 a product is three TF32 ones, and no tile of that fits the registers"
    if not call.scale >= 0.0:
        return f"the scale {call.scale} is negative"
    if 0 in (call.kv_len, q.shape[-1], v.shape[-1]):
        return "there are no keys, or nothing in them"
    return None


def reads(x: LoadedHeads) -> bool:
    """Whether kernels read heads as they are; packed ones else are to be unpacked first.

    They unpack int8 heads of one block or two: what is wider does not fit the registers.
    """
    if isinstance(x, Tensor):
        return True
    whole_blocks = x.width in (BLOCK, 2 * BLOCK) and x.first % BLOCK == 0
    return int8.has_kernel(x.whole) and whole_blocks


def _heads_in_place(x: Tensor) -> Tensor:
    """`x` (B, H, S, E), if the elements of a row lie side by side, as kernels want them."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _as_heads(x: Tensor, call: AttentionCall) -> Tensor:
    """(B*S_q, H*V) as (B, H, S_q, V), a view."""
    return x.view(call.batch, call.q_len, call.nhead, -1).transpose(1, 2)


def _strides(x: LoadedHeads, like: Tensor | None = None) -> Strides:
    """Of batch, head and row; and what unpacks codes, to the dtype of `like`."""
    if isinstance(x, Tensor):
        batch, head, row, _ = x.stride()
        return Strides(batch, head, row)
    codes, step = x.whole.parts
    per_batch, per_row, _ = step.unflatten(0, (x.batch, -1)).stride()
    batch, head, row, _ = x.of(codes).stride()
    return Strides(batch, head, row, step, like, per_batch, per_row, x.first)


def _elements(x: LoadedHeads) -> Tensor:
    """Heads in memory, or the codes of packed ones."""
    return x if isinstance(x, Tensor) else x.of(x.whole.parts[0])


def _can_describe(x: Tensor) -> bool:
    """Whether a tensor descriptor can hold x: aligned, and apart by multiples of 16 bytes."""
    apart = [s for n, s in zip(x.shape[:3], x.stride(), strict=False) if n > 1]
    steps = all(s > 0 and s * x.element_size() % 16 == 0 for s in apart)
    return steps and x.data_ptr() % 16 == 0


def _described(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """`x` as blocks (1, 1, rows, width)."""
    strides = [16 if n == 1 else s for n, s in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])


def _operands(
    problem: Problem,
    tile: AttentionTile,
    by_query: tuple[LoadedHeads, ...],
    by_key: tuple[LoadedHeads, ...],
    like: Tensor | None = None,
) -> tuple[list[Any], list[Strides], bool]:
    """Heads as a kernel takes them, their strides, and whether they are tensor descriptors.

    Packed ones are their codes, which are unpacked to the dtype of `like`.
    """
    heads = [*by_query, *by_key]
    strides = [_strides(x, like) for x in heads]
    by_descriptors = family(problem.target) in ATTENTION_BY_DESCRIPTORS
    in_memory = [x for x in heads if isinstance(x, Tensor)]
    if not by_descriptors or problem.in_rows or not all(map(_can_describe, in_memory)):
        return list(map(_elements, heads)), strides, False
    rows = [tile.block_m] * len(by_query) + [tile.block_n] * len(by_key)
    described = [
        _described(x, n, _padded(x.shape[-1])) if isinstance(x, Tensor) else _elements(x)
        for x, n in zip(heads, rows, strict=True)
    ]
    return list(described), strides, True


def _padded(width: int) -> int:
    return max(16, power_of_2(width))


def _constants(
    problem: Problem, tile: AttentionTile, widths: tuple[int, int], partial: bool, tma: bool
) -> dict[str, Any]:
    (e, v), (block_e, block_v) = widths, map(_padded, widths)
    return {
        "PARTIAL": partial,
        "KEEPS": problem.call.mask_keeps,
        "TMA": tma,
        "EVEN_E": e == block_e,
        "EVEN_V": v == block_v,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_E": block_e,
        "BLOCK_V": block_v,
    }


def _sizes(call: AttentionCall, widths: tuple[int, int]) -> tuple[int, ...]:
    return (call.nhead, call.nhead // call.kv_heads, call.q_len, call.kv_len, *widths)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    out: Tensor,
    lse: Tensor,
    target: Target,
    tile: AttentionTile | None = None,
) -> Iterator[Launch]:
    """Fills out (B*S_q, H*V) and lse (B, H, S_q) float32."""
    q, k, v = map(_heads_in_place, (q, k, v))
    widths = (q.shape[-1], v.shape[-1])
    tile = tile or attention_tile("fwd", target, max(widths), call)
    problem, launches = prepare(q, call, target, False)
    call = problem.call
    yield from launches
    blocks, blocks_strides, launches = lists(problem, tile, False)
    yield from launches
    given, strides, tma = _operands(problem, tile, (q,), (k, v))
    heads = _as_heads(out, call)
    partial = problem.is_partial(call.kv_len, tile.block_n)
    args = (
        *given, problem.masks, problem.bounds_q, call.lengths, blocks, problem.site_key(), heads,
        lse, *strides, blocks_strides, _strides(heads), *_sizes(call, widths), *problem.scalars(),
    )  # fmt: skip
    constants = _constants(problem, tile, widths, partial, tma)
    constants["WARP_SPECIALIZE"] = tile.warp_specialize
    programs = cdiv(call.q_len, tile.block_m) * call.batch * call.nhead
    yield Launch(
        attention_fwd_kernel, (programs,), args, constants, tile.warps, tile.stages, q.device
    )


def backward(
    dattn: Tensor,
    q: LoadedHeads,
    k: LoadedHeads,
    v: LoadedHeads,
    attn: Tensor,
    lse: Tensor,
    call: AttentionCall,
    grads: tuple[Tensor, Tensor, Tensor] | None,
    target: Target,
    tiles: tuple[AttentionTile, AttentionTile] | None = None,
) -> Iterator[Launch]:
    """Fills `grads` if given, adds to call.dmask and call.dpadding; `tiles` of dk, dv and of dq."""
    q, k, v = (_heads_in_place(x) if isinstance(x, Tensor) else x for x in (q, k, v))
    dout = _heads_in_place(_as_heads(dattn, call))
    widths = (q.shape[-1], v.shape[-1])
    out = _heads_in_place(_as_heads(attn, call))
    delta = torch.empty_like(lse)
    rows, block_v = _DELTA_ROWS, _padded(widths[1])
    programs = cdiv(call.q_len, rows) * call.batch * call.nhead
    args: tuple[Any, ...] = (dout, out, delta, _strides(dout), _strides(out))
    problem, launches = prepare(q, call, target, True)
    yield problem.launch(
        attention_delta_bwd_kernel, programs, (*args, call.nhead, call.q_len, widths[1]),
        BLOCK_M=rows, BLOCK_V=block_v,
    )  # fmt: skip
    yield from launches
    heads = (q, k, v, dout, lse, delta)
    unpacks = not all(isinstance(x, Tensor) for x in (q, k, v))
    if grads is not None:
        tiles = tiles or (
            attention_tile("dkdv", target, max(widths), call, unpacks),
            attention_tile("dq", target, max(widths), call, unpacks),
        )
        yield from _gradients(problem, heads, grads[1:], tiles[0], by_keys=True)
        yield from _gradients(problem, heads, grads[:1], tiles[1], by_keys=False)
    tile = attention_tile("mask", target, max(widths), call, unpacks)
    if call.dmask is not None:
        dmask = call.dmask if call.dmask.dim() == 4 else call.dmask[None, None]
        yield _mask_grad(problem, heads, dmask, tile)
    if call.dpadding is not None:
        yield _mask_grad(problem, heads, call.dpadding[:, None, None], tile)


def _gradients(
    problem: Problem,
    heads: Given,
    grads: tuple[Tensor, ...],
    tile: AttentionTile,
    by_keys: bool,
) -> Iterator[Launch]:
    """dk and dv by blocks of keys, or dq by tiles of queries."""
    call, (q, k, v, dout, lse, delta) = problem.call, heads
    widths = (q.shape[-1], v.shape[-1])
    blocks, blocks_strides, launches = lists(problem, tile, by_keys)
    yield from launches
    (q_in, do_in, k_in, v_in), strides, tma = _operands(problem, tile, (q, dout), (k, v), like=dout)
    kernel = attention_dkdv_bwd_kernel if by_keys else attention_dq_bwd_kernel
    pieces = cdiv(call.q_len, tile.block_m), cdiv(call.kv_len, tile.block_n)
    if by_keys:
        bounds, programs = problem.bounds_k, pieces[1] * call.batch * call.kv_heads
        partial = problem.is_partial(call.q_len, tile.block_m)
    else:
        bounds, programs = problem.bounds_q, pieces[0] * call.batch * call.nhead
        partial = problem.is_partial(call.kv_len, tile.block_n)
    constants = _constants(problem, tile, widths, partial, tma)
    for wanted in ((grads[0], None), (None, grads[1])) if tile.split and by_keys else (grads,):
        args = (
            q_in, k_in, v_in, do_in, lse, delta, problem.masks, bounds, call.lengths, blocks,
            problem.site_key(), *wanted, strides[0], *strides[2:], strides[1], blocks_strides,
            *map(_strides, grads), *_sizes(call, widths), *problem.scalars(),
        )  # fmt: skip
        yield Launch(kernel, (programs,), args, constants, tile.warps, tile.stages, q.device)


def _mask_grad(problem: Problem, heads: Given, dmask: Tensor, tile: AttentionTile) -> Launch:
    """dmask (b, h, m, n), each size 1 or that of the scores, is added to."""
    call, (q, k, v, dout, lse, delta) = problem.call, heads
    widths = (q.shape[-1], v.shape[-1])
    pieces = (
        call.batch, call.nhead, cdiv(call.q_len, tile.block_m), cdiv(call.kv_len, tile.block_n)
    )  # fmt: skip
    over = [n == 1 for n in dmask.shape]
    sizes = tuple(1 if o else n for o, n in zip(over, pieces, strict=True))
    spans = tuple(n if o else 1 for o, n in zip(over, pieces, strict=True))
    args = (
        *map(_elements, (q, k, v)), dout, lse, delta, problem.masks, problem.bounds_q,
        call.lengths, problem.site_key(), dmask, *(_strides(x, dout) for x in (q, k, v, dout)),
        dmask.stride(), sizes, spans,
        *_sizes(call, widths)[1:], *problem.scalars(),
    )  # fmt: skip
    constants = {
        "KEEPS": call.mask_keeps,
        "OVER_ROWS": over[2],
        "OVER_COLS": over[3],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_E": _padded(widths[0]),
        "BLOCK_V": _padded(widths[1]),
    }
    grid = (sizes[0] * sizes[1] * sizes[2] * sizes[3],)
    return Launch(
        attention_mask_bwd_kernel, grid, args, constants, tile.warps, tile.stages, q.device
    )

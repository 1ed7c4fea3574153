"""Attention in kernels (`kernels.attention`): heads of any strides, all masks, variable lengths.

First the choice and the two operations, then the launches of forward and backward. Masks are in
`triton.attention_masks`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.kernels import attention_bwd as kernels
from fused_remat.kernels.attention import Scores, Sizes, Strides, attention_fwd_kernel
from fused_remat.kernels.attention import Tile as KernelTile
from fused_remat.kernels.attention_masks import Sums, attention_mask_bwd_kernel
from fused_remat.steps import attention
from fused_remat.steps.attention import as_heads
from fused_remat.steps.attention_call import AttentionArgs, AttentionKey, Heads
from fused_remat.steps.operations import FAULTS, faster
from fused_remat.triton import launch, tables
from fused_remat.triton.attention_masks import Problem, lists, prepare
from fused_remat.triton.launch import Launch, Target, run, scratch, target_of
from fused_remat.triton.operands import cdiv, contiguous_rows, power_of_2
from fused_remat.triton.tables import AttentionTile, attention_tile

#: Options of `AttentionSpec` that the kernels support.
_KNOWN = frozenset({"window", "align", "dropout", "true_means", "sinks", *Scores._fields})
#: The widest head that fits into a tile.
MAX_WIDTH = 256
# Rows of a tile that sums delta = rowsum(dout * out), or the parts of dk or dv.
_SUM_ROWS = 64


def unsupported_reason(key: AttentionKey) -> str | None:
    spec, widths = key.spec, key.widths
    unknown = [name for name in spec.options if name not in _KNOWN]
    if unknown:
        return f"they have no {unknown[0]}"
    if max(widths) > MAX_WIDTH:
        return f"a head has {max(widths)} elements, more than {MAX_WIDTH}"
    if key.dtype == torch.float32 and not launch.INTERPRETED:
        return "float32 products are three TF32 products each, and no tile of them fits registers"
    if not spec.scale >= 0.0:
        return f"the scale {spec.scale} is negative"
    if 0 in (key.kv_len, *widths):
        return "there are no keys, or heads of width 0"
    return None


def _unsupported_fwd_reason(key: AttentionKey) -> str | None:
    own = tables.why_own_attention(target_of(key.device), key)
    return "" if own is None else unsupported_reason(key)


def _unsupported_bwd_reason(key: AttentionKey) -> str | None:
    # That of forward, also after a fault there.
    fault = FAULTS.get((attention.attention_fwd, "triton", key))
    return _unsupported_fwd_reason(key) if fault is None else fault


def _describe(key: AttentionKey, *_: Any, **__: Any) -> str:
    own = tables.why_own_attention(target_of(key.device), key)
    return f"kernel attention_fwd; attention_dkdv_bwd and attention_dq_bwd: {own}"


@faster(attention.attention_fwd, "triton", _describe, _unsupported_fwd_reason)
def attention_fwd_triton(q, k, v, call, out=None):
    if out is None:
        shape = (call.batch * call.q_len, call.spec.num_heads * v.shape[-1])
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    rows = (call.batch, call.spec.num_heads, call.q_len)
    lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    run(forward, q, k, v, call, out, lse, launch.TARGET)
    return out, lse


@faster(attention.attention_bwd, "triton", _describe, _unsupported_bwd_reason)
def attention_bwd_triton(dattn, q, k, v, attn, lse, call, grads, own=False):
    run(backward, dattn, q, k, v, attn, lse, call, grads, launch.TARGET)
    return grads


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, out: Tensor, lse: Tensor, target: Target
) -> Iterator[Launch]:
    """Return the launches that fill out (B*S_q, H*V) and lse (B, H, S_q), float32."""
    q, k, v = map(contiguous_rows, (q, k, v))
    widths = (q.shape[-1], v.shape[-1])
    tile = attention_tile("fwd", target, max(widths), call)
    problem, launches = prepare(q, call, target, False)
    call = problem.call
    yield from launches
    listed, launches = lists(problem, tile, False)
    yield from launches
    given, strides, tma = _operands(problem, tile, (q,), (k, v))
    heads = as_heads(out, call)
    partial = problem.is_partial(call.kv_len, tile.block_n)
    args = (
        *given, problem.masks, problem.bounds_q, call.lengths, listed, problem.site_key(), heads,
        lse, (*strides, _strides(heads)), _sizes(problem, widths), *problem.scalars(),
    )  # fmt: skip
    programs = cdiv(call.q_len, tile.block_m) * call.batch * call.spec.num_heads
    how, blocks = (tile.warps, tile.stages), _blocks(tile, widths, partial, tma)
    yield problem.launch(attention_fwd_kernel, programs, args, *how, tile=blocks)


def backward(
    dattn: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    lse: Tensor,
    call: AttentionArgs,
    grads: Heads | None,
    target: Target,
) -> Iterator[Launch]:
    """Return the launches that fill `grads`, if any, and add to call.dmask and call.dpadding."""
    q, k, v = map(contiguous_rows, (q, k, v))
    dout = contiguous_rows(as_heads(dattn, call))
    widths = (q.shape[-1], v.shape[-1])
    out = contiguous_rows(as_heads(attn, call))
    delta = scratch(lse, lse.shape)
    programs = cdiv(call.q_len, _SUM_ROWS) * call.batch * call.spec.num_heads
    args: tuple[Any, ...] = (dout, out, delta, (_strides(dout), _strides(out)))
    problem, launches = prepare(q, call, target, True)
    yield problem.launch(
        kernels.attention_delta_bwd_kernel, programs,
        (*args, call.spec.num_heads, call.q_len, widths[1]),
        BLOCK_M=_SUM_ROWS, BLOCK_V=_padded(widths[1]),
    )  # fmt: skip
    yield from launches
    heads = (q, k, v, dout, lse, delta)
    if grads is not None:
        tile = attention_tile("dkdv", target, max(widths), call)
        yield from _gradients(problem, heads, grads[1:], tile, by_keys=True)
        tile = attention_tile("dq", target, max(widths), call)
        yield from _gradients(problem, heads, grads[:1], tile, by_keys=False)
    tile = attention_tile("mask", target, max(widths), call)
    if call.dmask is not None:
        dmask = call.dmask if call.dmask.dim() == 4 else call.dmask[None, None]
        yield _mask_grad(problem, heads, dmask, tile)
    if call.dpadding is not None:
        yield _mask_grad(problem, heads, call.dpadding[:, None, None], tile)


def _gradients(
    problem: Problem,
    heads: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
    tile: AttentionTile,
    by_keys: bool,
) -> Iterator[Launch]:
    # Of dk and dv, a program is a block of keys; of dq, a tile of queries.
    call, (q, k, v, dout, lse, delta) = problem.call, heads
    widths = (q.shape[-1], v.shape[-1])
    listed, launches = lists(problem, tile, by_keys)
    yield from launches
    (q_in, do_in, k_in, v_in), strides, tma = _operands(problem, tile, (q, dout), (k, v))
    kernel = kernels.attention_dkdv_bwd_kernel if by_keys else kernels.attention_dq_bwd_kernel
    tiles = cdiv(call.q_len, tile.block_m), cdiv(call.kv_len, tile.block_n)
    parts, made = 1, grads
    if by_keys:
        parts = tables.group_parts(problem.target, call, tile)
        bounds, programs = problem.bounds_k, tiles[1] * call.batch * call.spec.num_kv_heads * parts
        partial = problem.is_partial(call.q_len, tile.block_m)
    else:
        bounds, programs = problem.bounds_q, tiles[0] * call.batch * call.spec.num_heads
        partial = problem.is_partial(call.kv_len, tile.block_n)
    if parts > 1:
        sizes = [(b, h * parts, n, e) for b, h, n, e in (x.shape for x in grads)]
        made = tuple(scratch(lse, n) for n in sizes)
    how, blocks = (tile.warps, tile.stages), _blocks(tile, widths, partial, tma)
    of_q, of_dout, of_k, of_v = strides
    apart = of_q, of_k, of_v, of_dout, *map(_strides, made)
    for wanted in ((made[0], None), (None, made[1])) if tile.split and by_keys else (made,):
        args = (
            q_in, k_in, v_in, do_in, lse, delta, problem.masks, bounds, call.lengths, listed,
            problem.site_key(), *wanted, apart, _sizes(problem, widths, parts), *problem.scalars(),
        )  # fmt: skip
        yield problem.launch(kernel, programs, args, *how, tile=blocks)
    for sums, grad in zip(made, grads, strict=True) if parts > 1 else ():
        batch, count, rows, width = grad.shape
        yield problem.launch(
            kernels.attention_sum_bwd_kernel, cdiv(rows, _SUM_ROWS) * batch * count,
            (sums, grad, (_strides(sums), _strides(grad)), count, parts, rows, width),
            BLOCK_M=_SUM_ROWS, BLOCK_E=_padded(width),
        )  # fmt: skip


def _mask_grad(
    problem: Problem, heads: tuple[Tensor, ...], dmask: Tensor, tile: AttentionTile
) -> Launch:
    """Return the launch that adds to dmask (b, h, m, n); each size is 1 or that of the scores."""
    call, (q, k, v, dout, lse, delta) = problem.call, heads
    widths = (q.shape[-1], v.shape[-1])
    tiles = cdiv(call.q_len, tile.block_m), cdiv(call.kv_len, tile.block_n)
    counted = (call.batch, call.spec.num_heads, *tiles)
    over = [n == 1 for n in dmask.shape]
    counts = tuple(1 if o else n for o, n in zip(over, counted, strict=True))
    spans = tuple(n if o else 1 for o, n in zip(over, counted, strict=True))
    args = (
        q, k, v, dout, lse, delta, problem.masks, problem.bounds_q,
        call.lengths, problem.site_key(), dmask, Sums(dmask.stride(), counts, spans),
        tuple(map(_strides, (q, k, v, dout))), _sizes(problem, widths),
        *problem.scalars(),
    )  # fmt: skip
    blocks = KernelTile(tile.block_m, tile.block_n, *_columns_of(widths))
    return problem.launch(
        attention_mask_bwd_kernel, math.prod(counts), args, tile.warps, tile.stages,
        OVER_ROWS=over[2], OVER_COLS=over[3], tile=blocks,
    )  # fmt: skip


def _sizes(problem: Problem, widths: tuple[int, int], parts: int = 1) -> Sizes:
    call, heads = problem.call, problem.call.spec.num_heads
    return Sizes(heads, heads // call.spec.num_kv_heads, call.q_len, call.kv_len, *widths, parts)


def _blocks(tile: AttentionTile, widths: tuple[int, int], partial: bool, tma: bool) -> KernelTile:
    e, v = _columns_of(widths)
    blocks = KernelTile(tile.block_m, tile.block_n, e, v, e == widths[0], v == widths[1], tma)
    return blocks._replace(PARTIAL=partial)


def _padded(width: int) -> int:
    return max(16, power_of_2(width))


def _columns_of(widths: tuple[int, int]) -> tuple[int, int]:
    # Values have no narrower tile than keys' first 128 columns: on an H100, compiled by Triton 3.6,
    # tiles of 64 and 32 columns read outside of shared memory.
    e, v = map(_padded, widths)
    return e, max(v, min(e, 128))


def _operands(
    problem: Problem, tile: AttentionTile, by_query: tuple[Tensor, ...], by_key: tuple[Tensor, ...]
) -> tuple[list[Any], list[Strides], bool]:
    """Return heads as a kernel takes them, their strides, and whether they are descriptors."""
    heads = [*by_query, *by_key]
    strides = list(map(_strides, heads))
    by_descriptors = tile.tma and tables.family(problem.target) in tables.ATTENTION_BY_DESCRIPTORS
    if not by_descriptors or tables.ends_early(problem.call) or not all(map(_can_describe, heads)):
        return heads, strides, False
    rows = [tile.block_m] * len(by_query) + [tile.block_n] * len(by_key)
    widths = by_query[0].shape[-1], by_key[-1].shape[-1]
    columns = dict(zip(widths, _columns_of(widths), strict=True))
    described = [_described(x, n, columns[x.shape[-1]]) for x, n in zip(heads, rows, strict=True)]
    return described, strides, True


def _strides(x: Tensor) -> Strides:
    batch, head, row, _ = x.stride()
    return Strides(batch, head, row)


def _can_describe(x: Tensor) -> bool:
    # Its address and strides are multiples of 16 bytes.
    apart = [s for n, s in zip(x.shape[:3], x.stride(), strict=False) if n > 1]
    steps = all(s > 0 and s * x.element_size() % 16 == 0 for s in apart)
    return steps and x.data_ptr() % 16 == 0


def _described(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    strides = [16 if n == 1 else s for n, s in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])

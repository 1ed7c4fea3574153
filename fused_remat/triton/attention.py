"""Attention in kernels (`kernels.attention`): heads of any strides, all masks, variable lengths.

First the choice and the two operations, then the launches of forward and backward, then masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.kernels.attention import (
    Lists,
    Masks,
    Scores,
    Sizes,
    Strides,
    attention_fwd_kernel,
)
from fused_remat.kernels.attention import Tile as KernelTile
from fused_remat.kernels.attention_bwd import (
    attention_delta_bwd_kernel,
    attention_dkdv_bwd_kernel,
    attention_dq_bwd_kernel,
    attention_sum_bwd_kernel,
)
from fused_remat.kernels.attention_masks import (
    Sums,
    attention_blocks_fwd_kernel,
    attention_bounds_fwd_kernel,
    attention_mask_bwd_kernel,
    attention_shift_fwd_kernel,
)
from fused_remat.random import scale as dropout_scale
from fused_remat.random import threshold
from fused_remat.spec import AttentionSpec
from fused_remat.steps import attention, attention_library
from fused_remat.steps.attention import as_heads
from fused_remat.steps.attention_call import AttentionArgs, AttentionKey, Heads
from fused_remat.steps.operations import FAULTS, faster
from fused_remat.triton.launch import (
    INTERPRETED,
    Launch,
    Target,
    cdiv,
    power_of_2,
    scratch,
    target_of,
)
from fused_remat.triton.launch_cache import TARGET, run
from fused_remat.triton.tables import (
    ATTENTION_BY_DESCRIPTORS,
    AttentionTile,
    attention_tile,
    family,
    group_parts,
    why_own_attention,
)

#: Options of `AttentionSpec` that the kernels support.
_KNOWN = frozenset({"window", "align", "dropout", "true_means", *Scores._fields})
#: The widest head that fits into a tile.
MAX_WIDTH = 256
# Rows of a tile that sums delta = rowsum(dout * out), or the parts of dk or dv.
_SUM_ROWS = 64
# Rows whose intervals of variable-length sequences a program finds.
_BOUNDS_ROWS = 128
#: q, k, v, dout, lse, delta.
Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
# A mask that adds more than this to a whole row is shifted to add 0: scores would lose digits.
_FAR = 128.0
# Tiles of the kernels that read masks alone.
_TILE = 64
# Up to so many elements of a mask, four warps list a block in fewer instructions than eight.
_FEW = 4096
_CONSTANT = {known: tl.constexpr(known) for known in (False, True)}
MaskStrides = tuple[int, ...]


def unsupported_reason(key: AttentionKey) -> str | None:
    """Why the kernels cannot serve a call, or None if they can."""
    spec, widths = key.spec, key.widths
    unknown = [name for name in spec.options if name not in _KNOWN]
    if unknown:
        return f"they have no {unknown[0]}"
    if max(widths) > MAX_WIDTH:
        return f"a head has {max(widths)} elements, more than {MAX_WIDTH}"
    if key.dtype == torch.float32 and not INTERPRETED:
        return "float32 products are three TF32 products each, and no tile of them fits registers"
    if not spec.scale >= 0.0:
        return f"the scale {spec.scale} is negative"
    if 0 in (key.kv_len, *widths):
        return "there are no keys, or heads of width 0"
    return None


def _why(key: AttentionKey) -> str | None:
    """Why these kernels are chosen over ATen's; None if ATen's are chosen."""
    return attention_library.unsupported_reason(key) or why_own_attention(
        target_of(key.device), key
    )


def _unsupported_fwd_reason(key: AttentionKey) -> str | None:
    return "" if _why(key) is None else unsupported_reason(key)


def _unsupported_bwd_reason(key: AttentionKey) -> str | None:
    """Return the reason of forward, also after a fault there.

    The kernels' lse is of scores shifted by far masks, the operation's is not.
    """
    fault = FAULTS.get((attention.attention_fwd, "triton", key))
    return _unsupported_fwd_reason(key) if fault is None else fault


def _describe(key: AttentionKey, *_: Any, **__: Any) -> str:
    if _unsupported_fwd_reason(key) is not None:
        return attention.describe(key)
    return f"kernel attention_fwd; attention_dkdv_bwd and attention_dq_bwd: {_why(key)}"


@faster(
    attention.attention_fwd,
    "triton",
    unsupported_reason=_unsupported_fwd_reason,
    description=_describe,
)
def attention_fwd_triton(q, k, v, call, out=None):
    if out is None:
        shape = (call.batch * call.q_len, call.spec.num_heads * v.shape[-1])
        out = torch.empty(shape, dtype=q.dtype, device=q.device)
    rows = (call.batch, call.spec.num_heads, call.q_len)
    lse = torch.empty(rows, dtype=torch.float32, device=q.device)
    run(forward, q, k, v, call, out, lse, TARGET)
    return out, lse


@faster(
    attention.attention_bwd,
    "triton",
    unsupported_reason=_unsupported_bwd_reason,
    description=_describe,
)
def attention_bwd_triton(dattn, q, k, v, attn, lse, call, grads):
    run(backward, dattn, q, k, v, attn, lse, call, grads, TARGET)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionArgs,
    out: Tensor,
    lse: Tensor,
    target: Target,
    tile: AttentionTile | None = None,
) -> Iterator[Launch]:
    """The launches that fill out (B*S_q, H*V) and lse (B, H, S_q), float32."""
    q, k, v = map(_heads_in_place, (q, k, v))
    widths = (q.shape[-1], v.shape[-1])
    tile = tile or attention_tile("fwd", target, max(widths), call)
    problem, launches = prepare(q, call, target, False)
    call = problem.call
    yield from launches
    blocks, apart, launches = lists(problem, tile, False)
    yield from launches
    listed = None if blocks is None else Lists(blocks, *apart)
    given, strides, tma = _operands(problem, tile, (q,), (k, v))
    heads = as_heads(out, call)
    partial = problem.is_partial(call.kv_len, tile.block_n)
    args = (
        *given, problem.masks, problem.bounds_q, call.lengths, listed, problem.site_key(), heads,
        lse, (*strides, _strides(heads)), _sizes(problem, widths), *problem.scalars(),
    )  # fmt: skip
    constants = _constants(tile, widths, partial, tma)
    programs = cdiv(call.q_len, tile.block_m) * call.batch * call.spec.num_heads
    yield Launch(
        attention_fwd_kernel, (programs,), args, constants, tile.warps, tile.stages, q.device
    )


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
    tiles: tuple[AttentionTile, AttentionTile] | None = None,
) -> Iterator[Launch]:
    """The launches that fill `grads`, if given, and add to call.dmask and call.dpadding.

    `tiles`: for dk and dv, and for dq.
    """
    q, k, v = map(_heads_in_place, (q, k, v))
    dout = _heads_in_place(as_heads(dattn, call))
    widths = (q.shape[-1], v.shape[-1])
    out = _heads_in_place(as_heads(attn, call))
    delta = scratch(lse, lse.shape)
    programs = cdiv(call.q_len, _SUM_ROWS) * call.batch * call.spec.num_heads
    args: tuple[Any, ...] = (dout, out, delta, (_strides(dout), _strides(out)))
    problem, launches = prepare(q, call, target, True)
    yield problem.launch(
        attention_delta_bwd_kernel, programs, (*args, call.spec.num_heads, call.q_len, widths[1]),
        BLOCK_M=_SUM_ROWS, BLOCK_V=_padded(widths[1]),
    )  # fmt: skip
    yield from launches
    heads = (q, k, v, dout, lse, delta)
    if grads is not None:
        tiles = tiles or (
            attention_tile("dkdv", target, max(widths), call),
            attention_tile("dq", target, max(widths), call),
        )
        yield from _gradients(problem, heads, grads[1:], tiles[0], by_keys=True)
        yield from _gradients(problem, heads, grads[:1], tiles[1], by_keys=False)
    tile = attention_tile("mask", target, max(widths), call)
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
    """The launches of dk and dv, a program per block of keys; or of dq, a program per tile."""
    call, (q, k, v, dout, lse, delta) = problem.call, heads
    widths = (q.shape[-1], v.shape[-1])
    blocks, blocks_apart, launches = lists(problem, tile, by_keys)
    yield from launches
    listed = None if blocks is None else Lists(blocks, *blocks_apart)
    (q_in, do_in, k_in, v_in), strides, tma = _operands(problem, tile, (q, dout), (k, v))
    kernel = attention_dkdv_bwd_kernel if by_keys else attention_dq_bwd_kernel
    pieces = cdiv(call.q_len, tile.block_m), cdiv(call.kv_len, tile.block_n)
    parts, made = 1, grads
    if by_keys:
        parts = group_parts(problem.target, call, tile)
        bounds, programs = problem.bounds_k, pieces[1] * call.batch * call.spec.num_kv_heads * parts
        partial = problem.is_partial(call.q_len, tile.block_m)
    else:
        bounds, programs = problem.bounds_q, pieces[0] * call.batch * call.spec.num_heads
        partial = problem.is_partial(call.kv_len, tile.block_n)
    if parts > 1:
        sizes = [(b, h * parts, n, e) for b, h, n, e in (x.shape for x in grads)]
        made = tuple(scratch(lse, n) for n in sizes)
    constants = _constants(tile, widths, partial, tma)
    of_q, of_dout, of_k, of_v = strides
    apart = of_q, of_k, of_v, of_dout, *map(_strides, made)
    for wanted in ((made[0], None), (None, made[1])) if tile.split and by_keys else (made,):
        args = (
            q_in, k_in, v_in, do_in, lse, delta, problem.masks, bounds, call.lengths, listed,
            problem.site_key(), *wanted, apart, _sizes(problem, widths, parts), *problem.scalars(),
        )  # fmt: skip
        yield Launch(kernel, (programs,), args, constants, tile.warps, tile.stages, q.device)
    for sums, grad in zip(made, grads, strict=True) if parts > 1 else ():
        batch, count, rows, width = grad.shape
        yield problem.launch(
            attention_sum_bwd_kernel, cdiv(rows, _SUM_ROWS) * batch * count,
            (sums, grad, (_strides(sums), _strides(grad)), count, parts, rows, width),
            BLOCK_M=_SUM_ROWS, BLOCK_E=_padded(width),
        )  # fmt: skip


def _mask_grad(problem: Problem, heads: Given, dmask: Tensor, tile: AttentionTile) -> Launch:
    """The launch that adds to dmask (b, h, m, n); each size is 1 or that of the scores."""
    call, (q, k, v, dout, lse, delta) = problem.call, heads
    widths = (q.shape[-1], v.shape[-1])
    blocks = cdiv(call.q_len, tile.block_m), cdiv(call.kv_len, tile.block_n)
    pieces = (call.batch, call.spec.num_heads, *blocks)
    over = [n == 1 for n in dmask.shape]
    counts = tuple(1 if o else n for o, n in zip(over, pieces, strict=True))
    spans = tuple(n if o else 1 for o, n in zip(over, pieces, strict=True))
    args = (
        q, k, v, dout, lse, delta, problem.masks, problem.bounds_q,
        call.lengths, problem.site_key(), dmask, Sums(dmask.stride(), counts, spans),
        tuple(map(_strides, (q, k, v, dout))), _sizes(problem, widths),
        *problem.scalars(),
    )  # fmt: skip
    constants = {
        "OVER_ROWS": over[2],
        "OVER_COLS": over[3],
        "tile": KernelTile(tile.block_m, tile.block_n, *_blocks_of(widths)),
    }
    grid = (counts[0] * counts[1] * counts[2] * counts[3],)
    return Launch(
        attention_mask_bwd_kernel, grid, args, constants, tile.warps, tile.stages, q.device
    )


def _sizes(problem: Problem, widths: tuple[int, int], parts: int = 1) -> Sizes:
    call, heads = problem.call, problem.call.spec.num_heads
    return Sizes(heads, heads // call.spec.num_kv_heads, call.q_len, call.kv_len, *widths, parts)


def _constants(
    tile: AttentionTile, widths: tuple[int, int], partial: bool, tma: bool
) -> dict[str, Any]:
    e, v = _blocks_of(widths)
    even_e, even_v = e == widths[0], v == widths[1]
    blocks = KernelTile(tile.block_m, tile.block_n, e, v, even_e, even_v, tma)
    return {"tile": blocks._replace(PARTIAL=partial)}


def _padded(width: int) -> int:
    return max(16, power_of_2(width))


def _blocks_of(widths: tuple[int, int]) -> tuple[int, int]:
    """The columns of a tile of keys and of one of values, of these widths.

    Values have no narrower tile than keys' first 128 columns: on an H100, compiled by Triton 3.6,
    tiles of 64 and 32 columns read outside of shared memory.
    """
    e, v = map(_padded, widths)
    return e, max(v, min(e, 128))


def _operands(
    problem: Problem,
    tile: AttentionTile,
    by_query: tuple[Tensor, ...],
    by_key: tuple[Tensor, ...],
) -> tuple[list[Any], list[Strides], bool]:
    """Return heads as a kernel takes them, their strides, and whether they are descriptors."""
    heads = [*by_query, *by_key]
    strides = list(map(_strides, heads))
    by_descriptors = tile.tma and family(problem.target) in ATTENTION_BY_DESCRIPTORS
    if not by_descriptors or problem.in_rows or not all(map(_can_describe, heads)):
        return heads, strides, False
    rows = [tile.block_m] * len(by_query) + [tile.block_n] * len(by_key)
    widths = by_query[0].shape[-1], by_key[-1].shape[-1]
    columns = dict(zip(widths, _blocks_of(widths), strict=True))
    described = [_described(x, n, columns[x.shape[-1]]) for x, n in zip(heads, rows, strict=True)]
    return described, strides, True


def _heads_in_place(x: Tensor) -> Tensor:
    """`x` (B, H, S, E) with contiguous rows, which kernels need: itself or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(x: Tensor) -> Strides:
    batch, head, row, _ = x.stride()
    return Strides(batch, head, row)


def _can_describe(x: Tensor) -> bool:
    """Whether x allows a tensor descriptor: its address and strides are multiples of 16 bytes."""
    apart = [s for n, s in zip(x.shape[:3], x.stride(), strict=False) if n > 1]
    steps = all(s > 0 and s * x.element_size() % 16 == 0 for s in apart)
    return steps and x.data_ptr() % 16 == 0


def _described(x: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A tensor descriptor of `x` in blocks (1, 1, rows, width)."""
    strides = [16 if n == 1 else s for n, s in zip(x.shape[:3], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, rows, width])


@dataclass(frozen=True)
class Problem:
    """A call on a target: what its launches share.

    Attributes:
        masks: the masks as kernels take them.
        bounds_q, bounds_k: for variable-length sequences, the interval of keys that each query
            sees, and of queries that see each key.
    """

    call: AttentionArgs
    target: Target
    device: torch.device
    masks: Masks
    bounds_q: Tensor | None = None
    bounds_k: Tensor | None = None

    @property
    def interval(self) -> tuple[int, int, int]:
        """offset, left and right, with sides of at most all positions, so that sums fit 32 bits."""
        (left, right), most = self.call.spec.window, self.call.q_len + self.call.kv_len
        left = min(left, most) if left >= 0 else most
        return self.call.offset, left, min(right, most) if right >= 0 else most

    @property
    def in_rows(self) -> bool:
        """Whether keys beyond a sequence must not be read: they may hold anything."""
        return self.call.lengths is not None or self.call.cu_q is not None

    @property
    def listed(self) -> tuple[int, int]:
        """For how many batches and heads the masks differ."""
        mask = self.call.mask
        batches, heads = mask.shape[:2] if mask is not None and mask.dim() == 4 else (1, 1)
        if self.call.padding is not None or self.call.lengths is not None:
            batches = self.call.batch
        return batches, heads

    def is_partial(self, length: int, block: int) -> bool:
        """Whether some block of `length` keys or queries may be seen in part only."""
        limited = self.call.spec.window != (-1, -1) or self.in_rows
        return limited or self.call.masked or length % block != 0

    def scalars(self) -> tuple[Any, ...]:
        """The kernels' arguments score, offset, left, right, row0, threshold and keep_scale."""
        p = self.call.spec.dropout
        dropout = (self.call.row0, threshold(p), dropout_scale(p)) if p > 0.0 else (0, 0, 0.0)
        return (scores_of(self.call.spec), *self.interval, *dropout)

    def site_key(self) -> Tensor | None:
        return self.call.site_key if self.call.spec.dropout > 0.0 else None

    def launch(self, kernel: Any, programs: int, args: tuple[Any, ...], **constants: Any) -> Launch:
        """A launch of a kernel that has no row in the tile tables."""
        return Launch(kernel, (programs,), args, constants, 8, 2, self.device)


def scores_of(spec: AttentionSpec) -> Scores:
    """The options of the scores as kernels take them: None for an option that is not set."""
    given = {name for name in Scores._fields if name == "scale" or name in spec.options}
    return Scores(**{n: getattr(spec, n) if n in given else None for n in Scores._fields})


def prepare(
    q: Tensor, call: AttentionArgs, target: Target, backward: bool
) -> tuple[Problem, list[Launch]]:
    """The problem with its intervals and shifts, and the launches that fill these."""
    if call.lengths is not None:
        call = replace(call, lengths=call.lengths.contiguous())
    problem = Problem(call, target, q.device, _masks(call))
    launches: list[Launch] = []
    bounds_q = bounds_k = shift = None
    if call.cu_q is not None:
        _, left, right = problem.interval
        bounds_q, launch = _bounds(call, left, right, by_keys=False)
        launches.append(launch)
        if backward:
            bounds_k, launch = _bounds(call, left, right, by_keys=True)
            launches.append(launch)
    if any(m is not None and m.is_floating_point() for m in (call.mask, call.padding)):
        batches, heads = problem.listed
        like = call.padding if call.mask is None else call.mask
        assert like is not None
        shift = scratch(like, (batches, heads, call.q_len))
        args = (problem.masks, bounds_q, call.lengths, shift, heads, call.q_len, call.kv_len)
        launches.append(
            problem.launch(
                attention_shift_fwd_kernel, cdiv(call.q_len, _TILE) * batches * heads,
                (*args, *problem.interval, _FAR), BLOCK_M=_TILE, BLOCK_N=_TILE,
            )
        )  # fmt: skip
    made = replace(problem, masks=_masks(call, shift), bounds_q=bounds_q, bounds_k=bounds_k)
    return made, launches


def _bounds(call: AttentionArgs, left: int, right: int, by_keys: bool) -> tuple[Tensor, Launch]:
    """The intervals of variable-length sequences, and the launch that fills them."""
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
    """The masks as kernels take them, with `shift` for rows that are far from 0."""
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
) -> tuple[Tensor | None, MaskStrides, list[Launch]]:
    """The blocks that the masks let a kernel visit, their strides, and the launches that fill them.

    Without masks there is no such list.
    """
    call = problem.call
    if not call.masked:
        return None, (0, 0), []
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
        BY_KEYS=by_keys, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
    )  # fmt: skip
    if tile.block_m * tile.block_n <= _FEW:
        launch = replace(launch, num_warps=4)
    return blocks, broadcast_strides(blocks)[:2], [launch]


def broadcast_strides(x: Tensor) -> MaskStrides:
    """Strides by which a dimension of size 1 is read as if it had any size."""
    return tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))


def _numbers(mask: Tensor) -> Tensor:
    """A mask as kernels read it: floats, or bytes for bool."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask

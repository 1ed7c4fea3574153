"""Attention by blocks: what forward and backward share, and the forward.

Heads x (B, H, S, E) are a pointer and `Strides`, or a tensor descriptor (TMA) over all four
dimensions whose block is (1, 1, rows, BLOCK_E); TMA says which. In backward they may be int8 codes,
unpacked as they are loaded. E and V, the widths of a head in q, k and in v, are padded to powers of
two by reading 0 outside.

Which keys a query sees is an interval (`seen_keys`: causal, window, lengths, packed sequences), and
inside it what the masks allow. A block of keys that every query of a tile sees whole takes no mask
arithmetic; one that none sees is not visited. Seen from the keys, the same holds for queries.
Where there are masks, a list made beforehand (`kernels.attention_masks`) says which block is which.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_remat.kernels.activations import tanh_fwd
from fused_remat.kernels.dropout import keep_at, split_key
from fused_remat.kernels.packing import BLOCK, unpack_int8

LOG2E = tl.constexpr(1.4426950408889634)


class Masks(NamedTuple):
    """What is added to scores, or excludes them; a pointer that a call has no use for is None.

    mask broadcasts to (B, H, S_q, S_k) by strides of 0, padding is (B, S_k): float, added; or
    uint8, a bool: True is excluded, in mask takes part instead where KEEPS. shift (B, H, S_q) is
    subtracted: the largest of what is added to a row, if that is far from 0.
    """

    mask: Any
    stride_mb: Any
    stride_mh: Any
    stride_mm: Any
    stride_mn: Any
    padding: Any
    stride_pb: Any
    stride_pn: Any
    shift: Any
    stride_sb: Any
    stride_sh: Any


class Scores(NamedTuple):
    """Options of the scores, as in `fused_remat.spec.AttentionSpec`; None for one that is not set.

    scores = scale q kᵀ, or softcap · tanh(scale q kᵀ / softcap), plus masks. scale must not be
    negative.
    """

    scale: Any
    softcap: Any


class Strides(NamedTuple):
    """Of heads: from one to the next, in elements; beside int8 codes, what unpacks them.

    Attributes:
        batch, head, row: from one sequence, head and token to the next.
        step: of the blocks of the rows that the heads lie in (`fused_remat.formats`); None where
            heads are as they are, and so is what follows.
        like: a tensor of the heads' dtype, to which they are rounded.
        step_batch, step_row: of `step`, from one sequence and token to the next.
        first: the column of a row where the heads begin.
    """

    batch: Any
    head: Any
    row: Any
    step: Any = None
    like: Any = None
    step_batch: Any = None
    step_row: Any = None
    first: Any = None


@triton.jit
def _load_codes(
    codes_ptr, strides, b, h, row, first, end, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """`load_rows` of int8 heads in whole blocks, (BLOCK_M, BLOCK_E) in their dtype."""
    BLOCKS: tl.constexpr = BLOCK_E // BLOCK
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_e = tl.arange(0, BLOCK_E)
    mask = ((offs_m >= first) & (offs_m < end))[:, None]
    rows = offs_m.to(tl.int64)[:, None]
    base = codes_ptr + b.to(tl.int64) * strides.batch + h.to(tl.int64) * strides.head
    codes = tl.load(base + rows * strides.row + offs_e[None, :], mask=mask, other=0)
    base = strides.step + b.to(tl.int64) * strides.step_batch + strides.first // BLOCK + h * BLOCKS
    blocks = tl.arange(0, BLOCKS)
    step = tl.load(base + rows * strides.step_row + blocks[None, :], mask=mask, other=0.0)
    tile = unpack_int8(codes.reshape([BLOCK_M, BLOCKS, BLOCK]), step[:, :, None])
    return tile.reshape([BLOCK_M, BLOCK_E]).to(strides.like.dtype.element_ty)


@triton.jit
def load_rows(
    x, strides, b, h, row, first, end, E,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows `row` to row + BLOCK_M of head (b, h), (BLOCK_M, BLOCK_E); 0 outside.

    Outside is a row before `first` or from `end` on, and a column from E on. EVEN: E is BLOCK_E.
    A descriptor ends rows where the tensor ends: `first` and `end` must be 0 and S.
    Codes are unpacked, whatever TMA says.
    """
    if strides.step is not None:
        tile = _load_codes(x, strides, b, h, row, first, end, BLOCK_M, BLOCK_E)
    elif TMA:
        tile = x.load([b, h, row, 0]).reshape([BLOCK_M, BLOCK_E])
    else:
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_e = tl.arange(0, BLOCK_E)
        mask = ((offs_m >= first) & (offs_m < end))[:, None]
        if not EVEN:
            mask = mask & (offs_e < E)[None, :]
        base = x + b.to(tl.int64) * strides.batch + h.to(tl.int64) * strides.head
        ptrs = base + offs_m.to(tl.int64)[:, None] * strides.row + offs_e[None, :]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile


@triton.jit
def store_rows(
    x_ptr, strides, b, h, row, end, E, tile, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Store (BLOCK_M, BLOCK_E) from row `row` of head (b, h) on, in the dtype of the tensor."""
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_e = tl.arange(0, BLOCK_E)
    base = x_ptr + b.to(tl.int64) * strides.batch + h.to(tl.int64) * strides.head
    ptrs = base + offs_m.to(tl.int64)[:, None] * strides.row + offs_e[None, :]
    mask = (offs_m < end)[:, None] & (offs_e < E)[None, :]
    tl.store(ptrs, tile.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right):
    """The keys that each query sees, from the first to one past the last.

    Query m sees keys m + offset - left to m + offset + right; no key from lengths[b] on. Of packed
    sequences bounds (M, 2) holds the interval. Queries from M on see what the last one sees.
    """
    offs_m = tl.minimum(offs_m, M - 1)
    if bounds_ptr is not None:
        low = tl.load(bounds_ptr + 2 * offs_m)
        high = tl.load(bounds_ptr + 2 * offs_m + 1)
    else:
        end = N
        if lengths_ptr is not None:
            end = tl.minimum(N, tl.load(lengths_ptr + b).to(tl.int32))
        low = tl.maximum(offs_m + (offset - left), 0)
        high = tl.minimum(offs_m + (offset + right + 1), end)
    return low, high


@triton.jit
def seeing_queries(offs_n, b, bounds_ptr, lengths_ptr, M, N, offset, left, right):
    """The queries that see each key, from the first to one past the last: `seen_keys`, inverted.

    bounds is (N, 2) here. Keys from N on are seen where the last one is; M to 0 is none.
    """
    offs_n = tl.minimum(offs_n, N - 1)
    if bounds_ptr is not None:
        low = tl.load(bounds_ptr + 2 * offs_n)
        high = tl.load(bounds_ptr + 2 * offs_n + 1)
    else:
        low = tl.maximum(offs_n - (offset + right), 0)
        high = tl.minimum(offs_n - (offset - left - 1), M)
        if lengths_ptr is not None:
            hidden = offs_n >= tl.load(lengths_ptr + b).to(tl.int32)
            low = tl.where(hidden, M, low)
            high = tl.where(hidden, 0, high)
    return low, high


@triton.jit
def visits(low, high, BLOCK: tl.constexpr):
    """Which blocks a tile visits, from the intervals of its rows.

    Returns start, left, gap, partial: of the `partial` blocks that not every row sees whole, number
    i is start + i if i < left, else gap + i; and full_start, full: the others, side by side.
    """
    start = tl.min(low, 0) // BLOCK
    stop = tl.maximum(tl.cdiv(tl.max(high, 0), BLOCK), start)
    full_start = tl.minimum(tl.cdiv(tl.max(low, 0), BLOCK), stop)
    full = tl.maximum(tl.min(high, 0) // BLOCK - full_start, 0)
    left = full_start - start
    return start, left, start + full, stop - start - full, full_start, full


@triton.jit
def listed(blocks_ptr, strides, b, h, tile, width):
    """Lists of a tile's blocks, `width` at most, and their lengths: the partial ones, the others.

    A row of `attention_blocks_fwd_kernel`: partial blocks from its front, the others up to its end.
    """
    row_ptr = blocks_ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    row_ptr += tile.to(tl.int64) * (width + 2)
    partial, full = tl.load(row_ptr + width), tl.load(row_ptr + width + 1)
    return row_ptr, row_ptr + width - full, partial, full


@triton.jit
def block_at(i, blocks_ptr, start, left, gap):
    """Number of the i-th block to visit: from a list, or as `visits` says."""
    if blocks_ptr is not None:
        block = tl.load(blocks_ptr + i)
    else:
        block = i + tl.where(i < left, start, gap)
    return block


@triton.jit
def masked(s, masks, b, h, offs_m, offs_n, M, N, KEEPS: tl.constexpr):
    """Scores with both masks; offs_m and offs_n broadcast to the tile, either way round."""
    bias = tl.zeros_like(s)
    inside = (offs_m < M) & (offs_n < N)
    if masks.mask is not None:
        base = masks.mask + b.to(tl.int64) * masks.stride_mb + h.to(tl.int64) * masks.stride_mh
        rows = offs_m.to(tl.int64) * masks.stride_mm
        mask = tl.load(base + rows + offs_n.to(tl.int64) * masks.stride_mn, mask=inside, other=0)
        if masks.mask.dtype.element_ty.is_floating():
            bias += mask.to(tl.float32)
        else:
            if KEEPS:
                hidden = mask == 0
            else:
                hidden = mask != 0
            bias = tl.where(hidden, float("-inf"), bias)
    if masks.padding is not None:
        base = masks.padding + b.to(tl.int64) * masks.stride_pb
        ptrs = base + offs_n.to(tl.int64) * masks.stride_pn
        padding = tl.load(ptrs, mask=offs_n < N, other=0)
        if masks.padding.dtype.element_ty.is_floating():
            bias += padding.to(tl.float32)
        else:
            bias = tl.where(padding != 0, float("-inf"), bias)
    if masks.shift is not None:
        base = masks.shift + b.to(tl.int64) * masks.stride_sb + h.to(tl.int64) * masks.stride_sh
        bias -= tl.load(base + offs_m, mask=offs_m < M, other=0.0)
    return s + bias


@triton.jit
def scores(
    qk, masks, b, h, offs_m, offs_n, offs, low, high, M, N, score,
    PARTIAL: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of q kᵀ, -inf where excluded; and tanh of the soft-cap, if there is one.

    Where PARTIAL, masks apply, and `offs`, one of offs_m and offs_n, must be in [low, high).
    """
    s = qk * score.scale
    capped = s
    if score.softcap is not None:
        capped = tanh_fwd(s / score.softcap)
        s = score.softcap * capped
    if PARTIAL:
        if (masks.mask is not None) or (masks.padding is not None):
            s = masked(s, masks, b, h, offs_m, offs_n, M, N, KEEPS)
        s = tl.where((offs >= low) & (offs < high), s, float("-inf"))
    return s, capped


@triton.jit
def exponentials(s, top, scale, RAW: tl.constexpr):
    """exp(s - top); where RAW, s is q kᵀ yet to be scaled, which costs nothing more."""
    if RAW:
        p = tl.exp2(s * (scale * LOG2E) - top * LOG2E)
    else:  # far scores would overflow in units of log 2
        p = tl.exp2((s - top) * LOG2E)
    return p


@triton.jit
def _attend(
    acc, total, top, q, k, v, k_strides, v_strides, masks, blocks_ptr, row_key, b, h, kv_h,
    offs_m, low, high, first, end, start, left, gap, count, M, N, E, V, score, threshold,
    keep_scale, PARTIAL: tl.constexpr, KEEPS: tl.constexpr,
    TMA: tl.constexpr, WARP_SPECIALIZE: tl.constexpr, EVEN_E: tl.constexpr, EVEN_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax for each of `count` blocks of keys."""
    RAW: tl.constexpr = (not PARTIAL) and (score.softcap is None)
    for i in tl.range(0, count, warp_specialize=WARP_SPECIALIZE):
        col = block_at(i, blocks_ptr, start, left, gap) * BLOCK_N
        k_tile = load_rows(k, k_strides, b, kv_h, col, first, end, E, BLOCK_N, BLOCK_E, EVEN_E, TMA)
        qk = tl.dot(q, k_tile.T)
        offs_n = col + tl.arange(0, BLOCK_N)
        if RAW:
            s = qk
            new_top = tl.maximum(top, tl.max(s, 1) * score.scale)
        else:
            s, _ = scores(
                qk, masks, b, h, offs_m[:, None], offs_n[None, :], offs_n[None, :], low[:, None],
                high[:, None], M, N, score, PARTIAL, KEEPS,
            )  # fmt: skip
            new_top = tl.maximum(top, tl.max(s, 1))
        # Of a row that has seen no key yet: -inf - -inf would be NaN.
        around = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = exponentials(s, around[:, None], score.scale, RAW)
        shrink = tl.exp2((top - around) * LOG2E)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        if row_key is not None:
            p *= keep_at(row_key[:, None], offs_n[None, :], threshold, keep_scale)
        v_tile = load_rows(v, v_strides, b, kv_h, col, first, end, V, BLOCK_N, BLOCK_V, EVEN_V, TMA)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc)
        top = new_top
    return acc, total, top


@triton.jit
def row_keys(site_key_ptr, row0, b, h, H, M, offs_m):
    """The dropout keys of queries of a head; None where there is no site."""
    keys = None
    if site_key_ptr is not None:
        row = row0 + (b * H + h).to(tl.int64) * M + offs_m
        keys = split_key(tl.load(site_key_ptr), row)
    return keys


@triton.jit
def tile_of_head(blocks, H, REVERSED: tl.constexpr):
    """This program's tile, batch and head; tiles of a head side by side, for the cache.

    REVERSED: the last tile first, which has most to do where masks are causal.
    """
    pid = tl.program_id(0)
    block = pid % blocks
    if REVERSED:
        block = blocks - 1 - block
    return block, pid // blocks // H, pid // blocks % H


@triton.jit(
    do_not_specialize=["offset", "left", "right", "row0", "threshold"],
    do_not_specialize_on_alignment=["site_key_ptr"],
)
def attention_fwd_kernel(
    q,
    k,
    v,
    masks,
    bounds_ptr,
    lengths_ptr,
    blocks_ptr,
    site_key_ptr,
    out_ptr,
    lse_ptr,
    q_strides,
    k_strides,
    v_strides,
    blocks_strides,
    out_strides,
    H,
    GROUP,
    M,
    N,
    E,
    V,
    score,
    offset,
    left,
    right,
    row0,
    threshold,
    keep_scale,
    PARTIAL: tl.constexpr,
    KEEPS: tl.constexpr,
    TMA: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr,
    EVEN_E: tl.constexpr,
    EVEN_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """out = dropout(softmax(scores)) v and lse = log sum exp(scores); of no key 0 and +inf.

    scores: as `Scores` says, plus masks.
    Shapes: q (B, H, M, E), k (B, H / GROUP, N, E), v (B, H / GROUP, N, V), out (B, H, M, V),
        lse (B, H, M) float32, contiguous; site_key () int64.
        blocks: a row of `attention_blocks_fwd_kernel` for each tile, or None. PARTIAL: there may be
        blocks that not every query sees. Grid: (cdiv(M, BLOCK_M) · B · H,).
    Units: FLOPs = 2·M·N·(E + V) a head; about 12 more operations an element of scores.
    Source: Dao et al. 2022; Milakov, Gimelshein 2018 (online softmax).
    """
    tile, b, h = tile_of_head(tl.cdiv(M, BLOCK_M), H, True)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    low, high = seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    first, end = 0, N
    if (bounds_ptr is not None) or (lengths_ptr is not None):
        first, end = tl.min(low, 0), tl.max(high, 0)
    kv_h = h // GROUP
    row_key = row_keys(site_key_ptr, row0, b, h, H, M, offs_m)
    q_tile = load_rows(q, q_strides, b, h, tile * BLOCK_M, 0, M, E, BLOCK_M, BLOCK_E, EVEN_E, TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    start, before, gap, partial, full_start, full = visits(low, high, BLOCK_N)
    partials_ptr = None
    fulls_ptr = None
    if blocks_ptr is not None:
        partials_ptr, fulls_ptr, partial, full = listed(
            blocks_ptr, blocks_strides, b, h, tile, tl.cdiv(N, BLOCK_N)
        )
    acc, total, top = _attend(
        acc, total, top, q_tile, k, v, k_strides, v_strides, masks, fulls_ptr, row_key, b, h, kv_h,
        offs_m, low, high, first, end, full_start, full, 0, full, M, N, E, V, score,
        threshold, keep_scale, False, KEEPS, TMA, WARP_SPECIALIZE, EVEN_E, EVEN_V,
        BLOCK_N, BLOCK_E, BLOCK_V,
    )  # fmt: skip
    if PARTIAL:
        acc, total, top = _attend(
            acc, total, top, q_tile, k, v, k_strides, v_strides, masks, partials_ptr, row_key, b, h,
            kv_h, offs_m, low, high, first, end, start, before, gap, partial, M, N, E, V, score,
            threshold, keep_scale, True, KEEPS, TMA, False, EVEN_E, EVEN_V, BLOCK_N, BLOCK_E,
            BLOCK_V,
        )  # fmt: skip
    seen = total != 0.0
    out = acc / tl.where(seen, total, 1.0)[:, None]
    lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("inf"))
    store_rows(out_ptr, out_strides, b, h, tile * BLOCK_M, M, V, out, BLOCK_M, BLOCK_V)
    tl.store(lse_ptr + (b * H + h).to(tl.int64) * M + offs_m, lse, mask=offs_m < M)

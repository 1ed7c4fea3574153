"""What attention's kernels are told about masks beforehand, and an additive mask's gradient."""

from typing import NamedTuple

import triton
import triton.language as tl

from fused_remat.kernels.attention import (
    Heads,
    load_rows,
    masked,
    row_keys,
    seeing_queries,
    seen_keys,
    tile_of_head,
    visits,
    windowed,
)
from fused_remat.kernels.attention_bwd import score_grads
from fused_remat.kernels.dropout import Site


class Sums(NamedTuple):
    """Of (B, H, tiles of M, blocks of N): dmask's strides, counts, and spans of a program's sum."""

    strides: tuple[int, ...]
    counts: tuple[int, ...]
    spans: tuple[int, ...]


@triton.jit(do_not_specialize=["left", "right", "count"])
def attention_bounds_fwd_kernel(
    cu_ptr, cu_other_ptr, bounds_ptr, M, N, count, left, right, BLOCK_M: tl.constexpr
):
    """Of packed sequences: the interval of keys that each query sees, or of queries that see a key.

    Token t of cu[n] to cu[n + 1] meets those of cu_other[n] to cu_other[n + 1], the last at the
    last: from t + offset - left to t + offset + right, with offset the difference of their ends.
    A token of no sequence meets none: N to 0. For the intervals of keys, cu is queries' and left
    and right are the window's; for those of queries, cu is keys' and the two are exchanged.
    Shapes: cu, cu_other (count + 1,) integers, bounds (M, 2) int32. Grid: (cdiv(M, BLOCK_M),).
    """
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # The last n with cu[n] <= t, which is not an empty sequence: by halving.
    low = tl.zeros([BLOCK_M], tl.int32)
    high = tl.full([BLOCK_M], 0, tl.int32) + count
    width = count
    while width > 0:
        middle = (low + high + 1) // 2
        after = tl.load(cu_ptr + middle).to(tl.int32) <= offs_m
        low = tl.where(after, middle, low)
        high = tl.where(after, high, middle - 1)
        width = width // 2
    begins = tl.load(cu_ptr + low).to(tl.int32) <= offs_m
    inside = begins & (low < count)
    stop = tl.load(cu_ptr + low + 1, mask=inside, other=0).to(tl.int32)
    other = tl.load(cu_other_ptr + low, mask=inside, other=0).to(tl.int32)
    other_stop = tl.load(cu_other_ptr + low + 1, mask=inside, other=0).to(tl.int32)
    at = offs_m + (other_stop - stop)
    # Nobody has checked the bounds on a GPU: never beyond what is there.
    first = tl.maximum(tl.maximum(other, 0), at - left)
    last = tl.minimum(tl.minimum(other_stop, N), at + right + 1)
    inside = inside & (first < last)
    mask = offs_m < M
    tl.store(bounds_ptr + 2 * offs_m, tl.where(inside, first, N), mask=mask)
    tl.store(bounds_ptr + 2 * offs_m + 1, tl.where(inside, last, 0), mask=mask)


@triton.jit
def _bias(
    masks, b, h, offs_m, offs_n, offs, low, high, M, N, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Return what is added to a tile of scores, (ROWS, COLS): -inf where excluded."""
    bias = masked(tl.zeros([ROWS, COLS], tl.float32), masks, b, h, offs_m, offs_n, M, N)
    inside = (offs_m < M) & (offs_n < N) & (offs >= low) & (offs < high)
    return tl.where(inside, bias, float("-inf"))


@windowed
def attention_shift_fwd_kernel(
    masks, bounds_ptr, lengths_ptr, shift_ptr, H, M, N, offset, left, right, far,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute shift: the largest addend of a row of scores, if finite and beyond ±far; else 0.

    Softmax does not change when it is subtracted, and scores keep their digits beside -1e9.
    Shapes: shift (B, H, M) float32, of as many batches and heads as the masks differ in.
        Grid: (cdiv(M, BLOCK_M) · B · H,).
    """
    tile, b, h = tile_of_head(tl.cdiv(M, BLOCK_M), H, False)
    offs_m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    low, high = seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for col in range(0, N, BLOCK_N):
        offs_n = col + tl.arange(0, BLOCK_N)
        bias = _bias(
            masks, b, h, offs_m[:, None], offs_n[None, :], offs_n[None, :], low[:, None],
            high[:, None], M, N, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        top = tl.maximum(top, tl.max(bias, 1))
    shift = tl.where((tl.abs(top) > far) & (tl.abs(top) < float("inf")), top, 0.0)
    tl.store(shift_ptr + (b * H + h).to(tl.int64) * M + offs_m, shift, mask=offs_m < M)


@windowed
def attention_blocks_fwd_kernel(
    masks, bounds_ptr, lengths_ptr, blocks_ptr, H, M, N, offset, left, right,
    BY_KEYS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """List the blocks of keys that each tile of queries visits; BY_KEYS, the tiles of each block.

    A block of which nothing is seen is left out; the others are partial, or full: seen whole, with
    nothing added. Row r of blocks (B, H, tiles, width + 2) int32 begins with the partial ones, ends
    with how many of each there are, and has the full ones, last first, up to there.
    Grid: (tiles · B · H,), of as many batches and heads as the masks differ in.
    """
    ROWS: tl.constexpr = BLOCK_N if BY_KEYS else BLOCK_M
    COLS: tl.constexpr = BLOCK_M if BY_KEYS else BLOCK_N
    STEP: tl.constexpr = COLS if COLS < 32 else 32
    rows, cols = M, N
    if BY_KEYS:
        rows, cols = N, M
    tile, b, h = tile_of_head(tl.cdiv(rows, ROWS), H, False)
    offs = tile * ROWS + tl.arange(0, ROWS)
    if BY_KEYS:
        low, high = seeing_queries(offs, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    else:
        low, high = seen_keys(offs, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    partial, full = visits(low, high, COLS)
    width = tl.cdiv(cols, COLS)
    row_ptr = blocks_ptr + tl.program_id(0).to(tl.int64) * (width + 2)
    partials = tl.zeros([], tl.int32)
    fulls = tl.zeros([], tl.int32)
    for block in range(partial.start, partial.start + partial.count + full.count):
        plains = tl.zeros([], tl.int32)
        seens = tl.zeros([], tl.int32)
        for part in range(0, COLS, STEP):  # a whole block takes too many registers
            others = block * COLS + part + tl.arange(0, STEP)
            offs_m, offs_n = offs[:, None], others[None, :]
            if BY_KEYS:
                offs_m, offs_n = others[None, :], offs[:, None]
            bias = _bias(
                masks, b, h, offs_m, offs_n, others[None, :], low[:, None], high[:, None], M, N,
                ROWS, STEP,
            )  # fmt: skip
            # Rows that are not there see what the last one sees.
            bias = tl.where((offs < rows)[:, None], bias, float("-inf"))
            plains += tl.sum((bias == 0.0).to(tl.int32))
            seens += tl.sum((bias != float("-inf")).to(tl.int32))
        plain = plains == tl.minimum(rows - tile * ROWS, ROWS) * COLS
        seen = seens > 0
        tl.store(row_ptr + width - 1 - fulls, block, mask=plain)
        fulls += plain.to(tl.int32)
        mixed = seen & (plain == 0)
        tl.store(row_ptr + partials, block, mask=mixed)
        partials += mixed.to(tl.int32)
    tl.store(row_ptr + width, partials)
    tl.store(row_ptr + width + 1, fulls)


@windowed
def attention_mask_bwd_kernel(
    q, k, v, dout, lse_ptr, delta_ptr, masks, bounds_ptr, lengths_ptr, site_key_ptr, dmask_ptr,
    sums, strides, sizes, score, offset, left, right, row0, threshold, keep_scale,
    OVER_ROWS: tl.constexpr, OVER_COLS: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute dmask += ds, summed over what the mask is broadcast over, always in the same order.

    Shapes: as `attention_fwd_kernel`; dmask (b, h, m, n) float32, each of its sizes 1 or that of
        the scores; OVER_ROWS, OVER_COLS: it has one row, one column. Grid: the product of
        `sums.counts`.
    Units: FLOPs = 2·M·N·(E + V) a head.
    """
    q, k = Heads(q, strides[0]), Heads(k, strides[1])
    v, dout = Heads(v, strides[2]), Heads(dout, strides[3])
    site = Site(site_key_ptr, row0, threshold, keep_scale)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    M, N = sizes.M, sizes.N
    counts, spans = sums.counts, sums.spans
    pid = tl.program_id(0)
    block = pid % counts[3] * spans[3]
    number = pid // counts[3] % counts[2] * spans[2]
    head = pid // (counts[3] * counts[2]) % counts[1] * spans[1]
    batch = pid // (counts[3] * counts[2] * counts[1]) * spans[0]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    count = spans[0] * spans[1] * spans[2] * spans[3]
    if (lengths_ptr is None) and not (OVER_ROWS or OVER_COLS):  # one tile: seen by none, or all
        low, high = seen_keys(
            number * BLOCK_M + tl.arange(0, BLOCK_M), 0, bounds_ptr, None, M, N, offset, left, right
        )
        seen = (tl.min(low, 0) < (block + 1) * BLOCK_N) & (tl.max(high, 0) > block * BLOCK_N)
        count = tl.where(seen, count, 0)
    for i in range(0, count):
        row, col = (number + i // spans[3] % spans[2]) * BLOCK_M, (block + i % spans[3]) * BLOCK_N
        h = head + i // (spans[3] * spans[2]) % spans[1]
        b = batch + i // (spans[3] * spans[2] * spans[1])
        offs_m, offs_n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        low, high = seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
        kv_h = h // sizes.GROUP
        row_key = row_keys(site, b, h, sizes, offs_m)
        q_tile = load_rows(
            q, b, h, row, 0, M, sizes.E, BLOCK_M, tile.BLOCK_E, tile.EVEN_E, tile.TMA
        )
        k_tile = load_rows(
            k, b, kv_h, col, 0, N, sizes.E, BLOCK_N, tile.BLOCK_E, tile.EVEN_E, tile.TMA
        )
        v_tile = load_rows(
            v, b, kv_h, col, 0, N, sizes.V, BLOCK_N, tile.BLOCK_V, tile.EVEN_V, tile.TMA
        )
        do_tile = load_rows(
            dout, b, h, row, 0, M, sizes.V, BLOCK_M, tile.BLOCK_V, tile.EVEN_V, tile.TMA
        )
        at = (b * sizes.H + h).to(tl.int64) * M + offs_m
        lse = tl.load(lse_ptr + at, mask=offs_m < M, other=float("inf"))
        delta = tl.load(delta_ptr + at, mask=offs_m < M, other=0.0)
        ds, _ = score_grads(
            q_tile, k_tile, v_tile, do_tile, lse, delta, masks, row_key, site, b, h, offs_m, offs_n,
            low, high, sizes, score, True,
        )  # fmt: skip
        there = (offs_n[None, :] >= low[:, None]) & (offs_n[None, :] < high[:, None])
        acc += tl.where(there & (offs_m < M)[:, None], ds, 0.0)
    base = dmask_ptr + batch.to(tl.int64) * sums.strides[0] + head.to(tl.int64) * sums.strides[1]
    offs_m = number * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    if OVER_ROWS:
        acc = tl.sum(acc, 0, keep_dims=True)
        offs_m = tl.arange(0, 1)
    if OVER_COLS:
        acc = tl.sum(acc, 1, keep_dims=True)
        offs_n = tl.arange(0, 1)
    ptrs = base + offs_m.to(tl.int64)[:, None] * sums.strides[2]
    ptrs += offs_n.to(tl.int64)[None, :] * sums.strides[3]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    acc += tl.load(ptrs, mask=mask, other=0.0)
    if OVER_ROWS or OVER_COLS:  # several warps hold the sums and load: before one of them stores
        tl.debug_barrier()
    tl.store(ptrs, acc, mask=mask)

"""Attention backward: dq, dk and dv, and the gradient of an additive mask. No atomics.

With P = softmax(scores), keep = dropout's multiplier, delta = rowsum(dO · O):
    dV = (keep · P)ᵀ dO,  dP = keep · dO Vᵀ,  dS = P · (dP - delta),
    dQ = scale dS K,  dK = scale dSᵀ Q.
P is rebuilt from q, k and the logsumexp. One kernel walks over the queries that see a block of
keys, another over the keys that a tile of queries sees: the scores are computed twice, which is
what it costs that no sum is shared between programs. Operands and intervals: `kernels.attention`.
Source: Dao et al. 2022.
"""

import triton
import triton.language as tl

from fused_remat.kernels.attention import (
    block_at,
    exponentials,
    listed,
    load_rows,
    row_keys,
    scores,
    seeing_queries,
    seen_keys,
    store_rows,
    tile_of_head,
    visits,
)
from fused_remat.kernels.dropout import keep_at


@triton.jit
def attention_delta_bwd_kernel(
    dout_ptr,
    out_ptr,
    delta_ptr,
    dout_strides,
    out_strides,
    H,
    M,
    V,
    BLOCK_M: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """delta = rowsum(dout · out).

    Shapes: dout, out (B, H, M, V) of any strides, delta (B, H, M) float32.
        Grid: (cdiv(M, BLOCK_M) · B · H,).
    Units: bytes moved = 2·B·H·M·V elements.
    """
    tile, b, h = tile_of_head(tl.cdiv(M, BLOCK_M), H, False)
    row = tile * BLOCK_M
    dout = load_rows(dout_ptr, dout_strides, b, h, row, 0, M, V, BLOCK_M, BLOCK_V, False, False)
    out = load_rows(out_ptr, out_strides, b, h, row, 0, M, V, BLOCK_M, BLOCK_V, False, False)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), 1)
    offs_m = row + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + (b * H + h).to(tl.int64) * M + offs_m, delta, mask=offs_m < M)


@triton.jit
def _gather_keys(
    dk, dv, k, v, q, dout, q_strides, dout_strides, lse_ptr, delta_ptr, masks, blocks_ptr,
    site_key_ptr, b, h, offs_n, low, high, first, end, start, left, gap, count, H, M, N, E, V,
    score, row0, threshold, keep_scale, WANTS_K: tl.constexpr, WANTS_V: tl.constexpr,
    PARTIAL: tl.constexpr, KEEPS: tl.constexpr, TMA: tl.constexpr,
    EVEN_E: tl.constexpr, EVEN_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds to dk (yet to be scaled) and dv what `count` tiles of queries of head h give."""
    RAW: tl.constexpr = (not PARTIAL) and (score.softcap is None)
    head = (b * H + h).to(tl.int64) * M
    for i in range(0, count):
        row = block_at(i, blocks_ptr, start, left, gap) * BLOCK_M
        q_tile = load_rows(q, q_strides, b, h, row, first, end, E, BLOCK_M, BLOCK_E, EVEN_E, TMA)
        offs_m = row + tl.arange(0, BLOCK_M)
        inside = (offs_m >= first) & (offs_m < end)
        lse = tl.load(lse_ptr + head + offs_m, mask=inside, other=float("inf"))
        s = tl.dot(k, q_tile.T)
        capped = s
        if not RAW:
            s, capped = scores(
                s, masks, b, h, offs_m[None, :], offs_n[:, None], offs_m[None, :], low[:, None],
                high[:, None], M, N, score, PARTIAL, KEEPS,
            )  # fmt: skip
        p = exponentials(s, lse[None, :], score.scale, RAW)
        do_tile = load_rows(
            dout, dout_strides, b, h, row, first, end, V, BLOCK_M, BLOCK_V, EVEN_V, TMA
        )
        dropped, dp = p, p
        if WANTS_K:
            dp = tl.dot(v, do_tile.T)
        if site_key_ptr is not None:
            row_key = row_keys(site_key_ptr, row0, b, h, H, M, offs_m)
            keep = keep_at(row_key[None, :], offs_n[:, None], threshold, keep_scale)
            dropped = p * keep
            dp *= keep
        if WANTS_V:
            dv = tl.dot(dropped.to(do_tile.dtype), do_tile, dv)
        if WANTS_K:
            delta = tl.load(delta_ptr + head + offs_m, mask=inside, other=0.0)
            ds = p * (dp - delta[None, :])
            if score.softcap is not None:
                ds *= 1.0 - capped * capped
            dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk)
    return dk, dv


@triton.jit(
    do_not_specialize=["offset", "left", "right", "row0", "threshold"],
    do_not_specialize_on_alignment=["site_key_ptr"],
)
def attention_dkdv_bwd_kernel(
    q,
    k,
    v,
    dout,
    lse_ptr,
    delta_ptr,
    masks,
    bounds_ptr,
    lengths_ptr,
    blocks_ptr,
    site_key_ptr,
    dk_ptr,
    dv_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    blocks_strides,
    dk_strides,
    dv_strides,
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
    EVEN_E: tl.constexpr,
    EVEN_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dk = scale · dsᵀ q and dv = (keep · p)ᵀ dout, summed over the query heads of a group; or one.

    Which one is wanted has a pointer, the other None: both at once are too much for wide heads.

    Shapes: as `attention_fwd_kernel`; lse and delta (B, H, M) float32; bounds (N, 2); blocks: a row
        for each block of keys. Grid: (cdiv(N, BLOCK_N) · B · H / GROUP,).
    Units: FLOPs = 4·M·N·(E + V) a query head.
    """
    tile, b, kv_h = tile_of_head(tl.cdiv(N, BLOCK_N), H // GROUP, False)
    col = tile * BLOCK_N
    offs_n = col + tl.arange(0, BLOCK_N)
    low, high = seeing_queries(offs_n, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    first, end = 0, M
    if bounds_ptr is not None:
        first, end = tl.min(low, 0), tl.max(high, 0)
    last = N
    if lengths_ptr is not None:
        last = tl.minimum(N, tl.load(lengths_ptr + b).to(tl.int32))
    WANTS_K: tl.constexpr = dk_ptr is not None
    WANTS_V: tl.constexpr = dv_ptr is not None
    k_tile = load_rows(k, k_strides, b, kv_h, col, 0, last, E, BLOCK_N, BLOCK_E, EVEN_E, TMA)
    v_tile = load_rows(v, v_strides, b, kv_h, col, 0, last, V, BLOCK_N, BLOCK_V, EVEN_V, TMA)
    dk = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    start, before, gap, partial, full_start, full = visits(low, high, BLOCK_M)
    for member in range(0, GROUP):
        h = kv_h * GROUP + member
        partials_ptr = None
        fulls_ptr = None
        if blocks_ptr is not None:
            partials_ptr, fulls_ptr, partial, full = listed(
                blocks_ptr, blocks_strides, b, h, tile, tl.cdiv(M, BLOCK_M)
            )
        dk, dv = _gather_keys(
            dk, dv, k_tile, v_tile, q, dout, q_strides, dout_strides, lse_ptr, delta_ptr, masks,
            fulls_ptr, site_key_ptr, b, h, offs_n, low, high, first, end, full_start, full, 0, full,
            H, M, N, E, V, score, row0, threshold, keep_scale, WANTS_K, WANTS_V,
            False, KEEPS, TMA, EVEN_E, EVEN_V, BLOCK_M, BLOCK_E, BLOCK_V,
        )  # fmt: skip
        if PARTIAL:
            dk, dv = _gather_keys(
                dk, dv, k_tile, v_tile, q, dout, q_strides, dout_strides, lse_ptr, delta_ptr, masks,
                partials_ptr, site_key_ptr, b, h, offs_n, low, high, first, end, start, before, gap,
                partial, H, M, N, E, V, score, row0, threshold, keep_scale, WANTS_K,
                WANTS_V, True, KEEPS, TMA, EVEN_E, EVEN_V, BLOCK_M, BLOCK_E, BLOCK_V,
            )  # fmt: skip
    # What no query sees was not visited, or is beside what was: its gradient is 0, not what p of
    # a key that is not there would give.
    seen = ((low < high) & (offs_n < N))[:, None]
    if WANTS_K:
        dk = tl.where(seen, dk * score.scale, 0.0)
        store_rows(dk_ptr, dk_strides, b, kv_h, col, N, E, dk, BLOCK_N, BLOCK_E)
    if WANTS_V:
        dv = tl.where(seen, dv, 0.0)
        store_rows(dv_ptr, dv_strides, b, kv_h, col, N, V, dv, BLOCK_N, BLOCK_V)


@triton.jit
def score_grads(
    q, k, v, dout, lse, delta, masks, row_key, b, h, offs_m, offs_n, low, high, M, N, score,
    threshold, keep_scale, PARTIAL: tl.constexpr, KEEPS: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of scores as the softmax sees them, and of scale q kᵀ."""
    RAW: tl.constexpr = (not PARTIAL) and (score.softcap is None)
    s = tl.dot(q, k.T)
    capped = s
    if not RAW:
        s, capped = scores(
            s, masks, b, h, offs_m[:, None], offs_n[None, :], offs_n[None, :], low[:, None],
            high[:, None], M, N, score, PARTIAL, KEEPS,
        )  # fmt: skip
    p = exponentials(s, lse[:, None], score.scale, RAW)
    dp = tl.dot(dout, v.T)
    if row_key is not None:
        dp *= keep_at(row_key[:, None], offs_n[None, :], threshold, keep_scale)
    ds = p * (dp - delta[:, None])
    dqk = ds
    if score.softcap is not None:
        dqk = ds * (1.0 - capped * capped)
    return ds, dqk


@triton.jit
def _gather_queries(
    dq, q, dout, lse, delta, k, v, k_strides, v_strides, masks, blocks_ptr, row_key, b, h, kv_h,
    offs_m, low, high, first, end, start, left, gap, count, M, N, E, V, score, threshold,
    keep_scale, PARTIAL: tl.constexpr, KEEPS: tl.constexpr,
    TMA: tl.constexpr, EVEN_E: tl.constexpr, EVEN_V: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Adds to dq (yet to be scaled) what `count` blocks of keys give."""
    for i in range(0, count):
        col = block_at(i, blocks_ptr, start, left, gap) * BLOCK_N
        k_tile = load_rows(k, k_strides, b, kv_h, col, first, end, E, BLOCK_N, BLOCK_E, EVEN_E, TMA)
        v_tile = load_rows(v, v_strides, b, kv_h, col, first, end, V, BLOCK_N, BLOCK_V, EVEN_V, TMA)
        _, ds = score_grads(
            q, k_tile, v_tile, dout, lse, delta, masks, row_key, b, h, offs_m,
            col + tl.arange(0, BLOCK_N), low, high, M, N, score, threshold, keep_scale,
            PARTIAL, KEEPS,
        )  # fmt: skip
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)
    return dq


@triton.jit(
    do_not_specialize=["offset", "left", "right", "row0", "threshold"],
    do_not_specialize_on_alignment=["site_key_ptr"],
)
def attention_dq_bwd_kernel(
    q,
    k,
    v,
    dout,
    lse_ptr,
    delta_ptr,
    masks,
    bounds_ptr,
    lengths_ptr,
    blocks_ptr,
    site_key_ptr,
    dq_ptr,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    blocks_strides,
    dq_strides,
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
    EVEN_E: tl.constexpr,
    EVEN_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """dq = scale · ds k.

    Shapes: as `attention_fwd_kernel`; lse and delta (B, H, M) float32.
        Grid: (cdiv(M, BLOCK_M) · B · H,).
    Units: FLOPs = 2·M·N·(2·E + V) a head.
    """
    tile, b, h = tile_of_head(tl.cdiv(M, BLOCK_M), H, True)
    row = tile * BLOCK_M
    offs_m = row + tl.arange(0, BLOCK_M)
    low, high = seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    first, end = 0, N
    if (bounds_ptr is not None) or (lengths_ptr is not None):
        first, end = tl.min(low, 0), tl.max(high, 0)
    kv_h = h // GROUP
    row_key = row_keys(site_key_ptr, row0, b, h, H, M, offs_m)
    q_tile = load_rows(q, q_strides, b, h, row, 0, M, E, BLOCK_M, BLOCK_E, EVEN_E, TMA)
    do_tile = load_rows(dout, dout_strides, b, h, row, 0, M, V, BLOCK_M, BLOCK_V, EVEN_V, TMA)
    head = (b * H + h).to(tl.int64) * M
    lse = tl.load(lse_ptr + head + offs_m, mask=offs_m < M, other=float("inf"))
    delta = tl.load(delta_ptr + head + offs_m, mask=offs_m < M, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    start, before, gap, partial, full_start, full = visits(low, high, BLOCK_N)
    partials_ptr = None
    fulls_ptr = None
    if blocks_ptr is not None:
        partials_ptr, fulls_ptr, partial, full = listed(
            blocks_ptr, blocks_strides, b, h, tile, tl.cdiv(N, BLOCK_N)
        )
    dq = _gather_queries(
        dq, q_tile, do_tile, lse, delta, k, v, k_strides, v_strides, masks, fulls_ptr, row_key, b,
        h, kv_h, offs_m, low, high, first, end, full_start, full, 0, full, M, N, E, V, score,
        threshold, keep_scale, False, KEEPS, TMA, EVEN_E, EVEN_V, BLOCK_N,
        BLOCK_E, BLOCK_V,
    )  # fmt: skip
    if PARTIAL:
        dq = _gather_queries(
            dq, q_tile, do_tile, lse, delta, k, v, k_strides, v_strides, masks, partials_ptr,
            row_key, b, h, kv_h, offs_m, low, high, first, end, start, before, gap, partial, M, N,
            E, V, score, threshold, keep_scale, True, KEEPS, TMA, EVEN_E,
            EVEN_V, BLOCK_N, BLOCK_E, BLOCK_V,
        )  # fmt: skip
    dq = dq * score.scale
    if bounds_ptr is not None:  # a token of no sequence may hold anything, and so may its gradient
        low, high = seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
        dq = tl.where((low < high)[:, None], dq, 0.0)
    store_rows(dq_ptr, dq_strides, b, h, row, M, E, dq, BLOCK_M, BLOCK_E)

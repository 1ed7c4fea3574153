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
    Heads,
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
    windowed,
)
from fused_remat.kernels.dropout import Site, keep_at


@triton.jit
def attention_delta_bwd_kernel(
    dout, out, delta_ptr, strides, H, M, V, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Compute delta = rowsum(dout · out).

    Shapes: dout, out (B, H, M, V) of any strides, delta (B, H, M) float32.
        Grid: (cdiv(M, BLOCK_M) · B · H,).
    Units: bytes moved = 2·B·H·M·V elements.
    """
    number, b, h = tile_of_head(tl.cdiv(M, BLOCK_M), H, False)
    row = number * BLOCK_M
    do_tile = load_rows(Heads(dout, strides[0]), b, h, row, 0, M, V, BLOCK_M, BLOCK_V, False, False)
    o_tile = load_rows(Heads(out, strides[1]), b, h, row, 0, M, V, BLOCK_M, BLOCK_V, False, False)
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    offs_m = row + tl.arange(0, BLOCK_M)
    tl.store(delta_ptr + (b * H + h).to(tl.int64) * M + offs_m, delta, mask=offs_m < M)


@triton.jit
def _gather_keys(
    dk, dv, k, v, q, dout, lse_ptr, delta_ptr, masks, site, b, h, offs_n, low, high, first, end,
    visit, list_ptr, sizes, score, WANTED: tl.constexpr, PARTIAL: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Add to dk (yet to be scaled) and dv what the tiles of queries of head h give, of `visit`.

    WANTED: "k", "v" or "kv".
    """
    WANTS_K: tl.constexpr = WANTED != "v"
    WANTS_V: tl.constexpr = WANTED != "k"
    RAW: tl.constexpr = (not PARTIAL) and (score.softcap is None)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    head = (b * sizes.H + h).to(tl.int64) * sizes.M
    for i in range(0, visit.count):
        row = block_at(i, visit, list_ptr) * BLOCK_M
        q_tile = load_rows(
            q, b, h, row, first, end, sizes.E, BLOCK_M, tile.BLOCK_E, tile.EVEN_E, tile.TMA
        )
        offs_m = row + tl.arange(0, BLOCK_M)
        inside = (offs_m >= first) & (offs_m < end)
        lse = tl.load(lse_ptr + head + offs_m, mask=inside, other=float("inf"))
        s = tl.dot(k, q_tile.T)
        capped = s
        if not RAW:
            s, capped = scores(
                s, masks, b, h, offs_m[None, :], offs_n[:, None], offs_m[None, :], low[:, None],
                high[:, None], sizes.M, sizes.N, score, PARTIAL,
            )  # fmt: skip
        p = exponentials(s, lse[None, :], score.scale, RAW)
        do_tile = load_rows(
            dout, b, h, row, first, end, sizes.V, BLOCK_M, tile.BLOCK_V, tile.EVEN_V, tile.TMA
        )
        dropped, dp = p, p
        if WANTS_K:
            dp = tl.dot(v, do_tile.T)
        if site.key_ptr is not None:
            row_key = row_keys(site, b, h, sizes, offs_m)
            keep = keep_at(row_key[None, :], offs_n[:, None], site.threshold, site.scale)
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


@windowed
def attention_dkdv_bwd_kernel(
    q, k, v, dout, lse_ptr, delta_ptr, masks, bounds_ptr, lengths_ptr, lists, site_key_ptr, dk, dv,
    strides, sizes, score, offset, left, right, row0, threshold, keep_scale, tile: tl.constexpr,
):  # fmt: skip
    """Compute dk = scale · dsᵀ q, dv = (keep · p)ᵀ dout, summed over a group's query heads; or one.

    The one that is not wanted is None: both at once are too much for wide heads. With PARTS above
    1, dk and dv hold that many heads of sums for each key head.

    Shapes: as `attention_fwd_kernel`; lse and delta (B, H, M) float32; bounds (N, 2); lists: for
        each block of keys. Grid: (cdiv(N, BLOCK_N) · B · H / GROUP · PARTS,).
    Units: FLOPs = 4·M·N·(E + V) a query head.
    """
    WANTS_K: tl.constexpr = dk is not None
    WANTS_V: tl.constexpr = dv is not None
    WANTED: tl.constexpr = "kv" if WANTS_K and WANTS_V else "k" if WANTS_K else "v"
    q, k = Heads(q, strides[0]), Heads(k, strides[1])
    v, dout = Heads(v, strides[2]), Heads(dout, strides[3])
    dk, dv = Heads(dk, strides[4]), Heads(dv, strides[5])
    site = Site(site_key_ptr, row0, threshold, keep_scale)
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_E: tl.constexpr = tile.BLOCK_E
    BLOCK_V: tl.constexpr = tile.BLOCK_V
    M, N, GROUP, PARTS = sizes.M, sizes.N, sizes.GROUP, sizes.PARTS
    number, b, part = tile_of_head(tl.cdiv(N, BLOCK_N), sizes.H // GROUP * PARTS, False)
    kv_h, members = part // PARTS, tl.cdiv(GROUP, PARTS)
    before = part % PARTS * members
    col = number * BLOCK_N
    offs_n = col + tl.arange(0, BLOCK_N)
    low, high = seeing_queries(offs_n, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    first, end = 0, M
    if bounds_ptr is not None:
        first, end = tl.min(low, 0), tl.max(high, 0)
    last = N
    if lengths_ptr is not None:
        last = tl.minimum(N, tl.load(lengths_ptr + b).to(tl.int32))
    k_tile = load_rows(
        k, b, kv_h, col, 0, last, sizes.E, BLOCK_N, tile.BLOCK_E, tile.EVEN_E, tile.TMA
    )
    v_tile = load_rows(
        v, b, kv_h, col, 0, last, sizes.V, BLOCK_N, tile.BLOCK_V, tile.EVEN_V, tile.TMA
    )
    dk_acc = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    some, whole = visits(low, high, tile.BLOCK_M)
    for member in range(0, tl.minimum(members, GROUP - before)):
        h = kv_h * GROUP + before + member
        partial, full, partial_ptr, full_ptr = some, whole, None, None
        if lists is not None:
            partial_ptr, full_ptr, partial, full = listed(
                lists, b, h, number, tl.cdiv(M, tile.BLOCK_M)
            )
        dk_acc, dv_acc = _gather_keys(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse_ptr, delta_ptr, masks, site, b, h, offs_n,
            low, high, first, end, full, full_ptr, sizes, score, WANTED, False, tile,
        )  # fmt: skip
        if tile.PARTIAL:
            dk_acc, dv_acc = _gather_keys(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse_ptr, delta_ptr, masks, site, b, h,
                offs_n, low, high, first, end, partial, partial_ptr, sizes, score, WANTED, True,
                tile,
            )  # fmt: skip
    # What no query sees was not visited, or is beside what was: its gradient is 0, not what p of
    # a key that is not there would give.
    seen = ((low < high) & (offs_n < N))[:, None]
    if WANTS_K:
        dk_acc = tl.where(seen, dk_acc * score.scale, 0.0)
        store_rows(dk, b, part, col, N, sizes.E, dk_acc)
    if WANTS_V:
        store_rows(dv, b, part, col, N, sizes.V, tl.where(seen, dv_acc, 0.0))


@triton.jit
def score_grads(
    q, k, v, dout, lse, delta, masks, row_key, site, b, h, offs_m, offs_n, low, high, sizes, score,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of scores as the softmax sees them, and of scale q kᵀ."""
    RAW: tl.constexpr = (not PARTIAL) and (score.softcap is None)
    s = tl.dot(q, k.T)
    capped = s
    if not RAW:
        s, capped = scores(
            s, masks, b, h, offs_m[:, None], offs_n[None, :], offs_n[None, :], low[:, None],
            high[:, None], sizes.M, sizes.N, score, PARTIAL,
        )  # fmt: skip
    p = exponentials(s, lse[:, None], score.scale, RAW)
    dp = tl.dot(dout, v.T)
    if row_key is not None:
        dp *= keep_at(row_key[:, None], offs_n[None, :], site.threshold, site.scale)
    ds = p * (dp - delta[:, None])
    dqk = ds
    if score.softcap is not None:
        dqk = ds * (1.0 - capped * capped)
    return ds, dqk


@triton.jit
def _gather_queries(
    dq, q, dout, lse, delta, k, v, masks, row_key, site, b, h, kv_h, offs_m, low, high, first, end,
    visit, list_ptr, sizes, score, PARTIAL: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Add to dq (yet to be scaled) what the blocks of keys give, of `visit`."""
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    for i in range(0, visit.count):
        col = block_at(i, visit, list_ptr) * BLOCK_N
        k_tile = load_rows(
            k, b, kv_h, col, first, end, sizes.E, BLOCK_N, tile.BLOCK_E, tile.EVEN_E, tile.TMA
        )
        v_tile = load_rows(
            v, b, kv_h, col, first, end, sizes.V, BLOCK_N, tile.BLOCK_V, tile.EVEN_V, tile.TMA
        )
        _, ds = score_grads(
            q, k_tile, v_tile, dout, lse, delta, masks, row_key, site, b, h, offs_m,
            col + tl.arange(0, BLOCK_N), low, high, sizes, score, PARTIAL,
        )  # fmt: skip
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq)
    return dq


@windowed
def attention_dq_bwd_kernel(
    q, k, v, dout, lse_ptr, delta_ptr, masks, bounds_ptr, lengths_ptr, lists, site_key_ptr, dq,
    strides, sizes, score, offset, left, right, row0, threshold, keep_scale, tile: tl.constexpr,
):  # fmt: skip
    """Compute dq = scale · ds k.

    Shapes: as `attention_fwd_kernel`; lse and delta (B, H, M) float32.
        Grid: (cdiv(M, BLOCK_M) · B · H,).
    Units: FLOPs = 2·M·N·(2·E + V) a head.
    """
    q, k = Heads(q, strides[0]), Heads(k, strides[1])
    v, dout = Heads(v, strides[2]), Heads(dout, strides[3])
    dq = Heads(dq, strides[4])
    site = Site(site_key_ptr, row0, threshold, keep_scale)
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_E: tl.constexpr = tile.BLOCK_E
    M, N = sizes.M, sizes.N
    number, b, h = tile_of_head(tl.cdiv(M, BLOCK_M), sizes.H, True)
    row = number * BLOCK_M
    offs_m = row + tl.arange(0, BLOCK_M)
    low, high = seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
    first, end = 0, N
    if (bounds_ptr is not None) or (lengths_ptr is not None):
        first, end = tl.min(low, 0), tl.max(high, 0)
    kv_h = h // sizes.GROUP
    row_key = row_keys(site, b, h, sizes, offs_m)
    q_tile = load_rows(q, b, h, row, 0, M, sizes.E, BLOCK_M, tile.BLOCK_E, tile.EVEN_E, tile.TMA)
    do_tile = load_rows(
        dout, b, h, row, 0, M, sizes.V, BLOCK_M, tile.BLOCK_V, tile.EVEN_V, tile.TMA
    )
    head = (b * sizes.H + h).to(tl.int64) * M
    lse = tl.load(lse_ptr + head + offs_m, mask=offs_m < M, other=float("inf"))
    delta = tl.load(delta_ptr + head + offs_m, mask=offs_m < M, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    partial, full = visits(low, high, tile.BLOCK_N)
    partial_ptr, full_ptr = None, None
    if lists is not None:
        partial_ptr, full_ptr, partial, full = listed(lists, b, h, number, tl.cdiv(N, tile.BLOCK_N))
    acc = _gather_queries(
        acc, q_tile, do_tile, lse, delta, k, v, masks, row_key, site, b, h, kv_h, offs_m, low, high,
        first, end, full, full_ptr, sizes, score, False, tile,
    )  # fmt: skip
    if tile.PARTIAL:
        acc = _gather_queries(
            acc, q_tile, do_tile, lse, delta, k, v, masks, row_key, site, b, h, kv_h, offs_m, low,
            high, first, end, partial, partial_ptr, sizes, score, True, tile,
        )  # fmt: skip
    acc = acc * score.scale
    if bounds_ptr is not None:  # a token of no sequence may hold anything, and so may its gradient
        low, high = seen_keys(offs_m, b, bounds_ptr, lengths_ptr, M, N, offset, left, right)
        acc = tl.where((low < high)[:, None], acc, 0.0)
    store_rows(dq, b, h, row, M, sizes.E, acc)


@triton.jit
def attention_sum_bwd_kernel(
    sums, grad, strides, H, PARTS, N, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Compute grad = the sum of the PARTS heads of `sums` that each of its heads has.

    Shapes: grad (B, H, N, E), sums (B, H · PARTS, N, E) float32, both of any strides.
        Grid: (cdiv(N, BLOCK_M) · B · H,).
    Units: bytes moved = B·H·N·E·(4·PARTS + those of an element of grad).
    """
    number, b, h = tile_of_head(tl.cdiv(N, BLOCK_M), H, False)
    row, parts = number * BLOCK_M, Heads(sums, strides[0])
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for part in range(0, PARTS):
        acc += load_rows(parts, b, h * PARTS + part, row, 0, N, E, BLOCK_M, BLOCK_E, False, False)
    store_rows(Heads(grad, strides[1]), b, h, row, N, E, acc)

"""Products of pairs of a token and one of its experts, sorted by expert.

Rows are pairs in the order of `pairs`: those of expert e end at ends[e], and dropped ones are last.
No program knows how many rows an expert has until it runs: `experts_tiles_fwd_kernel` lists tiles
of rows of one expert, at most cdiv(P, BLOCK_M) + E of them, and programs without a tile return.
Sums have a fixed order. Weights of another dtype than the rows are converted tile by tile.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_remat.kernels.linear import add_bias, part, tile_at
from fused_remat.kernels.pointwise import load_wide, store_narrow


class Stack(NamedTuple):
    """The matrices of all experts: elements from one to the next, and from one row to the next."""

    data: Any
    expert: Any
    stride: Any


class Rows(NamedTuple):
    """Rows by expert: pairs (P,) int64, ends (E,) int32, tiles (n, 2) int32: expert, first row.

    Expert E is that of dropped rows; beyond it there is none. Pair p is of token p // TOP_K.
    """

    pairs_ptr: Any
    ends_ptr: Any
    tiles_ptr: Any
    count: Any
    experts: Any


@triton.jit
def experts_tiles_fwd_kernel(
    ends_ptr, tiles_ptr, P, E, COUNT,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """List the tiles of BLOCK_M rows of each expert, then those of dropped rows.

    Shapes: ends (E,) int32, tiles (COUNT, 2) int32. GROUPS > E. Grid (cdiv(COUNT, BLOCK),).
    """
    groups = tl.arange(0, GROUPS)
    last = tl.load(ends_ptr + groups, mask=groups < E, other=P)
    first = tl.load(ends_ptr + groups - 1, mask=(groups > 0) & (groups <= E), other=P)
    rows = last - tl.where(groups == 0, 0, first)
    tiles = tl.cdiv(rows, BLOCK_M)
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = (tl.cumsum(tiles)[None, :] <= number[:, None]) & (groups <= E)[None, :]
    expert = tl.sum(before.to(tl.int32), 1)
    row = tl.sum(tl.where(before, rows[None, :], 0), 1)
    row += (number - tl.sum(tl.where(before, tiles[None, :], 0), 1)) * BLOCK_M
    ptrs = tiles_ptr + 2 * number
    tl.store(ptrs, expert, mask=number < COUNT)
    tl.store(ptrs + 1, row, mask=number < COUNT)


@triton.jit
def _rows_of(rows, number, BLOCK_M: tl.constexpr):
    """Return a tile's expert, its rows (int64), which of them exist, and their pairs.

    Rows that do not exist repeat the last one, so that loads need no mask.
    """
    expert = tl.load(rows.tiles_ptr + 2 * number)
    first = tl.load(rows.tiles_ptr + 2 * number + 1)
    end = tl.load(rows.ends_ptr + expert, mask=expert < rows.experts, other=rows.count)
    offs_m = first + tl.arange(0, BLOCK_M)
    offs = tl.minimum(offs_m, end - 1)
    return expert.to(tl.int64), offs.to(tl.int64), offs_m < end, tl.load(rows.pairs_ptr + offs)


@triton.jit
def _tokens(pairs, TOP_K: tl.constexpr):
    """Return the tokens of pairs; there are fewer than 2**31 pairs."""
    return (pairs.to(tl.int32) // TOP_K).to(tl.int64)


@triton.jit
def _load_rows(x, offs_m, offs_k, K, EVEN: tl.constexpr):
    """x[offs_m, offs_k]; 0 in columns from K on, of which there are none if EVEN."""
    ptrs = x.data + offs_m[:, None] * x.stride + offs_k[None, :]
    mask = None if EVEN else (offs_k < K)[None, :]
    return tl.load(ptrs, mask=mask, other=None if EVEN else 0.0)


@triton.jit
def _load_weight(w_ptr, stride, offs_n, offs_k, N, K, W_IS_KN: tl.constexpr, EVEN: tl.constexpr):
    """w.T (K, N) of one expert: w (N, K), or (K, N) where W_IS_KN; 0 outside, or any finite."""
    if W_IS_KN:
        ptrs = w_ptr + offs_k.to(tl.int64)[:, None] * stride + offs_n[None, :]
        mask = (offs_n < N)[None, :]
        if not EVEN:
            mask = mask & (offs_k < K)[:, None]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    else:
        offs_n = tl.minimum(offs_n, N - 1).to(tl.int64)
        ptrs = w_ptr + offs_k[:, None] + offs_n[None, :] * stride
        mask = None if EVEN else (offs_k < K)[:, None]
        tile = tl.load(ptrs, mask=mask, other=None if EVEN else 0.0)
    return tile


@triton.jit
def _product(
    x, offs_m, w_ptr, stride, col, N, K, WIDTH: tl.constexpr, W_IS_KN: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Return x[offs_m] @ w.T, columns `col` to `col` + WIDTH, float32."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    offs_n = col + tl.arange(0, WIDTH)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        x_tile = _load_rows(x, offs_m, offs_k, K, tile.EVEN)
        w_tile = _load_weight(w_ptr, stride, offs_n, offs_k, N, K, W_IS_KN, tile.EVEN)
        acc = tl.dot(x_tile, w_tile.to(x_tile.dtype), acc, input_precision=tile.PRECISION)
    return acc


@triton.jit
def _two_products(
    x, offs_m, w_ptr, apart, stride, col, N, K, W_IS_KN: tl.constexpr, tile: tl.constexpr
):
    """Return `_product` with each of two matrices, `apart` elements from one to the other."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    offs_n = col + tl.arange(0, BLOCK_N)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        x_tile = _load_rows(x, offs_m, offs_k, K, tile.EVEN)
        g_tile = _load_weight(w_ptr, stride, offs_n, offs_k, N, K, W_IS_KN, tile.EVEN)
        u_tile = _load_weight(w_ptr + apart, stride, offs_n, offs_k, N, K, W_IS_KN, tile.EVEN)
        gate = tl.dot(x_tile, g_tile.to(x_tile.dtype), gate, input_precision=tile.PRECISION)
        up = tl.dot(x_tile, u_tile.to(x_tile.dtype), up, input_precision=tile.PRECISION)
    return gate, up


@triton.jit
def experts_product_kernel(
    x, w, bias, weights_ptr, y, rows, N, K, COUNT,
    TOP_K: tl.constexpr, W_IS_KN: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute y = x @ w.T + weight * bias of each row's expert; 0 in dropped rows.

    Shapes: x (P, K), or where GATHER (T, K), of which a row reads its token's; w (E, N, K), or
        (E, K, N) where W_IS_KN; bias (E, N); weights (T, k), 1 if None; y (P, N), by pair where
        SCATTER. Grid (COUNT * cdiv(N, BLOCK_N),), COUNT of the list of tiles.
    Units: FLOPs = 2·P·N·K.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    row, col = tile_at(tl.program_id(0), COUNT * BLOCK_M, N, tile)
    expert, offs_m, exists, pairs = _rows_of(rows, row // BLOCK_M, BLOCK_M)
    if expert > rows.experts:
        return
    kept = expert < rows.experts
    from_m = _tokens(pairs, TOP_K) if GATHER else offs_m
    depth, w_ptr = tl.where(kept, K, 0), w.data + expert * w.expert
    acc = _product(x, from_m, w_ptr, w.stride, col, N, depth, BLOCK_N, W_IS_KN, tile)
    if bias is not None:
        offs_n = col + tl.arange(0, BLOCK_N)
        added = tl.load(
            bias.data + expert * bias.stride + offs_n, mask=kept & (offs_n < N), other=0.0
        ).to(tl.float32)[None, :]
        if weights_ptr is not None:
            added *= tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
        acc += added
    offs_n = col + tl.arange(0, BLOCK_N)
    mask = exists[:, None] & (offs_n < N)[None, :]
    store_narrow(y, pairs if SCATTER else offs_m, offs_n, mask, acc)


@triton.jit
def _pair(both):
    """Return even and odd columns."""
    return tl.split(tl.reshape(both, (both.shape[0], both.shape[1] // 2, 2)))


@triton.jit
def _clamped(gate, up, limit):
    """Return min(gate, limit), and up between -limit and limit; NaN stays NaN."""
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.where(gate > limit, limit, gate), up


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def gated_fwd(gate, up, limit, alpha, ACT: tl.constexpr):
    """Return an expert's activation, ACT None: "clamped_swish"; `gate` None: of `up` alone."""
    if gate is None:
        y = ACT(up)
    elif ACT is None:
        gate, up = _clamped(gate, up, limit)
        y = gate * _sigmoid(alpha * gate) * (up + 1.0)
    else:
        y = ACT(gate) * up
    return y


@triton.jit
def gated_bwd(dy, gate, up, limit, alpha, ACT: tl.constexpr):
    """Return the gradients of gate and up (of up, twice, without a gate), and `gated_fwd`."""
    if gate is None:
        dup, y = ACT(dy, up)
        dgate = dup
    elif ACT is None:
        g, u = _clamped(gate, up, limit)
        s = _sigmoid(alpha * g)
        dgate = dy * (u + 1.0) * (s + alpha * g * (s - s * s))
        dgate, dup = tl.where(gate > limit, 0.0, dgate), dy * g * s
        dup = tl.where((up > limit) | (up < -limit), 0.0, dup)
        y = g * s * (u + 1.0)
    else:
        dgate, y = ACT(dy * up, gate)
        dup = dy * y
        y = y * up
    return dgate, dup, y


@triton.jit
def experts_up_act_kernel(
    x, w, bias, weights_ptr, y, rows, limit, alpha, apart, F, K, COUNT,
    TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    W_IS_KN: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute y = weight * act(x @ w.T + bias), of each row's expert, the product rounded as y is.

    Shapes: x (T, K), of which a row reads its token's; w (E, C, K), or (E, K, C) where W_IS_KN,
        bias (E, C); C = 2 F where GATED, else F; the gate is first, `apart` elements before up,
        or INTERLEAVED; weights (T, k); y (P, F). Grid (COUNT * cdiv(F, BLOCK_N),).
    Units: FLOPs = 2·P·C·K.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    PARTS: tl.constexpr = tile.PARTS
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    row, col = tile_at(tl.program_id(0), COUNT * BLOCK_M, F, tile)
    expert, offs_m, exists, pairs = _rows_of(rows, row // BLOCK_M, BLOCK_M)
    if expert >= rows.experts:
        return
    tokens, w_ptr = _tokens(pairs, TOP_K), w.data + expert * w.expert
    bias_ptr = None if bias is None else bias.data + expert * bias.stride
    if GATED and not INTERLEAVED:
        gates, ups = _two_products(x, tokens, w_ptr, apart, w.stride, col, F, K, W_IS_KN, tile)
    elif GATED:
        ups = _product(x, tokens, w_ptr, w.stride, 2 * col, 2 * F, K, 2 * BLOCK_N, W_IS_KN, tile)
    else:
        ups = _product(x, tokens, w_ptr, w.stride, col, F, K, BLOCK_N, W_IS_KN, tile)
    weight = tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
    for index in tl.static_range(PARTS):
        at = col + index * WIDTH
        offs_n = at + tl.arange(0, WIDTH)
        up = part(ups, index, PARTS)
        if GATED and not INTERLEAVED:
            gate = add_bias(part(gates, index, PARTS), bias_ptr, at, F)
            up = add_bias(up, None if bias_ptr is None else bias_ptr + F, at, F)
        elif GATED:
            gate, up = _pair(add_bias(up, bias_ptr, 2 * at, 2 * F))
        else:
            gate, up = None, add_bias(up, bias_ptr, at, F)
        up = up.to(y.data.dtype.element_ty).to(tl.float32)
        if GATED:
            gate = gate.to(y.data.dtype.element_ty).to(tl.float32)
        act = gated_fwd(gate, up, limit, alpha, ACT) * weight
        store_narrow(y, offs_m, offs_n, exists[:, None] & (offs_n < F)[None, :], act)


@triton.jit
def _load_pre(pre, offs_m, at, exists, F, WIDTH: tl.constexpr, GATED: tl.constexpr,
              INTERLEAVED: tl.constexpr):  # fmt: skip
    """Return WIDTH columns of gate, or None, and up from `at` on, float32."""
    offs_n = at + tl.arange(0, WIDTH)
    mask = exists[:, None] & (offs_n < F)[None, :]
    if GATED and INTERLEAVED:
        offs_c = 2 * at + tl.arange(0, 2 * WIDTH)
        both = exists[:, None] & (offs_c < 2 * F)[None, :]
        gate, up = _pair(load_wide(pre, offs_m, offs_c, both))
    elif GATED:
        gate = load_wide(pre, offs_m, offs_n, mask)
        up = load_wide(pre, offs_m, offs_n + F, mask)
    else:
        gate, up = None, load_wide(pre, offs_m, offs_n, mask)
    return gate, up


@triton.jit
def experts_act_fwd_kernel(
    pre, weights_ptr, y, rows, limit, alpha, F, ACT: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y = weight * act(pre).

    Shapes: pre (P, C), y (P, F), weights (T, k). Grid (cdiv(P, BLOCK_M) * cdiv(F, BLOCK_N),).
    Units: bytes moved = P·(C + F) elements.
    """
    blocks_n = tl.cdiv(F, BLOCK_N)
    offs_m = (tl.program_id(0) // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    at = tl.program_id(0) % blocks_n * BLOCK_N
    exists = offs_m < rows.count
    gate, up = _load_pre(pre, offs_m, at, exists, F, BLOCK_N, GATED, INTERLEAVED)
    pairs = tl.load(rows.pairs_ptr + offs_m, mask=exists, other=0)
    weight = tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
    offs_n = at + tl.arange(0, BLOCK_N)
    act = gated_fwd(gate, up, limit, alpha, ACT) * weight
    store_narrow(y, offs_m, offs_n, exists[:, None] & (offs_n < F)[None, :], act)


@triton.jit
def _alike(acc, x):
    """Return acc and x in one layout: what follows is computed once, and not converted."""
    return tl.split(tl.join(acc, x))


@triton.jit
def _dot(a, b):
    """Return the sum of a * b over columns, the same in all threads that hold a row's.

    A product that were part of one thread's addition would be rounded in the others alone.
    """
    return tl.sum(tl.fma(a, tl.broadcast_to(b, a.shape), tl.zeros_like(a)), 1)


@triton.jit
def experts_act_bwd_kernel(
    dy, w, pre, weights_ptr, dpre, act, sums_ptr, rows, limit, alpha, F, K, COUNT,
    TOP_K: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    W_IS_KN: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """With p = dy @ w.T of each row's expert: the gradients of pre, and of the weights in parts.

    dpre = weight * p * act'(pre); act = weight * act(pre); a row of sums is the sum of p * act(pre)
    over the columns of a tile.

    Shapes: dy (T, K), of which a row reads its token's; w (E, F, K), or (E, K, F) where W_IS_KN;
        pre, dpre (P, C), act (P, F), sums (cdiv(F, BLOCK_N), P) float32; each of the last three
        may be None, and dpre may be pre. Grid (COUNT * cdiv(F, BLOCK_N),).
    Units: FLOPs = 2·P·F·K.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    PARTS: tl.constexpr = tile.PARTS
    WIDTH: tl.constexpr = BLOCK_N // PARTS
    row, col = tile_at(tl.program_id(0), COUNT * BLOCK_M, F, tile)
    expert, offs_m, exists, pairs = _rows_of(rows, row // BLOCK_M, BLOCK_M)
    if expert >= rows.experts:
        return
    w_ptr = w.data + expert * w.expert
    acc = _product(dy, _tokens(pairs, TOP_K), w_ptr, w.stride, col, F, K, BLOCK_N, W_IS_KN, tile)
    weight = tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
    total = tl.zeros([BLOCK_M], tl.float32)
    for index in tl.static_range(PARTS):
        at = col + index * WIDTH
        offs_n = at + tl.arange(0, WIDTH)
        mask = exists[:, None] & (offs_n < F)[None, :]
        gate, up = _load_pre(pre, offs_m, at, exists, F, WIDTH, GATED, INTERLEAVED)
        p, up = _alike(part(acc, index, PARTS), up)
        if GATED:
            p, gate = _alike(p, gate)
        dgate, dup, y = gated_bwd(p * weight, gate, up, limit, alpha, ACT)
        if sums_ptr is not None:
            total += _dot(p, y)
        if act is not None:
            store_narrow(act, offs_m, offs_n, mask, y * weight)
        if dpre is not None:
            if GATED and INTERLEAVED:
                both = tl.reshape(tl.join(dgate, dup), (BLOCK_M, 2 * WIDTH))
                offs_c = 2 * at + tl.arange(0, 2 * WIDTH)
                mask = exists[:, None] & (offs_c < 2 * F)[None, :]
                store_narrow(dpre, offs_m, offs_c, mask, both)
            elif GATED:
                store_narrow(dpre, offs_m, offs_n, mask, dgate)
                store_narrow(dpre, offs_m, offs_n + F, mask, dup)
            else:
                store_narrow(dpre, offs_m, offs_n, mask, dup)
    if sums_ptr is not None:
        at = (col // BLOCK_N).to(tl.int64) * rows.count + offs_m
        tl.store(sums_ptr + at, total, mask=exists)


@triton.jit
def experts_weights_bwd_kernel(
    sums_ptr, dy, bias, dweights_ptr, rows, N, PARTS,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of weights: the sums of their parts, and dy . bias; 0 of dropped rows.

    Shapes: sums (PARTS, P) float32, dy (T, N), bias (E, N) or None, dweights (T, k). Grid (COUNT,).
    """
    expert, offs_m, exists, pairs = _rows_of(rows, tl.program_id(0), BLOCK_M)
    if expert > rows.experts:
        return
    kept = expert < rows.experts
    total = tl.zeros([BLOCK_M], tl.float32)
    ptrs = sums_ptr + offs_m
    for _ in range(0, tl.where(kept, PARTS, 0)):
        total += tl.load(ptrs)
        ptrs += rows.count
    if bias is not None:
        tokens = _tokens(pairs, TOP_K)
        for col in range(0, tl.where(kept, N, 0), BLOCK_N):
            offs_n = col + tl.arange(0, BLOCK_N)
            mask = (offs_n < N)[None, :]
            b = tl.load(bias.data + expert * bias.stride + offs_n, mask=offs_n < N, other=0.0)
            total += _dot(load_wide(dy, tokens, offs_n, mask), b.to(tl.float32)[None, :])
    tl.store(dweights_ptr + pairs, total.to(dweights_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _span(rows, expert):
    """Return the first row of an expert, and the row after its last."""
    first = tl.load(rows.ends_ptr + expert - 1, mask=expert > 0, other=0)
    return first, tl.load(rows.ends_ptr + expert)


@triton.jit
def _load_turned(x, offs_m, pairs, exists, offs_n, N, TOP_K: tl.constexpr, GATHER: tl.constexpr):
    """x[rows, offs_n], rows of tokens where GATHER; 0 outside."""
    from_m = _tokens(pairs, TOP_K) if GATHER else offs_m.to(tl.int64)
    ptrs = x.data + from_m[:, None] * x.stride + offs_n[None, :]
    return tl.load(ptrs, mask=exists[:, None] & (offs_n < N)[None, :], other=0.0)


@triton.jit
def experts_dw_kernel(
    x, y, dw, rows, M, N, column,
    TOP_K: tl.constexpr, GATHER_X: tl.constexpr, GATHER_Y: tl.constexpr, ADD: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Compute dw = xᵀ @ y over the rows of each expert; added to dw where ADD.

    Shapes: x (P, M), y (P, N), or of tokens where GATHER_X or GATHER_Y; dw (E, M, N), whose columns
        are `column` elements apart. Grid (E * cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),).
    Units: FLOPs = 2·P·M·N.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    row, col = tile_at(tl.program_id(0) % (tiles_m * tiles_n), M, N, tile)
    first, end = _span(rows, expert)
    offs_m, offs_n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(first, end, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        exists = offs_k < end
        pairs = offs_k.to(tl.int64)
        if GATHER_X or GATHER_Y:
            pairs = tl.load(rows.pairs_ptr + offs_k, mask=exists, other=0)
        x_tile = _load_turned(x, offs_k, pairs, exists, offs_m, M, TOP_K, GATHER_X)
        y_tile = _load_turned(y, offs_k, pairs, exists, offs_n, N, TOP_K, GATHER_Y)
        acc = tl.dot(x_tile.T, y_tile, acc, input_precision=tile.PRECISION)
    ptrs = dw.data + expert.to(tl.int64) * dw.expert
    ptrs += offs_m.to(tl.int64)[:, None] * dw.stride + offs_n.to(tl.int64)[None, :] * column
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    if ADD:
        acc += tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(ptrs, acc.to(dw.data.dtype.element_ty), mask=mask)


@triton.jit
def experts_bias_bwd_kernel(
    dy, weights_ptr, dbias, rows, N,
    TOP_K: tl.constexpr, GATHER: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dbias = the sum of weight * dy over the rows of each expert; added where ADD.

    Shapes: dy (P, N), or (T, N) where GATHER; weights (T, k), 1 if None; dbias (E, N).
        Grid (E * cdiv(N, BLOCK_N),).
    """
    expert = tl.program_id(0) // tl.cdiv(N, BLOCK_N)
    offs_n = tl.program_id(0) % tl.cdiv(N, BLOCK_N) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, end = _span(rows, expert)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(first, end, BLOCK_M):
        offs_m = k + tl.arange(0, BLOCK_M)
        exists = offs_m < end
        pairs = tl.load(rows.pairs_ptr + offs_m, mask=exists, other=0)
        tile = _load_turned(dy, offs_m, pairs, exists, offs_n, N, TOP_K, GATHER).to(tl.float32)
        if weights_ptr is not None:
            tile *= tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
        total += tile
    ptrs = dbias.data + expert.to(tl.int64) * dbias.stride + offs_n
    found = tl.sum(total, 0)
    if ADD:
        found += tl.load(ptrs, mask=offs_n < N, other=0.0).to(tl.float32)
        tl.debug_barrier()  # several threads load an element, and one stores it
    tl.store(ptrs, found.to(dbias.data.dtype.element_ty), mask=offs_n < N)

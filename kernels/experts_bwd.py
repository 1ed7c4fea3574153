"""Backward of experts: the gradients of pre-activations, routing weights, matrices and biases.

Rows as in `kernels.experts`. A sum over the rows of an expert is one program's, in their order.
"""

import triton
import triton.language as tl

from fused_remat.kernels.experts import clamped, load_pre, product, rows_of, sigmoid, tokens_of
from fused_remat.kernels.linear import part, tile_at
from fused_remat.kernels.pointwise import load_wide, store_narrow


@triton.jit
def gated_bwd(dy, gate, up, limit, alpha, ACT: tl.constexpr):
    """Return the gradients of gate and up (both of up without a gate), and `gated_fwd`."""
    if gate is None:
        dup, y = ACT(dy, up)
        dgate = dup
    elif ACT is None:
        g, u = clamped(gate, up, limit)
        s = sigmoid(alpha * g)
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
    expert, offs_m, exists, pairs = rows_of(rows, row // BLOCK_M, BLOCK_M)
    if expert >= rows.experts:
        return
    w_ptr = w.data + expert * w.expert
    acc = product(dy, tokens_of(pairs, TOP_K), w_ptr, w.stride, col, F, K, BLOCK_N, W_IS_KN, tile)
    weight = tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
    total = tl.zeros([BLOCK_M], tl.float32)
    for index in tl.static_range(PARTS):
        at = col + index * WIDTH
        offs_n = at + tl.arange(0, WIDTH)
        mask = exists[:, None] & (offs_n < F)[None, :]
        gate, up = load_pre(pre, offs_m, at, exists, F, WIDTH, GATED, INTERLEAVED)
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
    expert, offs_m, exists, pairs = rows_of(rows, tl.program_id(0), BLOCK_M)
    if expert > rows.experts:
        return
    kept = expert < rows.experts
    total = tl.zeros([BLOCK_M], tl.float32)
    ptrs = sums_ptr + offs_m
    for _ in range(0, tl.where(kept, PARTS, 0)):
        total += tl.load(ptrs)
        ptrs += rows.count
    if bias is not None:
        tokens = tokens_of(pairs, TOP_K)
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
    from_m = tokens_of(pairs, TOP_K) if GATHER else offs_m.to(tl.int64)
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

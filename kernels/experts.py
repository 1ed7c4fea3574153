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
def rows_of(rows, number, BLOCK_M: tl.constexpr):
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
def tokens_of(pairs, TOP_K: tl.constexpr):
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
def product(
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
    """Return `product` with each of two matrices, `apart` elements from one to the other."""
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
    expert, offs_m, exists, pairs = rows_of(rows, row // BLOCK_M, BLOCK_M)
    if expert > rows.experts:
        return
    kept = expert < rows.experts
    from_m = tokens_of(pairs, TOP_K) if GATHER else offs_m
    depth, w_ptr = tl.where(kept, K, 0), w.data + expert * w.expert
    acc = product(x, from_m, w_ptr, w.stride, col, N, depth, BLOCK_N, W_IS_KN, tile)
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
def clamped(gate, up, limit):
    """Return min(gate, limit), and up between -limit and limit; NaN stays NaN."""
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.where(gate > limit, limit, gate), up


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def gated_fwd(gate, up, limit, alpha, ACT: tl.constexpr):
    """Return an expert's activation, ACT None: "clamped_swish"; `gate` None: of `up` alone."""
    if gate is None:
        y = ACT(up)
    elif ACT is None:
        gate, up = clamped(gate, up, limit)
        y = gate * sigmoid(alpha * gate) * (up + 1.0)
    else:
        y = ACT(gate) * up
    return y


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
    expert, offs_m, exists, pairs = rows_of(rows, row // BLOCK_M, BLOCK_M)
    if expert >= rows.experts:
        return
    tokens, w_ptr = tokens_of(pairs, TOP_K), w.data + expert * w.expert
    bias_ptr = None if bias is None else bias.data + expert * bias.stride
    if GATED and not INTERLEAVED:
        gates, ups = _two_products(x, tokens, w_ptr, apart, w.stride, col, F, K, W_IS_KN, tile)
    elif GATED:
        ups = product(x, tokens, w_ptr, w.stride, 2 * col, 2 * F, K, 2 * BLOCK_N, W_IS_KN, tile)
    else:
        ups = product(x, tokens, w_ptr, w.stride, col, F, K, BLOCK_N, W_IS_KN, tile)
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
def load_pre(pre, offs_m, at, exists, F, WIDTH: tl.constexpr, GATED: tl.constexpr,
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
    gate, up = load_pre(pre, offs_m, at, exists, F, BLOCK_N, GATED, INTERLEAVED)
    pairs = tl.load(rows.pairs_ptr + offs_m, mask=exists, other=0)
    weight = tl.load(weights_ptr + pairs).to(tl.float32)[:, None]
    offs_n = at + tl.arange(0, BLOCK_N)
    act = gated_fwd(gate, up, limit, alpha, ACT) * weight
    store_narrow(y, offs_m, offs_n, exists[:, None] & (offs_n < F)[None, :], act)

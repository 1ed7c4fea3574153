"""What matrix products are made of: tiles in an order that reuses cache, loads, the inner loop.

An operand or a result is a pointer and a row stride, or a tensor descriptor (TMA: Hopper and later)
whose block is the tile; TMA says which. Descriptors read 0 outside, and so do masked loads.
Products accumulate in float32; PRECISION is `tl.dot`'s, for float32 operands.
"""

import triton
import triton.language as tl

from fused_remat.kernels.dropout import keep_scale, split_key


@triton.jit
def tile_at(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of output tile number `tile`, in groups of GROUP_M rows of tiles."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    in_group = GROUP_M * tiles_n
    first = tile // in_group * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP_M)
    row = (first + tile % in_group % height) * BLOCK_M
    return row, tile % in_group // height * BLOCK_N


@triton.jit
def load_tile(
    x, stride, row, col, rows, cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """x[row : row + BLOCK_M, col : col + BLOCK_N]; 0 outside (rows, cols).

    EVEN: `cols` is a multiple of BLOCK_N, so that no column is outside.
    """
    if TMA:
        tile = x.load([row, col])
    else:
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_n = col + tl.arange(0, BLOCK_N)
        mask = (offs_m < rows)[:, None]
        if not EVEN:
            mask = mask & (offs_n < cols)[None, :]
        ptrs = x + offs_m.to(tl.int64)[:, None] * stride + offs_n[None, :]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile


@triton.jit
def store_tile(y, stride, row, col, rows, cols, tile, TMA: tl.constexpr):
    """y[row : row + BLOCK_M, col : col + BLOCK_N] = tile, in the dtype of y."""
    if TMA:
        y.store([row, col], tile.to(y.dtype))
    else:
        offs_m = row + tl.arange(0, tile.shape[0])
        offs_n = col + tl.arange(0, tile.shape[1])
        mask = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
        ptrs = y + offs_m.to(tl.int64)[:, None] * stride + offs_n[None, :]
        tl.store(ptrs, tile.to(y.dtype.element_ty), mask=mask)


@triton.jit
def rounded(tile, y, TMA: tl.constexpr):
    """The tile in the dtype of y."""
    if TMA:
        tile = tile.to(y.dtype)
    else:
        tile = tile.to(y.dtype.element_ty)
    return tile


@triton.jit
def keep_tile(
    site_key_ptr, row0, row, col, threshold, scale, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Dropout's multiplier of the tile whose first element is (row0 + row, col); 1 for no site."""
    keep = 1.0
    if site_key_ptr is not None:
        offs_m = (row + tl.arange(0, ROWS)).to(tl.int64)
        row_key = split_key(tl.load(site_key_ptr), row0 + offs_m)
        keep = keep_scale(row_key, col + tl.arange(0, COLS), threshold, scale)
    return keep


@triton.jit
def add_product(
    acc, x, w, stride_xm, stride_wn, row, col, M, N, K,
    W_IS_KN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + a tile of x @ wᵀ, or of x @ w where W_IS_KN.

    Shapes: acc (BLOCK_M, BLOCK_N) float32, x (M, K), w (N, K), or (K, N) where W_IS_KN, with row
        stride `stride_wn`; the tile's first row is `row` and its first column `col`.
    """
    for k in range(0, K, BLOCK_K):
        x_tile = load_tile(x, stride_xm, row, k, M, K, BLOCK_M, BLOCK_K, EVEN, TMA)
        if W_IS_KN:
            w_tile = load_tile(w, stride_wn, k, col, K, N, BLOCK_K, BLOCK_N, False, TMA)
        else:
            w_tile = load_tile(w, stride_wn, col, k, N, K, BLOCK_N, BLOCK_K, EVEN, TMA).T
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def add_bias(acc, bias_ptr, col, N):
    """acc + bias, from column `col` on; acc itself where there is none."""
    if bias_ptr is not None:
        offs_n = col + tl.arange(0, acc.shape[1])
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _half(x, index: tl.constexpr):
    """The first or second half of the columns."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    left, right = tl.split(tl.permute(halves, (0, 2, 1)))
    if index == 0:
        half = left
    else:
        half = right
    return half


@triton.jit
def part(x, index: tl.constexpr, PARTS: tl.constexpr):
    """Columns `index` · N / PARTS and so on: one of 1, 2, 4 or 8 parts of a tile.

    A tile's end that is computed part by part needs fewer registers.
    """
    if PARTS == 1:
        x = x
    elif PARTS == 2:
        x = _half(x, index)
    elif PARTS == 4:
        x = _half(_half(x, index // 2), index % 2)
    else:
        x = _half(_half(_half(x, index // 4), index // 2 % 2), index % 2)
    return x

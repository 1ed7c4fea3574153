"""What matrix products are made of: tiles in an order that reuses cache, loads, the inner loop.

An operand is a pointer and a row stride, or a tensor descriptor (TMA: Hopper and later) whose block
is the tile to be loaded; TMA says which. Descriptors read 0 outside, and so do masked loads.
Products accumulate in float32; PRECISION is `tl.dot`'s, for float32 operands.
"""

import triton
import triton.language as tl


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
        return x.load([row, col])
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    mask = (offs_m < rows)[:, None]
    if not EVEN:
        mask = mask & (offs_n < cols)[None, :]
    return tl.load(x + offs_m.to(tl.int64)[:, None] * stride + offs_n[None, :], mask, other=0.0)


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
def add_bias(acc, bias_ptr, offs_n, N):
    """acc + bias; acc itself where there is none."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def left_half(x):
    """The first half of the columns."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))[0]


@triton.jit
def right_half(x):
    """The second half of the columns."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(halves, (0, 2, 1)))[1]

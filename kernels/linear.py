"""A linear layer that ends in an activation, and the parts of all matrix products.

Persistent: the grid is as large as the device, and each program walks over output tiles.
An operand or a result is a pointer, or a tensor descriptor (TMA: Hopper and later) whose block is
the tile. Triton launches a descriptor only as an argument of its own, so a kernel takes matrices
one by one, their row strides together (`strides`), and makes each a `Matrix`. An argument that a
call has no use for is None. Descriptors read 0 outside, and so do masked loads.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from fused_remat.kernels.dropout import Site, keep_at, seeded, split_key
from fused_remat.kernels.pointwise import Matrix


class Tile(NamedTuple):
    """How a product is computed: constants.

    BLOCK_M, BLOCK_N, BLOCK_K: the tile of the result, and the step along K; EVEN: all depths are
    multiples of BLOCK_K. PARTS: its end is computed in 1, 2, 4 or 8 parts. GROUP_M: rows of tiles
    that are visited together. TMA: matrices are descriptors. PRECISION: `tl.dot`'s, of float32;
    sums are float32.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    EVEN: bool
    PARTS: int
    GROUP_M: int
    TMA: bool
    PRECISION: str


@triton.jit
def tile_at(number, M, N, tile: tl.constexpr):
    """First row and column of output tile `number`, in an order that reuses cache."""
    tiles_n = tl.cdiv(N, tile.BLOCK_N)
    in_group = tile.GROUP_M * tiles_n
    first = number // in_group * tile.GROUP_M
    height = tl.minimum(tl.cdiv(M, tile.BLOCK_M) - first, tile.GROUP_M)
    row = (first + number % in_group % height) * tile.BLOCK_M
    return row, number % in_group // height * tile.BLOCK_N


@triton.jit
def load_tile(
    x, row, col, rows, cols,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """x[row : row + BLOCK_M, col : col + BLOCK_N]; 0 outside (rows, cols).

    EVEN: `cols` is a multiple of BLOCK_N, so that no column is outside.
    """
    if TMA:
        tile = x.data.load([row, col])
    else:
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_n = col + tl.arange(0, BLOCK_N)
        mask = (offs_m < rows)[:, None]
        if not EVEN:
            mask = mask & (offs_n < cols)[None, :]
        ptrs = x.data + offs_m.to(tl.int64)[:, None] * x.stride + offs_n[None, :]
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile


@triton.jit
def store_tile(y, row, col, rows, cols, tile, TMA: tl.constexpr):
    """y[row : row + BLOCK_M, col : col + BLOCK_N] = tile, in the dtype of y."""
    if TMA:
        y.data.store([row, col], tile.to(y.data.dtype))
    else:
        offs_m = row + tl.arange(0, tile.shape[0])
        offs_n = col + tl.arange(0, tile.shape[1])
        mask = (offs_m < rows)[:, None] & (offs_n < cols)[None, :]
        ptrs = y.data + offs_m.to(tl.int64)[:, None] * y.stride + offs_n[None, :]
        tl.store(ptrs, tile.to(y.data.dtype.element_ty), mask=mask)


@triton.jit
def rounded(tile, y, TMA: tl.constexpr):
    """Return the tile in the dtype of y."""
    return tile.to(y.data.dtype if TMA else y.data.dtype.element_ty)


@triton.jit
def row_keys(site, row, ROWS: tl.constexpr):
    """Return the random keys of rows from `row` on; None for no site."""
    keys = None
    if site.key_ptr is not None:
        offs_m = (row + tl.arange(0, ROWS)).to(tl.int64)
        keys = split_key(tl.load(site.key_ptr), site.row0 + offs_m)
    return keys


@triton.jit
def keep_part(site, keys, col, COLS: tl.constexpr):
    """Dropout's multiplier in columns from `col` on, of rows with these keys; 1 for no site."""
    keep = 1.0
    if keys is not None:
        offs_n = col + tl.arange(0, COLS)
        keep = keep_at(keys[:, None], offs_n[None, :], site.threshold, site.scale)
    return keep


@triton.jit
def product(x, w, row, col, M, N, K, W_IS_KN: tl.constexpr, tile: tl.constexpr):
    """Return a tile of x @ wᵀ, or of x @ w where W_IS_KN, float32.

    Shapes: x (M, K), w (N, K), or (K, N) where W_IS_KN; the tile's first row is `row` and its first
        column `col`.
    """
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        x_tile = load_tile(x, row, k, M, K, BLOCK_M, BLOCK_K, tile.EVEN, tile.TMA)
        if W_IS_KN:
            w_tile = load_tile(w, k, col, K, N, BLOCK_K, BLOCK_N, False, tile.TMA)
        else:
            w_tile = load_tile(w, col, k, N, K, BLOCK_N, BLOCK_K, tile.EVEN, tile.TMA).T
        acc = tl.dot(x_tile, w_tile, acc, input_precision=tile.PRECISION)
    return acc


@triton.jit
def add_bias(acc, bias_ptr, col, N):
    """Return acc + bias, from column `col` on; acc itself where there is none."""
    if bias_ptr is not None:
        offs_n = col + tl.arange(0, acc.shape[1])
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def _half(x, index: tl.constexpr):
    """Return the first or second half of the columns."""
    halves = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    left, right = tl.split(tl.permute(halves, (0, 2, 1)))
    return left if index == 0 else right


@triton.jit
def part(x, index: tl.constexpr, PARTS: tl.constexpr):
    """Columns `index` · N / PARTS and so on: one of 1, 2, 4 or 8 parts of a tile.

    A tile's end that is computed part by part needs fewer registers.
    """
    if PARTS == 2:
        x = _half(x, index)
    elif PARTS == 4:
        x = _half(_half(x, index // 2), index % 2)
    elif PARTS == 8:
        x = _half(_half(_half(x, index // 4), index // 2 % 2), index % 2)
    return x


@triton.jit
def finish_pre(acc, bias_ptr, pre, y, row, col, M, N, TMA: tl.constexpr):
    """End a part of a product that an activation follows: bias, and what is kept of it.

    Returns float32, rounded to the dtype of y, kept or not: what backward will see.
    """
    acc = rounded(add_bias(acc, bias_ptr, col, N), y, TMA)
    if pre.data is not None:
        store_tile(pre, row, col, M, N, acc, TMA)
    return acc.to(tl.float32)


@seeded
def linear_fwd_kernel(
    x, w, bias_ptr, pre, y, strides, site_key_ptr, row0, threshold, scale, M, N, K,
    ACT: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute y = keep * act(pre), pre = x @ wᵀ + bias rounded as y is, and stored unless None.

    Shapes: x (M, K), w (N, K), bias (N,), pre, y (M, N); site_key () int64. Grid: any.
    Units: FLOPs = 2·M·N·K.
    """
    x, w, y = Matrix(x, strides[0]), Matrix(w, strides[1]), Matrix(y, strides[3])
    pre, site = Matrix(pre, strides[2]), Site(site_key_ptr, row0, threshold, scale)
    PARTS: tl.constexpr = tile.PARTS
    WIDTH: tl.constexpr = tile.BLOCK_N // tile.PARTS
    tiles = tl.cdiv(M, tile.BLOCK_M) * tl.cdiv(N, tile.BLOCK_N)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(number, M, N, tile)
        acc = product(x, w, row, col, M, N, K, False, tile)
        keys = row_keys(site, row, tile.BLOCK_M)
        for index in tl.static_range(PARTS):
            at = col + index * WIDTH
            end = finish_pre(part(acc, index, PARTS), bias_ptr, pre, y, row, at, M, N, tile.TMA)
            keep = keep_part(site, keys, at, WIDTH)
            store_tile(y, row, at, M, N, ACT(end) * keep, tile.TMA)

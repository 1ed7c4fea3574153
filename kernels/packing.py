"""Activations in 8 bits, blocks of 64 columns of a row with one step each: packed and unpacked.

The format, "int8" and "int8_stochastic", is defined in `fused_remat.formats`; these functions give
the same bits as there. All but the kernels load nothing but a site's key, so
that a kernel can pack the tile that it holds.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_remat.kernels.dropout import seeded, split_key, uniform_at

BLOCK = tl.constexpr(64)
OFFSET = tl.constexpr(0.0625)
LEVELS = tl.constexpr(126.0625)
STEP = tl.constexpr(1.0 / 126.0625)
TINY = tl.constexpr(1e-30)
# The bits of infinity: those of a NaN without its sign are more, of any other number fewer.
INFINITY = tl.constexpr(0x7F800000)


class Codes(NamedTuple):
    """What a kernel packs into: codes (M, N) int8 and steps (M, cdiv(N, BLOCK)) float32, both with
    rows side by side; rounded stochastically where there is the key of a site, from `row0` on."""

    data: Any
    step: Any
    key_ptr: Any
    row0: Any


@triton.jit
def largest_bits(x):
    """The bits of each row's largest magnitude, INFINITY and up where one is not finite.

    Shapes: x (M, N) float32; returns (M,) int32. As integers, because a maximum of floats ignores
        NaN, and magnitudes are in the same order as their bits.
    """
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def scales(largest):
    """Each block's step, NaN where an element is not finite, and 1 / step, or 0 there.

    Shapes: largest (M,) int32, as of `largest_bits`; returns (M,) float32 twice.
    """
    finite = largest < INFINITY
    top = largest.to(tl.float32, bitcast=True)
    known = finite & (top >= TINY)
    top = tl.where(known, top, 1.0)
    inverse = tl.div_rn(tl.full(top.shape, 1.0, tl.float32), top) * LEVELS
    step = tl.where(known, top * STEP, tl.where(finite, 0.0, float("nan")))
    return step, tl.where(known, inverse, 0.0)


@triton.jit
def int8_codes(x, inverse, uniform):
    """Codes of x, rounded to the nearest level, or stochastically where `uniform` is not None.

    Shapes: x (M, N) and uniform (M, N) float32, inverse (M,) float32; returns (M, N) int8.
    """
    finite = tl.abs(x) < float("inf")
    # No level is above 127; but without the minimum, product and sum could become one operation
    # that rounds once.
    level = tl.minimum(tl.where(finite, tl.abs(x), 0.0) * inverse[:, None], 127.0)
    if uniform is None:
        level = tl.floor(level + (1.5 - OFFSET))
    else:
        level = tl.floor(tl.maximum(level - OFFSET, 0.0) + uniform) + 1.0
    level = tl.minimum(level, 127.0)
    level = tl.where(finite & (x != 0.0), level, 0.0)
    return tl.where(x < 0.0, -level, level).to(tl.int8)


@triton.jit
def unpack_int8(codes, step):
    """The numbers of codes.

    Shapes: codes (M, N) int8, step float32 that broadcasts to them; returns (M, N) float32.
    """
    level = codes.to(tl.float32)
    sign = tl.where(level > 0.0, 1.0, tl.where(level < 0.0, -1.0, 0.0))
    return (level - sign * (1.0 - OFFSET)) * step


@triton.jit
def store_codes(codes, row, col, M, N, x, inverse):
    """Codes of x, which is of one block's columns or fewer, from row `row` and column `col` on.

    Shapes: x (BLOCK_M, W) float32, inverse (BLOCK_M,).
    """
    offs_m = (row + tl.arange(0, x.shape[0])).to(tl.int64)
    offs_n = col + tl.arange(0, x.shape[1])
    uniform = None
    if codes.key_ptr is not None:
        row_key = split_key(tl.load(codes.key_ptr), codes.row0 + offs_m)
        uniform = uniform_at(row_key[:, None], offs_n[None, :])
    ptrs = codes.data + offs_m[:, None] * N + offs_n[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(ptrs, int8_codes(x, inverse, uniform), mask=mask)


@triton.jit
def store_step(codes, row, col, M, N, step):
    """Steps (BLOCK_M,) of the block that begins in column `col`, from row `row` on."""
    offs_m = (row + tl.arange(0, step.shape[0])).to(tl.int64)
    ptrs = codes.step + offs_m * tl.cdiv(N, BLOCK) + col // BLOCK
    tl.store(ptrs, step, mask=(offs_m < M) & (col < N))


@triton.jit
def load_unpacked(x, block, M, offs_m, offs_n, mask):
    """A tile of a packed matrix in float32; 0 outside. Its columns are of the block `block`."""
    ptrs = x.data + offs_m[:, None] * x.stride + offs_n[None, :]
    codes = tl.load(ptrs, mask=mask, other=0)
    step = tl.load(x.step + offs_m * x.step_stride + block, mask=offs_m < M, other=0.0)
    return unpack_int8(codes, step[:, None])


@seeded
def pack_int8_fwd_kernel(
    x_ptr, codes_ptr, step_ptr, site_key_ptr, row0, stride_xm, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """codes and step of x; rounded stochastically where there is the key of a site.

    Shapes: x (M, N) of any float dtype, codes (M, N) int8, step (M, cdiv(N, BLOCK)) float32.
        BLOCK_N is BLOCK. Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),).
    Units: bytes moved = M·N elements and 1.0625·M·N.
    """
    blocks_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    row, col = (pid // blocks_n) * BLOCK_M, (pid % blocks_n) * BLOCK_N
    offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = col + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    step, inverse = scales(largest_bits(x))
    codes = Codes(codes_ptr, step_ptr, site_key_ptr, row0)
    store_step(codes, row, col, M, N, step)
    store_codes(codes, row, col, M, N, x, inverse)


@triton.jit
def unpack_int8_fwd_kernel(x, y, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y = the numbers of the packed matrix x, in the dtype of y.

    Shapes: x, y (M, N), y of any float dtype. BLOCK_N is BLOCK.
        Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),).
    Units: bytes moved = M·N elements and 1.0625·M·N.
    """
    blocks_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    block = pid % blocks_n
    offs_m = (pid // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tile = load_unpacked(x, block, M, offs_m, offs_n, mask)
    y_ptrs = y.data + offs_m[:, None] * y.stride + offs_n[None, :]
    tl.store(y_ptrs, tile.to(y.data.dtype.element_ty), mask=mask)

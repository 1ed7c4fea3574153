"""Cross-entropy over the logits of a linear layer, x @ wᵀ + bias, of which none is written.

Forward ends each tile of the product with what a softmax needs of its columns; backward ends it
with the logits' gradient. A row is a token, a column a class; `first` is the number of the first
column, where w is a part of the vocabulary. Operands as in `kernels.gemm`; a pointer that a call
has no use for is None.
"""

import triton
import triton.language as tl

from fused_remat.kernels.activations import tanh_fwd
from fused_remat.kernels.gemm import add_bias, add_product, part, store_tile, tile_at


@triton.jit
def _capped(z, softcap, SOFTCAP: tl.constexpr):
    """softcap * tanh(z / softcap), where there is one."""
    if SOFTCAP:
        z = softcap * tanh_fwd(z / softcap)
    return z


@triton.jit(do_not_specialize=["first"])
def linear_cross_entropy_fwd_kernel(
    x,
    w,
    bias_ptr,
    target_ptr,
    high_ptr,
    sum_ptr,
    total_ptr,
    picked_ptr,
    stride_xm,
    stride_wn,
    first,
    M,
    N,
    K,
    softcap,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of each row and each BLOCK_N columns of z = cap(x @ wᵀ + bias): max, sum(exp(z - max)).

    Also sum(z) where total is not None, and picked, the column of the row's target, which one tile
    writes: what no tile does keeps what is there.

    Shapes: x (M, K), w (N, K), bias (N,), target (M,) int64; high, sum and total (tiles, M), picked
        (M,), all float32. PARTS: the end is computed in so many. Grid: any.
    Units: FLOPs = 2·M·N·K; bytes written = 8·M·N / BLOCK_N (12 with total).
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = add_product(
            acc, x, w, stride_xm, stride_wn, row, col, M, N, K, False, BLOCK_M, BLOCK_N,
            BLOCK_K, EVEN, TMA, PRECISION,
        )  # fmt: skip
        offs_m = row + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        at = tl.load(target_ptr + offs_m, mask=mask_m, other=-1) - first
        # The least number, where a row is -inf: no exp(-inf + inf).
        high = tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)
        exps = tl.zeros([BLOCK_M], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        picked = tl.zeros([BLOCK_M], tl.float32)
        for index in tl.static_range(PARTS):
            left = col + index * (BLOCK_N // PARTS)
            z = add_bias(part(acc, index, PARTS), bias_ptr, left, N)
            z = _capped(z, softcap, SOFTCAP)
            offs_n = left + tl.arange(0, BLOCK_N // PARTS)
            picked += tl.sum(tl.where(offs_n[None, :] == at[:, None], z, 0.0), 1)
            if total_ptr is not None:
                total += tl.sum(tl.where((offs_n < N)[None, :], z, 0.0), 1)
            z = tl.where((offs_n < N)[None, :], z, float("-inf"))
            higher = tl.maximum(high, tl.max(z, 1))
            exps = exps * tl.exp(high - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
            high = higher
        place = (col // BLOCK_N).to(tl.int64) * M + offs_m
        tl.store(high_ptr + place, high, mask=mask_m)
        tl.store(sum_ptr + place, exps, mask=mask_m)
        if total_ptr is not None:
            tl.store(total_ptr + place, total, mask=mask_m)
        here = (at >= col) & (at < col + BLOCK_N) & (at < N)
        tl.store(picked_ptr + offs_m, picked, mask=mask_m & here)


@triton.jit(do_not_specialize=["first"])
def linear_cross_entropy_bwd_kernel(
    x,
    w,
    bias_ptr,
    target_ptr,
    high_ptr,
    log_sum_ptr,
    mass_ptr,
    spread_ptr,
    at_target_ptr,
    dz,
    stride_xm,
    stride_wn,
    stride_zm,
    first,
    M,
    N,
    K,
    softcap,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dz = (softmax(z) * mass + spread + at_target at the row's target) * dcap, of z made again.

    Shapes: as the forward's; high, log_sum, mass, spread and at_target (M,) float32, spread None
        for none; dz (M, N). A row whose mass is 0 has no softmax: ignored, it may be NaN. Grid:
        any.
    Units: FLOPs = 2·M·N·K.
    Source: d logsumexp(z) = softmax(z), with softmax(z) = exp(z - high - log_sum).
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = add_product(
            acc, x, w, stride_xm, stride_wn, row, col, M, N, K, False, BLOCK_M, BLOCK_N,
            BLOCK_K, EVEN, TMA, PRECISION,
        )  # fmt: skip
        offs_m = row + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        at = (tl.load(target_ptr + offs_m, mask=mask_m, other=-1) - first)[:, None]
        high = tl.load(high_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        log_sum = tl.load(log_sum_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        mass = tl.load(mass_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        at_target = tl.load(at_target_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        for index in tl.static_range(PARTS):
            left = col + index * (BLOCK_N // PARTS)
            z = add_bias(part(acc, index, PARTS), bias_ptr, left, N)
            z = _capped(z, softcap, SOFTCAP)
            grad = tl.where(mass == 0.0, 0.0, tl.exp(z - high - log_sum) * mass)
            if spread_ptr is not None:
                grad += tl.load(spread_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
            offs_n = left + tl.arange(0, BLOCK_N // PARTS)
            grad += tl.where(offs_n[None, :] == at, at_target, 0.0)
            if SOFTCAP:
                cap = z / softcap
                grad *= 1.0 - cap * cap
            store_tile(dz, stride_zm, row, left, M, N, grad, TMA)

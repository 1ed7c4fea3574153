"""A linear layer with fused ends: y = keep * act(norm(x) @ wᵀ + bias) + residual.

Persistent: the grid is as large as the device, and each program walks over output tiles.
Operands as in `kernels.gemm`; a pointer that a call has no use for is None.
"""

import triton
import triton.language as tl

from fused_remat.kernels.gemm import (
    add_bias,
    add_product,
    keep_tile,
    load_tile,
    part,
    rounded,
    store_tile,
    tile_at,
)
from fused_remat.kernels.packing import block_scales, store_codes


@triton.jit
def _add_normed_product(
    acc, x, w, mean_ptr, rstd_ptr, norm_weight_ptr, norm_bias_ptr,
    stride_xm, stride_wn, row, col, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + norm(x) @ wᵀ, x normalised from its statistics as it is loaded, and rounded."""
    offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    rstd = tl.load(rstd_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    mean = tl.zeros_like(rstd)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    for k in range(0, K, BLOCK_K):
        x_tile = load_tile(x, stride_xm, row, k, M, K, BLOCK_M, BLOCK_K, EVEN, TMA)
        w_tile = load_tile(w, stride_wn, col, k, N, K, BLOCK_N, BLOCK_K, EVEN, TMA)
        offs_k = k + tl.arange(0, BLOCK_K)
        normed = (x_tile.to(tl.float32) - mean) * rstd
        if norm_weight_ptr is not None:
            weight = tl.load(norm_weight_ptr + offs_k, mask=offs_k < K, other=0.0)
            normed *= weight.to(tl.float32)[None, :]
        if norm_bias_ptr is not None:
            bias = tl.load(norm_bias_ptr + offs_k, mask=offs_k < K, other=0.0)
            normed += bias.to(tl.float32)[None, :]
        acc = tl.dot(normed.to(x_tile.dtype), w_tile.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _finish(
    acc, inverse, bias_ptr, residual, site_key_ptr, pre, codes_ptr, pack_key_ptr, y, stride_rm,
    stride_pm, stride_ym, row0, pack_row0, row, col, M, N, threshold, scale, ACT: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Ends a tile: bias, the pre-activation's stores, activation, dropout, residual, y's store."""
    acc = add_bias(acc, bias_ptr, col, N)
    if ACT is not None:  # of the rounded value, stored or not: what backward will see
        acc = rounded(acc, y, TMA)
        if pre is not None:
            store_tile(pre, stride_pm, row, col, M, N, acc, TMA)
        acc = acc.to(tl.float32)
        if codes_ptr is not None:
            store_codes(codes_ptr, pack_key_ptr, pack_row0, row, col, M, N, acc, inverse)
        acc = ACT(acc)
    acc *= keep_tile(site_key_ptr, row0, row, col, threshold, scale, acc.shape[0], acc.shape[1])
    if residual is not None:
        acc += load_tile(
            residual, stride_rm, row, col, M, N, acc.shape[0], acc.shape[1], False, TMA
        ).to(tl.float32)
    store_tile(y, stride_ym, row, col, M, N, acc, TMA)


@triton.jit(
    do_not_specialize=["row0", "pack_row0", "threshold"],
    do_not_specialize_on_alignment=["site_key_ptr", "pack_key_ptr"],
)
def linear_fwd_kernel(
    x,
    w,
    bias_ptr,
    residual,
    site_key_ptr,
    mean_ptr,
    rstd_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    pack_key_ptr,
    pre,
    codes_ptr,
    step_ptr,
    y,
    stride_xm,
    stride_wn,
    stride_rm,
    stride_pm,
    stride_ym,
    row0,
    pack_row0,
    M,
    N,
    K,
    threshold,
    scale,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = keep * act(x @ wᵀ + bias) + residual; pre = x @ wᵀ + bias where pre is not None.

    Shapes: x (M, K), w (N, K), bias (N,), residual, pre, y (M, N); site_key () int64. With rstd
        (M,) (and mean, of LayerNorm) x is first normalised, as `norm_fwd_kernel` would.
        PARTS: the end is computed in 1, 2, 4 or 8 parts. Grid: any. codes (M, N) int8 and step
        (M, cdiv(N, BLOCK)) float32, or None, are of pre as ACT takes it, rounded stochastically
        with a key; a block is then IN_BLOCK parts, and BLOCK_N whole blocks.
    Units: FLOPs = 2·M·N·K.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if rstd_ptr is not None:
            acc = _add_normed_product(
                acc, x, w, mean_ptr, rstd_ptr, norm_weight_ptr, norm_bias_ptr, stride_xm,
                stride_wn, row, col, M, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN, TMA, PRECISION,
            )  # fmt: skip
        else:
            acc = add_product(
                acc, x, w, stride_xm, stride_wn, row, col, M, N, K, False, BLOCK_M, BLOCK_N,
                BLOCK_K, EVEN, TMA, PRECISION,
            )  # fmt: skip
        inverse = None
        for index in tl.static_range(PARTS):
            at = col + index * (BLOCK_N // PARTS)
            if codes_ptr is not None and index % IN_BLOCK == 0:
                inverse = block_scales(
                    acc, bias_ptr, y, index, PARTS, IN_BLOCK, row, at, M, N, step_ptr, TMA
                )
            _finish(
                part(acc, index, PARTS), inverse, bias_ptr, residual, site_key_ptr, pre, codes_ptr,
                pack_key_ptr, y, stride_rm, stride_pm, stride_ym, row0, pack_row0, row, at, M, N,
                threshold, scale, ACT, TMA,
            )  # fmt: skip

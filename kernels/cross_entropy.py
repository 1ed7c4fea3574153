"""Cross-entropy over the logits of a linear layer, x @ wᵀ + bias, of which none is written.

Forward ends each tile of the product with what a softmax needs of its columns; backward ends it
with the logits' gradient. A row is a token, a column a class; `first` is the number of the first
column, where w is a part of the vocabulary. Logits z = cap(scale * (x @ wᵀ + bias)); a None among
scale and softcap has no part in them. Arguments as in `kernels.linear`.
"""

import triton
import triton.language as tl

from fused_remat.kernels.activations import tanh_fwd
from fused_remat.kernels.linear import add_bias, part, product, store_tile, tile_at
from fused_remat.kernels.pointwise import Matrix, load_wide, store_narrow, tile_offsets


@triton.jit
def _logits(acc, index: tl.constexpr, PARTS: tl.constexpr, bias_ptr, left, N, scale, softcap):
    """Part `index` of a tile of logits, whose first column is `left`."""
    z = add_bias(part(acc, index, PARTS), bias_ptr, left, N)
    if scale is not None:
        z *= scale
    if softcap is not None:
        z = softcap * tanh_fwd(z / softcap)
    return z


@triton.jit(do_not_specialize=["first"])
def linear_cross_entropy_fwd_kernel(
    x, w, bias_ptr, target_ptr, high_ptr, sum_ptr, total_ptr, picked_ptr, exps, strides, first,
    M, N, K, scale, softcap, tile: tl.constexpr,
):  # fmt: skip
    """Of each row and each BLOCK_N columns of logits z: max, sum(exp(z - max)).

    Also sum(z) where total is not None, and picked, the column of the row's target, which one tile
    writes: what no tile does keeps what is there. And exp(z - max), where exps is not None.

    Shapes: x (M, K), w (N, K), bias (N,), target (M,) int64; high, sum and total (tiles, M), picked
        (M,), all float32; exps (M, N). Grid: any.
    Units: FLOPs = 2·M·N·K; bytes written = 8·M·N / BLOCK_N (12 with total), and exps.
    """
    x, w, exps = Matrix(x, strides[0]), Matrix(w, strides[1]), Matrix(exps, strides[2])
    PARTS: tl.constexpr = tile.PARTS
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(number, M, N, tile)
        acc = product(x, w, row, col, M, N, K, False, tile)
        offs_m = row + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        at = tl.load(target_ptr + offs_m, mask=mask_m, other=-1) - first
        # The least number, where a row is -inf: no exp(-inf + inf).
        high = tl.full([BLOCK_M], -3.4028234663852886e38, tl.float32)
        sums = tl.zeros([BLOCK_M], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        picked = tl.zeros([BLOCK_M], tl.float32)
        for index in tl.static_range(PARTS):
            left = col + index * (BLOCK_N // PARTS)
            z = _logits(acc, index, PARTS, bias_ptr, left, N, scale, softcap)
            offs_n = left + tl.arange(0, BLOCK_N // PARTS)
            picked += tl.sum(tl.where(offs_n[None, :] == at[:, None], z, 0.0), 1)
            if total_ptr is not None:
                total += tl.sum(tl.where((offs_n < N)[None, :], z, 0.0), 1)
            z = tl.where((offs_n < N)[None, :], z, float("-inf"))
            higher = tl.maximum(high, tl.max(z, 1))
            sums = sums * tl.exp(high - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
            high = higher
        place = (col // BLOCK_N).to(tl.int64) * M + offs_m
        tl.store(high_ptr + place, high, mask=mask_m)
        tl.store(sum_ptr + place, sums, mask=mask_m)
        if total_ptr is not None:
            tl.store(total_ptr + place, total, mask=mask_m)
        here = (at >= col) & (at < col + BLOCK_N) & (at < N)
        tl.store(picked_ptr + offs_m, picked, mask=mask_m & here)
        if exps.data is not None:
            for index in tl.static_range(PARTS):
                left = col + index * (BLOCK_N // PARTS)
                z = _logits(acc, index, PARTS, bias_ptr, left, N, scale, softcap)
                store_tile(exps, row, left, M, N, tl.exp(z - high[:, None]), tile.TMA)


@triton.jit
def cross_entropy_grad_kernel(
    exps, target_ptr, tile_high_ptr, high_ptr, log_sum_ptr, mass_ptr, spread_ptr, at_target_ptr,
    M, N, softcap, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Replace exps, of the forward's tiles of BLOCK_N columns, by the gradient of the logits.

    That is the backward's. Where softmax - 1 is almost 0, exps is a tile's largest, 1: exact.

    Shapes: exps (M, N); tile_high (tiles, M) float32; others as the backward's.
    Units: bytes moved = 2·M·N elements.
    Source: softmax(z) = exp(z - tile_high) * exp(tile_high - high - log_sum).
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    mask_m, place = offs_m < M, (tl.program_id(0) % tl.cdiv(N, BLOCK_N)).to(tl.int64) * M + offs_m
    at = offs_n[None, :] == tl.load(target_ptr + offs_m, mask=mask_m, other=-1)[:, None]
    total = tl.load(high_ptr + offs_m, mask=mask_m, other=0.0)
    total += tl.load(log_sum_ptr + offs_m, mask=mask_m, other=0.0)
    tile_high = tl.load(tile_high_ptr + place, mask=mask_m, other=0.0)
    mass = tl.load(mass_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
    at_target = tl.load(at_target_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
    tile = load_wide(exps, offs_m, offs_n, mask)
    softmax = tile * tl.exp(tile_high - total)[:, None]
    grad = tl.where(mass == 0.0, 0.0, softmax * mass) + tl.where(at, at_target, 0.0)
    if spread_ptr is not None:
        grad += tl.load(spread_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
    if softcap is not None:
        z = tl.log(tl.maximum(tile, 1e-37)) + tile_high[:, None]
        cap = tl.maximum(z, -softcap) / softcap
        grad *= tl.where(mass == 0.0, 0.0, 1.0 - cap * cap)
    store_narrow(exps, offs_m, offs_n, mask, grad)


@triton.jit(do_not_specialize=["first"])
def linear_cross_entropy_bwd_kernel(
    x, w, bias_ptr, target_ptr, high_ptr, log_sum_ptr, mass_ptr, spread_ptr, at_target_ptr, dz,
    strides, first, M, N, K, scale, softcap, tile: tl.constexpr,
):  # fmt: skip
    """Compute dz = (softmax(z) * mass + spread + at_target at the row's target) * dcap.

    Shapes: as the forward's; high, log_sum, mass, spread and at_target (M,) float32, spread None
        for none; dz (M, N). A row whose mass is 0 has no softmax: ignored, it may be NaN. Grid:
        any.
    Units: FLOPs = 2·M·N·K.
    Source: d logsumexp(z) = softmax(z), with softmax(z) = exp(z - high - log_sum).
    """
    x, w, dz = Matrix(x, strides[0]), Matrix(w, strides[1]), Matrix(dz, strides[2])
    PARTS: tl.constexpr = tile.PARTS
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(number, M, N, tile)
        acc = product(x, w, row, col, M, N, K, False, tile)
        offs_m = row + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        at = (tl.load(target_ptr + offs_m, mask=mask_m, other=-1) - first)[:, None]
        high = tl.load(high_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        log_sum = tl.load(log_sum_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        mass = tl.load(mass_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        at_target = tl.load(at_target_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
        for index in tl.static_range(PARTS):
            left = col + index * (BLOCK_N // PARTS)
            z = _logits(acc, index, PARTS, bias_ptr, left, N, scale, softcap)
            grad = tl.where(mass == 0.0, 0.0, tl.exp(z - high - log_sum) * mass)
            if spread_ptr is not None:
                grad += tl.load(spread_ptr + offs_m, mask=mask_m, other=0.0)[:, None]
            offs_n = left + tl.arange(0, BLOCK_N // PARTS)
            grad += tl.where(offs_n[None, :] == at, at_target, 0.0)
            if softcap is not None:
                cap = z / softcap
                grad *= 1.0 - cap * cap
            store_tile(dz, row, left, M, N, grad, tile.TMA)

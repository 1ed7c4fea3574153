"""An MLP's hidden half, forward and backward, in one kernel each: no pre-activation is written.

Forward: act(x @ w1ᵀ + b1), gated or (`kernels.linear`) plain. Backward: the pre-activation is
computed again, rounded as forward rounded it, then its gradient's product, and both end in the
activation and the gradient of the pre-activation. Persistent; operands as in `kernels.gemm`.
"""

import triton
import triton.language as tl

from fused_remat.kernels.gemm import (
    add_bias,
    add_product,
    left_half,
    load_tile,
    right_half,
    tile_at,
)
from fused_remat.kernels.pointwise import dropped, store_narrow


@triton.jit
def _add_two_products(
    gate, up, x, wg, w1, stride_xm, stride_gn, stride_wn, row, col, M, F, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """gate + x @ wgᵀ and up + x @ w1ᵀ, x loaded once."""
    for k in range(0, K, BLOCK_K):
        x_tile = load_tile(x, stride_xm, row, k, M, K, BLOCK_M, BLOCK_K, EVEN, TMA)
        g_tile = load_tile(wg, stride_gn, col, k, F, K, BLOCK_N, BLOCK_K, EVEN, TMA)
        w_tile = load_tile(w1, stride_wn, col, k, F, K, BLOCK_N, BLOCK_K, EVEN, TMA)
        gate = tl.dot(x_tile, g_tile.T, gate, input_precision=PRECISION)
        up = tl.dot(x_tile, w_tile.T, up, input_precision=PRECISION)
    return gate, up


@triton.jit
def _offsets(row, col, M, F, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows (int64) and columns of a tile, and the mask of those that exist."""
    offs_m = (row + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = col + tl.arange(0, BLOCK_N)
    return offs_m, offs_n, (offs_m < M)[:, None] & (offs_n < F)[None, :]


@triton.jit
def gated_mlp_fwd_kernel(
    x,
    wg,
    w1,
    bg_ptr,
    b1_ptr,
    site_key_ptr,
    y_ptr,
    stride_xm,
    stride_gn,
    stride_wn,
    stride_ym,
    row0,
    M,
    F,
    K,
    threshold,
    scale,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = keep * act(x @ wgᵀ + bg) * (x @ w1ᵀ + b1), both products rounded to the dtype of y.

    Shapes: x (M, K), wg, w1 (F, K), bg, b1 (F,), y (M, F). Units: FLOPs = 4·M·F·K.
    Source: Shazeer 2020.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(F, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(tile, M, F, BLOCK_M, BLOCK_N, GROUP_M)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gate, up = _add_two_products(
            gate, up, x, wg, w1, stride_xm, stride_gn, stride_wn, row, col, M, F, K, BLOCK_M,
            BLOCK_N, BLOCK_K, EVEN, TMA, PRECISION,
        )  # fmt: skip
        offs_m, offs_n, mask = _offsets(row, col, M, F, BLOCK_M, BLOCK_N)
        dtype = y_ptr.dtype.element_ty
        gate = add_bias(gate, bg_ptr, offs_n, F).to(dtype).to(tl.float32)
        up = add_bias(up, b1_ptr, offs_n, F).to(dtype).to(tl.float32)
        y = dropped(ACT(gate) * up, site_key_ptr, row0, offs_m, offs_n, threshold, scale)
        store_narrow(y_ptr, stride_ym, offs_m, offs_n, mask, y)


@triton.jit
def _finish_bwd(
    dact, up, site_key_ptr, act_ptr, dup_ptr, stride_am, stride_um, row0, row, col, M, F,
    threshold, scale, ACT: tl.constexpr,
):  # fmt: skip
    """Ends a tile of the plain backward: stores act and dup."""
    offs_m, offs_n, mask = _offsets(row, col, M, F, up.shape[0], up.shape[1])
    dact = dropped(dact, site_key_ptr, row0, offs_m, offs_n, threshold, scale)
    dup, act = ACT(dact, up.to(tl.float32))
    store_narrow(dup_ptr, stride_um, offs_m, offs_n, mask, dup)
    if act_ptr is not None:
        act = dropped(act, site_key_ptr, row0, offs_m, offs_n, threshold, scale)
        store_narrow(act_ptr, stride_am, offs_m, offs_n, mask, act)


@triton.jit
def mlp_bwd_kernel(
    x,
    w1,
    dy,
    w2,
    b1_ptr,
    site_key_ptr,
    act_ptr,
    dup_ptr,
    stride_xm,
    stride_wn,
    stride_dym,
    stride_w2,
    stride_am,
    stride_um,
    row0,
    M,
    F,
    K,
    D,
    threshold,
    scale,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """With up = x @ w1ᵀ + b1: act = keep * act(up) and dup = keep * (dy @ w2) * act'(up).

    Shapes: x (M, K), w1 (F, K), b1 (F,), dy (M, D), w2 (D, F), act and dup (M, F); act_ptr may be
        None. EVEN: K and D are multiples of BLOCK_K. ACT: a backward of `kernels.activations`.
    Units: FLOPs = 2·M·F·(K + D); bytes written = 2·M·F elements.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(F, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(tile, M, F, BLOCK_M, BLOCK_N, GROUP_M)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = add_product(
            up, x, w1, stride_xm, stride_wn, row, col, M, F, K, False, BLOCK_M, BLOCK_N, BLOCK_K,
            EVEN, TMA, PRECISION,
        )  # fmt: skip
        up = add_bias(up, b1_ptr, col + tl.arange(0, BLOCK_N), F).to(dup_ptr.dtype.element_ty)
        dact = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dact = add_product(
            dact, dy, w2, stride_dym, stride_w2, row, col, M, F, D, True, BLOCK_M, BLOCK_N,
            BLOCK_K, EVEN, TMA, PRECISION,
        )  # fmt: skip
        if SPLIT:
            _finish_bwd(
                left_half(dact), left_half(up), site_key_ptr, act_ptr, dup_ptr, stride_am,
                stride_um, row0, row, col, M, F, threshold, scale, ACT,
            )  # fmt: skip
            _finish_bwd(
                right_half(dact), right_half(up), site_key_ptr, act_ptr, dup_ptr, stride_am,
                stride_um, row0, row, col + BLOCK_N // 2, M, F, threshold, scale, ACT,
            )  # fmt: skip
        else:
            _finish_bwd(
                dact, up, site_key_ptr, act_ptr, dup_ptr, stride_am, stride_um, row0, row, col, M,
                F, threshold, scale, ACT,
            )  # fmt: skip


@triton.jit
def _finish_gated_bwd(
    dact, gate, up, site_key_ptr, act_ptr, dgate_ptr, dup_ptr, stride_am, stride_dgm, stride_um,
    row0, row, col, M, F, threshold, scale, ACT: tl.constexpr,
):  # fmt: skip
    """Ends a tile of the gated backward: stores act, dgate and dup."""
    offs_m, offs_n, mask = _offsets(row, col, M, F, up.shape[0], up.shape[1])
    dact = dropped(dact, site_key_ptr, row0, offs_m, offs_n, threshold, scale)
    up = up.to(tl.float32)
    dgate, y = ACT(dact * up, gate.to(tl.float32))
    store_narrow(dgate_ptr, stride_dgm, offs_m, offs_n, mask, dgate)
    store_narrow(dup_ptr, stride_um, offs_m, offs_n, mask, dact * y)
    if act_ptr is not None:
        act = dropped(y * up, site_key_ptr, row0, offs_m, offs_n, threshold, scale)
        store_narrow(act_ptr, stride_am, offs_m, offs_n, mask, act)


@triton.jit
def gated_mlp_bwd_kernel(
    x,
    wg,
    w1,
    dy,
    w2,
    bg_ptr,
    b1_ptr,
    site_key_ptr,
    act_ptr,
    dgate_ptr,
    dup_ptr,
    stride_xm,
    stride_gn,
    stride_wn,
    stride_dym,
    stride_w2,
    stride_am,
    stride_dgm,
    stride_um,
    row0,
    M,
    F,
    K,
    D,
    threshold,
    scale,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`mlp_bwd_kernel` for y = keep * act(gate) * up, with gate = x @ wgᵀ + bg.

    dgate = keep * (dy @ w2) * up * act'(gate) and dup = keep * (dy @ w2) * act(gate).

    Shapes: as there; wg (F, K), bg (F,), dgate (M, F). Units: FLOPs = 2·M·F·(2·K + D).
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(F, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(tile, M, F, BLOCK_M, BLOCK_N, GROUP_M)
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gate, up = _add_two_products(
            gate, up, x, wg, w1, stride_xm, stride_gn, stride_wn, row, col, M, F, K, BLOCK_M,
            BLOCK_N, BLOCK_K, EVEN, TMA, PRECISION,
        )  # fmt: skip
        offs_n = col + tl.arange(0, BLOCK_N)
        gate = add_bias(gate, bg_ptr, offs_n, F).to(dup_ptr.dtype.element_ty)
        up = add_bias(up, b1_ptr, offs_n, F).to(dup_ptr.dtype.element_ty)
        dact = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dact = add_product(
            dact, dy, w2, stride_dym, stride_w2, row, col, M, F, D, True, BLOCK_M, BLOCK_N,
            BLOCK_K, EVEN, TMA, PRECISION,
        )  # fmt: skip
        if SPLIT:
            _finish_gated_bwd(
                left_half(dact), left_half(gate), left_half(up), site_key_ptr, act_ptr, dgate_ptr,
                dup_ptr, stride_am, stride_dgm, stride_um, row0, row, col, M, F, threshold, scale,
                ACT,
            )  # fmt: skip
            _finish_gated_bwd(
                right_half(dact), right_half(gate), right_half(up), site_key_ptr, act_ptr,
                dgate_ptr, dup_ptr, stride_am, stride_dgm, stride_um, row0, row,
                col + BLOCK_N // 2, M, F, threshold, scale, ACT,
            )  # fmt: skip
        else:
            _finish_gated_bwd(
                dact, gate, up, site_key_ptr, act_ptr, dgate_ptr, dup_ptr, stride_am, stride_dgm,
                stride_um, row0, row, col, M, F, threshold, scale, ACT,
            )  # fmt: skip

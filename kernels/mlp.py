"""An MLP's hidden half: forward, and backward from its input.

Forward: act(x @ w1ᵀ + b1), gated or (`kernels.linear`) plain. Backward ends in the activation and
the gradient of the pre-activation: `linear_act_bwd_kernel` reads a pre-activation that was computed
again before; the `mlp_bwd` kernels compute both products of a tile, one after the other, and never
write one. Operands as in `kernels.gemm`; all are persistent but the `mlp_bwd` kernels, whose two
inner loops leave no registers for an outer one.
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
def _finish_pre(
    acc, inverse, bias_ptr, pre, stride_pm, codes_ptr, key_ptr, y, row0, row, col, M, F,
    TMA: tl.constexpr,
):  # fmt: skip
    """Ends a tile of one product: bias, its stores; float32, rounded to the dtype of y."""
    acc = rounded(add_bias(acc, bias_ptr, col, F), y, TMA)
    if pre is not None:
        store_tile(pre, stride_pm, row, col, M, F, acc, TMA)
    acc = acc.to(tl.float32)
    if codes_ptr is not None:
        store_codes(codes_ptr, key_ptr, row0, row, col, M, F, acc, inverse)
    return acc


@triton.jit(
    do_not_specialize=["row0", "pack_row0", "threshold"],
    do_not_specialize_on_alignment=["site_key_ptr", "gate_key_ptr", "up_key_ptr"],
)
def gated_mlp_fwd_kernel(
    x,
    wg,
    w1,
    bg_ptr,
    b1_ptr,
    site_key_ptr,
    gate_key_ptr,
    up_key_ptr,
    gate_pre,
    gate_codes_ptr,
    gate_step_ptr,
    up_pre,
    up_codes_ptr,
    up_step_ptr,
    y,
    stride_xm,
    stride_gn,
    stride_wn,
    stride_gm,
    stride_um,
    stride_ym,
    row0,
    pack_row0,
    M,
    F,
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
    """y = keep * act(x @ wgᵀ + bg) * (x @ w1ᵀ + b1), both products rounded to the dtype of y.

    Shapes: x (M, K), wg, w1 (F, K), bg, b1 (F,), y (M, F). Of both products, so rounded, and each
        None or not: itself, gate_pre and up_pre (M, F), and codes and step, as in
        `linear_fwd_kernel`. Units: FLOPs = 4·M·F·K.
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
        gate_inverse, up_inverse = None, None
        for index in tl.static_range(PARTS):
            at = col + index * (BLOCK_N // PARTS)
            if gate_codes_ptr is not None and index % IN_BLOCK == 0:
                gate_inverse = block_scales(
                    gate, bg_ptr, y, index, PARTS, IN_BLOCK, row, at, M, F, gate_step_ptr, TMA
                )
            if up_codes_ptr is not None and index % IN_BLOCK == 0:
                up_inverse = block_scales(
                    up, b1_ptr, y, index, PARTS, IN_BLOCK, row, at, M, F, up_step_ptr, TMA
                )
            gate_tile = _finish_pre(
                part(gate, index, PARTS), gate_inverse, bg_ptr, gate_pre, stride_gm,
                gate_codes_ptr, gate_key_ptr, y, pack_row0, row, at, M, F, TMA,
            )  # fmt: skip
            up_tile = _finish_pre(
                part(up, index, PARTS), up_inverse, b1_ptr, up_pre, stride_um, up_codes_ptr,
                up_key_ptr, y, pack_row0, row, at, M, F, TMA,
            )  # fmt: skip
            keep = keep_tile(
                site_key_ptr, row0, row, at, threshold, scale, BLOCK_M, BLOCK_N // PARTS
            )
            store_tile(y, stride_ym, row, at, M, F, ACT(gate_tile) * up_tile * keep, TMA)


@triton.jit
def _finish_bwd(
    dact, up, site_key_ptr, act, dup, stride_am, stride_um, row0, row, col, M, F, threshold, scale,
    ACT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Ends a tile of the plain backward: stores act and dup."""
    keep = keep_tile(site_key_ptr, row0, row, col, threshold, scale, up.shape[0], up.shape[1])
    d_tile, y_tile = ACT(dact * keep, up.to(tl.float32))
    if act is not None:
        store_tile(act, stride_am, row, col, M, F, y_tile * keep, TMA)
    store_tile(dup, stride_um, row, col, M, F, d_tile, TMA)


@triton.jit
def _finish_gated_bwd(
    dact, gate, up, site_key_ptr, act, dgate, dup, stride_am, stride_dgm, stride_um, row0, row,
    col, M, F, threshold, scale, ACT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Ends a tile of the gated backward: stores act, dgate and dup."""
    keep = keep_tile(site_key_ptr, row0, row, col, threshold, scale, up.shape[0], up.shape[1])
    dact *= keep
    up = up.to(tl.float32)
    d_tile, y_tile = ACT(dact * up, gate.to(tl.float32))
    if act is not None:
        store_tile(act, stride_am, row, col, M, F, y_tile * up * keep, TMA)
    store_tile(dgate, stride_dgm, row, col, M, F, d_tile, TMA)
    store_tile(dup, stride_um, row, col, M, F, dact * y_tile, TMA)


@triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)
def linear_act_bwd_kernel(
    dy,
    w2,
    gate,
    up,
    site_key_ptr,
    act,
    dgate,
    dup,
    stride_dym,
    stride_w2,
    stride_gm,
    stride_upm,
    stride_am,
    stride_dgm,
    stride_um,
    row0,
    M,
    F,
    D,
    threshold,
    scale,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A product that ends in the activation's backward, where up was computed before.

    act = keep * f(up) and dup = keep * (dy @ w2) * f'(up); or with a gate, act = keep * f(gate) *
    up, dgate = keep * (dy @ w2) * up * f'(gate), dup = keep * (dy @ w2) * f(gate).

    Shapes: dy (M, D), w2 (D, F), all others (M, F); gate and dgate, or act, may be None. act may
        be up, and dgate gate, or dup either: a tile is read before it is written.
    Units: FLOPs = 2·M·F·D; bytes moved = 3·M·F elements, 5 with a gate.
    """
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(F, BLOCK_N)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(tile, M, F, BLOCK_M, BLOCK_N, GROUP_M)
        dact = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        dact = add_product(
            dact, dy, w2, stride_dym, stride_w2, row, col, M, F, D, True, BLOCK_M, BLOCK_N,
            BLOCK_K, EVEN, TMA, PRECISION,
        )  # fmt: skip
        for index in tl.static_range(PARTS):
            at = col + index * (BLOCK_N // PARTS)
            up_tile = load_tile(
                up, stride_upm, row, at, M, F, BLOCK_M, BLOCK_N // PARTS, False, TMA
            )
            if gate is not None:
                gate_tile = load_tile(
                    gate, stride_gm, row, at, M, F, BLOCK_M, BLOCK_N // PARTS, False, TMA
                )
                _finish_gated_bwd(
                    part(dact, index, PARTS), gate_tile, up_tile, site_key_ptr, act, dgate, dup,
                    stride_am, stride_dgm, stride_um, row0, row, at, M, F, threshold, scale, ACT,
                    TMA,
                )  # fmt: skip
            else:
                _finish_bwd(
                    part(dact, index, PARTS), up_tile, site_key_ptr, act, dup, stride_am,
                    stride_um, row0, row, at, M, F, threshold, scale, ACT, TMA,
                )  # fmt: skip


@triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)
def mlp_bwd_kernel(
    x,
    w1,
    dy,
    w2,
    b1_ptr,
    site_key_ptr,
    act,
    dup,
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
    PARTS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """With up = x @ w1ᵀ + b1: act = keep * act(up) and dup = keep * (dy @ w2) * act'(up).

    Shapes: x (M, K), w1 (F, K), b1 (F,), dy (M, D), w2 (D, F), act and dup (M, F); act may be
        None. EVEN: K and D are multiples of BLOCK_K. ACT: a backward of `kernels.activations`.
    Units: FLOPs = 2·M·F·(K + D); bytes written = 2·M·F elements.
    """
    row, col = tile_at(tl.program_id(0), M, F, BLOCK_M, BLOCK_N, GROUP_M)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = add_product(
        up, x, w1, stride_xm, stride_wn, row, col, M, F, K, False, BLOCK_M, BLOCK_N, BLOCK_K,
        EVEN, TMA, PRECISION,
    )  # fmt: skip
    up = rounded(add_bias(up, b1_ptr, col, F), dup, TMA)
    dact = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dact = add_product(
        dact, dy, w2, stride_dym, stride_w2, row, col, M, F, D, True, BLOCK_M, BLOCK_N,
        BLOCK_K, EVEN, TMA, PRECISION,
    )  # fmt: skip
    for index in tl.static_range(PARTS):
        _finish_bwd(
            part(dact, index, PARTS), part(up, index, PARTS), site_key_ptr, act, dup,
            stride_am, stride_um, row0, row, col + index * (BLOCK_N // PARTS), M, F, threshold,
            scale, ACT, TMA,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)
def gated_mlp_bwd_kernel(
    x,
    wg,
    w1,
    dy,
    w2,
    bg_ptr,
    b1_ptr,
    site_key_ptr,
    act,
    dgate,
    dup,
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
    PARTS: tl.constexpr,
    GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`mlp_bwd_kernel` for y = keep * act(gate) * up, with gate = x @ wgᵀ + bg.

    dgate = keep * (dy @ w2) * up * act'(gate) and dup = keep * (dy @ w2) * act(gate).

    Shapes: as there; wg (F, K), bg (F,), dgate (M, F). Units: FLOPs = 2·M·F·(2·K + D).
    """
    row, col = tile_at(tl.program_id(0), M, F, BLOCK_M, BLOCK_N, GROUP_M)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    gate, up = _add_two_products(
        gate, up, x, wg, w1, stride_xm, stride_gn, stride_wn, row, col, M, F, K, BLOCK_M,
        BLOCK_N, BLOCK_K, EVEN, TMA, PRECISION,
    )  # fmt: skip
    gate = rounded(add_bias(gate, bg_ptr, col, F), dup, TMA)
    up = rounded(add_bias(up, b1_ptr, col, F), dup, TMA)
    dact = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dact = add_product(
        dact, dy, w2, stride_dym, stride_w2, row, col, M, F, D, True, BLOCK_M, BLOCK_N,
        BLOCK_K, EVEN, TMA, PRECISION,
    )  # fmt: skip
    for index in tl.static_range(PARTS):
        _finish_gated_bwd(
            part(dact, index, PARTS), part(gate, index, PARTS), part(up, index, PARTS),
            site_key_ptr, act, dgate, dup, stride_am, stride_dgm, stride_um, row0, row,
            col + index * (BLOCK_N // PARTS), M, F, threshold, scale, ACT, TMA,
        )  # fmt: skip

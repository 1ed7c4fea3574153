"""An MLP's hidden half: forward, and backward from its input.

Forward: act(x @ w1ᵀ + b1), gated or (`kernels.linear`) plain. Backward ends in the activation and
the gradient of the pre-activation: its kernels compute both products of a tile, one after the
other, and write neither. Arguments as in `kernels.linear`; `keep` is dropout's multiplier. Forward
is persistent; the two inner loops of backward leave no registers for an outer one.
"""

import triton
import triton.language as tl

from fused_remat.kernels.dropout import Site, seeded
from fused_remat.kernels.linear import (
    add_bias,
    finish_pre,
    keep_part,
    load_tile,
    part,
    product,
    rounded,
    row_keys,
    store_tile,
    tile_at,
)
from fused_remat.kernels.pointwise import Matrix


@triton.jit
def _two_products(x, wg, w1, row, col, M, F, K, tile: tl.constexpr):
    """Return a tile of x @ wgᵀ and one of x @ w1ᵀ, float32, x loaded once."""
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    BLOCK_K: tl.constexpr = tile.BLOCK_K
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        x_tile = load_tile(x, row, k, M, K, BLOCK_M, BLOCK_K, tile.EVEN, tile.TMA)
        g_tile = load_tile(wg, col, k, F, K, BLOCK_N, BLOCK_K, tile.EVEN, tile.TMA)
        w_tile = load_tile(w1, col, k, F, K, BLOCK_N, BLOCK_K, tile.EVEN, tile.TMA)
        gate = tl.dot(x_tile, g_tile.T, gate, input_precision=tile.PRECISION)
        up = tl.dot(x_tile, w_tile.T, up, input_precision=tile.PRECISION)
    return gate, up


@seeded
def gated_mlp_fwd_kernel(
    x, wg, w1, bg_ptr, b1_ptr, gate_pre, up_pre, y, strides,
    site_key_ptr, row0, threshold, scale, M, F, K,
    ACT: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Compute y = keep * act(x @ wgᵀ + bg) * (x @ w1ᵀ + b1), both products rounded as y is.

    Shapes: x (M, K), wg, w1 (F, K), bg, b1 (F,), y (M, F). Of both products, so rounded, and each
        None or not: gate_pre and up_pre (M, F). Units: FLOPs = 4·M·F·K.
    Source: Shazeer 2020.
    """
    x, wg, w1 = Matrix(x, strides[0]), Matrix(wg, strides[1]), Matrix(w1, strides[2])
    gate_pre, up_pre = Matrix(gate_pre, strides[3]), Matrix(up_pre, strides[4])
    y, site = Matrix(y, strides[5]), Site(site_key_ptr, row0, threshold, scale)
    PARTS: tl.constexpr = tile.PARTS
    WIDTH: tl.constexpr = tile.BLOCK_N // tile.PARTS
    tiles = tl.cdiv(M, tile.BLOCK_M) * tl.cdiv(F, tile.BLOCK_N)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = tile_at(number, M, F, tile)
        gate, up = _two_products(x, wg, w1, row, col, M, F, K, tile)
        keys = row_keys(site, row, tile.BLOCK_M)
        for index in tl.static_range(PARTS):
            at = col + index * WIDTH
            g_tile = finish_pre(
                part(gate, index, PARTS), bg_ptr, gate_pre, y, row, at, M, F, tile.TMA
            )
            u_tile = finish_pre(part(up, index, PARTS), b1_ptr, up_pre, y, row, at, M, F, tile.TMA)
            keep = keep_part(site, keys, at, WIDTH)
            store_tile(y, row, at, M, F, ACT(g_tile) * u_tile * keep, tile.TMA)


@triton.jit
def _alike(acc, x):
    """acc, and x in float32, in one layout: what follows is computed once, and not converted."""
    return tl.split(tl.join(acc, x.to(tl.float32)))


@triton.jit
def _finish_bwd(
    dact, gate, up, site, keys, act, dgate, dup, row, col, M, F,
    ACT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """End a part of the backward: store act, dgate where there is a gate (not None), and dup."""
    keep = keep_part(site, keys, col, up.shape[1])
    dact *= keep
    dact, up = _alike(dact, up)
    if gate is not None:
        dact, gate = _alike(dact, gate)
        d_tile, y_tile = ACT(dact * up, gate)
        if act.data is not None:
            store_tile(act, row, col, M, F, y_tile * up * keep, TMA)
        store_tile(dgate, row, col, M, F, d_tile, TMA)
        store_tile(dup, row, col, M, F, dact * y_tile, TMA)
    else:
        d_tile, y_tile = ACT(dact, up)
        store_tile(dup, row, col, M, F, d_tile, TMA)
        if act.data is not None:
            store_tile(act, row, col, M, F, y_tile * keep, TMA)


@seeded
def mlp_bwd_kernel(
    x, w1, dy, w2, b1_ptr, act, dup, strides, site_key_ptr, row0, threshold, scale, M, F, K, D,
    ACT: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """With up = x @ w1ᵀ + b1: act = keep * act(up) and dup = keep * (dy @ w2) * act'(up).

    Shapes: x (M, K), w1 (F, K), b1 (F,), dy (M, D), w2 (D, F), act and dup (M, F); act may be
        None. ACT: a backward of `kernels.activations`.
    Units: FLOPs = 2·M·F·(K + D); bytes written = 2·M·F elements.
    """
    x, w1, dy = Matrix(x, strides[0]), Matrix(w1, strides[1]), Matrix(dy, strides[2])
    w2, act, dup = Matrix(w2, strides[3]), Matrix(act, strides[4]), Matrix(dup, strides[5])
    site = Site(site_key_ptr, row0, threshold, scale)
    PARTS: tl.constexpr = tile.PARTS
    row, col = tile_at(tl.program_id(0), M, F, tile)
    up = product(x, w1, row, col, M, F, K, False, tile)
    up = rounded(add_bias(up, b1_ptr, col, F), dup, tile.TMA)
    dact = product(dy, w2, row, col, M, F, D, True, tile)
    keys = row_keys(site, row, tile.BLOCK_M)
    for index in tl.static_range(PARTS):
        at = col + index * (tile.BLOCK_N // tile.PARTS)
        _finish_bwd(
            part(dact, index, PARTS), None, part(up, index, PARTS), site, keys, act, None, dup,
            row, at, M, F, ACT, tile.TMA,
        )  # fmt: skip


@seeded
def gated_mlp_bwd_kernel(
    x, wg, w1, dy, w2, bg_ptr, b1_ptr, act, dgate, dup, strides,
    site_key_ptr, row0, threshold, scale, M, F, K, D, ACT: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """`mlp_bwd_kernel` for y = keep * act(gate) * up, with gate = x @ wgᵀ + bg.

    dgate = keep * (dy @ w2) * up * act'(gate) and dup = keep * (dy @ w2) * act(gate).

    Shapes: as there; wg (F, K), bg (F,), dgate (M, F). Units: FLOPs = 2·M·F·(2·K + D).
    """
    x, wg, w1 = Matrix(x, strides[0]), Matrix(wg, strides[1]), Matrix(w1, strides[2])
    dy, w2, act = Matrix(dy, strides[3]), Matrix(w2, strides[4]), Matrix(act, strides[5])
    dgate, dup = Matrix(dgate, strides[6]), Matrix(dup, strides[7])
    site = Site(site_key_ptr, row0, threshold, scale)
    PARTS: tl.constexpr = tile.PARTS
    row, col = tile_at(tl.program_id(0), M, F, tile)
    gate, up = _two_products(x, wg, w1, row, col, M, F, K, tile)
    gate = rounded(add_bias(gate, bg_ptr, col, F), dup, tile.TMA)
    up = rounded(add_bias(up, b1_ptr, col, F), dup, tile.TMA)
    dact = product(dy, w2, row, col, M, F, D, True, tile)
    keys = row_keys(site, row, tile.BLOCK_M)
    for index in tl.static_range(PARTS):
        at = col + index * (tile.BLOCK_N // tile.PARTS)
        _finish_bwd(
            part(dact, index, PARTS), part(gate, index, PARTS), part(up, index, PARTS), site, keys,
            act, dgate, dup, row, at, M, F, ACT, tile.TMA,
        )  # fmt: skip

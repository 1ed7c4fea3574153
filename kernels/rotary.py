"""Rotary position embedding of packed heads, with an RMSNorm of each head before it, and back.

A row (a token) is H query heads, KV key heads and KV value heads of E elements side by side. Of a
query or key head, R elements are rotated in pairs by the row's angles: (i, i + R/2), or neighbours
(2i, 2i + 1) where INTERLEAVED. The other E - R elements pair up too (an odd one alone), so that a
program holds a head as two tiles, x1 and x2, whatever R is; values likewise, and both are copied.

A program works on BLOCK_M tokens of up to BLOCK_H heads of one kind, which share the tables' rows.
It reads all of its elements before it writes any: y may be x. LANES pairs of a head are read and
written: R/2 in place without norms, else cdiv(E, 2). An argument that a call has no use for is
None. Rows of heads are `kernels.pointwise.Matrix`; or queries, keys and values are tensors of their
own, as attention's backward gives their gradients (`Heads`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pairs(NamedTuple):
    """How a program reads a head: constants, E to INTERLEAVED as above, and LANES <= BLOCK_P."""

    E: int
    R: int
    LANES: int
    INTERLEAVED: bool
    BLOCK_P: int


class Angles(NamedTuple):
    """cos and sin, (S, R/2) or (B, S, R/2): pointers, strides of a sequence (or 0) and position."""

    cos_ptr: Any
    sin_ptr: Any
    stride_b: Any
    stride_s: Any


class Heads(NamedTuple):
    """Heads (B, H, S, E) of queries, keys and values: pointers, and strides of B, H and S."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    of_q: Any
    of_k: Any
    of_v: Any


@triton.jit
def _heads_of(group, H, KV, BLOCK_H: tl.constexpr):
    """Kind (0 query, 1 key, 2 value), head numbers in the row, and which exist, of a group.

    Groups are numbered kind by kind.
    """
    of_queries, of_keys = tl.cdiv(H, BLOCK_H), tl.cdiv(KV, BLOCK_H)
    kind = (group >= of_queries).to(tl.int32) + (group >= of_queries + of_keys).to(tl.int32)
    before = tl.where(kind == 0, 0, of_queries + (kind - 1) * of_keys)
    offs_h = (group - before) * BLOCK_H + tl.arange(0, BLOCK_H)
    mask_h = offs_h < tl.where(kind == 0, H, KV)
    return kind, offs_h + tl.where(kind == 0, 0, H + (kind - 1) * KV), mask_h


@triton.jit
def _pair_offsets(pairs: tl.constexpr, LANES: tl.constexpr):
    """Where in a head the members of each pair are, and which exist: the first, the second."""
    lanes = tl.arange(0, pairs.BLOCK_P)
    if pairs.INTERLEAVED:
        first, second = 2 * lanes, 2 * lanes + 1
    else:
        rest: tl.constexpr = (pairs.E - pairs.R + 1) // 2  # pairs of what is not rotated
        first = tl.where(lanes < pairs.R // 2, lanes, lanes + pairs.R // 2)
        second = lanes + pairs.R // 2 + tl.where(lanes < pairs.R // 2, 0, rest)
    return first, second, lanes < LANES, (lanes < LANES) & (second < pairs.E)


@triton.jit
def _load_heads(x, kind, offs_m, offs_h, mask, S, H, KV, pairs: tl.constexpr):
    """Return pairs of `Heads` of one kind, float32, of the tokens (b, s) = divmod(offs_m, S)."""
    x_ptr = x.q_ptr
    if kind == 1:
        x_ptr = x.k_ptr
    if kind == 2:
        x_ptr = x.v_ptr
    stride_b = tl.where(kind == 0, x.of_q[0], tl.where(kind == 1, x.of_k[0], x.of_v[0]))
    stride_h = tl.where(kind == 0, x.of_q[1], tl.where(kind == 1, x.of_k[1], x.of_v[1]))
    stride_s = tl.where(kind == 0, x.of_q[2], tl.where(kind == 1, x.of_k[2], x.of_v[2]))
    offs_h -= tl.where(kind == 0, 0, H + (kind - 1) * KV)
    rows = (offs_m // S).to(tl.int64) * stride_b + (offs_m % S).to(tl.int64) * stride_s
    rows = rows[:, None] + offs_h.to(tl.int64)[None, :] * stride_h
    return _load_pairs(x_ptr, rows, mask, pairs)


@triton.jit
def _load_pairs(x_ptr, rows, mask, pairs: tl.constexpr):
    """Return the members of the pairs of heads that begin at `rows` (tokens, heads), float32."""
    if pairs.INTERLEAVED:  # side by side in memory: one load
        offs = tl.arange(0, 2 * pairs.BLOCK_P)
        inside = mask[:, :, None] & (offs < min(pairs.E, 2 * pairs.LANES))[None, None, :]
        x = tl.load(x_ptr + rows[:, :, None] + offs[None, None, :], mask=inside, other=0.0)
        x1, x2 = tl.split(tl.reshape(x, (rows.shape[0], rows.shape[1], pairs.BLOCK_P, 2)))
    else:
        first, second, has1, has2 = _pair_offsets(pairs, pairs.LANES)
        ptrs, there = x_ptr + rows[:, :, None], mask[:, :, None]
        x1 = tl.load(ptrs + first[None, None, :], mask=there & has1[None, None, :], other=0.0)
        x2 = tl.load(ptrs + second[None, None, :], mask=there & has2[None, None, :], other=0.0)
    return x1.to(tl.float32), x2.to(tl.float32)


@triton.jit
def _store_pairs(y_ptr, rows, mask, y1, y2, pairs: tl.constexpr):
    """As `_load_pairs`: the members of each pair to where they are."""
    y1, y2 = y1.to(y_ptr.dtype.element_ty), y2.to(y_ptr.dtype.element_ty)
    if pairs.INTERLEAVED:
        offs = tl.arange(0, 2 * pairs.BLOCK_P)
        inside = mask[:, :, None] & (offs < min(pairs.E, 2 * pairs.LANES))[None, None, :]
        y = tl.reshape(tl.join(y1, y2), (rows.shape[0], rows.shape[1], 2 * pairs.BLOCK_P))
        tl.store(y_ptr + rows[:, :, None] + offs[None, None, :], y, mask=inside)
    else:
        first, second, has1, has2 = _pair_offsets(pairs, pairs.LANES)
        ptrs, there = y_ptr + rows[:, :, None], mask[:, :, None]
        tl.store(ptrs + first[None, None, :], y1, mask=there & has1[None, None, :])
        tl.store(ptrs + second[None, None, :], y2, mask=there & has2[None, None, :])


@triton.jit
def _load_vector(ptr, pairs: tl.constexpr, mask):
    """Return a weight (E,) by the members of pairs, float32; 0 where `mask` is False."""
    first, second, has1, has2 = _pair_offsets(pairs, (pairs.E + 1) // 2)
    w1 = tl.load(ptr + first, mask=has1 & mask, other=0.0)
    w2 = tl.load(ptr + second, mask=has2 & mask, other=0.0)
    return w1.to(tl.float32), w2.to(tl.float32)


@triton.jit
def _load_weight(q_weight_ptr, k_weight_ptr, kind, pairs: tl.constexpr):
    """Return the norm's weight of heads of a kind (0 for values), by the members of pairs."""
    q1, q2 = _load_vector(q_weight_ptr, pairs, kind == 0)
    k1, k2 = _load_vector(k_weight_ptr, pairs, kind == 1)
    return (q1 + k1)[None, None, :], (q2 + k2)[None, None, :]


@triton.jit
def _rotated(x1, x2, angles, place, S, mask_m, pairs: tl.constexpr, BACK: tl.constexpr):
    """Return the pairs, turned by the angles of their tokens, by the opposite ones where BACK.

    What is not rotated stays as it is. The order of operations is spelled out, so that every call
    of them has the same bits.
    """
    lanes = tl.arange(0, pairs.BLOCK_P)
    table = (place // S).to(tl.int64) * angles.stride_b
    table += (place % S).to(tl.int64) * angles.stride_s
    offs = table[:, None] + lanes[None, :]
    mask = mask_m[:, None] & (lanes < pairs.R // 2)[None, :]
    cos = tl.load(angles.cos_ptr + offs, mask=mask, other=1.0).to(tl.float32)[:, None, :]
    sin = tl.load(angles.sin_ptr + offs, mask=mask, other=0.0).to(tl.float32)[:, None, :]
    if BACK:
        sin = -sin
    y1, y2 = tl.fma(x1, cos, -(x2 * sin)), tl.fma(x2, cos, x1 * sin)
    if pairs.LANES > pairs.R // 2:
        turns = (lanes < pairs.R // 2)[None, None, :]
        y1, y2 = tl.where(turns, y1, x1), tl.where(turns, y2, x2)
    return y1, y2


@triton.jit
def _rstd(x1, x2, eps, E: tl.constexpr):
    """1 / sqrt(mean(x**2) + eps) over each head."""
    return (1.0 / tl.sqrt(tl.sum(tl.fma(x1, x1, x2 * x2), 2) / E + eps))[:, :, None]


@triton.jit(do_not_specialize=["place0"])
def rotary_fwd_kernel(
    x, angles, q_weight_ptr, k_weight_ptr, y, place0, S, M, H, KV, groups, eps,
    pairs: tl.constexpr, BACK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute y = x, its query and key heads normed (where there are weights) and rotated.

    BACK: in the other direction, the gradient of a rotation.
    Shapes: x, y (M, (H + 2·KV)·E), y may be x; row m has the angles at (b, s) = divmod(place0 + m,
        S), place0 + M < 2**31; q_weight, k_weight (E,).
        Grid (cdiv(M, BLOCK_M) * groups,), `groups` of BLOCK_H heads: of queries and keys, and of
        values unless in place.
    Units: bytes moved = 2·M·(H + 2·KV)·E elements, in place without norms 2·M·(H + KV)·R; tables.
    Source: Su et al. 2021; Zhang, Sennrich 2019.
    """
    pid = tl.program_id(0)
    kind, offs_h, mask_h = _heads_of(pid % groups, H, KV, BLOCK_H)
    offs_m = (pid // groups) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    mask, inside = mask_m[:, None] & mask_h[None, :], (offs_h * pairs.E)[None, :]
    rows = offs_m.to(tl.int64)[:, None] * x.stride + inside
    x1, x2 = _load_pairs(x.data, rows, mask, pairs)
    if kind < 2:
        if q_weight_ptr is not None:
            rstd = _rstd(x1, x2, eps, pairs.E)
            w1, w2 = _load_weight(q_weight_ptr, k_weight_ptr, kind, pairs)
            x1, x2 = x1 * rstd * w1, x2 * rstd * w2
        if pairs.R > 0:
            x1, x2 = _rotated(x1, x2, angles, place0 + offs_m, S, mask_m, pairs, BACK)
    rows = offs_m.to(tl.int64)[:, None] * y.stride + inside
    _store_pairs(y.data, rows, mask, x1, x2, pairs)


@triton.jit(do_not_specialize=["place0"])
def rotary_pack_bwd_kernel(
    dy, angles, dx, sums_ptr, place0, S, M, H, KV, groups,
    pairs: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute dx = dy, queries and keys rotated back; and the sum of each program's tokens.

    Shapes: dy `Heads`; dx (M, (H + 2·KV)·E); sums (P, (H + 2·KV)·E) float32, P = cdiv(M, ROWS), or
        None; the rest as in `rotary_fwd_kernel`. ROWS: tokens of a program, a multiple of BLOCK_M.
        Grid (P * groups,), `groups` of BLOCK_H heads: of queries, keys and values.
    Units: bytes moved = 2·M·(H + 2·KV)·E elements; tables.
    """
    pid = tl.program_id(0)
    kind, offs_h, mask_h = _heads_of(pid % groups, H, KV, BLOCK_H)
    inside = (offs_h * pairs.E)[None, :]
    BLOCK_P: tl.constexpr = pairs.BLOCK_P
    sum1 = tl.zeros([BLOCK_M, BLOCK_H, BLOCK_P], tl.float32)
    sum2 = tl.zeros([BLOCK_M, BLOCK_H, BLOCK_P], tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        offs_m = (pid // groups) * ROWS + start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < M
        mask = mask_m[:, None] & mask_h[None, :]
        x1, x2 = _load_heads(dy, kind, offs_m, offs_h, mask, S, H, KV, pairs)
        if pairs.R > 0:  # noqa: SIM102 (known when it is compiled)
            if kind < 2:
                x1, x2 = _rotated(x1, x2, angles, place0 + offs_m, S, mask_m, pairs, True)
        rows = offs_m.to(tl.int64)[:, None] * dx.stride + inside
        _store_pairs(dx.data, rows, mask, x1, x2, pairs)
        sum1 += x1
        sum2 += x2
    if sums_ptr is not None:
        first, second, has1, has2 = _pair_offsets(pairs, pairs.LANES)
        at = (pid // groups).to(tl.int64) * ((H + 2 * KV) * pairs.E) + (offs_h * pairs.E)[:, None]
        mask = mask_h[:, None]
        tl.store(sums_ptr + at + first[None, :], tl.sum(sum1, 0), mask=mask & has1[None, :])
        tl.store(sums_ptr + at + second[None, :], tl.sum(sum2, 0), mask=mask & has2[None, :])


@triton.jit(do_not_specialize=["place0"])
def rotary_norm_bwd_kernel(
    dy, heads, x, angles, q_weight_ptr, k_weight_ptr, dx, dweight_ptr,
    place0, S, rows, M, H, KV, eps,
    pairs: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of `rotary_fwd_kernel` with norms: dx, and parts of dweight.

    With n = x * rstd, g = dy rotated back and w the weight: dx = rstd * (g w - n mean(g w n)), and
    dweight = g n summed over tokens and heads. Statistics are computed again.
    Shapes: dy, x, dx (M, (H + 2·KV)·E), dx may be dy; or dy is None, and is in `Heads`; dweight
        (groups of queries and keys, P, E) float32. Program (group, p) does tokens p·`rows` to
        (p+1)·`rows`, a multiple of BLOCK_M. Grid (groups, P), P = cdiv(M, rows); groups of values
        unless in place.
    Units: bytes moved = 3·M·(H + KV)·E elements, and 2·M·KV·E for values; tables.
    """
    kind, offs_h, mask_h = _heads_of(tl.program_id(0), H, KV, BLOCK_H)
    inside = (offs_h * pairs.E)[None, :]
    w1, w2 = _load_weight(q_weight_ptr, k_weight_ptr, kind, pairs)
    BLOCK_P: tl.constexpr = pairs.BLOCK_P
    dw1 = tl.zeros([BLOCK_M, BLOCK_H, BLOCK_P], tl.float32)
    dw2 = tl.zeros([BLOCK_M, BLOCK_H, BLOCK_P], tl.float32)
    for start in range(0, rows, BLOCK_M):
        offs_m = tl.program_id(1) * rows + start + tl.arange(0, BLOCK_M)
        mask_m, row = offs_m < M, offs_m.to(tl.int64)[:, None]
        mask = mask_m[:, None] & mask_h[None, :]
        if heads is not None:
            dx1, dx2 = _load_heads(heads, kind, offs_m, offs_h, mask, S, H, KV, pairs)
        else:
            dx1, dx2 = _load_pairs(dy.data, row * dy.stride + inside, mask, pairs)
        if kind < 2:
            at = row * x.stride + inside
            n1, n2 = _load_pairs(x.data, at, mask, pairs)
            rstd = tl.where(mask[:, :, None], _rstd(n1, n2, eps, pairs.E), 0.0)
            n1, n2 = n1 * rstd, n2 * rstd
            if pairs.R > 0:
                dx1, dx2 = _rotated(dx1, dx2, angles, place0 + offs_m, S, mask_m, pairs, True)
            dw1 += dx1 * n1
            dw2 += dx2 * n2
            g1, g2 = dx1 * w1, dx2 * w2
            mean = (tl.sum(tl.fma(g1, n1, g2 * n2), 2) / pairs.E)[:, :, None]
            dx1, dx2 = rstd * (g1 - n1 * mean), rstd * (g2 - n2 * mean)
        if dx is not None:
            at = row * dx.stride + inside
            _store_pairs(dx.data, at, mask, dx1, dx2, pairs)
    if dweight_ptr is not None and kind < 2:
        at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        first, second, has1, has2 = _pair_offsets(pairs, pairs.LANES)
        total1, total2 = tl.sum(tl.sum(dw1, 0), 0), tl.sum(tl.sum(dw2, 0), 0)
        tl.store(dweight_ptr + at.to(tl.int64) * pairs.E + first, total1, mask=has1)
        tl.store(dweight_ptr + at.to(tl.int64) * pairs.E + second, total2, mask=has2)

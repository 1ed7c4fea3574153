"""LayerNorm and RMSNorm: forward, rebuild from statistics, backward; rows of up to 64K elements.

Statistics and arithmetic are float32 whatever the dtypes. A row is held in one tile, or in equal
ones side by side, since the width of a tile is a power of two: 1536 columns are three of 512
(`norm_fwd_kernel`, `norm_bwd_kernel`). Wider rows are walked in blocks (`norm_wide_*`). KIND is one
of `KINDS`; RMSNorm has the mean 0. Matrices are `kernels.pointwise.Matrix`; an argument that a call
has no use for is None.
The gradients of weight and bias are summed over rows in two stages, without atomics: each program
sums its own rows into a row of partials, and `column_sum_kernel` adds those.
With `sequences` (`kernels.pointwise.Sequences`), weight and bias are matrices with one row for each
sequence, and so are their gradients; else they are pointers to vectors.
"""

import triton
import triton.language as tl

from fused_remat.kernels.dropout import Site, keep_tile, seeded
from fused_remat.kernels.pointwise import (
    Matrix,
    load_wide,
    sequence_of,
    sequence_of_part,
    store_narrow,
    strip_of,
)

#: Norms that there are kernels for, by `NormSpec.kind`.
KINDS = ("layer_norm", "rms_norm")


@triton.jit
def _row_of(affine, sequence):
    """Return the pointer to the weight or bias of all rows, or of a sequence; None for None."""
    row_ptr = affine
    if affine is not None:  # noqa: SIM102 (known when it is compiled)
        if sequence is not None:
            row_ptr = affine.data + sequence * affine.stride
    return row_ptr


@triton.jit
def _normed(x, mean, rstd, weight_ptr, bias_ptr, offs_n, mask_n):
    """(x - mean) * rstd * weight + bias."""
    y = (x - mean[:, None]) * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _load_stats(mean_ptr, rstd_ptr, offs_m, mask_m):
    """Return the mean (0 where there is none) and rstd of rows, float32."""
    rstd = tl.load(rstd_ptr + offs_m, mask=mask_m, other=0.0)
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + offs_m, mask=mask_m, other=0.0)
    else:
        mean = tl.zeros_like(rstd)
    return mean, rstd


@triton.jit
def _columns(BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the columns of a row's tiles."""
    columns = ()
    for i in tl.static_range(BLOCKS):
        columns = columns + (i * BLOCK_N + tl.arange(0, BLOCK_N),)
    return columns


@triton.jit
def _row_sum(tiles):
    """Return the sums of rows over the columns of all tiles: threads exchange only once."""
    total = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i]
    return tl.sum(total, 1)


@triton.jit
def _row_dot(tiles, others):
    """Return the sums of rows of products."""
    total = tiles[0] * others[0]
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i] * others[i]
    return tl.sum(total, 1)


@seeded
def norm_fwd_kernel(
    x, residual, total, y, weight, bias, mean_ptr, rstd_ptr, sequences,
    site_key_ptr, row0, threshold, scale, M, N, eps,
    KIND: tl.constexpr, HAS_STATS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute y = norm(total), total = residual + keep * x rounded to its dtype; or y = norm(x).

    Shapes: x, residual, total, y (M, N); weight, bias (N,); mean, rstd (M,) float32, written, or
        read where HAS_STATS (a rebuild). BLOCKS * BLOCK_N >= N. A program does one part of
        `strip_of`, of BLOCK_M rows.
    Units: bytes moved = 2·M·N elements, 4 with a residual.
    Source: Ba, Kiros, Hinton 2016; Zhang, Sennrich 2019.
    """
    first, end = strip_of(tl.program_id(0), BLOCK_M, M, sequences)
    offs_m = first + tl.arange(0, BLOCK_M)
    mask_m = offs_m < end
    columns, tiles = _columns(BLOCKS, BLOCK_N), ()
    for i in tl.static_range(BLOCKS):
        mask = mask_m[:, None] & (columns[i] < N)[None, :]
        tile = load_wide(x, offs_m, columns[i], mask)
        if residual is not None:
            tile *= keep_tile(Site(site_key_ptr, row0, threshold, scale), offs_m, columns[i])
            tile += load_wide(residual, offs_m, columns[i], mask)
            store_narrow(total, offs_m, columns[i], mask, tile)
            tile = tile.to(total.data.dtype.element_ty).to(tl.float32)
        tiles = tiles + (tile,)
    if HAS_STATS:
        mean, rstd = _load_stats(mean_ptr, rstd_ptr, offs_m, mask_m)
    else:
        if KIND == "layer_norm":
            mean = _row_sum(tiles) / N
            tl.store(mean_ptr + offs_m, mean, mask=mask_m)
        else:
            mean = tl.zeros([BLOCK_M], tl.float32)
        squares = ()
        for i in tl.static_range(BLOCKS):
            from_mean = tiles[i]
            if KIND == "layer_norm":
                from_mean = tl.where((columns[i] < N)[None, :], from_mean - mean[:, None], 0.0)
            squares = squares + (from_mean * from_mean,)
        rstd = 1.0 / tl.sqrt(_row_sum(squares) / N + eps)
        tl.store(rstd_ptr + offs_m, rstd, mask=mask_m)
    sequence = sequence_of_part(tl.program_id(0), sequences)
    weight_ptr, bias_ptr = _row_of(weight, sequence), _row_of(bias, sequence)
    for i in tl.static_range(BLOCKS):
        mask_n = columns[i] < N
        normed = _normed(tiles[i], mean, rstd, weight_ptr, bias_ptr, columns[i], mask_n)
        store_narrow(y, offs_m, columns[i], mask_m[:, None] & mask_n[None, :], normed)


@triton.jit
def norm_wide_fwd_kernel(
    x, y, weight, bias, mean_ptr, rstd_ptr, sequences, M, N, eps,
    KIND: tl.constexpr, HAS_STATS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`norm_fwd_kernel` without a residual, for rows wider than a tile. Grid (M,).

    Moments of blocks are merged as in Chan, Golub, LeVeque 1979.
    Units: bytes moved = 3·M·N elements, the second reading from cache.
    """
    offs_m = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    if HAS_STATS:
        mean, rstd = _load_stats(mean_ptr, rstd_ptr, offs_m, offs_m >= 0)
    else:
        mean, square = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
        seen = tl.zeros([1], tl.float32)
        for start in range(0, N, BLOCK_N):
            offs_n = start + tl.arange(0, BLOCK_N)
            mask = (offs_n < N)[None, :]
            tile = load_wide(x, offs_m, offs_n, mask)
            count = tl.sum(tl.where(mask, 1.0, 0.0), 1)
            if KIND == "layer_norm":
                block_mean = tl.sum(tile, 1) / count
            else:
                block_mean = tl.zeros([1], tl.float32)
            from_mean = tl.where(mask, tile - block_mean[:, None], 0.0)
            delta = block_mean - mean
            square += tl.sum(from_mean * from_mean, 1)
            square += delta * delta * (seen * count / (seen + count))
            mean += delta * (count / (seen + count))
            seen += count
        rstd = 1.0 / tl.sqrt(square / N + eps)
        tl.store(rstd_ptr + offs_m, rstd)
        if KIND == "layer_norm":
            tl.store(mean_ptr + offs_m, mean)
    sequence = sequence_of(tl.program_id(0), M, sequences)
    weight_ptr, bias_ptr = _row_of(weight, sequence), _row_of(bias, sequence)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        tile = load_wide(x, offs_m, offs_n, mask_n[None, :])
        tile = _normed(tile, mean, rstd, weight_ptr, bias_ptr, offs_n, mask_n)
        store_narrow(y, offs_m, offs_n, mask_n[None, :], tile)


@triton.jit
def _load_weight(weight_ptr, offs_n, mask_n):
    """Return the weight of columns in float32; None where there is none."""
    weight = weight_ptr
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    return weight


@triton.jit
def _load_bwd(dy, x, weight, mean, rstd, offs_m, offs_n, mask):
    """dy, g = dy * weight, and the normed x of a tile."""
    grad = load_wide(dy, offs_m, offs_n, mask)
    tile = load_wide(x, offs_m, offs_n, mask)
    normed = (tile - mean[:, None]) * rstd[:, None]
    g = grad
    if weight is not None:
        g = grad * weight[None, :]
    return grad, g, normed


@triton.jit
def _store_dx(g, normed, mean_g, mean_gn, rstd, add, dx, offs_m, offs_n, mask):
    """Compute dx = rstd * (g - mean(g) - normed * mean(g * normed)) + add."""
    grad = rstd[:, None] * (g - mean_g[:, None] - normed * mean_gn[:, None])
    if add is not None:
        grad += load_wide(add, offs_m, offs_n, mask)
    store_narrow(dx, offs_m, offs_n, mask, grad)


@triton.jit
def norm_bwd_kernel(
    dy, x, add, dx, weight, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, sequences, rows, M, N,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute dx = the norm's gradient + add; each program's part of dweight and dbias.

    Shapes: dy, x, add, dx (M, N); mean (None: RMSNorm), rstd (M,) float32; dweight, dbias (P, N)
        float32, a row a program. A program does one part of `strip_of`, of `rows` rows, a
        multiple of BLOCK_M. BLOCKS * BLOCK_N >= N. Grid (P,).
    Units: bytes moved = 3·M·N elements, 4 with `add`.
    """
    first, end = strip_of(tl.program_id(0), rows, M, sequences)
    weight_ptr = _row_of(weight, sequence_of_part(tl.program_id(0), sequences))
    columns, weights, dweights, dbiases = _columns(BLOCKS, BLOCK_N), (), (), ()
    for i in tl.static_range(BLOCKS):
        if weight_ptr is not None:  # a tuple holds no None
            weights = weights + (_load_weight(weight_ptr, columns[i], columns[i] < N),)
        dweights = dweights + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
        dbiases = dbiases + (tl.zeros([BLOCK_M, BLOCK_N], tl.float32),)
    for start in range(0, rows, BLOCK_M):
        offs_m = first + start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < end
        mean, rstd = _load_stats(mean_ptr, rstd_ptr, offs_m, mask_m)
        grads, gs, norms, new_dweights, new_dbiases = (), (), (), (), ()
        for i in tl.static_range(BLOCKS):
            mask = mask_m[:, None] & (columns[i] < N)[None, :]
            read = offs_m, columns[i], mask
            scale = weight_ptr if weight_ptr is None else weights[i]
            grad, g, normed = _load_bwd(dy, x, scale, mean, rstd, *read)
            grads, gs, norms = grads + (grad,), gs + (g,), norms + (normed,)
        if dx is not None:
            mean_g = tl.zeros_like(rstd)
            if KIND == "layer_norm":
                mean_g = _row_sum(gs) / N
            mean_gn = _row_dot(gs, norms) / N
            for i in tl.static_range(BLOCKS):
                mask = mask_m[:, None] & (columns[i] < N)[None, :]
                read = offs_m, columns[i], mask
                _store_dx(gs[i], norms[i], mean_g, mean_gn, rstd, add, dx, *read)
        for i in tl.static_range(BLOCKS):
            new_dweights = new_dweights + (dweights[i] + grads[i] * norms[i],)
            new_dbiases = new_dbiases + (dbiases[i] + grads[i],)
        dweights, dbiases = new_dweights, new_dbiases
    at = tl.program_id(0).to(tl.int64) * N
    for i in tl.static_range(BLOCKS):
        if dweight_ptr is not None:
            tl.store(dweight_ptr + at + columns[i], tl.sum(dweights[i], 0), mask=columns[i] < N)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + at + columns[i], tl.sum(dbiases[i], 0), mask=columns[i] < N)


@triton.jit
def norm_wide_bwd_kernel(
    dy, x, add, dx, weight, mean_ptr, rstd_ptr, sequences, M, N,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dx of `norm_bwd_kernel` for rows wider than a tile, a row a program. Grid (M,).

    Units: bytes moved = 5·M·N elements, 6 with `add`, the second reading from cache.
    """
    offs_m = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    weight_ptr = _row_of(weight, sequence_of(tl.program_id(0), M, sequences))
    mean, rstd = _load_stats(mean_ptr, rstd_ptr, offs_m, offs_m >= 0)
    mean_g, mean_gn = tl.zeros([1], tl.float32), tl.zeros([1], tl.float32)
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        scale = _load_weight(weight_ptr, offs_n, mask_n)
        _, g, normed = _load_bwd(dy, x, scale, mean, rstd, offs_m, offs_n, mask_n[None, :])
        if KIND == "layer_norm":
            mean_g += tl.sum(g, 1) / N
        mean_gn += tl.sum(g * normed, 1) / N
    for start in range(0, N, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        scale = _load_weight(weight_ptr, offs_n, mask_n)
        _, g, normed = _load_bwd(dy, x, scale, mean, rstd, offs_m, offs_n, mask_n[None, :])
        _store_dx(g, normed, mean_g, mean_gn, rstd, add, dx, offs_m, offs_n, mask_n[None, :])


@triton.jit
def norm_params_bwd_kernel(
    dy, x, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, sequences, rows, M, N,
    KIND: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Parts of dweight and dbias for rows wider than a tile: columns by axis 0, rows by axis 1.

    Shapes: as in `norm_bwd_kernel`. Grid (cdiv(N, BLOCK_N), P).
    Units: bytes moved = 2·M·N elements.
    """
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    dweight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first, end = strip_of(tl.program_id(1), rows, M, sequences)
    for start in range(0, rows, BLOCK_M):
        offs_m = first + start + tl.arange(0, BLOCK_M)
        mask_m = offs_m < end
        mask = mask_m[:, None] & mask_n[None, :]
        mean, rstd = _load_stats(mean_ptr, rstd_ptr, offs_m, mask_m)
        grad, _, normed = _load_bwd(dy, x, None, mean, rstd, offs_m, offs_n, mask)
        dweight += grad * normed
        dbias += grad
    at = tl.program_id(1).to(tl.int64) * N + offs_n
    if dweight_ptr is not None:
        tl.store(dweight_ptr + at, tl.sum(dweight, 0), mask=mask_n)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + at, tl.sum(dbias, 0), mask=mask_n)


@triton.jit
def column_sum_kernel(
    parts_ptr, out_ptr, other_parts_ptr, other_out_ptr, P, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute out, the sum of parts over rows, always in the same order; also of the others.

    Shapes: parts (P, N), out (N,), float32. Grid (cdiv(N, BLOCK_N), 1, or 2 with others).
    """
    if other_parts_ptr is not None:  # noqa: SIM102 (known when it is compiled)
        if tl.program_id(1) == 1:
            parts_ptr = other_parts_ptr
            out_ptr = other_out_ptr
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, P, BLOCK_M):
        offs_m = (start + tl.arange(0, BLOCK_M)).to(tl.int64)
        mask = (offs_m < P)[:, None] & (offs_n < N)[None, :]
        total += load_wide(Matrix(parts_ptr, N), offs_m, offs_n, mask)
    tl.store(out_ptr + offs_n, tl.sum(total, 0), mask=offs_n < N)

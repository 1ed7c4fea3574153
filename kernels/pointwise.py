"""One pass over a matrix: dropout and residual sum; activations, plain and gated, and backward.

Rows may lie any distance apart, also none (an expanded gradient); the elements of a row are side
by side. Element (i, j)'s dropout is that of row `row0 + i`, column j in `fused_remat.random`.
An argument that a call has no use for is None. Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fused_remat.kernels.dropout import Site, keep_tile, seeded


class Matrix(NamedTuple):
    """A matrix (M, N): where it is, and the elements from one row to the next.

    `data` is a pointer; within the kernels of products it may be a tensor descriptor, or None.
    """

    data: Any
    stride: Any


class Sequences(NamedTuple):
    """The sequences of a matrix's rows: row r is of number (first + r) // tokens of `count`."""

    first: Any
    tokens: Any
    count: Any


@triton.jit
def sequence_of(offs_m, M, sequences):
    """Return the sequence of each row, of rows beyond M the last; None without sequences."""
    sequence = sequences
    if sequences is not None:
        rows = sequences.first + tl.minimum(offs_m, M - 1).to(tl.int32)
        sequence = (rows // sequences.tokens).to(tl.int64)
    return sequence


@triton.jit
def sequence_of_part(part, sequences):
    """Return the sequence of a part of rows; None without sequences."""
    sequence = sequences
    if sequences is not None:
        sequence = (part % sequences.count).to(tl.int64)
    return sequence


@triton.jit
def strip_of(part, rows, M, sequences):
    """Return the first row of part `part`, at most `rows`, and the row after its last.

    With sequences, no part has rows of two, and the parts of one are `count` apart.
    """
    if sequences is None:
        first = part.to(tl.int64) * rows
        end = M
    else:
        begin = sequence_of_part(part, sequences) * sequences.tokens - sequences.first
        start = begin + (part // sequences.count).to(tl.int64) * rows
        first = tl.maximum(start, 0)
        end = tl.minimum(tl.minimum(start + rows, begin + sequences.tokens), M)
    return first, end


@triton.jit
def tile_offsets(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows (int64) and columns of this program's tile, and the mask of those that exist."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    offs_m = (pid // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    return offs_m, offs_n, (offs_m < M)[:, None] & (offs_n < N)[None, :]


@triton.jit
def load_wide(x, offs_m, offs_n, mask):
    """Return a tile in float32; 0 outside."""
    ptrs = x.data + offs_m[:, None] * x.stride + offs_n[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_narrow(y, offs_m, offs_n, mask, tile):
    """Store a tile in the dtype of the matrix."""
    ptrs = y.data + offs_m[:, None] * y.stride + offs_n[None, :]
    tl.store(ptrs, tile.to(y.data.dtype.element_ty), mask=mask)


@seeded
def dropout_add_fwd_kernel(
    x, residual, y, site_key_ptr, row0, threshold, scale, M, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y = residual + keep * x, rounded once; without a residual, also dropout's backward.

    Shapes: x, residual, y (M, N) of any float dtype; site_key () int64.
    Units: bytes moved = 3·M·N elements (2 without a residual); about 10 operations an element.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    tile = load_wide(x, offs_m, offs_n, mask)
    tile *= keep_tile(Site(site_key_ptr, row0, threshold, scale), offs_m, offs_n)
    if residual is not None:
        tile += load_wide(residual, offs_m, offs_n, mask)
    store_narrow(y, offs_m, offs_n, mask, tile)


@triton.jit
def gate_add_fwd_kernel(
    x, residual, gate, y, sequences, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Compute y = residual + gate * x, rounded once; without a residual, also the gradient of x.

    Shapes: x, residual, y (M, N) of any float dtype; gate (sequences, N).
    Units: bytes moved = 3·M·N elements (2 without a residual), and the gate from cache.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    tile = load_wide(gate, sequence_of(offs_m, M, sequences), offs_n, mask)
    tile *= load_wide(x, offs_m, offs_n, mask)
    if residual is not None:
        tile += load_wide(residual, offs_m, offs_n, mask)
    store_narrow(y, offs_m, offs_n, mask, tile)


@triton.jit
def gate_add_bwd_kernel(
    dy, x, gate, dx, sums_ptr, sequences, M, N,
    ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dx = gate * dy, if not None, and the sums of dy * x over each program's rows.

    Shapes: dy, x, dx (M, N), dx may be x; gate (sequences, N); sums (P, N) float32, P a multiple of
        the number of sequences. ROWS is a multiple of BLOCK_M. Grid (P * cdiv(N, BLOCK_N),).
    Units: bytes moved = 3·M·N elements, 2 without dx.
    """
    blocks_n = tl.cdiv(N, BLOCK_N)
    part = tl.program_id(0) // blocks_n
    offs_n = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    first, end = strip_of(part, ROWS, M, sequences)
    if dx is not None:
        sequence = sequence_of_part(part, sequences) + tl.arange(0, 1)
        own = load_wide(gate, sequence, offs_n, (offs_n < N)[None, :])
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        offs_m = first + start + tl.arange(0, BLOCK_M)
        mask = (offs_m < end)[:, None] & (offs_n < N)[None, :]
        grad = load_wide(dy, offs_m, offs_n, mask)
        total += grad * load_wide(x, offs_m, offs_n, mask)
        if dx is not None:
            store_narrow(dx, offs_m, offs_n, mask, grad * own)
    tl.store(sums_ptr + part.to(tl.int64) * N + offs_n, tl.sum(total, 0), mask=offs_n < N)


@seeded
def act_fwd_kernel(
    x, y, site_key_ptr, row0, threshold, scale, M, N,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y = keep * act(x).

    Shapes: x, y (M, N). Units: bytes moved = 2·M·N elements.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    act = ACT(load_wide(x, offs_m, offs_n, mask))
    act *= keep_tile(Site(site_key_ptr, row0, threshold, scale), offs_m, offs_n)
    store_narrow(y, offs_m, offs_n, mask, act)


@seeded
def act_bwd_kernel(
    dy, x, dx, y, site_key_ptr, row0, threshold, scale, M, N,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dx = keep * dy * act'(x), and y = keep * act(x) where y is not None.

    Shapes: dy, x, dx, y (M, N); dx may be dy, and y may be x.
    Units: bytes moved = 3·M·N elements, 4 with y.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    dact = load_wide(dy, offs_m, offs_n, mask)
    keep = keep_tile(Site(site_key_ptr, row0, threshold, scale), offs_m, offs_n)
    dact *= keep
    grad, act = ACT(dact, load_wide(x, offs_m, offs_n, mask))
    store_narrow(dx, offs_m, offs_n, mask, grad)
    if y is not None:
        store_narrow(y, offs_m, offs_n, mask, act * keep)


@seeded
def act_sum_bwd_kernel(
    dy, x, dx, y, sums_ptr, site_key_ptr, row0, threshold, scale, M, N,
    ACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute what `act_bwd_kernel` does, and the sums of dx over each program's rows.

    Without x, dx = keep * dy.
    Shapes: as there; sums (P, N) float32, P = cdiv(M, ROWS). ROWS is a multiple of BLOCK_M.
        Grid (P * cdiv(N, BLOCK_N),).
    Units: bytes moved = 3·M·N elements, 4 with y.
    """
    blocks_n = tl.cdiv(N, BLOCK_N)
    part = tl.program_id(0) // blocks_n
    offs_n = (tl.program_id(0) % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, ROWS, BLOCK_M):
        offs_m = part.to(tl.int64) * ROWS + start + tl.arange(0, BLOCK_M)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        keep = keep_tile(Site(site_key_ptr, row0, threshold, scale), offs_m, offs_n)
        grad = load_wide(dy, offs_m, offs_n, mask) * keep
        if x is not None:
            grad, act = ACT(grad, load_wide(x, offs_m, offs_n, mask))
            if y is not None:
                store_narrow(y, offs_m, offs_n, mask, act * keep)
        store_narrow(dx, offs_m, offs_n, mask, grad)
        total += grad
    at = part.to(tl.int64) * N + offs_n
    tl.store(sums_ptr + at, tl.sum(total, 0), mask=offs_n < N)


@seeded
def gated_fwd_kernel(
    gate, up, y, site_key_ptr, row0, threshold, scale, M, N,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y = keep * act(gate) * up (Shazeer 2020).

    Shapes: gate, up, y (M, N). Units: bytes moved = 3·M·N elements.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    gates = load_wide(gate, offs_m, offs_n, mask)
    ups = load_wide(up, offs_m, offs_n, mask)
    act = ACT(gates) * ups
    act *= keep_tile(Site(site_key_ptr, row0, threshold, scale), offs_m, offs_n)
    store_narrow(y, offs_m, offs_n, mask, act)


@seeded
def gated_bwd_kernel(
    dy, gate, up, dgate, dup, y, site_key_ptr, row0, threshold, scale, M, N,
    ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dgate = keep * dy * up * act'(gate) and dup = keep * dy * act(gate).

    Also y of `gated_fwd_kernel` where y is not None.
    Shapes: all (M, N); up, dgate and y, or dup, may be None. dgate may be dy or gate, dup may be
        dy, and y may be up.
    Units: bytes moved = 5·M·N elements, 6 with y.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    dact = load_wide(dy, offs_m, offs_n, mask)
    keep = keep_tile(Site(site_key_ptr, row0, threshold, scale), offs_m, offs_n)
    dact *= keep
    gates = load_wide(gate, offs_m, offs_n, mask)
    if up is not None:
        ups = load_wide(up, offs_m, offs_n, mask)
        grad, act = ACT(dact * ups, gates)
        store_narrow(dgate, offs_m, offs_n, mask, grad)
        if y is not None:
            store_narrow(y, offs_m, offs_n, mask, act * ups * keep)
    else:
        _, act = ACT(dact, gates)
    if dup is not None:
        store_narrow(dup, offs_m, offs_n, mask, dact * act)

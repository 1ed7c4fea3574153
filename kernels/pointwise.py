"""One pass over a matrix: dropout and residual sum; activations, plain and gated, and backward.

Rows may lie any distance apart, also none (an expanded gradient); the elements of a row are side
by side. Element (i, j)'s dropout is that of row `row0 + i`, column j in `fused_remat.random`.
A pointer that a call has no use for is None. Grid: (cdiv(M, BLOCK_M) * cdiv(N, BLOCK_N),).

What an activation is of may be packed: codes (M, N) int8, with the steps (M, cdiv(N, BLOCK)) of
`kernels.packing`, float32, which are None where it is not. BLOCK_N is then its BLOCK.
"""

import triton
import triton.language as tl

from fused_remat.kernels.dropout import keep_scale, split_key
from fused_remat.kernels.packing import load_unpacked


@triton.jit
def tile_offsets(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows (int64) and columns of this program's tile, and the mask of those that exist."""
    blocks_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    offs_m = (pid // blocks_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % blocks_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    return offs_m, offs_n, (offs_m < M)[:, None] & (offs_n < N)[None, :]


@triton.jit
def load_wide(x_ptr, stride_xm, offs_m, offs_n, mask):
    """A tile in float32; 0 outside."""
    ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_operand(x_ptr, step_ptr, like_ptr, stride_xm, stride_sm, M, N, offs_m, offs_n, mask):
    """A tile of this program in float32, packed where there are steps; 0 outside.

    What is unpacked is rounded to the dtype of `like_ptr`, in which it was before it was packed.
    """
    if step_ptr is not None:
        block = tl.program_id(0) % tl.cdiv(N, offs_n.shape[0])
        x = load_unpacked(x_ptr, step_ptr, stride_xm, stride_sm, block, M, offs_m, offs_n, mask)
        x = x.to(like_ptr.dtype.element_ty).to(tl.float32)
    else:
        x = load_wide(x_ptr, stride_xm, offs_m, offs_n, mask)
    return x


@triton.jit
def store_narrow(y_ptr, stride_ym, offs_m, offs_n, mask, y):
    """Store a tile in the dtype of the tensor."""
    ptrs = y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def keep_at(site_key_ptr, row0, offs_m, offs_n, threshold, scale):
    """Dropout's multiplier for rows and columns; 1 where there is no site (None)."""
    keep = 1.0
    if site_key_ptr is not None:
        row_key = split_key(tl.load(site_key_ptr), row0 + offs_m)
        keep = keep_scale(row_key, offs_n, threshold, scale)
    return keep


@triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)
def dropout_add_fwd_kernel(
    x_ptr,
    residual_ptr,
    site_key_ptr,
    y_ptr,
    stride_xm,
    stride_rm,
    stride_ym,
    row0,
    M,
    N,
    threshold,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = residual + keep * x, rounded once; without a residual, also dropout's backward.

    Shapes: x, residual, y (M, N) of any float dtype; site_key () int64.
    Units: bytes moved = 3·M·N elements (2 without a residual); about 10 operations an element.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    y = load_wide(x_ptr, stride_xm, offs_m, offs_n, mask)
    y *= keep_at(site_key_ptr, row0, offs_m, offs_n, threshold, scale)
    if residual_ptr is not None:
        y += load_wide(residual_ptr, stride_rm, offs_m, offs_n, mask)
    store_narrow(y_ptr, stride_ym, offs_m, offs_n, mask, y)


@triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)
def act_fwd_kernel(
    x_ptr,
    step_ptr,
    site_key_ptr,
    y_ptr,
    stride_xm,
    stride_sm,
    stride_ym,
    row0,
    M,
    N,
    threshold,
    scale,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = keep * act(x).

    Shapes: x, y (M, N); x may be packed. Units: bytes moved = 2·M·N elements.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    x = load_operand(x_ptr, step_ptr, y_ptr, stride_xm, stride_sm, M, N, offs_m, offs_n, mask)
    y = ACT(x)
    y *= keep_at(site_key_ptr, row0, offs_m, offs_n, threshold, scale)
    store_narrow(y_ptr, stride_ym, offs_m, offs_n, mask, y)


@triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)
def act_bwd_kernel(
    dy_ptr,
    x_ptr,
    step_ptr,
    site_key_ptr,
    dx_ptr,
    y_ptr,
    stride_dym,
    stride_xm,
    stride_sm,
    stride_dxm,
    stride_ym,
    row0,
    M,
    N,
    threshold,
    scale,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dx = keep * dy * act'(x), and y = keep * act(x) where y_ptr is not None.

    Shapes: dy, x, dx, y (M, N); x may be packed; dx may be dy.
    Units: bytes moved = 3·M·N elements, 4 with y.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    dy = load_wide(dy_ptr, stride_dym, offs_m, offs_n, mask)
    keep = keep_at(site_key_ptr, row0, offs_m, offs_n, threshold, scale)
    dy *= keep
    x = load_operand(x_ptr, step_ptr, dx_ptr, stride_xm, stride_sm, M, N, offs_m, offs_n, mask)
    dx, y = ACT(dy, x)
    store_narrow(dx_ptr, stride_dxm, offs_m, offs_n, mask, dx)
    if y_ptr is not None:
        store_narrow(y_ptr, stride_ym, offs_m, offs_n, mask, y * keep)


@triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)
def gated_fwd_kernel(
    gate_ptr,
    gate_step_ptr,
    up_ptr,
    up_step_ptr,
    site_key_ptr,
    y_ptr,
    stride_gm,
    stride_gsm,
    stride_um,
    stride_usm,
    stride_ym,
    row0,
    M,
    N,
    threshold,
    scale,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = keep * act(gate) * up (Shazeer 2020).

    Shapes: gate, up, y (M, N); gate and up may be packed. Units: bytes moved = 3·M·N elements.
    """
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    gate = load_operand(
        gate_ptr, gate_step_ptr, y_ptr, stride_gm, stride_gsm, M, N, offs_m, offs_n, mask
    )
    up = load_operand(up_ptr, up_step_ptr, y_ptr, stride_um, stride_usm, M, N, offs_m, offs_n, mask)
    y = ACT(gate) * up
    y *= keep_at(site_key_ptr, row0, offs_m, offs_n, threshold, scale)
    store_narrow(y_ptr, stride_ym, offs_m, offs_n, mask, y)


@triton.jit(
    do_not_specialize=["row0", "threshold"], do_not_specialize_on_alignment=["site_key_ptr"]
)
def gated_bwd_kernel(
    dy_ptr,
    gate_ptr,
    gate_step_ptr,
    up_ptr,
    up_step_ptr,
    site_key_ptr,
    dgate_ptr,
    dup_ptr,
    stride_dym,
    stride_gm,
    stride_gsm,
    stride_um,
    stride_usm,
    stride_dgm,
    stride_dum,
    row0,
    M,
    N,
    threshold,
    scale,
    ACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dgate = keep * dy * up * act'(gate) and dup = keep * dy * act(gate).

    Shapes: all (M, N); gate and up may be packed; up and dgate, or dup, may be None; dgate may be
        dy. Units: bytes moved = 5·M·N elements.
    """
    if dup_ptr is not None:
        like_ptr = dup_ptr
    else:
        like_ptr = dgate_ptr
    offs_m, offs_n, mask = tile_offsets(M, N, BLOCK_M, BLOCK_N)
    dy = load_wide(dy_ptr, stride_dym, offs_m, offs_n, mask)
    dy *= keep_at(site_key_ptr, row0, offs_m, offs_n, threshold, scale)
    gate = load_operand(
        gate_ptr, gate_step_ptr, like_ptr, stride_gm, stride_gsm, M, N, offs_m, offs_n, mask
    )
    if up_ptr is not None:
        up = load_operand(
            up_ptr, up_step_ptr, like_ptr, stride_um, stride_usm, M, N, offs_m, offs_n, mask
        )
        dgate, act = ACT(dy * up, gate)
        store_narrow(dgate_ptr, stride_dgm, offs_m, offs_n, mask, dgate)
    else:
        _, act = ACT(dy, gate)
    if dup_ptr is not None:
        store_narrow(dup_ptr, stride_dum, offs_m, offs_n, mask, dy * act)

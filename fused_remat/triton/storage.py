"""Storage formats in kernels (`kernels.packing`): which have some, and how operands are passed."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat.formats import BLOCK, FORMATS, Loaded, Parts, Quantized
from fused_remat.kernels.packing import pack_int8_fwd_kernel, unpack_int8_fwd_kernel
from fused_remat.kernels.pointwise import Matrix, PackedMatrix
from fused_remat.steps.operations import faster
from fused_remat.steps.storage import QuantizeCall, dequantize, quantize
from fused_remat.triton.launch import Launch, cdiv, matrix, operand, rows_in_place
from fused_remat.triton.launch_cache import run

#: Formats that kernels quantize and dequantize; they differ only in rounding.
KERNELS = frozenset({"int8", "int8_stochastic"})
#: How an activation is quantized, and the codes and steps that a kernel fills.
Codes = tuple[QuantizeCall, Parts]
_ROWS = 64  # rows of a program, which processes one block of each


def unsupported_reason(*formats: str) -> str | None:
    """Why kernels cannot process activations in these formats ("" is native); None if they can."""
    unknown = [name for name in formats if name and name not in KERNELS]
    return f"there is no kernel for {unknown[0]}" if unknown else None


@faster(
    quantize,
    "triton",
    unsupported_reason=unsupported_reason,
    description=lambda key, *_: f"kernel pack_int8_fwd, {key}",
)
def quantize_triton(x, storage):
    parts = new_parts(x, storage)
    run(quantize_int8, x, storage, parts)
    return parts


@faster(
    dequantize,
    "triton",
    unsupported_reason=unsupported_reason,
    description=lambda key, *_: f"kernel unpack_int8_fwd, {key}",
)
def dequantize_triton(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    run(dequantize_int8, x, y)
    return y


def dequantized(x: Quantized) -> Tensor:
    """`dequantize`, by the kernel if the format has one."""
    return dequantize_triton(x) if unsupported_reason(x.stored) is None else dequantize(x)


def quantize_int8(x: Tensor, storage: QuantizeCall, parts: Parts) -> Launch:
    """Fill `parts` with the codes and steps of x."""
    x, (codes, step), (key, row0) = rows_in_place(x), parts, site_of(storage)
    args = (x, codes, step, key, row0, x.stride(0), *x.shape)
    return _over_blocks(pack_int8_fwd_kernel, args, x)


def dequantize_int8(x: Quantized, y: Tensor) -> Launch:
    """Fill y with the values of x."""
    args = (loaded(x), matrix(y), *y.shape)
    return _over_blocks(unpack_int8_fwd_kernel, args, y)


def _over_blocks(kernel: object, args: tuple[object, ...], x: Tensor) -> Launch:
    grid = (cdiv(x.shape[0], _ROWS) * cdiv(x.shape[1], BLOCK),)
    constants = {"BLOCK_M": _ROWS, "BLOCK_N": BLOCK}
    return Launch(kernel, grid, args, constants, num_warps=8, device=x.device)


def loaded(x: Loaded | None) -> Matrix | PackedMatrix | None:
    """`operand`, of what may be packed."""
    if isinstance(x, Quantized):
        codes, step = x.parts
        return PackedMatrix(codes, codes.stride(0), step, step.stride(0))
    return operand(x)


def new_parts(x: Tensor, storage: QuantizeCall) -> Parts:
    """Uninitialised codes and steps of x."""
    row, (rows, width) = FORMATS[storage.stored], x.shape
    codes = torch.empty((rows, width), dtype=row.dtype, device=x.device)
    shape = (rows, row.scale_width(width))
    return codes, torch.empty(shape, dtype=torch.float32, device=x.device)


def site_of(storage: QuantizeCall) -> tuple[Tensor | None, int]:
    """The site's key and the first row for stochastic rounding; None and 0 for other rounding."""
    if not FORMATS[storage.stored].seeded:
        return None, 0
    if storage.uniform is None:
        raise ValueError(f"the format {storage.stored!r} rounds stochastically: pass uniform=")
    return storage.uniform.site_key, storage.uniform.row0


def codes_of(
    codes_and_call: Codes | None,
) -> tuple[tuple[Tensor | None, ...], Tensor | None, int | None]:
    """Codes and steps, the rounding site's key and first row, as a kernel takes them; or None."""
    if codes_and_call is None:
        return (None, None), None, None
    return codes_and_call[1], *site_of(codes_and_call[0])

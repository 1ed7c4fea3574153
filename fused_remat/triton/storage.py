"""Storage formats by `kernels.packing`: which have kernels, activations as kernels take them."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat.formats import BLOCK, FORMATS, Loaded, Parts, Quantized
from fused_remat.kernels.packing import pack_int8_fwd_kernel, unpack_int8_fwd_kernel
from fused_remat.steps.operations import faster
from fused_remat.steps.storage import QuantizeCall, dequantize, quantize
from fused_remat.triton.launch import Launch, cdiv, rows_in_place, stride_of

#: Formats that kernels pack and unpack; they differ in how they round alone.
KERNELS = frozenset({"int8", "int8_stochastic"})

#: A matrix, and the steps of its codes where it is packed.
Operand = tuple[Tensor | None, Tensor | None]

#: How an activation is to be packed, and what a kernel is to fill.
Codes = tuple[QuantizeCall, Parts]

_ROWS = 64  # a program's, of one block each


def why_not(*formats: str) -> str | None:
    """Why kernels do not take what is in these formats, "" for native; None if they do."""
    unknown = [name for name in formats if name and name not in KERNELS]
    return f"no kernel for {unknown[0]}" if unknown else None


def operand(x: Loaded | None) -> Operand:
    """x as a kernel loads it: in place, or its codes and their steps."""
    if isinstance(x, Quantized):
        codes, step = x.parts
        return codes, step
    return None if x is None else rows_in_place(x), None


def strides(given: Operand) -> tuple[int, int | None]:
    """The row strides of an operand; None for that of no steps, so that it is no argument."""
    x, step = given
    return stride_of(x), None if step is None else step.stride(0)


def unpacked(x: Quantized) -> Tensor:
    """`dequantize`, by the kernel where there is one."""
    return dequantize_triton(x) if why_not(x.stored) is None else dequantize(x)


def new_parts(x: Tensor, storage: QuantizeCall) -> Parts:
    """Codes and steps of x for a kernel to fill."""
    row, (rows, width) = FORMATS[storage.stored], x.shape
    codes = torch.empty((rows, width), dtype=row.dtype, device=x.device)
    shape = (rows, row.scale_width(width))
    return codes, torch.empty(shape, dtype=torch.float32, device=x.device)


def site_of(storage: QuantizeCall) -> tuple[Tensor | None, int]:
    """The key of the site of stochastic rounding, and the first row; None and 0 without."""
    if not FORMATS[storage.stored].seeded:
        return None, 0
    if storage.uniform is None:
        raise ValueError(f"the format {storage.stored!r} is rounded stochastically: pass uniform=")
    return storage.uniform.site_key, storage.uniform.row0


def codes_of(
    packed: Codes | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, int | None]:
    """The key of a site of stochastic rounding, codes, steps, and the first row, for a kernel."""
    if packed is None:
        return None, None, None, None
    (key, row0), (codes, step) = site_of(packed[0]), packed[1]
    return key, codes, step, row0


def pack_int8(x: Tensor, storage: QuantizeCall, parts: Parts) -> Launch:
    """parts = the codes and steps of x."""
    x, (codes, step), (key, row0) = rows_in_place(x), parts, site_of(storage)
    args = (x, key, codes, step, stride_of(x), row0, *x.shape)
    return _over_blocks(pack_int8_fwd_kernel, args, x)


def unpack_int8(x: Quantized, y: Tensor) -> Launch:
    """y = x."""
    codes, step = x.parts
    args = (codes, step, y, *map(stride_of, (codes, step, y)), *y.shape)
    return _over_blocks(unpack_int8_fwd_kernel, args, y)


def _over_blocks(kernel: object, args: tuple[object, ...], x: Tensor) -> Launch:
    grid = (cdiv(x.shape[0], _ROWS) * cdiv(x.shape[1], BLOCK),)
    constants = {"BLOCK_M": _ROWS, "BLOCK_N": BLOCK}
    return Launch(kernel, grid, args, constants, num_warps=8, device=x.device)


@faster(quantize, "triton", why_not=why_not, says=lambda key, *_: f"kernel pack_int8_fwd, {key}")
def quantize_triton(x, storage):
    parts = new_parts(x, storage)
    pack_int8(x, storage, parts).run()
    return parts


@faster(
    dequantize, "triton", why_not=why_not, says=lambda key, *_: f"kernel unpack_int8_fwd, {key}"
)
def dequantize_triton(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    unpack_int8(x, y).run()
    return y

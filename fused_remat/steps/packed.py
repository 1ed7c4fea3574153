"""Frozen quantized weights: the formats of other libraries, whose own functions dequantize them.

A packed weight is data of a block. Every product in forward, in a rebuild and in backward makes a
copy in its own dtype and frees it, so that nothing but the packed weight is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.spec import PackedSpec
from fused_remat.steps.operations import operation

Tensors = Sequence[Tensor]


class Format(NamedTuple):
    """A format of quantized weights."""

    library: str  # its package
    #: Returns the weight (out, in) of the tensors named by a spec, if possible in a dtype.
    dequantize: Callable[[PackedSpec, Tensors, torch.dtype], Tensor]
    #: Computes x @ weight.T + bias as the library does on CUDA.
    product: Callable[[PackedSpec, Tensors, Tensor, Tensor | None], Tensor] | None = None


def _describe(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    return f"the function of {FORMATS[key[0]].library}"


@operation(
    key=lambda spec, tensors, dtype: (spec.kind, dtype, tensors[0].device), description=_describe
)
def dequantize(spec: PackedSpec, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    """Return the weight (out, in) in `dtype`; `tensors` are those of `spec.names`."""
    return FORMATS[spec.kind].dequantize(spec, tensors, dtype).to(dtype)


@operation(key=lambda spec, tensors, x, bias: (spec.kind, x.dtype, x.device), description=_describe)
def packed_product(
    spec: PackedSpec, tensors: Tensors, x: Tensor, bias: Tensor | None
) -> Tensor | None:
    """Return x @ weight.T + bias by one function of the library, where its module calls one.

    That is on CUDA; None elsewhere.
    """
    run = FORMATS[spec.kind].product if x.is_cuda else None
    return None if run is None else run(spec, tensors, x, bias)


def of_experts(spec: PackedSpec, tensors: Tensors) -> tuple[PackedSpec, Tensors]:
    """Return the format of one expert's matrix in a stack, and the tensors (E, ...) of all.

    Nested maxima are dequantized, since their blocks do not end where experts do.
    """
    return _of_one(spec), [t.view(spec.shape[0], -1) for t in (tensors[0], _maxima(spec, tensors))]


@functools.lru_cache(256)
def _of_one(spec: PackedSpec) -> PackedSpec:
    options = (*spec.options[:2], 0)
    return replace(spec, shape=spec.shape[1:], parts=("absmax",), options=options)


def _maxima(spec: PackedSpec, tensors: Tensors) -> Tensor:
    """Return the maxima of blocks of 4 bits, which may be quantized, too."""
    _, absmax, *nested = tensors
    if nested:
        code, scale, offset = nested
        decode: Any = torch.ops.bitsandbytes.dequantize_blockwise.default
        absmax = decode(absmax, scale, code, spec.options[2], torch.float32).add_(offset)
    return absmax


def _4bit(spec: PackedSpec, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    blocksize, quant_type, _ = spec.options
    ops: Any = torch.ops.bitsandbytes
    given = tensors[0], _maxima(spec, tensors), blocksize, quant_type, list(spec.shape), dtype
    return ops.dequantize_4bit.default(*given)  # type: ignore[no-any-return]


def _4bit_product(spec: PackedSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    (weight, absmax, *nested), (blocksize, quant_type, _) = tensors, spec.options
    more = dict[str, Any]()
    if nested:
        code, scale, offset = nested
        more = {"absmax_8bit": absmax, "absmax_code": code, "absmax_offset": offset}
        absmax = scale
    given = x, weight.view(-1, 1), list(spec.shape), absmax, blocksize, quant_type
    product: Any = torch.ops.bitsandbytes.gemm_4bit.default
    return product(*given, bias=bias, **more)  # type: ignore[no-any-return]


def _int8(spec: PackedSpec, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    weight, scale = tensors
    return weight.to(dtype).mul_(scale.unsqueeze(1).mul(1.0 / 127.0))


def _int8_product(spec: PackedSpec, tensors: Tensors, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product of LLM.int8(), which quantizes x, too."""
    (weight, scale), (threshold,) = tensors, spec.options
    ops: Any = torch.ops.bitsandbytes
    x_int8, x_scale, outliers = ops.int8_vectorwise_quant.default(x.half(), threshold)
    if threshold > 0.0:
        given = x, x_int8, weight, x_scale, scale, outliers, bias
        return ops.int8_mixed_scaled_mm.default(*given)[0]  # type: ignore[no-any-return]
    product = ops.int8_scaled_mm.default(x_int8, weight, x_scale, scale, bias=bias, dtype=x.dtype)
    return product  # type: ignore[no-any-return]


def _affine(spec: PackedSpec, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    from torchao.quantization.quant_primitives import dequantize_affine  # type: ignore[import-untyped]

    (weight, scale, *zero), (block, bounds) = tensors, spec.options
    given = weight, block, scale, [*zero, None][0], torch.int8, *bounds
    return dequantize_affine(*given, output_dtype=spec.dtype)  # type: ignore[no-any-return]


def _hqq(spec: PackedSpec, tensors: Tensors, dtype: torch.dtype) -> Tensor:
    from hqq.core.quantize import Quantizer  # type: ignore[import-untyped]

    (weight, scale, zero), (view, *options) = tensors, spec.options
    meta = dict(options) | {"scale": scale, "zero": zero, "shape": spec.shape}
    meta |= {"compute_dtype": spec.dtype, "unpack_view_dtype": getattr(torch, view)}
    return Quantizer.dequantize(weight, meta)  # type: ignore[no-any-return]


#: By kind, the formats of which a block dequantizes weights.
FORMATS: dict[str, Format] = {
    "bnb_4bit": Format("bitsandbytes", _4bit, _4bit_product),
    "bnb_int8": Format("bitsandbytes", _int8, _int8_product),
    "torchao": Format("torchao", _affine),
    "hqq": Format("hqq", _hqq),
}

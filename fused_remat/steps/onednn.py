"""Products of linear layers on CPUs in addition to ATen's: forward and dx. `cpu_choice` chooses.

In float32 ATen's are MKL's on x86, and oneDNN's are faster on some processors. In 16 bits ATen's
are oneDNN's, and on some processors two of half the columns each are faster. Weight gradients are
ATen's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fused_remat.steps import cpu_choice, linear
from fused_remat.steps.cpu_choice import LARGEST_16_BIT, SMALLEST_PRODUCT
from fused_remat.steps.linear import LOW, linear_dx, linear_fwd
from fused_remat.steps.operations import faster

# The products of 16 bits that may run in halves: tokens, columns and multiply-adds.
_TOKENS, _MOST_TOKENS, _LEAST_COLUMNS = 256, 2048, 128


def _onednn() -> Any:
    """Return oneDNN's product if PyTorch has it with the arguments of the calls here, else None."""
    product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if product is None or not torch.backends.mkldnn.is_available():
        return None
    if product not in flop_registry:
        register_flop_formula(product)(_flops)
    expected = ["X", "W", "B", "attr", "scalars", "algorithm"]
    named = [argument.name for argument in product.default._schema.arguments]
    return product.default if named == expected else None


def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Return the floating-point operations of oneDNN's product of these shapes."""
    return 2 * int(math.prod(x)) * int(weight[0])


_ONEDNN = _onednn()


_available = functools.partial(cpu_choice.may_apply, cpu_choice.PRODUCTS)


def _unsupported_reason(backward: bool, key: tuple[Any, ...]) -> str | None:
    dtype, device, *_, (tokens, *weight) = key
    low, size = dtype in LOW, math.prod((tokens, *weight))
    has = linear.cpu_has_native(dtype) if low else dtype == torch.float32 and _ONEDNN is not None
    if device.type != "cpu" or not has or len(weight) != 2:
        return ""
    if size < SMALLEST_PRODUCT:
        return "" if low else "slower at this size"
    columns = weight[1] if backward else weight[0]
    in_range = _TOKENS <= tokens < _MOST_TOKENS and size <= LARGEST_16_BIT
    if low and not (in_range and columns >= _LEAST_COLUMNS):
        return ""
    if cpu_choice.forced(cpu_choice.PRODUCTS) == "onednn":
        return None
    chosen = cpu_choice.applies(cpu_choice.PRODUCTS, dtype, size)
    return None if chosen else "" if low else "slower on this processor"


def _describe(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    return "ATen's addmm, half the columns at a time" if key[0] in LOW else "oneDNN's linear"


@faster(
    linear_fwd, "eager", name="oneDNN", available=_available, description=_describe,
    unsupported_reason=functools.partial(_unsupported_reason, False),
)  # fmt: skip
def linear_fwd_onednn(x, weight, bias, residual=None, mask=None, out=None):
    if x.dtype in LOW:
        y = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
        biases = (None, None) if bias is None else bias.chunk(2)
        for half, rows, b in zip(y.chunk(2, 1), weight.chunk(2), biases, strict=True):
            linear_fwd(x, rows, b, out=half)
    elif not torch._C._get_mkldnn_enabled():
        return linear_fwd(x, weight, bias, residual, mask, out)
    else:
        y = _ONEDNN(x, weight, bias, "none", [], "")
    if mask is not None:
        y.mul_(mask.tensor())
    if residual is not None:
        y.add_(residual)
    return y if out is None or out is y else out.copy_(y)


@faster(
    linear_dx, "eager", name="oneDNN", available=_available, description=_describe,
    unsupported_reason=functools.partial(_unsupported_reason, True),
)  # fmt: skip
def linear_dx_onednn(dy, weight, into=None):
    if dy.dtype not in LOW:
        if not torch._C._get_mkldnn_enabled():
            return linear_dx(dy, weight, into)
        dx = _ONEDNN(dy, weight.t(), None, "none", [], "")
        return dx if into is None else into.add_(dx)
    dx = dy.new_empty((dy.shape[0], weight.shape[1])) if into is None else into
    for half, columns in zip(dx.chunk(2, 1), weight.chunk(2, 1), strict=True):
        if into is None:
            torch.mm(dy, columns, out=half)
        else:
            torch.addmm(half, dy, columns, out=half)
    return dx

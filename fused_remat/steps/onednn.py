"""Products of linear layers on CPUs of which a timing decides: forward and dx.

In float32 ATen's are MKL's on x86, which are faster than oneDNN's on some processors, slower on
others. In 16 bits ATen's are oneDNN's, and for some sizes two of half the columns each are faster.
Weight gradients are ATen's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fused_remat.steps import linear, timing
from fused_remat.steps.linear import LOW, linear_dx, linear_fwd
from fused_remat.steps.operations import faster
from fused_remat.steps.timing import Run

# (tokens, columns of x, columns of y) of the float32 products that are timed, each for those from
# its size. In 16 bits every weight's shape is timed, at the multiple of so many tokens below, if
# columns, tokens and multiply-adds are within these.
_TIMED = (512, 512, 1024), (256, 256, 512)
_TOKENS, _MOST_TOKENS, _LEAST_COLUMNS, _LARGEST_PRODUCT = 256, 2048, 128, 2**32


def _onednn() -> Any:
    """oneDNN's product, if this PyTorch has it with the arguments of the calls here; else None."""
    product = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if product is None or not torch.backends.mkldnn.is_available():
        return None
    if product not in flop_registry:
        register_flop_formula(product)(_flops)
    expected = ["X", "W", "B", "attr", "scalars", "algorithm"]
    named = [argument.name for argument in product.default._schema.arguments]
    return product.default if named == expected else None


def _flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    """Of oneDNN's product, given shapes."""
    return 2 * int(math.prod(x)) * int(weight[0])


_ONEDNN = _onednn()


def _sizes(dtype: torch.dtype, shape: tuple[int, int, int]) -> tuple[int, int, int] | None:
    """The sizes of the product that is timed for one of `shape`; None if none is, and ATen's is."""
    tokens, size = shape[0], math.prod(shape)
    if dtype == torch.float32:
        return next((sizes for sizes in _TIMED if math.prod(sizes) <= size), None)
    if not _TOKENS <= tokens < _MOST_TOKENS or shape[2] < _LEAST_COLUMNS:
        return None
    if not timing.LEAST_PRODUCT <= size <= _LARGEST_PRODUCT:
        return None
    return tokens // _TOKENS * _TOKENS, *shape[1:]


def _unsupported_reason(backward: bool, key: tuple[Any, ...]) -> str | None:
    dtype, device, *_, (tokens, *weight) = key
    low = dtype in LOW
    has = linear.cpu_has_native(dtype) if low else dtype == torch.float32 and _ONEDNN is not None
    if device.type != "cpu" or not has or len(weight) != 2:
        return ""
    columns = weight if backward else weight[::-1]
    sizes = _sizes(dtype, (tokens, *columns))
    if sizes is None:
        return "" if low else "slower at this size"

    def pair() -> tuple[Run, Run]:
        x = torch.ones(sizes[:2], dtype=dtype)
        if backward:
            weight = torch.ones(sizes[1:], dtype=dtype)
            return lambda: torch.mm(x, weight), lambda: linear_dx_timed(x, weight)
        weight = torch.ones(sizes[:0:-1], dtype=dtype)
        return lambda: F.linear(x, weight), lambda: linear_fwd_timed(x, weight, None)

    chosen = timing.prefers("FUSED_REMAT_CPU_PRODUCTS", "onednn", (backward, dtype, sizes), pair)
    return None if chosen else "" if low else "slower on this machine"


def _describe(key: tuple[Any, ...], *_: Any, **__: Any) -> str:
    return "ATen's addmm, half the columns at a time" if key[0] in LOW else "oneDNN's linear"


@faster(
    linear_fwd, "eager", name="oneDNN", timed=True, description=_describe,
    unsupported_reason=functools.partial(_unsupported_reason, False),
)  # fmt: skip
def linear_fwd_timed(x, weight, bias, residual=None, mask=None, out=None):
    if x.dtype in LOW:
        y = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
        biases = (None, None) if bias is None else bias.chunk(2)
        for half, rows, b in zip(y.chunk(2, 1), weight.chunk(2), biases, strict=True):
            linear_fwd(x, rows, b, out=half)
    else:
        y = _ONEDNN(x, weight, bias, "none", [], "")
    if mask is not None:
        y.mul_(mask.tensor())
    if residual is not None:
        y.add_(residual)
    return y if out is None or out is y else out.copy_(y)


@faster(
    linear_dx, "eager", name="oneDNN", timed=True, description=_describe,
    unsupported_reason=functools.partial(_unsupported_reason, True),
)  # fmt: skip
def linear_dx_timed(dy, weight, into=None):
    if dy.dtype not in LOW:
        dx = _ONEDNN(dy, weight.t(), None, "none", [], "")
        return dx if into is None else into.add_(dx)
    dx = dy.new_empty((dy.shape[0], weight.shape[1])) if into is None else into
    for half, columns in zip(dx.chunk(2, 1), weight.chunk(2, 1), strict=True):
        if into is None:
            torch.mm(dy, columns, out=half)
        else:
            torch.addmm(half, dy, columns, out=half)
    return dx

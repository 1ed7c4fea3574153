"""Linear layers: products, their gradients, and low-rank updates.

On CPUs without native bf16/fp16 products, low-precision products run in float32 on float32 copies
of the operands (faster there than ATen's, and rounded once): the copies are the size of a chunk and
of one weight, and live for one product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.random import Keep
from fused_remat.steps.operations import operation

_LOW = (torch.bfloat16, torch.float16)


@functools.cache
def _cpu_has_native(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def widens(x: Tensor) -> bool:
    """Whether products over `x` are better computed in float32: low precision, not native."""
    return x.dtype in _LOW and x.device.type == "cpu" and not _cpu_has_native(x.dtype)


def says_product(dtype: torch.dtype, device: torch.device) -> str:
    """What a product runs, of operands in a dtype on a device."""
    if not widens(torch.empty(0, dtype=dtype, device=device)):
        return "ATen's addmm"
    return f"ATen's addmm on float32 copies: this CPU has no {str(dtype)[6:]} products"


def _key(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    mask: Keep | None = None,
    out: Tensor | None = None,
) -> tuple[Any, ...]:
    """Dtype and device, and whether the product ends in dropout or a residual."""
    return x.dtype, x.device, residual is not None or mask is not None


@operation(key=_key, says=lambda key, *_, **__: says_product(key[0], key[1]))
def linear_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    mask: Keep | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """residual + mask * (x @ weight.T + bias), in the dtype of x.

    Without residual and mask, `out` may be columns of a matrix.
    """
    assert weight is not None
    wide = x.dtype in _LOW and widens(x)
    if wide:
        y = F.linear(x.float(), weight.float(), bias if bias is None else bias.float())
    elif out is None:
        y = F.linear(x, weight, bias)
    elif bias is None:
        y = torch.mm(x, weight.t(), out=out)
    else:
        y = torch.addmm(bias, x, weight.t(), out=out)
    if mask is not None:
        y.mul_(mask.tensor())
    if residual is not None:
        y.add_(residual)
    if not wide:
        return y
    return y.to(x.dtype) if out is None else out.copy_(y)


@operation(
    key=lambda dy, weight, into=None: (dy.dtype, dy.device),
    says=lambda key, *_, **__: says_product(*key),
)
def linear_dx(dy: Tensor, weight: Tensor | None, into: Tensor | None = None) -> Tensor:
    """into + dy @ weight, in `into` if given; dy may be columns of a matrix."""
    assert weight is not None
    if dy.dtype in _LOW and widens(dy):
        dx = torch.mm(dy.float(), weight.float())
        return dx.to(dy.dtype) if into is None else into.add_(dx)
    if into is None:
        return torch.mm(dy, weight)
    return torch.addmm(into, dy, weight, out=into)  # not addmm_: FLOP counters miss it


@operation(
    key=lambda dy, x, into, partial, exact=False: (x.dtype, x.device, partial or exact),
    says=lambda key, *_, **__: says_product(key[0], key[1]),
)
def linear_dw(
    dy: Tensor, x: Tensor, into: Tensor | None, partial: bool, exact: bool = False
) -> Tensor:
    """into + dy.T @ x, in `into` if given.

    `partial`: more will be added, so the sum is held in float32; `exact`: so is the product, which
    is not rounded to 16 bits before it is added.
    """
    if x.dtype in _LOW and (exact or widens(x)):
        dy, x = dy.float(), x.float()
    if into is not None and into.dtype == x.dtype:
        return torch.addmm(into, dy.t(), x, out=into)  # not addmm_: FLOP counters miss it
    dw = torch.mm(dy.t(), x)
    if into is not None:
        return into.add_(dw)
    return dw.float() if partial and dw.dtype in _LOW else dw


@operation(key=lambda dy: (dy.dtype, dy.device), says="ATen's sum")
def bias_grad(dy: Tensor) -> Tensor:
    """The sum of dy over tokens, in float32 (float64 for float64)."""
    return dy.sum(0, dtype=torch.float32) if dy.dtype in _LOW else dy.sum(0)


@operation(key=lambda y, x, *_: (x.dtype, x.device), says=lambda key, *_, **__: says_product(*key))
def low_rank_add(y: Tensor, x: Tensor, weight: Tensor | None, scale: float) -> None:
    """y += scale * x @ weight.T; y may be columns of a matrix, and of a lower dtype."""
    assert weight is not None
    if x.dtype == y.dtype and not widens(x):
        torch.addmm(y, x, weight.t(), alpha=scale, out=y)
        return
    wide = torch.promote_types(x.dtype, torch.float32)
    y.add_(torch.mm(x.to(wide), weight.t().to(wide)), alpha=scale)

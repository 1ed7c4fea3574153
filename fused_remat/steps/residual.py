"""The residual sum and the gradient of dropout."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat.random import Keep
from fused_remat.steps.operations import operation


@operation(key=lambda x, residual, *_, **__: (residual.dtype, x.device), says="pointwise, eager")
def residual_add(
    x: Tensor, residual: Tensor, mask: Keep | None, out: Tensor | None = None
) -> Tensor:
    """residual + mask * x, rounded once, in the dtype of the residual."""
    if mask is None:
        return torch.add(x, residual, out=out)
    y = torch.addcmul(residual.to(mask.dtype), x, mask.tensor())
    return y.to(residual.dtype) if out is None else out.copy_(y)


@operation(key=lambda x, *_: (x.dtype, x.device), says="pointwise, eager")
def dropout(x: Tensor, mask: Keep, dtype: torch.dtype | None = None) -> Tensor:
    """mask * x, a new tensor, in `dtype` or that of x."""
    return torch.mul(x, mask.tensor()).to(dtype or x.dtype)

"""The autograd Function of a scalar loss whose gradients are computed in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_remat.autograd.engine import keeps_graph
from fused_remat.autograd.gradients import not_differentiable
from fused_remat.execution.observe import LOSSES, LossRun, is_observed

_functorch = torch._C._functorch
Grads = tuple[Tensor | None, ...]
# Elements that are scaled at a time where ATen converts its operands.
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 20, 1 << 28


class LossWithGradients(torch.autograd.Function):
    """A loss () whose forward computes its gradients; backward multiplies them by its own.

    It does so in place, if the graph is not kept, which hooks on saved tensors may notice.

    `apply(compute, describe, *tensors)`; `compute()` returns the loss and the gradients of
    `tensors`, which may be of a wider dtype, and which nobody else may hold. `describe(grads)` is
    for observers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute: Callable[[], tuple[Tensor, Grads]],
        describe: Callable[[Grads], LossRun],
        *tensors: Tensor | None,
    ) -> Tensor:
        loss, grads = compute()
        for observe in LOSSES if LOSSES and is_observed() else ():
            observe(describe(grads))
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        ctx.save_for_backward(*grads)
        return loss

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Grads:
        owned = not (torch.is_grad_enabled() or keeps_graph())
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        with torch.no_grad():
            grads = [None if t is None else scaled(t, factor, dtype, owned) for t, dtype in pairs]
        return (None, None, *(not_differentiable(grads) if torch.is_grad_enabled() else grads))


def scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype, owned: bool) -> Tensor:
    """Return `grad` times `factor` (), rounded once to `dtype`; in place if `owned`."""
    if _functorch.is_batchedtensor(factor) or _functorch.is_legacy_batchedtensor(factor):
        return (grad.to(factor.dtype) * factor).to(dtype)
    result = grad if owned and grad.dtype == dtype else torch.empty_like(grad, dtype=dtype)
    if grad.numel():
        step = _CPU_ELEMENTS if grad.device.type == "cpu" else _DEVICE_ELEMENTS
        rows = max(1, step * len(grad) // grad.numel())
        factor = factor.view([1] * grad.dim())  # a tensor () would be rounded to the dtype first
        for part, out in zip(grad.split(rows), result.split(rows), strict=True):
            torch.mul(part, factor, out=out)
    return result

"""Experts by oneDNN's products, on CPUs where the table of `cpu_choice` has them.

The choice depends on the rows that an expert has on average: those that a batch sends it would make
it differ from step to step.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from fused_remat.steps import cpu_choice, experts, experts_loop
from fused_remat.steps.experts_loop import ATEN, Products
from fused_remat.steps.operations import Function, faster
from fused_remat.steps.stacks import Into


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return cpu_choice._ONEDNN(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _fwd(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(_product(x, weight, bias))


def _dx(dy: Tensor, weight: Tensor, out: Tensor) -> None:
    out.copy_(_product(dy, weight.t(), None))


def _dw(dy: Tensor, x: Tensor, grad: Tensor, into: Into) -> None:
    dw = _product(dy.t(), x.t(), None)
    grad.copy_(dw) if into.fresh else grad.add_(dw)


ONEDNN = Products(_fwd, _dx, _dw)


def unsupported_reason(key: Any) -> str | None:
    """Return why oneDNN's products do not run for a key of `experts.key`, or None."""
    dtype, device, rows, sizes = key[1:5]
    if device.type != "cpu" or dtype != torch.float32 or cpu_choice._ONEDNN is None:
        return ""
    size = rows * math.prod(sizes)
    if size < cpu_choice.SMALLEST_PRODUCT:
        return "slower at this size"
    if cpu_choice.forced(cpu_choice.PRODUCTS) == "onednn":
        return None
    is_chosen = cpu_choice.applies(cpu_choice.PRODUCTS, dtype, size)
    return None if is_chosen else "slower on this processor"


def _register(function: Function, loop: Function) -> None:
    """Register the loop with oneDNN's products as an implementation of an operation."""

    @functools.wraps(function)  # whose parameters are the operation's
    def run(*args: Any, **kwargs: Any) -> Any:
        has = torch._C._get_mkldnn_enabled()
        return loop(ONEDNN if has else ATEN, *args, **kwargs)

    faster(
        function, "eager", name="oneDNN", available=cpu_choice._available,
        description="oneDNN's products, one expert after the other",
        unsupported_reason=unsupported_reason,
    )(run)  # fmt: skip


_register(experts.experts_up_fwd, experts_loop.up_fwd)
_register(experts.experts_down_fwd, experts_loop.down_fwd)
_register(experts.experts_fwd, experts_loop.fwd)
_register(experts.experts_bwd, experts_loop.bwd)
_register(experts.experts_bwd_stages, experts_loop.bwd_stages)

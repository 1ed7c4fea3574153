"""oneDNN's products for CPUs: forward and dx of linear layers in float32, where a timing says so.

ATen's float32 products are MKL's on x86, which are faster than oneDNN's on some processors, slower
on others. Weight gradients are ATen's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fused_remat.steps import timing
from fused_remat.steps.linear import linear_dx, linear_fwd
from fused_remat.steps.operations import faster
from fused_remat.steps.timing import Run

# (tokens, columns of x, columns of y) of the products that are timed, each for those from its size.
_TIMED = (512, 512, 1024), (256, 256, 512)


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


def _why_not_onednn(backward: bool, key: tuple[Any, ...]) -> str | None:
    dtype, device, *_, size = key
    if dtype != torch.float32 or device.type != "cpu" or _ONEDNN is None:
        return ""
    sizes = next((sizes for sizes in _TIMED if math.prod(sizes) <= size), None)
    if sizes is None:
        return "slower at this size"

    def pair() -> tuple[Run, Run]:
        x, weight = torch.ones(sizes[0], sizes[1]), torch.ones(sizes[2], sizes[1])
        dy = torch.ones(sizes[0], sizes[2])
        if backward:
            return lambda: torch.mm(dy, weight), lambda: linear_dx_onednn(dy, weight)
        return lambda: F.linear(x, weight), lambda: linear_fwd_onednn(x, weight, None)

    chosen = timing.prefers("FUSED_REMAT_CPU_PRODUCTS", "onednn", (backward, sizes), pair)
    return None if chosen else "slower on this machine"


@faster(
    linear_fwd, "eager", name="oneDNN", timed=True, says="oneDNN's linear",
    why_not=functools.partial(_why_not_onednn, False),
)  # fmt: skip
def linear_fwd_onednn(x, weight, bias, residual=None, mask=None, out=None):
    y = _ONEDNN(x, weight, bias, "none", [], "")
    if mask is not None:
        y.mul_(mask.tensor())
    if residual is not None:
        y.add_(residual)
    return y if out is None else out.copy_(y)


@faster(
    linear_dx, "eager", name="oneDNN", timed=True, says="oneDNN's linear",
    why_not=functools.partial(_why_not_onednn, True),
)  # fmt: skip
def linear_dx_onednn(dy, weight, into=None):
    dx = _ONEDNN(dy, weight.t(), None, "none", [], "")
    return dx if into is None else into.add_(dx)

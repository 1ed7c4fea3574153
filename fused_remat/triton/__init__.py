"""Triton kernels where they save a pass or a product's end; importing this registers them.

Plain products are `torch.mm`; attention is ATen's where the tables say so, else our own. A result
that a kernel fills is always a fresh contiguous matrix; operands are read by their strides, and
copied only if the elements of a row are not side by side (`launch.rows_in_place`).
"""

from fused_remat.triton import (
    attention,
    cross_entropy,
    norm,
    pointwise,
    products,
    rotary,
    storage,
)
from fused_remat.triton.launch import why_not

__all__ = [
    "attention",
    "cross_entropy",
    "norm",
    "pointwise",
    "products",
    "rotary",
    "storage",
    "why_not",
]

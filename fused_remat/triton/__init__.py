"""Implementations of operations by Triton kernels; importing this package registers them.

Plain products are `torch.mm`. Attention runs ATen's kernels where the tables say so, else ours. A
kernel fills a new contiguous matrix. It reads operands by their strides; they are copied only if
their rows are not contiguous (`launch.contiguous_rows`).
"""

from fused_remat.triton import attention, cross_entropy, norm, pointwise, products, rotary
from fused_remat.triton.launch import unsupported_reason

__all__ = [
    "attention",
    "cross_entropy",
    "norm",
    "pointwise",
    "products",
    "rotary",
    "unsupported_reason",
]

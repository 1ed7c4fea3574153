"""Implementations of operations by Triton kernels; importing this package registers them.

Plain products are `torch.mm`. Attention runs ATen's kernels or ours, by the tables. A kernel fills
a new contiguous matrix. It reads operands by their strides; they are copied only if their rows are
not contiguous (`operands.contiguous_rows`).
"""

from fused_remat.triton import attention, cross_entropy, experts, norm, pointwise, products, rotary  # noqa: F401

"""The ops of `python -m bench kernels`."""

from __future__ import annotations

from bench.kernels import attention, passes, products
from bench.kernels.problem import Op

#: Name on the command line -> op, in the order in which they are measured.
OPS: dict[str, Op] = {
    "norm": passes.NORM,
    "mlp": products.MLP,
    "attention": attention.ATTENTION,
    "loss": products.LOSS,
}

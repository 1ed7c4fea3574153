"""The ops of `python -m bench kernels`."""

from __future__ import annotations

from bench.kernels import attention, dropout, linear, loss, mlp, norm, rope
from bench.kernels.problem import Op

#: Name on the command line -> op, in the order in which they are measured.
OPS: dict[str, Op] = {
    "norm": norm.OP,
    "linear": linear.OP,
    "mlp": mlp.OP,
    "attention": attention.OP,
    "dropout": dropout.OP,
    "rope": rope.OP,
    "loss": loss.OP,
}

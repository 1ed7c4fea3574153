"""Blocks under autograd: one Function in eager mode, operators for the compiler."""

from fused_remat.autograd import operators  # noqa: F401 - registers what saved programs call
from fused_remat.autograd.function import run_block

__all__ = ["run_block"]

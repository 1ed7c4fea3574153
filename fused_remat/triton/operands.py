"""Tensors, dropout masks and sizes as kernels take them."""

from __future__ import annotations

from torch import Tensor

from fused_remat.kernels.pointwise import Matrix, Sequences
from fused_remat.random import DropoutMask, scale, threshold
from fused_remat.steps.modulation_aten import Rows


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x (..., N) with contiguous rows, any distance apart: itself or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def vector(x: Tensor | None) -> Tensor | None:
    """Return x (N,) as a contiguous vector: itself or a copy."""
    return None if x is None else contiguous_rows(x)


def matrix(x: Tensor | None) -> Matrix | None:
    """Return x (M, N), whose rows are contiguous, as kernels take it."""
    return None if x is None else Matrix(x, x.stride(0))


def operand(x: Tensor | None) -> Matrix | None:
    """Return x (M, N) as kernels read it, with contiguous rows."""
    return None if x is None else matrix(contiguous_rows(x))


def by_sequence(
    rows: Rows, count: int, *conditions: Tensor | None
) -> tuple[Sequences, list[Tensor | None]]:
    """Return the sequences of `count` rows, and their part of each condition (B, D)."""
    a, b = rows.first // rows.tokens, cdiv(rows.first + count, rows.tokens)
    sequences = Sequences(0, count, 1)
    if b - a > 1:
        sequences = Sequences(rows.first % rows.tokens, rows.tokens, b - a)
    return sequences, [None if t is None else t[a:b] for t in conditions]


def dropout_of(mask: DropoutMask | None) -> tuple[Tensor | None, int, int, float]:
    """Return the site's key, first row, threshold and scale as kernels take them."""
    if mask is None:
        return None, 0, 0, 0.0
    return mask.site_key, mask.row0, threshold(mask.p), scale(mask.p)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()

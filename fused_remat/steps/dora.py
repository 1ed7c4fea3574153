"""DoRA: a low-rank update after which a layer's output columns are scaled.

y = c * (x @ W.T + s * x @ A.T @ B.T) + bias, where c = m / ||W + s * B @ A||, a norm for each row.
As in PEFT, the norm is a constant of backward, and dropout z = mask * x changes the formula: y is
x @ W.T + bias + (c - 1) * z @ W.T + c * s * z @ A.T @ B.T.

Source: Liu et al. 2024 (arXiv 2402.09353), whose section 4.3 has no gradient through the norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_remat.steps.chunk import spans
from fused_remat.steps.linear import LOW, add_weight_grad, linear_dx, linear_fwd
from fused_remat.steps.low_rank import LowRank, chunks_of_rows, dropped_rows, low_rank_add
from fused_remat.steps.node import Node
from fused_remat.steps.residual import dropout

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk

#: Elements of a matrix that are computed in float32 at a time, in at most `_PARTS` parts.
_ELEMENTS, _PARTS = 1 << 21, 8


def _parts(x: Tensor) -> Iterator[slice]:
    rows = max(_ELEMENTS // max(x.shape[1], 1), -(-x.shape[0] // _PARTS), 1)
    return (slice(*span) for span in spans(x.shape[0], rows))


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ||weight + scale * b @ a|| of each row, in float32 (float64 for float64)."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, norms = a.to(wide), []
    for rows in _parts(weight):
        sums = torch.addmm(weight[rows].to(wide), b[rows].to(wide), a, alpha=scale)
        norms.append(torch.linalg.vector_norm(sums, dim=1))
    return torch.cat(norms)


def scale_columns(y: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    """Set y to scale * (y - bias) + bias in place; y may be columns, and have a lower dtype."""
    if bias is None:
        y.mul_(scale)
    else:
        torch.addcmul(bias - scale * bias, y, scale, out=y)


def scale_grad(dy: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
    """Return the sum of dy * (y - bias) over tokens, in float32 (float64 for float64)."""
    total: Tensor | None = None
    for rows in _parts(y):
        values = y[rows] if bias is None else y[rows] - bias
        values = values.float() if values.dtype in LOW else values
        part = (values * dy[rows]).sum(0)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


@dataclass(frozen=True, kw_only=True)
class Dora(LowRank):
    """The one update of a linear layer, whose columns it scales."""

    def _weight(self, chunk: Chunk, linear: Any) -> Tensor:
        """Return the layer's weight, in the dtype of its input if it is quantized."""
        dtype = linear.compute or chunk.dtype_of(linear.x)
        weight: Tensor = linear.base_weight(chunk, linear.weights.index(self.weight), dtype, True)
        return weight

    def _scale(self, chunk: Chunk, linear: Node) -> tuple[Tensor, Tensor]:
        """Return the scale of columns and the norms, computed once in a pass."""
        scales = chunk.owner.scales
        if self.low not in scales:
            a, b, m = (chunk.param(name) for name in self.params)
            assert a is not None and b is not None and m is not None
            norms = row_norms(self._weight(chunk, linear), a, b, self.scale)
            scales[self.low] = m / norms, norms
        return scales[self.low]

    def _scaled(self, chunk: Chunk, linear: Node, dy: Tensor) -> Tensor:
        # Without dropout it is scaled already, for all that needs it.
        return dy * self._scale(chunk, linear)[0] if self.mask else dy

    def add_to(self, y: Tensor, chunk: Chunk, linear: Node) -> None:
        low, b = self._product(chunk, linear), chunk.param(self.b)
        (scale, _), weight = (
            self._scale(chunk, linear),
            self._weight(chunk, linear) if self.mask else None,
        )
        assert b is not None
        scaled = (b * scale[:, None]).to(b.dtype) if self.mask else b
        parts = chunks_of_rows(y, y.dtype != low.dtype)
        for rows, z in self._dropped(chunk, linear) if self.mask else parts:
            mine = self._columns(y[rows])
            wide = mine.to(low.dtype)  # rounded once, at the end
            if isinstance(z, Tensor):
                wide.addcmul_(chunk.ops[linear_fwd](z, weight, None), scale - 1)
            chunk.ops[low_rank_add](wide, low[rows], scaled, self.scale)
            if not self.mask:
                scale_columns(wide, scale, chunk.param(self.bias))
            if wide is not mine:
                mine.copy_(wide)
        chunk.put(self.low, low)

    def _dropped(self, chunk: Chunk, linear: Node) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows of x and x * mask there, in the dtype of the layer's product."""
        x, dtype = chunk[linear.inputs[0]], linear.compute or chunk.dtype_of(linear.inputs[0])
        for rows, mask in chunks_of_rows(x, True, chunk.mask(self.mask)):
            yield rows, dropped_rows(chunk, x[rows], mask, dtype)

    def backward_scale(
        self, chunk: Chunk, linear: Node, dy: Tensor, needs_grad: Collection[str]
    ) -> None:
        """Add the magnitudes' gradient; scale dy, or add the gradients of (c - 1) * z @ W.T."""
        own = self._columns(dy)
        if self.mask:
            self._backward_dropped(chunk, linear, own, needs_grad)
            return
        if self.magnitude in needs_grad:  # y - bias is m / ||...|| times what m multiplies
            y, m = self._columns(chunk[linear.name]), chunk.param(self.magnitude)
            assert m is not None
            total = scale_grad(own, y, chunk.param(self.bias))
            chunk.add_param_grad(self.magnitude, total / m)
        own.mul_(self._scale(chunk, linear)[0])

    def _backward_dropped(
        self, chunk: Chunk, linear: Node, dy: Tensor, needs_grad: Collection[str]
    ) -> None:
        x, b, weight = linear.inputs[0], chunk.param(self.b), self._weight(chunk, linear)
        scale, norms = self._scale(chunk, linear)
        if self.magnitude in needs_grad:
            low = self._product(chunk, linear)
            for rows, z in self._dropped(chunk, linear):
                y = chunk.ops[linear_fwd](z, weight, None)
                chunk.ops[low_rank_add](y, low[rows], b, self.scale)
                total = scale_grad(dy[rows], y, None)
                chunk.add_param_grad(self.magnitude, total / norms)
        dy = (dy * (scale - 1)).to(dy.dtype)
        if self.weight in needs_grad:
            for rows, z in self._dropped(chunk, linear):
                add_weight_grad(chunk, self.weight, dy[rows], z, partial=True)
        if x in needs_grad:
            dx, mask = chunk.ops[linear_dx](dy, weight), chunk.mask(self.mask)
            assert mask is not None
            chunk.add_grad(x, chunk.ops[dropout](dx, mask, chunk.dtype_of(x)), owned=True)

"""Low-rank updates of linear layers (LoRA): y += scale * (mask * x) @ A.T @ B.T.

Source: Hu et al. 2021 (arXiv 2106.09685). An update is a part of the `Linear` step that it changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_remat.random import DropoutMask
from fused_remat.steps.chunk import Part, spans
from fused_remat.steps.linear import (
    add_weight_grad,
    describe_product,
    linear_dx,
    linear_fwd,
    rows_of,
    widens,
)
from fused_remat.steps.node import Node
from fused_remat.steps.operations import operation
from fused_remat.steps.residual import dropout

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


@operation(key=lambda y, x, *_: (x.dtype, x.device), description=describe_product)
def low_rank_add(y: Tensor, x: Tensor, weight: Tensor | None, scale: float) -> None:
    """Add scale * x @ weight.T to y, which may be columns, and may have a lower dtype."""
    assert weight is not None
    if x.dtype == y.dtype and not widens(x):
        torch.addmm(y, x, weight.t(), alpha=scale, out=y)
        return
    wide = torch.promote_types(x.dtype, torch.float32)
    y.add_(torch.mm(x.to(wide), weight.t().to(wide)), alpha=scale)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """One update. The methods take the step that it is a part of, as `linear`."""

    a: str  # a, b: names of the matrices A (rank, in) and B (out, rank)
    b: str
    low: str  # name of the product (mask * x) @ A.T
    scale: float  # the factor of the update
    mask: str = ""  # name of the dropout mask of x, "" for none
    # start and stop of the columns of y that the update is added to; None for all
    columns: tuple[int, int] | None = None
    part: Part | None = None  # the rows of B that are this update's, if others have the rest
    # of the matrices and of the product between them; None for the step's dtype
    dtype: torch.dtype | None = None
    # names of DoRA's magnitudes, and of the layer's weight and bias (`dora.Dora`); "" for LoRA
    magnitude: str = ""
    weight: str = ""
    bias: str = ""

    @property
    def params(self) -> tuple[str, ...]:
        """Tensors of the block that are the update's own."""
        return (self.a, self.b, *filter(None, (self.magnitude,)))

    def add_to(self, y: Tensor, chunk: Chunk, linear: Node) -> None:
        """Add the update to y, the result of the step, in place."""
        low = self._product(chunk, linear)
        for rows, _ in chunks_of_rows(y, y.dtype != low.dtype):
            mine = self._columns(y[rows])
            b = rows_of(chunk.param(self.b), self.part)
            chunk.ops[low_rank_add](mine, low[rows], b, self.scale)
        chunk.put(self.low, low)

    def _columns(self, y: Tensor) -> Tensor:
        return y if self.columns is None else y[:, slice(*self.columns)]

    def _scaled(self, chunk: Chunk, linear: Node, dy: Tensor) -> Tensor:
        return dy

    def _product(self, chunk: Chunk, linear: Node) -> Tensor:
        if self.low in chunk:
            return chunk[self.low]
        x, mask, weight = chunk[linear.inputs[0]], chunk.mask(self.mask), chunk.param(self.a)
        assert weight is not None
        dtype = self.dtype or linear.compute or x.dtype
        low = x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)
        for rows, mine in chunks_of_rows(x, x.dtype != dtype, mask):
            operand = dropped_rows(chunk, x[rows], mine, dtype)
            chunk.ops[linear_fwd](operand, weight, None, out=low[rows])
        return low

    def backward_b(
        self, chunk: Chunk, linear: Node, dy: Tensor, needs_grad: Collection[str]
    ) -> Tensor | None:
        """Add the gradient of B; return that of (mask * x) @ A.T, or None if nothing needs it."""
        dtype, parts = self.dtype or dy.dtype, []
        needs_low = linear.inputs[0] in needs_grad or self.a in needs_grad
        low = self._product(chunk, linear) if self.b in needs_grad else None
        for rows, _ in chunks_of_rows(dy, dy.dtype != dtype):
            mine = self._scaled(chunk, linear, self._columns(dy[rows])).to(dtype)
            if low is not None:
                add_weight_grad(chunk, self.b, mine, low[rows] * self.scale, self.part)
            if needs_low:
                b = rows_of(chunk.param(self.b), self.part)
                parts.append(chunk.ops[linear_dx](mine, b).mul_(self.scale))
        if not needs_low:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def backward_a(
        self, chunk: Chunk, linear: Node, dlow: Tensor, needs_grad: Collection[str]
    ) -> None:
        """Add the gradients of A and of x, given `dlow`, the gradient of (mask * x) @ A.T."""
        mask, weight = chunk.mask(self.mask), chunk.param(self.a)
        dx: Tensor | None = None
        if linear.inputs[0] in needs_grad:  # then the layer itself has given one
            dx = chunk.sum_of_grads(linear.inputs[0], chunk.dtype_of(linear.inputs[0]))
            assert dx is not None
        x = chunk[linear.inputs[0]] if self.a in needs_grad else None
        for rows, mine in chunks_of_rows(
            dlow, chunk.dtype_of(linear.inputs[0]) != dlow.dtype, mask
        ):
            if x is not None:
                operand = dropped_rows(chunk, x[rows], mine, dlow.dtype)
                cut = rows.stop - rows.start < dlow.shape[0]
                add_weight_grad(chunk, self.a, dlow[rows], operand, partial=cut)
                del operand
            if dx is None:
                continue
            if mine is None and dx.dtype == dlow.dtype:
                chunk.ops[linear_dx](dlow[rows], weight, into=dx[rows])
            else:
                part = chunk.ops[linear_dx](dlow[rows], weight)
                dx[rows].add_(part if mine is None else chunk.ops[dropout](part, mine))
        if dx is not None:
            chunk.add_grad(linear.inputs[0], dx, owned=True)


#: How many tokens are converted at a time where an update has another dtype than the block.
_ROWS = 4096


def chunks_of_rows(
    x: Tensor, converts: bool, mask: DropoutMask | None = None
) -> Iterator[tuple[slice, DropoutMask | None]]:
    """Yield rows of x and their part of the mask: `_ROWS` at a time if they are converted.

    The part is a new object, so that the tensor which it makes is freed with the chunk.
    """
    for start, stop in spans(x.shape[0], _ROWS if converts else max(x.shape[0], 1)):
        yield slice(start, stop), None if mask is None else mask.of_rows(start, stop - start)


def dropped_rows(chunk: Chunk, x: Tensor, mask: DropoutMask | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if mask is None else chunk.ops[dropout](x, mask, dtype)

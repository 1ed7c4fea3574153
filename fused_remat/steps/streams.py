"""Activations side by side: two streams of tokens in each sequence, or columns of each token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fused_remat.steps.node import Input, Inputs, Node, Shapes

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


@dataclass(frozen=True, kw_only=True)
class Join(Node):
    """name = the tokens of each of `xs`, one after the other in every sequence (`tokens`)."""

    xs: Inputs
    per_sequence: ClassVar[bool] = True
    description: ClassVar[tuple[str, str]] = ("copies, one stream after the other", "")

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        y = chunk.empty(self.name) if out is None else out
        for name, part in zip(self.xs, self._parts(chunk, y), strict=True):
            part.copy_(chunk[name].view(part.shape))
        chunk.put(self.name, y)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        for name, part in zip(self.xs, self._parts(chunk, dy), strict=True):
            if name in needs_grad:
                grad = part.reshape(-1, part.shape[-1])  # a view for one sequence
                chunk.add_grad(name, grad, owned or grad.data_ptr() != part.data_ptr())

    def _parts(self, chunk: Chunk, y: Tensor) -> tuple[Tensor, ...]:
        """Return views (B, tokens, width) of the rows of each of `xs`."""
        lengths = chunk.owner.execution.lengths
        joint = y.view(-1, lengths[self.name], y.shape[-1])
        return joint.split_with_sizes([lengths[name] for name in self.xs], 1)


@dataclass(frozen=True, kw_only=True)
class Concat(Node):
    """name = the columns of each of `xs`, side by side."""

    xs: Inputs
    description: ClassVar[tuple[str, str]] = ("copies, side by side", "")

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return sum([widths[name] for name in self.xs])

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        chunk.put(self.name, torch.cat([chunk[name] for name in self.xs], 1, out=out))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        widths = [chunk.owner.widths[name] for name in self.xs]
        for name, part in zip(self.xs, dy.split_with_sizes(widths, 1), strict=True):
            if name in needs_grad:
                chunk.add_grad(name, part.contiguous(), True)


@dataclass(frozen=True, kw_only=True)
class Take(Node):
    """name = the tokens (`tokens`) of x that begin after those of `after`, in every sequence."""

    x: Input
    after: tuple[str, ...] = ()  # inputs of the block
    per_sequence: ClassVar[bool] = True
    keepable: ClassVar[bool] = False
    description: ClassVar[tuple[str, str]] = ("a copy of the tokens of one stream", "")

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        part = self._part(chunk, chunk[self.x])
        y = chunk.empty(self.name) if out is None else out
        y.view(part.shape).copy_(part)
        chunk.put(self.name, y)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        have = chunk.sum_of_grads(self.x, dy.dtype)
        grad = chunk.empty(self.x).zero_() if have is None else have
        part = self._part(chunk, grad)
        part.add_(dy.view(part.shape))
        chunk.add_grad(self.x, grad, True)

    def _part(self, chunk: Chunk, x: Tensor) -> Tensor:
        """Return a view (B, tokens, width) of the rows of x that it takes."""
        lengths = chunk.owner.execution.lengths
        joint = x.view(-1, lengths[self.x], x.shape[-1])
        first = sum([lengths[name] for name in self.after])
        return joint[:, first : first + lengths[self.name]]

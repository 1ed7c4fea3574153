"""The steps of a block whose heads and MLP are divided among the ranks of a tensor-parallel group.

Each rank has some of the heads and some of the MLP's hidden units: its shards of the weights. Two
steps join the ranks. Before a half, `Gathered` makes the tokens of all ranks of what it reads;
after it, `Reduced` sums what the ranks made of them. They are steps like others: what they make is
named, kept, rebuilt and freed by the same rules, so a rung that keeps the sum after a half talks to
nobody to rebuild it.

With `sequence`, the residual stream, its norms and what a block keeps of them are divided by tokens
(Korthikanti et al. 2022, arXiv 2205.05198): gathering and reducing are an all-gather and a
reduce-scatter. Without, every rank has the whole stream: gathering is nothing, and its backward an
all-reduce; reducing is an all-reduce (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fused_remat import collectives
from fused_remat.spec import ParallelSpec
from fused_remat.steps.linear import bias_grad
from fused_remat.steps.node import Input, Node, Param, Shapes

if TYPE_CHECKING:
    from fused_remat.steps.frame import Frame

#: Between the dropout sites of two ranks: each draws on its own for what is divided.
SITES_OF_A_RANK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Joins(Node):
    """A step that talks to the other ranks: what both have.

    Attributes:
        parallel: the rank's place.
    """

    x: Input
    parallel: ParallelSpec

    @property
    def communication(self) -> tuple[str, str]:
        """What it says in forward and in backward; "" for nothing."""
        raise NotImplementedError

    @property
    def says(self) -> tuple[str, str]:
        forward, backward = self.communication
        return forward or "nothing: every rank has it", backward

    def _batch(self, f: Frame) -> int:
        """The number of sequences whose rows are to stay together; 1 where rows are tokens."""
        return f.seqs[1] - f.seqs[0] if self.per_sequence else 1

    def _gather(self, f: Frame, x: Tensor) -> Tensor:
        return collectives.gather(x, self.parallel.group, self.parallel.size, self._batch(f))

    def _scatter_sum(self, f: Frame, x: Tensor) -> Tensor:
        return collectives.scatter_sum(x, self.parallel.group, self.parallel.size, self._batch(f))


@dataclass(frozen=True, kw_only=True)
class Gathered(Joins):
    """name = x of all ranks, whose gradients are summed over ranks. Its rows are tokens in any
    order, as an MLP takes them."""

    keepable: ClassVar[bool] = False

    def length(self, lengths: Mapping[str, int]) -> int:
        return lengths[self.x] * (self.parallel.size if self.parallel.sequence else 1)

    @property
    def communication(self) -> tuple[str, str]:
        return ("all-gather", "reduce-scatter") if self.parallel.sequence else ("", "all-reduce")

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        x = f[self.x] if self.compute is None else f[self.x].to(self.compute)
        f.put(self.name, self._gather(f, x) if self.parallel.sequence else x)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        if self.parallel.sequence:
            dx = self._scatter_sum(f, dy)
        else:
            dx = collectives.total(dy, self.parallel.group, owned)
        f.add_grad(self.x, dx.to(f.dtype_of(self.x)), owned=True)


@dataclass(frozen=True, kw_only=True)
class GatheredSequences(Gathered):
    """`Gathered` whose rows are the tokens of whole sequences in order, as attention takes them."""

    per_sequence: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class Reduced(Joins):
    """name = the sum of x over ranks, of this rank's tokens, + bias."""

    bias: Param

    def length(self, lengths: Mapping[str, int]) -> int:
        return lengths[self.x] // (self.parallel.size if self.parallel.sequence else 1)

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return widths[self.x]

    @property
    def communication(self) -> tuple[str, str]:
        return ("reduce-scatter", "all-gather") if self.parallel.sequence else ("all-reduce", "")

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        x = f[self.x]
        if self.parallel.sequence:
            y = self._scatter_sum(f, x)
        else:
            y = collectives.total(x, self.parallel.group)
        bias = f.param(self.bias)
        f.put(self.name, y if bias is None else y.add_(bias))

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        if self.bias in wants:
            f.add_param_grad(self.bias, f.ops[bias_grad](dy))
        if self.x in wants:
            sequence = self.parallel.sequence
            f.add_grad(self.x, self._gather(f, dy) if sequence else dy, owned or sequence)


@dataclass(frozen=True, kw_only=True)
class ReducedSequences(Reduced):
    """`Reduced` of rows that are the tokens of whole sequences in order."""

    per_sequence: ClassVar[bool] = True

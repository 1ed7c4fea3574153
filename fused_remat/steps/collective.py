"""Communication between the ranks of a tensor-parallel group: the steps, and the collectives.

Each rank has some of the heads and of the MLP's hidden units: its shards of the weights.
`AllGather` before a branch collects the tokens of all ranks, and `ReduceScatter` after it sums the
ranks' results. They follow the rules of all steps, so a preset that keeps the sum after a branch
needs no communication in backward's rebuild.

With `ParallelSpec.sequence`, the residual stream and its norms are divided by tokens, and the steps
are an all-gather and a reduce-scatter (Korthikanti et al. 2022, arXiv 2205.05198). Without it every
rank has the entire stream: forward of `AllGather` does nothing and its backward is an all-reduce;
`ReduceScatter` is an all-reduce (Shoeybi et al. 2019, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fused_remat.spec import ParallelSpec
from fused_remat.steps.linear import bias_grad
from fused_remat.steps.node import Input, Node, Param

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


#: Difference between the dropout sites of two ranks, which draw different masks of divided parts.
SITES_OF_A_RANK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CollectiveStep(Node):
    """A step that communicates with the other ranks of `parallel`."""

    x: Input
    parallel: ParallelSpec
    # as in `Node`: whether the tokens of each sequence stay in order, which attention needs
    per_sequence: bool = False  # type: ignore[misc]

    @property
    def communication(self) -> tuple[str, str]:
        """Collectives of forward and of backward; "" for none."""
        raise NotImplementedError

    @property
    def description(self) -> tuple[str, str]:
        forward, backward = self.communication
        return forward or "nothing: every rank has all tokens", backward

    def _move(self, move: Callable[..., Tensor], chunk: Chunk, x: Tensor) -> Tensor:
        """Return `gather` or `scatter_sum` of x, sequence by sequence if they stay in order."""
        batch = chunk.seqs[1] - chunk.seqs[0] if self.per_sequence else 1
        return move(x, self.parallel.group, self.parallel.size, batch)


@dataclass(frozen=True, kw_only=True)
class AllGather(CollectiveStep):
    """name = the tokens x of all ranks; backward sums the gradients over ranks."""

    keepable: ClassVar[bool] = False

    def length(self, lengths: Mapping[str, int]) -> int:
        return lengths[self.x] * (self.parallel.size if self.parallel.sequence else 1)

    @property
    def communication(self) -> tuple[str, str]:
        return ("all-gather", "reduce-scatter") if self.parallel.sequence else ("", "all-reduce")

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x = chunk[self.x] if self.compute is None else chunk[self.x].to(self.compute)
        chunk.put(self.name, self._move(gather, chunk, x) if self.parallel.sequence else x)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        if self.parallel.sequence:
            dx = self._move(scatter_sum, chunk, dy)
        else:
            dx = total(dy, self.parallel.group, owned)
        chunk.add_grad(self.x, dx.to(chunk.dtype_of(self.x)), owned=True)


@dataclass(frozen=True, kw_only=True)
class ReduceScatter(CollectiveStep):
    """name = the sum of x over ranks for this rank's tokens, + bias."""

    bias: Param

    def length(self, lengths: Mapping[str, int]) -> int:
        return lengths[self.x] // (self.parallel.size if self.parallel.sequence else 1)

    @property
    def communication(self) -> tuple[str, str]:
        return ("reduce-scatter", "all-gather") if self.parallel.sequence else ("all-reduce", "")

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x, bias, parallel = chunk[self.x], chunk.param(self.bias), self.parallel
        sequence = parallel.sequence
        y = self._move(scatter_sum, chunk, x) if sequence else total(x, parallel.group)
        chunk.put(self.name, y if bias is None else y.add_(bias))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        if self.bias in needs_grad:
            chunk.add_param_grad(self.bias, chunk.ops[bias_grad](dy))
        if self.x in needs_grad:
            sequence = self.parallel.sequence
            dx = self._move(gather, chunk, dy) if sequence else dy
            chunk.add_grad(self.x, dx, owned or sequence)


# Collectives by their names since torch 2.13, or before.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def in_context_parallel() -> bool:
    """Return whether torch's `context_parallel` has replaced `scaled_dot_product_attention`."""
    module = F.scaled_dot_product_attention.__module__ or ""
    return module.startswith("torch.distributed.tensor.experimental")


vars(in_context_parallel)["_dynamo_marked_constant"] = True  # Dynamo calls it without tracing


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor, without importing what defines it."""
    cls = type(value)
    return cls.__name__ == "DTensor" and cls.__module__.startswith("torch.distributed.")


def _group(name: str) -> Any:
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(name)  # not cached: a name is reused after all are destroyed


def gather(
    x: Tensor, group: str, size: int, batch: int = 1, shape: Sequence[int] | None = None
) -> Tensor:
    """Return the rows of all ranks; within each of `batch` sequences, ordered by rank.

    Shapes: x (batch * S, W); returns (batch * size * S, W), or those elements in `shape`.
    """
    x = x.contiguous()
    shape = (size * x.shape[0], x.shape[1]) if shape is None else shape
    out = x.new_empty(shape)  # not a view, since FSDP2 warns of views
    _all_gather(out.view(size * x.shape[0], x.shape[1]), x, group=_group(group))
    if batch == 1 or x.numel() == 0:
        return out
    by_rank = out.view(size, batch, -1, x.shape[1])
    return by_rank.transpose(0, 1).reshape(shape)


def scatter_sum(x: Tensor, group: str, size: int, batch: int = 1) -> Tensor:
    """Return this rank's rows of the sum over ranks: those that it contributes to `gather`.

    Shapes: x (batch * size * S, W); returns (batch * S, W).
    """
    if batch > 1 and x.numel():
        x = x.view(batch, size, -1, x.shape[1]).transpose(0, 1)
    x = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((x.shape[0] // size, x.shape[1]))
    _reduce_scatter(out, x, group=_group(group))
    return out


def total(x: Tensor, group: str, owned: bool = False, largest: bool = False) -> Tensor:
    """Return the sum, or maximum, over ranks; in place if x is `owned` and contiguous."""
    y = x.contiguous() if owned else x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=_group(group))
    return y


def first_ranks(x: Tensor, group: str) -> Tensor:
    """Return a copy of the x of the group's first rank."""
    y = x.clone()
    dist.broadcast(y, group=_group(group), group_src=0)
    return y

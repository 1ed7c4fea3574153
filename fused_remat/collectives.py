"""What a tensor-parallel block says to the other ranks of its group: matrices of tokens.

The group is named, so that a block's graph stays plain data. All calls wait for their result on the
device's current stream; every rank must make the same calls in the same order, which it does where
all have the same shapes, policy and wanted gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Their names since torch 2.13, and before.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)  # type: ignore[assignment]
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)  # type: ignore[assignment]


def in_context_parallel() -> bool:
    """Whether torch's `context_parallel` has put its ring in the place of attention.

    >>> in_context_parallel()
    False
    """
    module = F.scaled_dot_product_attention.__module__ or ""
    return module.startswith("torch.distributed.tensor.experimental")


vars(in_context_parallel)["_dynamo_marked_constant"] = True  # not traced, but called


def _group(name: str) -> Any:
    """The process group. Not cached: names are used again once all groups were destroyed."""
    c10d: Any = dist.distributed_c10d
    return c10d._resolve_process_group(name)


def gather(
    x: Tensor, group: str, size: int, batch: int = 1, shape: Sequence[int] | None = None
) -> Tensor:
    """The rows of all ranks: of each of `batch` sequences, the first rank's first.

    Shapes: x (batch * S, W); returns (batch * size * S, W), or those elements in `shape`.
    """
    x = x.contiguous()
    shape = (size * x.shape[0], x.shape[1]) if shape is None else shape
    out = x.new_empty(shape)  # returned as it is: no view, which FSDP2 warns of
    _all_gather(out.view(size * x.shape[0], x.shape[1]), x, group=_group(group))
    if batch == 1 or x.numel() == 0:
        return out
    by_rank = out.view(size, batch, -1, x.shape[1])
    return by_rank.transpose(0, 1).reshape(shape)


def scatter_sum(x: Tensor, group: str, size: int, batch: int = 1) -> Tensor:
    """This rank's rows of the sum over ranks; `gather` undoes the choice of rows.

    Shapes: x (batch * size * S, W); returns (batch * S, W).
    """
    if batch > 1 and x.numel():
        x = x.view(batch, size, -1, x.shape[1]).transpose(0, 1)
    x = x.reshape(-1, x.shape[-1]).contiguous()
    out = x.new_empty((x.shape[0] // size, x.shape[1]))
    _reduce_scatter(out, x, group=_group(group))
    return out


def total(x: Tensor, group: str, owned: bool = False, largest: bool = False) -> Tensor:
    """The sum over ranks (the maximum, if `largest`); in place if x is `owned` and contiguous."""
    y = x.contiguous() if owned else x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=_group(group))
    return y


def first_ranks(x: Tensor, group: str) -> Tensor:
    """x of the group's first rank."""
    y = x.clone()
    dist.broadcast(y, group=_group(group), group_src=0)
    return y

"""A head whose rows, a vocabulary's, are divided among ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import collectives
from fused_remat.shards import local_shards


class VocabularyParallelLinear(nn.Linear):
    """`nn.Linear` whose weight and bias are DTensors, rows divided; every rank gets all logits.

    The loss does not call it: `ops.linear_cross_entropy(hidden, head.weight, ...)` has none whole.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        mesh, given = weight.device_mesh, [weight] if self.bias is None else [weight, self.bias]
        group = mesh.get_group().group_name
        shards = local_shards(group, (False,) * len(given), given)
        logits = F.linear(_Shared.apply(input, group), *shards)
        out: Tensor = _Columns.apply(logits, group, mesh.size(), mesh.get_local_rank())
        return out


class _Shared(torch.autograd.Function):
    """What every rank has whole, and computes a part of the gradient of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return collectives.total(dy, ctx.group), None


class _Columns(torch.autograd.Function):
    """The columns of all ranks, side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, rank: int) -> Tensor:
        ctx.rank, ctx.width = rank, x.shape[-1]
        rows = x.reshape(-1, x.shape[-1])
        whole = collectives.gather(rows, group, size).view(size, *rows.shape)
        return whole.movedim(0, 1).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return dy.narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None, None, None

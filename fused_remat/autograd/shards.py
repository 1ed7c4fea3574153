"""This rank's shards of DTensors, and their gradients as DTensors again.

Gradients of what all ranks have, and each computed a part of, are summed over ranks, all of a call
at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_remat.steps import collective


def local_shards(group: str, summed: Sequence[bool], params: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return this rank's shards of the DTensors `params`, differentiably.

    `summed` marks parameters whose gradients are summed over the process group `group`.
    """
    shards: tuple[Tensor, ...] = LocalShards.apply(group, tuple(summed), *params)
    return shards


class LocalShards(torch.autograd.Function):
    """This rank's shards of DTensors; `summed` marks gradients to sum over ranks."""

    @staticmethod
    def forward(ctx: Any, group: str, summed: tuple[bool, ...], *params: Any) -> tuple[Tensor, ...]:
        ctx.group, ctx.summed = group, summed
        ctx.specs = [(p.device_mesh, p.placements, p.shape, p.stride()) for p in params]
        ctx.set_materialize_grads(False)
        shards = tuple([p._local_tensor.view_as(p._local_tensor) for p in params])
        frozen = [t for t, p in zip(shards, params, strict=True) if not p.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return shards

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        from torch.distributed.tensor import DTensor

        result: list[Any] = list(_summed(ctx.group, ctx.summed, grads))
        for i, (mesh, placements, shape, stride) in enumerate(ctx.specs):
            if result[i] is not None:
                result[i] = DTensor.from_local(
                    result[i], mesh, placements, run_check=False, shape=shape, stride=stride
                )
        return (None, None, *result)


def _summed(
    group: str, summed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Sum the gradients that `summed` marks over ranks, with one message for each dtype."""
    result = list(grads)
    partial = [i for i, (g, s) in enumerate(zip(grads, summed, strict=True)) if s and g is not None]
    for dtype in dict.fromkeys([grads[i].dtype for i in partial]):  # type: ignore[union-attr]
        indices = [i for i in partial if grads[i].dtype == dtype]  # type: ignore[union-attr]
        parts: list[Any] = [grads[i] for i in indices]
        flat = collective.total(torch.cat([g.reshape(-1) for g in parts]), group, owned=True)
        sums = flat.split([g.numel() for g in parts])
        for i, total, part in zip(indices, sums, parts, strict=True):
            result[i] = total.view(part.shape)
    return result

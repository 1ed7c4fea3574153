"""Calls of a layer that is divided among ranks: its tokens, and what a call of it changes.

A divided layer's parameters are DTensors of a tensor-parallel mesh (`fused_remat.parallel`). A call
is chosen by their whole shapes, as any layer's, and then made this rank's: its heads, its shards,
its masks' heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import random
from fused_remat.autograd.shards import is_dtensor, local_shards
from fused_remat.layers.read import LayerCall, with_own_biases
from fused_remat.spec import ParallelSpec
from fused_remat.steps import collective

#: Of what all ranks have, what each computes a part of the gradient of: its heads' part.
_OF_HEADS = ("q_norm.weight", "k_norm.weight", "qkv.bias", "cross.bias")


@dataclass(frozen=True)
class TensorParallel:
    """How a layer is divided among ranks.

    Attributes:
        parallel: the rank's place.
        splits: its input is whole on every rank, and divided by tokens first.
        joins: its output is made whole on every rank.
        lengths: of the layers between a split and a join: the tokens of a sequence that a rank had
            after the split, of all calls. None where nobody splits for the layer.
    """

    parallel: ParallelSpec
    splits: bool = False
    joins: bool = False
    lengths: set[int] | None = None

    def entered(self, x: Tensor, dim: int) -> Tensor:
        """This rank's tokens of a layer's input, which are in dimension `dim`.

        Raises: ValueError where the ranks' shares would differ; RuntimeError for an input that the
            first layer has not divided.
        """
        if self.splits:
            x = split_tokens(x, dim, self.parallel)
            if self.lengths is not None:
                self.lengths.add(x.shape[dim])
        elif self.lengths is not None and x.shape[dim] not in self.lengths:
            raise RuntimeError(
                f"fused_remat: a layer with sequence parallel got {x.shape[dim]} tokens of a "
                f"sequence, and the first layer of its container has left {sorted(self.lengths)} "
                "to a rank: layers are called one after the other, none left out"
            )
        return x


class Split(torch.autograd.Function):
    """This rank's tokens of what every rank has whole, whose gradient is made whole again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parallel: ParallelSpec) -> Tensor:
        ctx.dim, ctx.parallel = dim, parallel
        return _own(x, dim, parallel)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _all(dy, ctx.dim, ctx.parallel), None, None


class Join(torch.autograd.Function):
    """The tokens of all ranks, of which every rank then computes the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, parallel: ParallelSpec) -> Tensor:
        ctx.dim, ctx.parallel = dim, parallel
        return _all(x, dim, parallel)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _own(dy, ctx.dim, ctx.parallel), None, None


def _own(x: Tensor, dim: int, parallel: ParallelSpec) -> Tensor:
    count = x.shape[dim] // parallel.size
    return x.narrow(dim, parallel.rank * count, count).contiguous()


def _all(x: Tensor, dim: int, parallel: ParallelSpec) -> Tensor:
    if dim == 0:
        rows, shape = x.reshape(x.shape[0], -1), (parallel.size * x.shape[0], *x.shape[1:])
        return collective.gather(rows, parallel.group, parallel.size, 1, shape)
    rows, shape = x.reshape(-1, x.shape[-1]), (x.shape[0], parallel.size * x.shape[1], x.shape[-1])
    return collective.gather(rows, parallel.group, parallel.size, x.shape[0], shape)


def split_tokens(x: Tensor, dim: int, parallel: ParallelSpec) -> Tensor:
    """This rank's tokens of x, which every rank has whole.

    Raises: ValueError where the ranks' shares would differ.
    """
    if x.shape[dim] % parallel.size:
        raise ValueError(
            f"sequence parallel: {x.shape[dim]} tokens of a sequence cannot be divided evenly "
            f"among {parallel.size} ranks: pad the sequences"
        )
    out: Tensor = Split.apply(x, dim, parallel)
    return out


def join_tokens(x: Tensor, dim: int, parallel: ParallelSpec) -> Tensor:
    """The tokens of all ranks, on every rank."""
    out: Tensor = Join.apply(x, dim, parallel)
    return out


def stand_in(x: Any, dim: int, parallel: ParallelSpec) -> Any:
    """In the place of this rank's tokens, what a call is chosen by: whole sequences, no memory."""
    if not isinstance(x, Tensor) or not parallel.sequence or x.dim() <= dim:
        return x
    shape = list(x.shape)
    shape[dim] *= parallel.size
    return x.detach().new_empty(()).expand(shape)


def local_call(
    call: LayerCall,
    inputs: Mapping[str, Tensor | None],
    parallel: ParallelSpec,
    seeded: bool = False,
) -> LayerCall:
    """This rank's part of a call that was chosen by whole shapes; `inputs`: the real ones.

    `seeded`: its policy draws random numbers.

    Raises: RuntimeError for what is not divided.
    """
    reason = _why_not(call)
    if reason is not None:
        raise RuntimeError(f"fused_remat: a tensor-parallel layer cannot run: {reason}")
    tensors = {**call.tensors, **inputs}
    tensors = {**tensors, **_shards(tensors, parallel)}
    attention = call.spec.attention
    if attention.projection == "split":
        tensors = with_own_biases(tensors, parallel.size, parallel.rank)
    for name in ("mask", "memory_mask"):
        tensors[name] = _own_heads(tensors.get(name), attention.num_heads, parallel)
    spec = call.spec.on_rank(parallel)
    if not parallel.sequence and (seeded or spec.drops):  # alike where it is not divided
        seed = random.draw_seed(tensors["input"].device)  # type: ignore[union-attr]
        tensors["seed"] = collective.first_ranks(seed, parallel.group)
    return replace(call, spec=spec, tensors=tensors)


def _why_not(call: LayerCall) -> str | None:
    if call.functions:
        return "its activation function has no row: it might mix what is divided among ranks"
    if call.spec.loras:
        return "its low-rank updates are not divided among ranks"
    for name in ("mask", "padding", "memory_mask", "memory_padding"):
        mask = call.tensors.get(name)
        if mask is not None and mask.requires_grad:
            return f"{name} wants a gradient, of which each rank would have its heads' part"
    return None


def _shards(tensors: Mapping[str, Tensor | None], parallel: ParallelSpec) -> dict[str, Tensor]:
    """The local tensors of those that are DTensors, by name."""
    named: dict[str, Any] = {name: t for name, t in tensors.items() if is_dtensor(t)}
    summed = []
    for name, t in named.items():
        if len(t.placements) != 1:
            raise RuntimeError(
                f"fused_remat: {name} is sharded on {t.device_mesh}: FSDP gathers it in the hooks "
                "of its module, so call that and not its forward"
            )
        summed.append(t.placements[0].is_replicate() and (parallel.sequence or name in _OF_HEADS))
    return dict(zip(named, local_shards(parallel.group, summed, named.values()), strict=True))


def _own_heads(mask: Tensor | None, nhead: int, parallel: ParallelSpec) -> Tensor | None:
    """This rank's heads of a mask (B*H, S_q, S_k) or (B, H, S_q, S_k); others are all heads'."""
    if mask is None or mask.dim() < 3 or (mask.dim() == 4 and mask.shape[1] == 1):
        return mask
    count = nhead // parallel.size
    heads = mask.view(-1, nhead, *mask.shape[-2:]) if mask.dim() == 3 else mask
    own = heads.narrow(1, parallel.rank * count, count)
    return own.reshape(-1, *mask.shape[1:]) if mask.dim() == 3 else own


class VocabularyParallelLinear(nn.Linear):
    """`nn.Linear` whose weight and bias are DTensors, rows divided; every rank gets all logits.

    The loss does not call it: `ops.linear_cross_entropy(hidden, head.weight, ...)` has none whole.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        mesh, given = weight.device_mesh, [weight] if self.bias is None else [weight, self.bias]
        group = mesh.get_group().group_name
        shards = local_shards(group, (False,) * len(given), given)
        logits = F.linear(_SharedInput.apply(input, group), *shards)
        out: Tensor = _Columns.apply(logits, group, mesh.size(), mesh.get_local_rank())
        return out


class _SharedInput(torch.autograd.Function):
    """What every rank has whole, and computes a part of the gradient of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return collective.total(dy, ctx.group), None


class _Columns(torch.autograd.Function):
    """The columns of all ranks, side by side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, size: int, rank: int) -> Tensor:
        ctx.rank, ctx.width = rank, x.shape[-1]
        rows = x.reshape(-1, x.shape[-1])
        whole = collective.gather(rows, group, size).view(size, *rows.shape)
        return whole.movedim(0, 1).reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return dy.narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None, None, None

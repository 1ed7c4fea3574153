"""Calls of a layer that is divided among ranks: this rank's tokens, heads and shards.

The parameters of such a layer are DTensors of a tensor-parallel mesh (`fused_remat.parallel`). A
call is read by their whole shapes, as that of any layer, and then reduced to this rank's part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import random
from fused_remat.autograd.shards import local_shards
from fused_remat.graph.build import block_graph
from fused_remat.layers.eligibility import Reason
from fused_remat.layers.modules import split_biases
from fused_remat.layers.read import BlockInputs
from fused_remat.spec import BlockSpec, ParallelSpec
from fused_remat.steps import collective
from fused_remat.steps.collective import is_dtensor

#: Parameters that all ranks have, and whose gradient each rank computes for its own heads.
_OF_HEADS = ("q_norm.weight", "k_norm.weight", "qkv.bias", "cross.bias")


@dataclass(frozen=True)
class TensorParallel:
    """The division of a layer among ranks."""

    place: ParallelSpec
    splits: bool = False  # whether every rank has the full input, which is divided by tokens
    joins: bool = False  # whether every rank gets the full output
    #: Between a split and a join, the numbers of tokens per sequence that a rank had after the
    #: split, in all calls. None if no layer splits for this one.
    lengths: set[int] | None = None

    def entered(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's tokens of a layer's input, which are in dimension `dim`; checked."""
        if self.splits:
            count, size = x.shape[dim], self.place.size
            if count % size:
                raise ValueError(
                    f"sequence parallel: {count} tokens of a sequence cannot be divided evenly "
                    f"among {size} ranks; pad the sequences"
                )
            x = _Part.apply(x, dim, self.place, False)
            if self.lengths is not None:
                self.lengths.add(x.shape[dim])
        elif self.lengths is not None and x.shape[dim] not in self.lengths:
            raise RuntimeError(
                f"fused_remat: a sequence-parallel layer got {x.shape[dim]} tokens of a sequence, "
                f"but the first layer of the container left {sorted(self.lengths)} tokens to each "
                "rank; call all layers of the container, in their order"
            )
        return x

    def whole(self, x: Tensor, dim: int) -> Tensor:
        """Return a tensor of full sequences, as masks and tables are; it takes no memory."""
        if not self.place.sequence or x.dim() <= dim:
            return x
        shape = list(x.shape)
        shape[dim] *= self.place.size
        return x.detach().new_empty(()).expand(shape)

    def joined(self, x: Tensor, dim: int) -> Tensor:
        """Return the tokens of all ranks, on every rank."""
        out: Tensor = _Part.apply(x, dim, self.place, True)
        return out

    def read(self, layer: Any, arguments: Mapping[str, Any]) -> BlockInputs | Reason:
        """Return this rank's part of a call of `layer`, whose input becomes this rank's tokens."""
        for value in arguments.values():
            if is_dtensor(value):
                raise RuntimeError(
                    "fused_remat: a tensor-parallel layer takes this rank's local tensor, got a "
                    f"DTensor of shape {tuple(value.shape)}; set use_local_output=True in the plan "
                    "of the module that returns it"
                )
        name = layer._map.input
        x = arguments[name]
        if not isinstance(x, Tensor) or x.is_nested or x.dim() not in (2, 3):
            raise ValueError(
                f"{name} must be a tensor of 2 or 3 dimensions, got {type(x).__name__}"
            )
        dim = layer._tokens_dim(x)
        x = self.entered(x, dim)
        inputs: BlockInputs | Reason = layer._read(**{**arguments, name: self.whole(x, dim)})
        if isinstance(inputs, Reason):
            return inputs
        if inputs.spec is None:
            return Reason("a traced layer cannot be divided among ranks")
        return self._own_part(inputs, inputs.spec, x.unsqueeze(0) if inputs.unbatched else x)

    def _own_part(self, inputs: BlockInputs, spec: BlockSpec, x: Tensor) -> BlockInputs:
        """Return this rank's part of a call that was read by full shapes; `x` is its own input."""
        reason, place = _unsupported_reason(inputs, spec), self.place
        if reason is not None:
            raise RuntimeError(f"fused_remat: a tensor-parallel layer cannot run: {reason}")
        tensors = {**inputs.tensors, "input": x}
        tensors = {**tensors, **_shards(tensors, place)}
        if spec.attention.projection == "split":
            tensors = split_biases(tensors, place.size, place.rank)
        for name in ("mask", "memory_mask"):
            tensors[name] = _own_heads(tensors.get(name), spec.attention.num_heads, place)
        spec = spec.on_rank(place)
        if not place.sequence and spec.drops:  # ranks draw the same for shared tensors
            tensors["seed"] = collective.first_ranks(random.draw_seed(x.device), place.group)
        return replace(inputs, spec=spec, graph=block_graph(spec), tensors=tensors)


class _Part(torch.autograd.Function):
    """A full tensor to this rank's part of a dimension, or back if `joins`: opposite passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, place: ParallelSpec, joins: bool) -> Tensor:
        ctx.own = dim, place, joins
        return _all(x, dim, place) if joins else _own(x, dim, place)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        dim, place, joins = ctx.own
        return (_own if joins else _all)(dy, dim, place), None, None, None


def _own(x: Tensor, dim: int, place: ParallelSpec) -> Tensor:
    count = x.shape[dim] // place.size
    return x.narrow(dim, place.rank * count, count).contiguous()


def _all(x: Tensor, dim: int, place: ParallelSpec) -> Tensor:
    batch, shape = math.prod(x.shape[:dim]), list(x.shape)
    rows = x.reshape(batch * shape[dim], math.prod(x.shape[dim:]) // max(shape[dim], 1))
    shape[dim] *= place.size
    return collective.gather(rows, place.group, place.size, batch, shape)


def _unsupported_reason(inputs: BlockInputs, spec: BlockSpec) -> str | None:
    if inputs.functions:
        return (
            "the activation function may mix hidden units of different ranks; use one that is "
            "named in fused_remat.steps.activation.ACTIVATIONS"
        )
    if spec.loras:
        return "low-rank updates are not divided among ranks"
    for name in ("mask", "padding", "memory_mask", "memory_padding"):
        mask = inputs.tensors.get(name)
        if mask is not None and mask.requires_grad:
            return f"{name} requires a gradient, and each rank would add that of some heads only"
    return None


def _shards(tensors: Mapping[str, Tensor | None], place: ParallelSpec) -> dict[str, Tensor]:
    named: dict[str, Any] = {name: t for name, t in tensors.items() if is_dtensor(t)}
    summed = []
    for name, t in named.items():
        if len(t.placements) != 1:
            raise RuntimeError(
                f"fused_remat: {name} is still sharded on {t.device_mesh}; FSDP gathers parameters "
                "in the hooks of a module, so call the module itself, not module.forward"
            )
        summed.append(t.placements[0].is_replicate() and (place.sequence or name in _OF_HEADS))
    return dict(zip(named, local_shards(place.group, summed, named.values()), strict=True))


def _own_heads(mask: Tensor | None, nhead: int, place: ParallelSpec) -> Tensor | None:
    """Return this rank's heads of a mask (B*H, S_q, S_k) or (B, H, S_q, S_k), others unchanged."""
    if mask is None or mask.dim() < 3 or (mask.dim() == 4 and mask.shape[1] == 1):
        return mask
    count = nhead // place.size
    heads = mask.view(-1, nhead, *mask.shape[-2:]) if mask.dim() == 3 else mask
    own = heads.narrow(1, place.rank * count, count)
    return own.reshape(-1, *mask.shape[1:]) if mask.dim() == 3 else own


class VocabularyParallelLinear(nn.Linear):
    """`nn.Linear` whose weight and bias are DTensors divided by rows; every rank gets all logits.

    `ops.linear_cross_entropy(hidden, head.weight, ...)` needs no logits, and does not call it.
    """

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        mesh, own = weight.device_mesh, [weight] if self.bias is None else [weight, self.bias]
        group, rank = mesh.get_group().group_name, mesh.get_local_rank()
        shards = local_shards(group, (False,) * len(own), own)
        logits = F.linear(_SharedInput.apply(input, group), *shards)
        place = ParallelSpec(group=group, size=mesh.size(), rank=rank, sequence=False)
        out: Tensor = _Part.apply(logits, logits.dim() - 1, place, True)
        return out


class _SharedInput(torch.autograd.Function):
    """The identity of a tensor that every rank has in full; gradients are summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return collective.total(dy, ctx.group), None

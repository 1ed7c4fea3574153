"""A call of a layer as a block: its description, its tensors, its own functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fused_remat.layers.linears import (
    Update,
    read_linear,
    tensor_of,
    update_tensors,
    without_adapters,
)
from fused_remat.layers.precision import CASTABLE, Precision
from fused_remat.spec import BlockSpec, LoraSpec
from fused_remat.steps.user_function import Function


@dataclass(frozen=True)
class LayerCall:
    """What a block takes.

    Attributes:
        spec: what it computes.
        tensors: by the block's names, inputs and all.
        functions: the caller's own activation function, if any.
        seq_first, unbatched: the inputs are (S, B, D), or (S, D) given as (1, S, D).
        precision: the dtypes under autocast, None if it is off.
    """

    spec: BlockSpec
    tensors: Mapping[str, Tensor | None]
    functions: Mapping[str, Function]
    seq_first: bool
    unbatched: bool
    precision: Precision | None = None


def batched(tensor: Tensor | None, unbatched: bool) -> Tensor | None:
    """`tensor`, of a batch of one if the call has no batch."""
    return tensor.unsqueeze(0) if unbatched and tensor is not None else tensor


#: What no adapter is around.
_STOCK = frozenset(
    (nn.Linear, nn.LayerNorm, nn.MultiheadAttention, NonDynamicallyQuantizableLinear)
)
#: Where a layer has its block's tensors: the way to a module, and (the block's name, attribute).
Place = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]


def in_attention(module: str, qkv: str, proj: str) -> tuple[Place, Place]:
    """The tensors of an `nn.MultiheadAttention` by the block's names `qkv` and `proj`."""
    packed = (f"{qkv}.weight", "in_proj_weight"), (f"{qkv}.bias", "in_proj_bias")
    return ((module,), packed), in_module(proj, module, "out_proj")


def in_split_attention(
    module: str, qkv: str, proj: str, layers: Sequence[str]
) -> tuple[Place, ...]:
    """The same of one whose q, k and v, by the block's names `layers`, have their own weights."""
    names = [f"{layer}.weight" for layer in layers]
    weights = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    split = (*zip(names, weights, strict=True), (f"{qkv}.bias", "in_proj_bias"))
    return ((module,), split), in_module(proj, module, "out_proj")


#: Biases of packed projections, by the layers that have parts of them.
_PACKED_BIASES = {"qkv.bias": ("q", "k", "v"), "cross.bias": ("cross_q", "cross_k", "cross_v")}


def with_own_biases(
    tensors: Mapping[str, Tensor | None], size: int = 1, rank: int = 0
) -> dict[str, Tensor | None]:
    """`tensors` with biases of packed projections as those of q, k and v: a rank's part of each.

    >>> list(with_own_biases({"qkv.bias": torch.arange(12)}, 2, 1)["k.bias"])
    [tensor(6), tensor(7)]
    """
    found = dict(tensors)
    for packed, layers in _PACKED_BIASES.items():
        whole = found.pop(packed, None)
        if whole is not None:
            parts = whole.view(3, size, -1)[:, rank].unbind()
            names = [f"{layer}.bias" for layer in layers]
            found.update(zip(names, parts, strict=True))
    return found


def in_module(name: str, *way: str) -> Place:
    """The weight and bias of a module by the block's `name`.

    >>> in_module("fc1", "linear1")
    (('linear1',), (('fc1.weight', 'weight'), ('fc1.bias', 'bias')))
    """
    return way, tuple((f"{name}.{kind}", kind) for kind in ("weight", "bias"))


def tensors_at(layer: Any, places: Iterable[Place]) -> dict[str, Tensor | None]:
    """The tensors at `places` by the block's names, read through the submodules at every call."""
    found: dict[str, Tensor | None] = {}
    for way, names in places:
        module = layer
        for step in way:
            module = None if module is None else module._modules.get(step)
            if type(module) not in _STOCK:
                module = without_adapters(module)
        if module is None:
            found.update((name, None) for name, _ in names)
            continue
        own = module._parameters.get
        for name, attribute in names:
            found[name] = t if (t := own(attribute)) is not None else tensor_of(module, attribute)
    return found


Adapters = tuple[dict[str, Tensor | None], tuple[LoraSpec, ...]]


def adapters_of(layer: nn.Module, x: Tensor, low: torch.dtype | None) -> Adapters | str:
    """The tensors of PEFT's adapters on a layer of `torch.nn` and their numbers, or why not.

    `low`: the dtype of autocast, None if it is off.

    >>> adapters_of(nn.TransformerEncoderLayer(8, 2), torch.zeros(3, 2, 8), None)
    ({}, ())
    """
    child = layer._modules.get
    if type(child("linear1")) is nn.Linear and type(child("linear2")) is nn.Linear:
        return {}, ()  # this runs at every call
    updates: dict[str, tuple[Update, ...]] = {}
    for name, linear in (("fc1", "linear1"), ("fc2", "linear2")):
        parts = read_linear(child(linear))
        if isinstance(parts, str):
            return f"its {linear} {parts}"
        updates[name] = parts.updates
    for name, mine in updates.items():
        for a in [update.a for update in mine]:
            fits = a.dtype in ((x.dtype, torch.float32) if low is None else CASTABLE)
            if not fits or a.device != x.device:
                where = f"is {a.dtype} on {a.device} beside {x.dtype} on {x.device}"
                return f"an adapter of {name} {where}"
    return update_tensors(updates, x.dtype if low is None else None)

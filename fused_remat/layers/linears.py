"""A linear layer as a block's tensors: `nn.Linear`, transformers' `Conv1D`, and PEFT's LoRA on one.

The fused path reads weights instead of calling the layer, so it has to know what the call would do.
What is not known exactly has a reason, and runs as it is under ordinary rebuild. Classes of other
packages are recognised by name, and neither package is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.autograd.shards import is_dtensor
from fused_remat.ops.activation import has_hooks
from fused_remat.spec import LoraSpec, lora_params

_PLAIN = (Tensor, nn.Parameter)
_FORWARD = nn.Linear.forward
_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_LORA = ("peft.tuners.lora.layer", "Linear")
_SAVED = ("peft.utils.other", "ModulesToSaveWrapper")


@dataclass(frozen=True, eq=False)
class Update:
    """One active adapter: + scale * dropout_p(x) @ a.T @ b.T, a (rank, in), b (out, rank)."""

    a: Tensor
    b: Tensor
    scale: float
    p: float


@dataclass(frozen=True, eq=False)
class LinearParts:
    """What a linear layer computes now: x @ weight.T + bias, and the updates.

    weight (out, in): a parameter, or the transposed view of one.
    """

    weight: Tensor
    bias: Tensor | None
    updates: tuple[Update, ...] = ()


def read_linear(
    module: Any, types: tuple[type[nn.Module], ...] = (nn.Linear,)
) -> LinearParts | str:
    """What `module` computes now, or why the fused path cannot: a phrase with a verb.

    `types`: of the layer itself, exactly; transformers' Conv1D is always known. Of PEFT's LoRA,
    whatever adapters are active now, in their present mode, scaling and merging. It cannot serve
    variants (DoRA and others), adapters with a bias, quantised layers, and anything unknown.

    >>> layer = nn.Linear(4, 2, bias=False)
    >>> read_linear(layer).weight is layer.weight
    True
    >>> read_linear(nn.Bilinear(4, 4, 2)), read_linear(None)
    ('is a Bilinear, not a Linear', 'is missing')
    """
    if type(module) in types:
        return _plain(module, types)
    module = unwrapped(module)
    if isinstance(module, str):
        return module
    if not _is(module, _LORA):
        return _plain(module, types)
    reason = _why_not_called(module)
    if reason is not None:
        return reason
    base = _plain(module._modules["base_layer"], types)
    if isinstance(base, str):
        return f"has a base layer that {base}"
    updates = _updates(module, base.weight.dtype)
    return updates if isinstance(updates, str) else LinearParts(base.weight, base.bias, updates)


def without_adapters(module: Any) -> Any:
    """`module`, or what PEFT's LoRA is around.

    >>> layer = nn.Linear(4, 2)
    >>> without_adapters(layer) is layer
    True
    """
    while isinstance(module, nn.Module) and _is(module, _LORA):
        module = module._modules["base_layer"]
    return module


def unwrapped(module: Any) -> nn.Module | str:
    """`module`, or what acts in its place now if PEFT trains a copy of it (modules_to_save).

    >>> norm = nn.LayerNorm(4)
    >>> unwrapped(norm) is norm
    True
    """
    if not isinstance(module, nn.Module):
        return "is missing" if module is None else f"is a {type(module).__name__}"
    if not _is(module, _SAVED):
        return module
    reason = _why_not_called(module)
    if reason is not None:
        return reason
    wrapper: Any = module
    active = wrapper.active_adapters
    if not active or wrapper._disable_adapters or any(n not in wrapper._adapters for n in active):
        return wrapper._modules["original_module"]  # type: ignore[no-any-return]
    return wrapper._modules["modules_to_save"][active[0]]  # type: ignore[no-any-return]


def block_tensors(
    layers: Mapping[str, LinearParts], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor | None], tuple[LoraSpec, ...]]:
    """The tensors of a block's layers by its names, and their updates, as a block's config has.

    `dtype`: of what the layers read; None under autocast, where their products have its dtype.

    >>> layer = nn.Linear(4, 2)
    >>> parts = LinearParts(layer.weight, layer.bias, (Update(torch.ones(1, 4), ..., 0.5, 0.0),))
    >>> tensors, loras = block_tensors({"fc1": parts}, torch.float32)
    >>> list(tensors)
    ['fc1.weight', 'fc1.bias', 'lora.0.A', 'lora.0.B']
    >>> loras
    (LoraSpec(layer='fc1', scale=0.5, dropout=0.0, dtype=None),)
    """
    tensors: dict[str, Tensor | None] = {}
    for layer, parts in layers.items():
        tensors[f"{layer}.weight"], tensors[f"{layer}.bias"] = parts.weight, parts.bias
    updates = {layer: parts.updates for layer, parts in layers.items() if parts.updates}
    if not updates:
        return tensors, ()
    matrices, loras = update_tensors(updates, dtype)
    return {**tensors, **matrices}, loras


def update_tensors(
    updates: Mapping[str, tuple[Update, ...]], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor | None], tuple[LoraSpec, ...]]:
    """`block_tensors` of the updates alone, by their layer.

    >>> update_tensors({"fc1": ()}, torch.float32)
    ({}, ())
    """
    every = [(layer, update) for layer, mine in updates.items() for update in mine]
    loras = []
    for layer, update in every:
        own = None if dtype is None or update.a.dtype == dtype else update.a.dtype
        scale, p = update.scale, update.p
        loras.append(LoraSpec(layer=layer, scale=scale, dropout=p, dtype=own))
    matrices = [matrix for _, update in every for matrix in (update.a, update.b)]
    return dict(zip(lora_params(len(every)), matrices, strict=True)), tuple(loras)


def is_readable(param: Tensor) -> bool:
    """Whether a block may read a parameter: a plain one, or a DTensor, of which it reads a shard.

    >>> is_readable(nn.Parameter(torch.ones(1)))
    True
    """
    return type(param) in _PLAIN or is_dtensor(param)


def dropout_p(module: Any) -> float:
    """The probability that an `nn.Dropout` or `nn.Identity` applies now.

    >>> dropout_p(nn.Dropout(0.1)), dropout_p(nn.Dropout(0.1).eval()), dropout_p(nn.Identity())
    (0.1, 0.0, 0.0)
    """
    state = module.__dict__
    return float(state.get("p", 0.0)) if state["training"] else 0.0


def _is(module: nn.Module, named: tuple[str, str]) -> bool:
    cls = type(module)
    return (cls.__module__, cls.__qualname__) == named


def _why_not_called(module: nn.Module) -> str | None:
    """Why calling `module` would do something else than what its class says."""
    if has_hooks(module):
        return "has hooks"
    forward: Any = type(module).forward
    if isinstance(module, nn.Linear):
        replaced = forward is not _FORWARD
    else:  # a patched class says where the patch is from, or what it wraps
        replaced = forward.__module__ != type(module).__module__ or hasattr(forward, "__wrapped__")
    return "has a replaced forward" if replaced or "forward" in module.__dict__ else None


def _plain(module: Any, types: tuple[type[nn.Module], ...]) -> LinearParts | str:
    """A layer without adapters."""
    transposed = type(module) not in types
    if transposed and not _is(module, _CONV1D):
        return f"is a {type(module).__name__}, not a {types[0].__name__}"
    reason = _why_not_called(module)
    if reason is not None:
        return reason
    weight, bias = tensor_of(module, "weight"), tensor_of(module, "bias")
    if weight is None:
        return "has no weight"
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and type(tensor) not in _PLAIN and not is_readable(tensor):
            return f"has a {name} that is a {type(tensor).__name__}"
    return LinearParts(weight.t() if transposed else weight, bias)


def _updates(module: Any, dtype: torch.dtype) -> tuple[Update, ...] | str:
    """What the active adapters of PEFT's LoRA on a layer of `dtype` add, or what is unknown."""
    if module._disable_adapters:
        # PEFT's forward then takes the merged ones out of the weight.
        return "has merged adapters while they are disabled" if module.merged_adapters else ()
    if module.merged_adapters:
        return ()
    updates = []
    for name in module.active_adapters:
        if name in module.lora_A:
            update = _update(module, name, dtype)
            if isinstance(update, str):
                return f"has the adapter {name!r}, {update}"
            updates.append(update)
    return tuple(updates)


def _update(module: Any, name: str, dtype: torch.dtype) -> Update | str:
    """The adapter `name` of PEFT's LoRA on a layer of `dtype`, or what about it is unknown."""
    variant = getattr(module, "lora_variant", {}).get(name)
    if variant is not None or module.use_dora.get(name):
        return f"a {'DoRA' if variant is None else type(variant).__name__}"
    a = _plain(module.lora_A._modules[name], (nn.Linear,))
    b = _plain(module.lora_B._modules[name], (nn.Linear,))
    if isinstance(a, str):
        return f"whose A {a}"
    if isinstance(b, str):
        return f"whose B {b}"
    if a.bias is not None or b.bias is not None:
        return "which has a bias"
    if a.weight.dtype != b.weight.dtype:
        return f"whose A is {a.weight.dtype}, B {b.weight.dtype}"
    if a.weight.dtype != dtype and not getattr(module, "cast_input_dtype_enabled", True):
        return f"which is {a.weight.dtype} beside {dtype}, and casting is disabled"
    dropout = module.lora_dropout._modules[name]
    if type(dropout) not in (nn.Dropout, nn.Identity) or _why_not_called(dropout) is not None:
        return f"whose dropout is a {type(dropout).__name__}, or has hooks"
    scale = module.scaling[name]
    if type(scale) not in (int, float):
        return f"whose scaling is a {type(scale).__name__}"
    return Update(a.weight, b.weight, float(scale), dropout_p(dropout))


def tensor_of(module: Any, name: str) -> Tensor | None:
    """`module.name` if there is such a tensor: a parameter, or what replaced it.

    >>> tensor_of(nn.Linear(2, 3, bias=False), "bias") is None
    True
    """
    own = module._parameters.get(name)
    if own is not None:
        return own  # type: ignore[no-any-return]
    # Not getattr: a parametrization would compute, and update its buffers.
    for where in (module._buffers, module.__dict__):
        own = where.get(name)
        if own is not None:
            return own if isinstance(own, Tensor) else None
    return None

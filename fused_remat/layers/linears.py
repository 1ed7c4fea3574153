"""What a linear layer computes: `nn.Linear`, transformers' `Conv1D`, or PEFT's LoRA on one of them.

The fused path reads weights instead of calling the layer, so it has to know what a call would do.
Where that is not known exactly, `Unsupported` says why. Classes of other packages are recognised
by their name; neither package is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.layers.eligibility import (
    Unsupported,
    check_foreign_module,
    check_module,
    qualified,
)
from fused_remat.spec import LoraSpec, lora_params

_CONV1D = ("transformers.pytorch_utils", "Conv1D")
_LORA = ("peft.tuners.lora.layer", "Linear")
_SAVED = ("peft.utils.other", "ModulesToSaveWrapper")
#: Biases of packed projections, by the layers that have parts of them.
_PACKED_BIASES = {"qkv.bias": ("q", "k", "v"), "cross.bias": ("cross_q", "cross_k", "cross_v")}


@dataclass(frozen=True, eq=False)
class Update:
    """One active adapter: + scale * dropout_p(x) @ a.T @ b.T, a (rank, in), b (out, rank)."""

    a: Tensor
    b: Tensor
    scale: float
    p: float


#: A layer computes x @ weight.T + bias, and its updates; weight is (out, in).
Linear = tuple[Tensor, Tensor | None, tuple[Update, ...]]


def read_linear(module: Any, path: str) -> Linear:
    """What the linear layer `module` computes now; messages call it `path`.

    Of PEFT's LoRA, whatever adapters are active, in their present mode, scaling and merging.

    Raises: Unsupported for variants (DoRA and others), adapters with a bias, quantised layers,
        modules of other classes, with hooks or with a forward of their own.

    >>> layer = nn.Linear(4, 2, bias=False)
    >>> weight, bias, updates = read_linear(layer, "proj")
    >>> weight is layer.weight, bias, updates
    (True, None, ())
    >>> read_linear(nn.Bilinear(4, 4, 2), "proj")
    Traceback (most recent call last):
    fused_remat.layers.eligibility.Unsupported: proj is torch.nn.Bilinear; the fused path supports
    torch.nn.Linear
    """
    is_linear = type(module) is nn.Linear
    if not is_linear:  # rarely; this runs at every call
        module = active_module(module, path)
        if _is(module, _LORA):
            check_foreign_module(module, path, *_LORA)
            base, base_bias = _plain(module._modules["base_layer"], f"{path}.base_layer")
            return base, base_bias, _updates(module, path, base.dtype)
    is_conv1d = not is_linear and _is(module, _CONV1D)
    if is_conv1d:
        check_foreign_module(module, path, *_CONV1D)
    else:
        check_module(module, path, nn.Linear)
    weight, bias = affine_of(module)
    if weight is None:
        raise Unsupported(f"{path} has no weight")
    return weight.t() if is_conv1d else weight, bias, ()


def _plain(module: Any, path: str) -> tuple[Tensor, Tensor | None]:
    """The weight and bias of a layer that may not have adapters."""
    weight, bias, updates = read_linear(module, path)
    if updates:
        raise Unsupported(f"{path} has adapters itself")
    return weight, bias


def affine_of(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """The weight and bias of a module: parameters, or the tensors that replaced them."""
    own = module._parameters
    return (
        own["weight"] if "weight" in own else tensor_of(module, "weight"),
        own["bias"] if "bias" in own else tensor_of(module, "bias"),
    )


def tensor_of(module: Any, name: str) -> Tensor | None:
    """`module.name` if there is such a tensor: a parameter, or what replaced it."""
    # Not getattr: a parametrization would compute, and update its buffers.
    for where in (module._parameters, module._buffers, module.__dict__):
        own = where.get(name)
        if own is not None:
            return own if isinstance(own, Tensor) else None
    return None


def without_adapters(module: Any) -> Any:
    """`module`, or the layer that PEFT's LoRA is around."""
    while isinstance(module, nn.Module) and _is(module, _LORA):
        module = module._modules["base_layer"]
    return module


def active_module(module: Any, path: str) -> Any:
    """`module`, or the one that acts in its place now if PEFT trains a copy (modules_to_save)."""
    if not isinstance(module, nn.Module) or not _is(module, _SAVED):
        return module
    check_foreign_module(module, path, *_SAVED)
    wrapper: Any = module
    active = wrapper.active_adapters
    if not active or wrapper._disable_adapters or any(n not in wrapper._adapters for n in active):
        return wrapper._modules["original_module"]
    return wrapper._modules["modules_to_save"][active[0]]


def split_biases(
    tensors: Mapping[str, Tensor | None], size: int = 1, rank: int = 0
) -> dict[str, Tensor | None]:
    """`tensors` with the biases of packed projections as those of q, k and v: a rank's part.

    >>> list(split_biases({"qkv.bias": torch.arange(12)}, 2, 1)["k.bias"])
    [tensor(6), tensor(7)]
    """
    found = dict(tensors)
    for packed, layers in _PACKED_BIASES.items():
        whole = found.pop(packed, None)
        if whole is not None:
            parts = whole.view(3, size, -1)[:, rank].unbind()
            found.update(zip([f"{layer}.bias" for layer in layers], parts, strict=True))
    return found


def update_tensors(
    updates: Mapping[str, tuple[Update, ...]], dtype: torch.dtype | None
) -> tuple[dict[str, Tensor | None], tuple[LoraSpec, ...]]:
    """The matrices of a block's low-rank updates by its names, and their specs.

    `updates`: by the layer that they update. `dtype`: of what the layers read; None under
    autocast, where products have its dtype.

    >>> update_tensors({"fc1": (Update(torch.ones(1, 4), torch.ones(2, 1), 0.5, 0.0),)}, None)[1]
    (LoraSpec(layer='fc1', scale=0.5, dropout=0.0, dtype=None),)
    """
    every = [(layer, update) for layer, mine in updates.items() for update in mine]
    loras = []
    for layer, update in every:
        own = None if dtype is None or update.a.dtype == dtype else update.a.dtype
        loras.append(LoraSpec(layer=layer, scale=update.scale, dropout=update.p, dtype=own))
    matrices = [matrix for _, update in every for matrix in (update.a, update.b)]
    return dict(zip(lora_params(len(every)), matrices, strict=True)), tuple(loras)


def read_dropout(module: Any, path: str) -> float:
    """The probability that an `nn.Dropout` or `nn.Identity` applies now.

    >>> read_dropout(nn.Dropout(0.1), "dropout"), read_dropout(nn.Dropout(0.1).eval(), "dropout")
    (0.1, 0.0)
    """
    check_module(module, path, nn.Dropout, nn.Identity)
    state = module.__dict__
    p = float(state.get("p", 0.0)) if state["training"] else 0.0
    if not 0.0 <= p <= 1.0:
        raise Unsupported(f"{path} has the probability {p}, outside [0, 1]")
    return p


def _is(module: Any, named: tuple[str, str]) -> bool:
    kind = type(module)
    return (kind.__module__, kind.__qualname__) == named


def _updates(module: Any, path: str, dtype: torch.dtype) -> tuple[Update, ...]:
    """What the active adapters of PEFT's LoRA on a layer of `dtype` add."""
    if module._disable_adapters:
        if module.merged_adapters:  # PEFT's forward takes them out of the weight
            raise Unsupported(f"{path} has merged adapters while they are disabled")
        return ()
    if module.merged_adapters:
        return ()
    active = [name for name in module.active_adapters if name in module.lora_A]
    return tuple(
        [_update(module, name, f"the adapter {name!r} of {path}", dtype) for name in active]
    )


def _update(module: Any, name: str, called: str, dtype: torch.dtype) -> Update:
    """The adapter `name` of PEFT's LoRA on a layer of `dtype`; messages call it `called`."""
    variant = getattr(module, "lora_variant", {}).get(name)
    if variant is not None or module.use_dora.get(name):
        kind = "DoRA" if variant is None else qualified(type(variant))
        raise Unsupported(f"{called} is {kind}; the fused path supports plain LoRA")
    a, a_bias = _plain(module.lora_A._modules[name], f"A of {called}")
    b, b_bias = _plain(module.lora_B._modules[name], f"B of {called}")
    if a_bias is not None or b_bias is not None:
        raise Unsupported(f"{called} has a bias")
    if a.dtype != b.dtype:
        raise Unsupported(f"{called} has A of {a.dtype} and B of {b.dtype}")
    if a.dtype != dtype and not getattr(module, "cast_input_dtype_enabled", True):
        raise Unsupported(f"{called} is {a.dtype} beside {dtype}, and casting is disabled")
    p = read_dropout(module.lora_dropout._modules[name], f"the dropout of {called}")
    scale = module.scaling[name]
    if type(scale) not in (int, float):
        raise Unsupported(f"the scaling of {called} is {qualified(type(scale))}; expected a number")
    return Update(a, b, float(scale), p)

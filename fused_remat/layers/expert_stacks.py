"""PEFT's LoRA on stacked parameters (`target_parameters`), read as low-rank updates.

PEFT wraps the module that has the parameter, once for each, and adds a parametrization to it for
the time of a call. A replica, whose tensors may be replaced, computes the same without changing it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from fused_remat.layers.eligibility import Unsupported, check_foreign_module, parameters_of
from fused_remat.layers.modules import updates_of

_WRAPPER = ("peft.tuners.lora.layer", "ParamWrapper")


class StackUpdate(NamedTuple):
    """An active adapter of a stacked parameter; A and B are named relative to the wrapper."""

    parameter: str
    a: str
    b: str
    scale: float


def is_wrapper(module: Any) -> bool:
    """Return whether a module is PEFT's around one with an adapted parameter."""
    return (type(module).__module__, type(module).__qualname__) == _WRAPPER


def unwrapped(module: Any) -> tuple[Any, str, list[StackUpdate]]:
    """Return the module in PEFT's wrappers, the prefix of its path, and the active adapters.

    Raises: Unsupported for adapters that no block computes.
    """
    base, prefix, updates = module, "", list[StackUpdate]()
    while is_wrapper(base):
        if type(base) not in _FUNCTIONS.values():
            check_foreign_module(base, prefix or "it", *_WRAPPER)
        name, parameter = base.parameter_name, base.get_param()
        names = {id(p): n for n, p in parameters_of(base).items()}
        for a, b, scale, _, _ in updates_of(base, name, parameter.dtype):
            if parameter.dim() != 3:
                raise Unsupported(f"{name} has an adapter, and is no stack of matrices")
            own_a, own_b = (f"{prefix}{names[id(t)]}" for t in (a, b))
            updates.append(StackUpdate(name, own_a, own_b, scale))
        base, prefix = base._modules["base_layer"], f"{prefix}base_layer."
    return base, prefix, updates


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module without its parametrizations."""
    kind = type(module)
    return kind.__bases__[0] if "parametrizations" in module._modules else kind


_FUNCTIONS: dict[type, type] = {}


def functional(kind: type) -> type:
    """Return the class for replicas of PEFT's wrapper; `kind` itself for any other class."""
    if (kind.__module__, kind.__qualname__) != _WRAPPER or kind in _FUNCTIONS.values():
        return kind
    if kind not in _FUNCTIONS:
        attributes = {"forward": _forward, "__module__": _WRAPPER[0], "__qualname__": _WRAPPER[1]}
        _FUNCTIONS[kind] = type(_WRAPPER[1], (kind,), attributes)
    return _FUNCTIONS[kind]


def _forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call the module in the wrappers with updated parameters."""
    base, weights = self, dict[str, Tensor]()
    while is_wrapper(base):
        updates_of(base, base.parameter_name, x.dtype)  # which may raise
        skips = base.disable_adapters or base.merged
        for name in () if skips else [n for n in base.active_adapters if n in base.lora_A]:
            known = weights.get(base.parameter_name)
            weight = base.get_param() if known is None else known
            weights[base.parameter_name] = weight + base.get_delta_weight(name)
        base = base._modules["base_layer"]
    plain: Any = object.__new__(class_of(base))
    own = {n: p for n, p in base._parameters.items() if n not in weights}
    vars(plain).update(vars(base), _parameters=own)
    for name in getattr(base, "parametrizations", ()):
        weights.setdefault(name, getattr(base, name))
    vars(plain).update(weights)
    return plain(x, *args, **kwargs)

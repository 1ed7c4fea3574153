"""When the fused path can stand in for a layer of transformers, and why not.

As in `layers.eligibility`: only where nobody could tell, and every function returns the reason for
"no" as a phrase. Modules of the layer have to be of the architecture's own classes, with their own
forward and without hooks; linear layers are read by `layers.linears`, which knows PEFT's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fused_remat.huggingface.rows import ACTIVATIONS, Architecture, at
from fused_remat.layers.eligibility import why_not_global_hooks
from fused_remat.ops.activation import activation_name, has_hooks

_PLAIN = (Tensor, nn.Parameter)
_DROPOUT = (nn.Dropout, nn.Identity)
_CAPTURE = "transformers.utils.output_capturing"
_LAYER_NORM = nn.LayerNorm.forward
#: Layers of older ones return tuples, or have their parts elsewhere.
_OLDEST = (5, 17)


def why_not_convertible(layer: nn.Module, row: Architecture) -> str | None:
    """Why the block has no place for something that a layer always does, whatever its call."""
    from transformers import __version__ as version

    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        return f"transformers is {version}, older than {_OLDEST[0]}.{_OLDEST[1]}"
    if "forward" in layer.__dict__ or not _is_own(type(layer).forward, row):
        return "its forward was replaced"
    for path, attribute, meaning in row.excluded:
        module = at(layer, path)
        value = None if module is None else getattr(module, attribute, None)
        if value is not None and value is not False:
            return f"it has {meaning}"
    return _why_not_activation(layer, row)


def _is_own(forward: Any, row: Architecture) -> bool:
    """Whether a class still has the forward that transformers wrote, which the block stands for."""
    return bool(forward.__module__ == row.package)


def _activation(layer: nn.Module, row: Architecture) -> Any:
    """A module, or a function of the caller's."""
    path, _, name = row.activation.rpartition(".")
    return getattr(at(layer, path), name, None)


def _why_not_activation(layer: nn.Module, row: Architecture) -> str | None:
    if name_of_activation(layer, row) is not None:
        return None
    activation = _activation(layer, row)
    shown = getattr(activation, "__name__", type(activation).__name__)
    return f"its activation is {shown}, which has no row, or has hooks"


def name_of_activation(layer: nn.Module, row: Architecture) -> str | None:
    """The backends' name of the layer's activation; None if it has none."""
    activation = _activation(layer, row)
    cls = type(activation)
    if cls.__module__ == "transformers.activations" and cls.__name__ in ACTIVATIONS:
        plain = not has_hooks(activation) and "forward" not in activation.__dict__
        return ACTIVATIONS[cls.__name__] if plain else None
    return activation_name(activation)


def why_not_modules(layer: nn.Module, row: Architecture) -> str | None:
    """Why the fused path cannot stand in for the layer's own forward and its submodules."""
    stock: Any = type(layer).stock  # type: ignore[attr-defined]
    if not _is_own(stock.forward, row):  # since conversion: a class may be patched at any time
        return "its forward was replaced"
    for path, name in row.containers.items():
        reason = _why_not_own(at(layer, path), row.package, name)
        if reason is not None:
            return f"its {path} {reason}"
    for path in (*row.norms.values(), *row.head_norms.values()):
        reason = _why_not_norm(at(layer, path), row)
        if reason is not None:
            return f"its {path} {reason}"
    for path in row.dropouts.values():
        module = at(layer, path)
        if type(module) not in _DROPOUT or has_hooks(module) or "forward" in module.__dict__:
            return f"its {path} is a {type(module).__name__}, or was changed"
    return _why_not_activation(layer, row) or why_not_global_hooks()


def _why_not_norm(module: Any, row: Architecture) -> str | None:
    if row.norm != "layer_norm":
        return _why_not_own(module, row.package, row.norm_class)
    if type(module) is not nn.LayerNorm:
        return f"is a {type(module).__name__}, not a LayerNorm"
    if "forward" in module.__dict__ or nn.LayerNorm.forward is not _LAYER_NORM:
        return "has a replaced forward"
    return "has hooks" if has_hooks(module) else None


def _why_not_own(module: Any, package: str, name: str) -> str | None:
    """Why calling `module` would not run the forward that `package` has for its class `name`."""
    cls = type(module)
    if (cls.__module__, cls.__qualname__) != (package, name):
        return f"is a {cls.__name__}, not a {name}"
    forward: Any = cls.forward
    if "forward" in module.__dict__ or forward.__module__ != package:
        return "has a replaced forward"
    return _why_hooked(module) if has_hooks(module) else None


def _why_hooked(module: nn.Module) -> str | None:
    """transformers leaves its own recorders on modules; they look only while they are asked."""
    state = module.__dict__
    if state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return "has hooks"
    if any(getattr(h, "__module__", "") != _CAPTURE for h in state["_forward_hooks"].values()):
        return "has hooks"
    from transformers.utils import output_capturing

    asked = output_capturing._active_collector.get()
    if asked is None or not any(key.endswith("attentions") for key in asked):
        return None
    return "is asked for its attention weights"


def why_not_input(x: Any) -> str | None:
    """Why the fused path cannot take `x`, whatever the layer.

    >>> import torch
    >>> why_not_input(torch.zeros(2, 3))
    'hidden_states has shape (2, 3), expected (B, S, D)'
    """
    if type(x) not in _PLAIN:
        return f"hidden_states is a {type(x).__name__}"
    if x.dim() != 3:
        return f"hidden_states has shape {tuple(x.shape)}, expected (B, S, D)"
    return None if x.dtype.is_floating_point else f"hidden_states is {x.dtype}"

"""Swap the layers of an existing model for fused ones, in place, and back."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from fused_remat.backends.registry import check_name
from fused_remat.layers import FusedRematLayer
from fused_remat.policies import Policy

Model = TypeVar("Model", bound=nn.Module)

#: Layer types that can be swapped, and what for. A new architecture is a new row.
LAYERS: dict[type[nn.Module], type[FusedRematLayer]] = {
    nn.TransformerEncoderLayer: FusedRematLayer,
}
_STOCK = {fused: stock for stock, fused in LAYERS.items()}


def _fused_layers(model: nn.Module) -> Iterator[tuple[str, FusedRematLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, FusedRematLayer):
            yield name, module


def convert(
    model: Model,
    policy: str | Policy = "full",
    every: int = 1,
    backend: str = "auto",
    accumulate_into: str | None = None,
) -> Model:
    """Make every eligible layer of `model` a fused one, in place; returns `model`.

    The layer objects stay the same (only their class changes), and with them parameters,
    optimizer state, train/eval mode, hooks and references held elsewhere. Eligible are layers
    whose type is exactly `nn.TransformerEncoderLayer`; `every=k` takes every k-th of them,
    the first included. `accumulate_into`: as in `FusedRematLayer`, of every layer.

    Raises: ValueError if there is no such layer, for an unknown policy, backend or accumulate_into,
        or if `every` is not a positive int.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> model = convert(nn.TransformerEncoder(layer, num_layers=3), policy="lean")
    >>> [type(m).__name__ for m in model.layers]
    ['FusedRematLayer', 'FusedRematLayer', 'FusedRematLayer']
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every must be a positive int, got {every!r}")
    check_name(backend)
    found = [module for module in model.modules() if type(module) in LAYERS]
    if not found:
        wanted = ", ".join(t.__name__ for t in LAYERS)
        fused = sum(1 for _ in _fused_layers(model))
        already = f"; {fused} are fused already, see set_policy" if fused else ""
        raise ValueError(
            f"{type(model).__name__} has no layer to convert (looked for {wanted}{already})"
        )
    chosen = found[::every]
    done: list[nn.Module] = []
    try:
        for module in chosen:
            module.__class__ = LAYERS[type(module)]
            done.append(module)
            module.policy = policy  # type: ignore[assignment]
            module.backend = backend  # type: ignore[assignment]
            module.accumulate_into = accumulate_into  # type: ignore[assignment]
    except Exception:
        for module in done:
            _revert_one(module)  # type: ignore[arg-type]
        raise
    return model


def _revert_one(layer: FusedRematLayer) -> None:
    layer.__class__ = _STOCK[type(layer)]  # type: ignore[assignment]
    for name in ("_policy", "_backend", "_accumulate_into"):
        layer.__dict__.pop(name, None)


def revert(model: Model) -> Model:
    """Undo `convert`: every `FusedRematLayer` becomes the stock layer again, in place.

    Layers of a subclass of `FusedRematLayer` are left as they are.

    >>> model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4), 2))
    >>> type(revert(model).layers[0]).__name__
    'TransformerEncoderLayer'
    """
    for module in list(model.modules()):
        if type(module) in _STOCK:
            _revert_one(module)  # type: ignore[arg-type]
    return model


def set_policy(model: Model, pattern: str, policy: str | Policy) -> Model:
    """Set the policy of the fused layers whose qualified name matches `pattern`, a shell pattern.

    Raises: ValueError if no fused layer matches (the message lists their names), or for an
        unknown policy.

    >>> model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4), 2))
    >>> _ = set_policy(model, "layers.0", "fast")
    >>> [layer.policy for layer in model.layers]
    ['fast', 'full']
    """
    layers = dict(_fused_layers(model))
    matching = [layer for name, layer in layers.items() if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        names = ", ".join(map(repr, layers)) or "none"
        raise ValueError(f"no fused layer matches {pattern!r}; fused layers: {names}")
    for layer in matching:
        layer.policy = policy
    return model

"""Swap the layers of an existing model for fused ones, in place, and back."""

from __future__ import annotations

import fnmatch
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from fused_remat.execution.choose import check_name
from fused_remat.huggingface import rows
from fused_remat.huggingface.call import check_convertible
from fused_remat.huggingface.head import (
    FUSED_HEADS,
    HuggingFaceHead,
    head_class,
    supported_heads,
)
from fused_remat.huggingface.layer import FUSED, HuggingFaceLayer, fused_class
from fused_remat.layers import (
    FusedLayer,
    FusedRematDecoderLayer,
    FusedRematLayer,
    FusedRematWarning,
)
from fused_remat.layers.eligibility import Unsupported
from fused_remat.policies import Policy

Model = TypeVar("Model", bound=nn.Module)

#: Layer types of torch.nn that can be swapped, and what for. Those of transformers are the rows of
#: `huggingface.rows`.
LAYERS: dict[type[nn.Module], type[FusedLayer]] = {
    nn.TransformerEncoderLayer: FusedRematLayer,
    nn.TransformerDecoderLayer: FusedRematDecoderLayer,
}
_STOCK = {fused: stock for stock, fused in LAYERS.items()}


def _is_known(stock: type[nn.Module]) -> bool:
    """Whether a layer class can be swapped."""
    known = rows.architecture_of(stock) is not None and stock not in FUSED.values()
    return stock in LAYERS or known


def _class_for(stock: type[nn.Module]) -> type[FusedLayer] | None:
    """What a layer class is swapped for."""
    return LAYERS.get(stock) or fused_class(stock)


def _fused_layers(model: nn.Module) -> Iterator[tuple[str, FusedLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, FusedLayer):
            yield name, module


def convert(
    model: Model,
    policy: str | Policy = "full",
    every: int = 1,
    backend: str = "auto",
    accumulate_into: str | None = None,
    loss: bool = False,
) -> Model:
    """Make every eligible layer of `model` a fused one, in place; returns `model`.

    The layer objects stay the same (only their class changes), and with them parameters,
    optimizer state, train/eval mode, hooks and references held elsewhere. Eligible are layers
    whose type is exactly `nn.TransformerEncoderLayer` or `nn.TransformerDecoderLayer`, as in
    `nn.Transformer`, or one of transformers' that there is a row for (docs/huggingface.md), which
    keep their class's name; one with something that the block has no place for is left as it was,
    with a `FusedRematWarning`. `every=k` takes every k-th of them, the first included.
    `accumulate_into`: as in `FusedRematLayer`, of every layer. `loss`: a causal language model of
    transformers computes its loss by `ops.cross_entropy`, without whole logits, where a call
    trains and has labels; `logits` of what it returns is None then.

    Raises: ValueError if there is no such layer (the message lists what there is), or with `loss`
        no such model, for an unknown policy, backend or accumulate_into, or if `every` is not a
        positive int.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> model = convert(nn.TransformerEncoder(layer, num_layers=3), policy="lean")
    >>> [type(m).__name__ for m in model.layers]
    ['FusedRematLayer', 'FusedRematLayer', 'FusedRematLayer']
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every must be a positive int, got {every!r}")
    check_name(backend)
    found = [module for module in model.modules() if _is_known(type(module))]
    heads = _heads(model) if loss else []
    if not (found or heads):
        raise ValueError(_nothing_found(model))
    chosen = _convertible(model, found[::every])
    done: list[FusedLayer] = []
    try:
        for module in chosen:
            module.__class__ = _class_for(type(module))  # type: ignore[assignment]
            assert isinstance(module, FusedLayer)
            done.append(module)
            module.policy = policy
            module.backend = backend
            module.accumulate_into = accumulate_into
    except Exception:
        for module in done:
            _revert_one(module)
        raise
    for head in heads:
        head.__class__ = head_class(type(head))  # type: ignore[assignment]
        head.loss_backend = backend  # type: ignore[assignment]
    return model


def _heads(model: nn.Module) -> list[nn.Module]:
    """The language models in `model` whose loss can be computed without logits."""
    found = [module for module in model.modules() if head_class(type(module)) is not None]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no language model whose loss to convert (looked for "
            f"{supported_heads()})"
        )
    return found


def _nothing_found(model: nn.Module) -> str:
    wanted = ", ".join(t.__name__ for t in LAYERS)
    fused = sum(1 for _ in _fused_layers(model))
    already = f"; {fused} are fused already, see set_policy" if fused else ""
    return (
        f"{type(model).__name__} has no layer to convert (looked for {wanted} of torch.nn; in "
        f"transformers, the layers of {rows.supported()}{already})"
    )


def _convertible(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Those of `layers` that the block has everything for; warns of the others."""
    chosen, left = [], Counter[str]()
    for layer in layers:
        row = rows.architecture_of(type(layer))
        try:
            if row is not None:
                check_convertible(layer, row)
            chosen.append(layer)
        except Unsupported as reason:
            left[f"of class {type(layer).__name__} unchanged: {reason}"] += 1
    for what, count in left.items():
        noun = "layer" if count == 1 else "layers"
        text = f"fused_remat: convert leaves {count} {noun} {what}"
        warnings.warn(text, FusedRematWarning, stacklevel=3)
    return chosen


def _stock_of(layer: nn.Module) -> type[nn.Module] | None:
    """The class that `convert` found; None if it is not convert's own that it has now."""
    if isinstance(layer, HuggingFaceLayer):
        return layer.stock if FUSED.get(layer.stock) is type(layer) else None
    if isinstance(layer, HuggingFaceHead):
        return layer.stock if FUSED_HEADS.get(layer.stock) is type(layer) else None
    return _STOCK.get(type(layer))  # type: ignore[arg-type]


def _revert_one(layer: nn.Module) -> None:
    layer.__class__ = _stock_of(layer)  # type: ignore[assignment]
    for name in ("_policy", "_backend", "_accumulate_into", "loss_backend"):
        layer.__dict__.pop(name, None)


def revert(model: Model) -> Model:
    """Undo `convert`: every fused layer becomes the stock layer again, in place.

    Layers of a subclass of a fused one are left as they are.

    >>> model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4), 2))
    >>> type(revert(model).layers[0]).__name__
    'TransformerEncoderLayer'
    """
    for module in list(model.modules()):
        if _stock_of(module) is not None:
            _revert_one(module)
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

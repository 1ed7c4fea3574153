"""Replaces the layers of an existing model by fused ones, in place, and back."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator
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
from fused_remat.huggingface.layer import FUSED, fused_class
from fused_remat.layers import (
    FusedLayer,
    FusedRematDecoderLayer,
    FusedRematLayer,
)
from fused_remat.layers.converted import ConvertedLayer, around_layers
from fused_remat.layers.eligibility import Unsupported, qualified
from fused_remat.layers.record import record_of
from fused_remat.policies import Policy
from fused_remat.steps.operations import warn
from fused_remat.tracing.discovery import first_batch_norm, repeated_layers
from fused_remat.tracing.isolation import NOTES
from fused_remat.tracing.layer import ROWS, converted_class

Model = TypeVar("Model", bound=nn.Module)

#: Layer classes of torch.nn and the fused ones; those of transformers are in `huggingface.rows`.
LAYERS: dict[type[nn.Module], type[FusedLayer]] = {
    nn.TransformerEncoderLayer: FusedRematLayer,
    nn.TransformerDecoderLayer: FusedRematDecoderLayer,
}
_STOCK = {fused: stock for stock, fused in LAYERS.items()}


def _is_known(stock: type[nn.Module]) -> bool:
    """Whether there is a fused class for a layer class."""
    of_transformers = rows.architecture_of(stock) is not None and stock not in FUSED.values()
    return stock in LAYERS or of_transformers


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
    optimizer state, train/eval mode, hooks and references held elsewhere. Eligible are
    `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, as in `nn.Transformer`, the
    classes of transformers in docs/huggingface.md, and any other layer in a list of modules (or
    `model` itself) that has a norm and two matrices. Those others are read at their first call that
    trains: their operations are recorded on small tensors, read as a block, and the block is
    compared with the layer in float64 before it takes its place. A layer of which that fails stays
    as it is, with a `FusedRematWarning`; `conversion(model)` says what became of each layer.

    Args:
        model: changed in place.
        policy, backend, accumulate_into: of every layer, as in `FusedRematLayer`.
        every: convert every k-th eligible layer, the first included.
        loss: a causal language model of transformers computes its loss by
            `ops.linear_cross_entropy`, without whole logits, where a call trains and has labels;
            the `logits` of the output are then None, with one warning.

    Raises: ValueError if there is no eligible layer (the message lists the layers that `model` has,
        and the supported ones), or with `loss` no such model; for an unknown policy, backend or
        accumulate_into, or if `every` is not a positive int; TypeError if `loss` is not a bool.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> model = convert(nn.TransformerEncoder(layer, num_layers=3), policy="lean")
    >>> [type(m).__name__ for m in model.layers]
    ['FusedRematLayer', 'FusedRematLayer', 'FusedRematLayer']
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every must be a positive int, got {every!r}")
    if not isinstance(loss, bool):
        raise TypeError(f"loss must be True or False, got {loss!r}")
    check_name(backend)
    found = [module for module in model.modules() if _is_known(type(module))]
    known = {part for module in found for part in module.modules()}
    found += [layer for layer in repeated_layers(model) if layer not in known]
    heads = _heads(model) if loss else []
    if not (found or heads):
        raise ValueError(_nothing_found(model))
    order = {module: i for i, module in enumerate(model.modules())}
    paths, warned = {module: path for path, module in model.named_modules()}, set[str]()
    chosen = [m for m in sorted(found, key=order.__getitem__)[::every] if _is_own(m)]
    done: list[FusedLayer] = []
    try:
        for module in chosen:
            module.__class__ = _class_for(module)
            assert isinstance(module, FusedLayer)
            done.append(module)
            module.policy = policy
            module.backend = backend
            module.accumulate_into = accumulate_into
            record = record_of(module)
            record.path, record.warned = paths[module], warned
            if isinstance(module, ConvertedLayer):
                module._warn_of_options()
    except Exception:
        for module in done:
            _revert_one(module)
        raise
    for head in heads:
        head.__class__ = head_class(type(head))  # type: ignore[assignment]
        head.loss_backend = backend  # type: ignore[assignment]
        record_of(head).path = paths[head]
    around_layers(model, True)
    return model


def _heads(model: nn.Module) -> list[nn.Module]:
    """The language models in `model` whose loss can be computed without logits."""
    found = [module for module in model.modules() if head_class(type(module)) is not None]
    if not found:
        raise ValueError(
            f"loss=True: {type(model).__name__} contains no language model whose loss can be "
            f"computed without logits; supported: {supported_heads()}"
        )
    return found


def _nothing_found(model: nn.Module) -> str:
    count = sum(1 for _ in _fused_layers(model))
    blocking = None if count else first_batch_norm(model)
    if blocking is not None:
        path, norm = blocking
        return (
            f"{type(model).__name__} has no layer to convert: {path} is {qualified(type(norm))}, "
            "whose running statistics recomputation would update twice in a step; use a norm "
            "without running statistics, such as nn.LayerNorm or nn.GroupNorm"
        )
    already = f"; {count} are fused already: change them with set_policy" if count else ""
    return (
        f"{type(model).__name__} has no layer to convert{already or _layers_of(model)}; a layer is "
        "torch.nn's or transformers', or an element of a ModuleList or Sequential that has a norm "
        "and two matrices"
    )


def _layers_of(model: nn.Module) -> str:
    """The classes of repeated layers in `model`, for messages; else of its innermost modules."""
    found = Counter[str]()
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList | nn.Sequential):
            found.update({name: n for name, n in _classes(stack).items() if n > 1})
    if not found:
        parents = [m for m in model.modules() if any(m.children())]
        found = _classes(m for m in parents if not any(any(c.children()) for c in m.children()))
    listed = ", ".join(f"{n} x {name}" for name, n in found.most_common())
    return listed and f"; it has {listed}"


def _classes(modules: Iterable[nn.Module]) -> Counter[str]:
    """How many of `modules` are of each class, without PyTorch's own."""
    kinds = [type(module) for module in modules]
    return Counter(k.__name__ for k in kinds if not k.__module__.startswith("torch.nn."))


def _is_own(layer: nn.Module) -> bool:
    """Whether a layer has nothing that a fused layer would hide; warns if it has."""
    own, name = {**vars(layer), **layer._modules, **layer._parameters}, type(layer).__name__
    hidden = ("forward", "policy", "backend", "accumulate_into", "last_trace")
    taken = [n for n in hidden if n in own]
    if taken:
        warn(f"convert left a layer of class {name} unchanged: {name}.{taken[0]} was replaced")
    return not taken


def _row_class(layer: nn.Module) -> type[ConvertedLayer] | None:
    """Return the fused class of a layer of transformers whose row supports it; None for others."""
    row = rows.architecture_of(type(layer))
    if row is None:
        return None
    try:
        check_convertible(layer, row)
    except Unsupported:
        return None
    return fused_class(type(layer))


ROWS.append(_row_class)


def _class_for(layer: nn.Module) -> type[nn.Module]:
    """Return the class of the fused layer."""
    return LAYERS.get(type(layer)) or converted_class(layer)


def _stock_of(layer: nn.Module) -> type[nn.Module] | None:
    """The class that `convert` replaced; None for a layer that `convert` did not make."""
    if isinstance(layer, ConvertedLayer):
        return layer.stock if "stock" in type(layer).__dict__ else None
    if isinstance(layer, HuggingFaceHead):
        return layer.stock if FUSED_HEADS.get(layer.stock) is type(layer) else None
    return _STOCK.get(type(layer))  # type: ignore[arg-type]


def _revert_one(layer: nn.Module) -> None:
    layer.__class__ = _stock_of(layer)  # type: ignore[assignment]
    for name in ("_policy", "_backend", "_accumulate_into", *NOTES, "loss_backend"):
        layer.__dict__.pop(name, None)


def revert(model: Model) -> Model:
    """Undo `convert`: every fused layer becomes the stock layer again, in place.

    Layers of a subclass of a fused class stay unchanged.

    >>> model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4), 2))
    >>> type(revert(model).layers[0]).__name__
    'TransformerEncoderLayer'
    """
    for module in list(model.modules()):
        if _stock_of(module) is not None:
            _revert_one(module)
    around_layers(model, any(True for _ in _fused_layers(model)))
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

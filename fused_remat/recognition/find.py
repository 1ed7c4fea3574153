"""Finds the layers of a model that may be read as blocks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fused_remat.layers.fused_layer import FusedLayer

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The transformer layers of a model, in order; the model itself if it is one.

    A layer is an element of a list of modules, or the model itself, that has a norm and two
    matrices. Where such an element has a list of like layers itself (a stage of a hierarchical
    model), those are the layers.
    """
    found = list(_layers(model))
    if not found and _is_layer(model) and not _lists(model):
        found = [model]
    seen: set[nn.Module] = set()
    for layer in found:
        if layer not in seen:
            seen.add(layer)
            yield layer


def _layers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, FusedLayer):
            continue
        if not isinstance(child, _LISTS):
            yield from _layers(child)
            continue
        for element in child.children():
            if isinstance(element, FusedLayer):
                continue
            if _is_layer(element) and not any(map(_is_stage, _lists(element))):
                yield element
            else:
                yield from _layers(element)


def _lists(module: nn.Module) -> list[nn.Module]:
    return [
        child for child in module.modules() if isinstance(child, _LISTS) and child is not module
    ]


def _is_stage(children: nn.Module) -> bool:
    """Whether a list holds layers of one class."""
    layers = [child for child in children.children() if _is_layer(child)]
    return bool(layers) and len({type(layer) for layer in layers}) == 1 == len(
        {type(child) for child in children.children()}
    )


def _is_layer(module: nn.Module) -> bool:
    """Whether a module has a norm over the width and two matrices or more."""
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, FusedLayer):
        return False
    parts = [part for part in module.modules() if part is not module]
    norms = any("norm" in type(part).__name__.lower() for part in parts)
    matrices = sum(
        1
        for part in parts
        for p in part.parameters(recurse=False)
        if p.dim() == 2 and min(p.shape) > 1
    )
    return (
        norms
        and matrices >= 2
        and not any(isinstance(p, nn.modules.batchnorm._BatchNorm) for p in parts)
    )

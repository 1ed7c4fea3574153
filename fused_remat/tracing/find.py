"""Finds the layers of a model that may be read as blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from torch import nn

from fused_remat.layers.eligibility import packed_as
from fused_remat.layers.fused_layer import FusedLayer

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The transformer layers of a model, in order; the model itself if it is one.

    A layer is an element of a list of modules, or the model itself, that has a norm and two
    matrices. Where such an element has a list of like layers itself (a stage of a hierarchical
    model) with two thirds of its parameters, or a list of convolutions (a block of a UNet), layers
    are within it. Where there is none, parts without a norm are layers.
    """
    found = list(_layers(model, _is_layer))
    if not found and _is_layer(model) and not _lists(model):
        found = [model]
    return list(dict.fromkeys(found or _layers(model, _is_part)))


def first_batch_norm(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The first batch norm, by its path, in modules that would be layers if they had none."""
    found = list(_layers(model, _has_matrices))
    if not found and _has_matrices(model) and not _lists(model):
        found = [model]
    parts = {part for layer in found for part in layer.modules()}
    named = model.named_modules()
    return next(((name, m) for name, m in named if m in parts and _is_batch_norm(m)), None)


def _layers(module: nn.Module, chosen: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        in_list = isinstance(module, _LISTS) and not isinstance(child, _LISTS)
        if in_list and chosen(child) and not any(_divides(each, child) for each in _lists(child)):
            yield child
        elif not is_fused(child):
            yield from _layers(child, chosen)


def is_fused(module: nn.Module) -> bool:
    """Whether a module is a fused layer; not a subclass whose own forward calls no other's."""
    if not isinstance(module, FusedLayer):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return not module._has_own_forward or code is None or "forward" in code.co_names


def _lists(module: nn.Module) -> list[nn.Module]:
    return [
        child for child in module.modules() if isinstance(child, _LISTS) and child is not module
    ]


def _divides(children: nn.Module, parent: nn.Module) -> bool:
    """Whether a list within `parent` holds its layers, of one class and with two thirds of its
    parameters, or convolution blocks, which have a norm each."""
    blocks = [child for child in children.children() if _has_norm(child)]
    if any(_mixes_pixels(part) for block in blocks for part in block.modules()):
        return True
    layers = [child for child in children.children() if _is_layer(child)]
    kinds = {type(child) for child in children.children()}
    held, all_of_parent = (sum([p.numel() for p in m.parameters()]) for m in (children, parent))
    return bool(layers) and len(kinds) == 1 and 3 * held > 2 * all_of_parent


def _is_layer(module: nn.Module) -> bool:
    """Whether a module has a norm over the width and two matrices or more."""
    return _has_norm(module) and _is_part(module)


def _has_norm(module: nn.Module) -> bool:
    return any("norm" in type(part).__name__.lower() for part in module.modules())


def _mixes_pixels(module: nn.Module) -> bool:
    """Whether a module is a convolution over images or videos, in which channels meet as well."""
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)) or module.groups > 1:
        return False
    return any(n > 1 for n in module.kernel_size)


def _is_part(module: nn.Module) -> bool:
    """Whether a module, not one of PyTorch's, has two matrices or more, and no batch norm."""
    return _has_matrices(module) and not any(map(_is_batch_norm, module.modules()))


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _has_matrices(module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn."):
        return False
    parts = [part for part in module.modules() if part is not module]
    if is_fused(module) or any(map(is_fused, parts)):
        return False
    matrices = [
        min(p.shape[:2]) > 1 or packed_as(part, p)
        for part in parts
        for p in part.parameters(recurse=False)
        if p.dim() == 2 or (p.dim() == 3 and p.shape[2] == 1)  # a convolution of single tokens
    ]
    return sum(map(bool, matrices)) >= 2

"""The layers of a model that `convert` may trace as blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

from torch import nn

from fused_remat.layers.eligibility import packed_as
from fused_remat.layers.fused_layer import FusedLayer

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers of a model, in order; the model itself if it is one.

    A layer is an element of a list of modules, or the model itself, that has a norm and two
    matrices. An element that has a list of equal layers itself with two thirds of its parameters (a
    stage of a hierarchical model), or a list of convolutions (a block of a UNet), is searched
    instead. In a model without any, elements without a norm are layers.
    """
    layers = _chosen(model, _is_layer) or [*_layers(model, _has_matrices)]
    return [*dict.fromkeys(layers)]


def first_batch_norm(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the first batch norm and its path, in modules that would be layers without it."""
    parts = {part for layer in _chosen(model, _has_any_matrices) for part in layer.modules()}
    named = model.named_modules()
    return next(((name, m) for name, m in named if m in parts and _is_batch_norm(m)), None)


def is_fused(module: nn.Module) -> bool:
    """Return whether a module is a fused layer, whose own forward, if any, calls another's."""
    if not isinstance(module, FusedLayer):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return not module._has_own_forward or code is None or "forward" in code.co_names


def _chosen(model: nn.Module, chosen: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Return the chosen elements of lists in a model, or a model without lists if it is chosen."""
    layers = [*_layers(model, chosen)]
    return layers or [model] * (chosen(model) and not _lists(model))


def _layers(module: nn.Module, chosen: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        in_list = isinstance(module, _LISTS) and not isinstance(child, _LISTS)
        if in_list and chosen(child) and not any(_divides(each, child) for each in _lists(child)):
            yield child
        elif not is_fused(child):
            yield from _layers(child, chosen)


def _lists(module: nn.Module) -> list[nn.Module]:
    return [part for part in module.modules() if isinstance(part, _LISTS) and part is not module]


def _divides(children: nn.Module, parent: nn.Module) -> bool:
    """Return whether a list within `parent` holds its layers, or convolution blocks with norms."""
    blocks = [child for child in children.children() if _has_norm(child)]
    if any(_mixes_pixels(part) for block in blocks for part in block.modules()):
        return True
    kinds = {type(child) for child in children.children()}
    held, total = (sum([p.numel() for p in m.parameters()]) for m in (children, parent))
    return len(kinds) == 1 and 3 * held > 2 * total and any(map(_is_layer, children.children()))


def _is_layer(module: nn.Module) -> bool:
    return _has_norm(module) and _has_matrices(module)


def _has_norm(module: nn.Module) -> bool:
    return any("norm" in type(part).__name__.lower() for part in module.modules())


def _mixes_pixels(module: nn.Module) -> bool:
    """Return whether a module is a convolution over images or videos that mixes channels."""
    if not isinstance(module, (nn.Conv2d, nn.Conv3d)) or module.groups > 1:
        return False
    return any(n > 1 for n in module.kernel_size)


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _has_matrices(module: nn.Module) -> bool:
    return _has_any_matrices(module) and not any(map(_is_batch_norm, module.modules()))


def _has_any_matrices(module: nn.Module) -> bool:
    """Return whether a module, not one of PyTorch's or a fused one, has two matrices or more."""
    if type(module).__module__.startswith("torch.nn.") or any(map(is_fused, module.modules())):
        return False
    matrices = [
        min(p.shape[:2]) > 1 or bool(packed_as(part, p))
        for part in module.modules()
        if part is not module
        for p in part.parameters(recurse=False)
        if p.dim() == 2 or (p.dim() == 3 and p.shape[2] == 1)  # a convolution of single tokens
    ]
    return sum(matrices) >= 2

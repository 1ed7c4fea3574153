"""PyTorch's own forward under checkpoint, replayed on what the first run read.

`torch.utils.checkpoint` alone calls the module again in backward, with whatever parameters,
buffers, modes and hooks it has by then: after `functional_call`, an optimizer step, `eval()`, a
buffer update or `handle.remove()` that is another function, and the gradients would be wrong
without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_remat.blocks.reread import changed
from fused_remat.layers.hooks import HookRun


class _Caller(nn.Module):
    """Gives `functional_call` a module whose forward is `forward`, over the layer's tensors."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward

    def forward(self, *args: Any) -> Tensor:
        return self._forward(*args)


def _kind(value: Any) -> tuple[tuple[int, ...], torch.dtype, torch.device] | None:
    plain = type(value) in (Tensor, nn.Parameter)
    return (tuple(value.shape), value.dtype, value.device) if plain else None


@contextlib.contextmanager
def _attributes_restored(layer: nn.Module) -> Iterator[None]:
    before = [(module, module.__dict__.copy()) for module in layer.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            module.__dict__.update(attributes)
            for name in module.__dict__.keys() - attributes.keys():
                del module.__dict__[name]


def checkpointed(layer: nn.Module, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """`forward(*args)`, a method of `layer`, under non-reentrant checkpoint.

    Backward replays it with the parameters of now (changing one in place raises RuntimeError, and
    so does moving, casting or resizing one), copies of the buffers of now, the training flags of
    now, and the submodules' hooks of now: again those that acted (`HookRun`), while those that only
    look fire once. It leaves attributes of modules as it found them.

    >>> layer = nn.Linear(2, 2)
    >>> y = checkpointed(layer, layer.forward, torch.ones(3, 2))
    >>> y.sum().backward(); layer.bias.grad
    tensor([3., 3.])
    """
    # Sharded ones (DTensor, and ZeRO-3's, which are empty until they are gathered) are left to the
    # hooks that gather them, which the replay calls again.
    plain = [
        (name, p)
        for name, p in layer.named_parameters()
        if type(p) in (Tensor, nn.Parameter) and not hasattr(p, "ds_id")
    ]
    params = {f"layer.{name}": p for name, p in plain}
    buffers = {f"layer.{name}": b.detach().clone() for name, b in layer.named_buffers()}
    count = len(args)
    flat = (*args, *params.values())  # checkpoint saves its tensor arguments, with their versions
    names = (*(f"argument {i}" for i in range(count)), *(name for name, _ in plain))
    kinds = [_kind(value) for value in flat]
    modes = [(module, module.training) for module in layer.modules()]
    hooks = HookRun(layer)
    first = True

    def run(given: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        nonlocal first
        if first:
            first = False
            with hooks.first():
                return forward(*given)
        for name, kind, value in zip(names, kinds, (*given, *tensors), strict=True):
            if kind is not None and kind != _kind(value):
                raise changed(name, kind, value)
        state = dict(zip(params, tensors, strict=True))
        state |= {name: b.clone() for name, b in buffers.items()}
        with _attributes_restored(layer), hooks.again():
            for module, training in modes:
                module.training = training
            out: Tensor = torch.func.functional_call(_Caller(layer, forward), state, given)
            return out

    return checkpoint(lambda *a: run(a[:count], *a[count:]), *flat, use_reentrant=False)  # type: ignore[no-any-return]

"""PyTorch's own forward under checkpoint, replayed on what the first run read.

`torch.utils.checkpoint` alone calls the module again in backward, with whatever parameters, buffers
and modes it has by then: after `functional_call`, an optimizer step, `eval()` or a buffer update
that is another function, and the gradients would be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class _Caller(nn.Module):
    """Gives `functional_call` a module whose forward is `forward`, over the layer's tensors."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self._forward = forward

    def forward(self, *args: Any) -> Tensor:
        return self._forward(*args)


def checkpointed(layer: nn.Module, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    """`forward(*args)`, a method of `layer`, under non-reentrant checkpoint.

    Backward replays it with the parameters of now (changing one in place raises RuntimeError),
    copies of the buffers of now, and the training flags of now.

    >>> layer = nn.Linear(2, 2)
    >>> y = checkpointed(layer, layer.forward, torch.ones(3, 2))
    >>> y.sum().backward(); layer.bias.grad
    tensor([3., 3.])
    """
    params = {f"layer.{name}": p for name, p in layer.named_parameters()}
    buffers = {f"layer.{name}": b.detach().clone() for name, b in layer.named_buffers()}
    modes = [(module, module.training) for module in layer.modules()]
    first = True

    def run(given: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        nonlocal first
        if first:
            first = False
            return forward(*given)
        state = dict(zip(params, tensors, strict=True))
        state |= {name: b.clone() for name, b in buffers.items()}
        now = [module.training for module, _ in modes]
        try:
            for module, training in modes:
                module.training = training
            out: Tensor = torch.func.functional_call(_Caller(layer, forward), state, given)
            return out
        finally:
            for (module, _), training in zip(modes, now, strict=True):
                module.training = training

    count = len(args)
    flat = (*args, *params.values())  # checkpoint saves its tensor arguments, with their versions
    return checkpoint(lambda *a: run(a[:count], *a[count:]), *flat, use_reentrant=False)  # type: ignore[no-any-return]

"""An activation function that has no row of its own, as the fused path can call it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.blocks.custom import probe
from fused_remat.layers.eligibility import has_hooks

Function = Callable[[Tensor], Tensor]


def bind(activation: Any, shape: tuple[int, ...], seq_first: bool) -> Function:
    """`activation` on a matrix of tokens, in the layout in which the stock layer calls it.

    `shape` is that of the layer's src, which is (S, B, D) if `seq_first`. A module is called with
    the parameters and in the modes of now.

    >>> import torch
    >>> bind(lambda x: x.cumsum(0), (2, 1, 3), True)(torch.ones(2, 4))
    tensor([[1., 1., 1., 1.],
            [2., 2., 2., 2.]])
    """
    fn = _with_state_of_now(activation) if isinstance(activation, nn.Module) else activation
    lead = shape[:-1]

    def call(up: Tensor) -> Tensor:
        if seq_first:
            made = fn(up.view(lead[1], lead[0], -1).transpose(0, 1))
            made = made.transpose(0, 1) if made.dim() == 3 else made
        else:
            made = fn(up.view(*lead, -1))
        return made.reshape(up.shape) if made.numel() == up.numel() else made

    return call


def _with_state_of_now(module: nn.Module) -> Function:
    params: dict[str, Tensor] = dict(module.named_parameters())
    modes = [(m, m.training) for m in module.modules()]

    def call(x: Tensor) -> Tensor:
        now = [m.training for m, _ in modes]
        try:
            for m, training in modes:
                m.training = training
            made: Tensor = torch.func.functional_call(module, params, (x,))
            return made
        finally:
            for (m, _), training in zip(modes, now, strict=True):
                m.training = training

    return call


def captured(activation: Any, src: Tensor, width: int) -> tuple[Tensor, ...] | str:
    """The tensors requiring grad that `activation` captures, or why the fused path cannot call it.

    `width` is that of the tensor it is applied to; it is tried on one token.

    >>> captured(nn.PReLU(), torch.zeros(3, 2, 4), 8)
    (Parameter containing:
    tensor([0.2500], requires_grad=True),)
    """
    if isinstance(activation, nn.Module):
        if any(has_hooks(m) for m in activation.modules()):
            return "its activation has hooks"
        if next(activation.buffers(), None) is not None:
            return "its activation has buffers, which a second call may change"
        activation = _with_state_of_now(activation)
    return probe(activation, src.new_zeros((*(1,) * (src.dim() - 1), width)))

"""An activation function that has no row of its own, as the fused path can call it again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.blocks.custom import Function, Probed, probe
from fused_remat.layers.eligibility import has_hooks


def prepare(activation: Any, src: Tensor, width: int, seq_first: bool) -> Probed | str:
    """`activation` on matrices of tokens and what it captures, or why it cannot be called again.

    `width` is that of the tensor it is applied to, `src` the layer's input, (S, B, D) if
    `seq_first`. It is tried on one token, and given whole tensors in the layout in which the stock
    layer calls it. A module is called with the parameters and in the modes of now.

    >>> prepare(nn.PReLU(), torch.zeros(3, 2, 4), 8, True).captured
    (Parameter containing:
    tensor([0.2500], requires_grad=True),)
    >>> prepare(lambda x: x.cumsum(0), torch.zeros(2, 1, 3), 4, True).fn(torch.ones(2, 4))
    tensor([[1., 1., 1., 1.],
            [2., 2., 2., 2.]])
    """
    fn = activation
    if isinstance(activation, nn.Module):
        if any(has_hooks(m) for m in activation.modules()):
            return "its activation has hooks"
        if next(activation.buffers(), None) is not None:
            return "its activation has buffers, which a second call may change"
        fn = _with_state_of_now(activation)
    found = probe(fn, src.new_zeros((*(1,) * (src.dim() - 1), width)))
    if isinstance(found, str):
        return found
    return Probed(_on_matrices(found.fn, tuple(src.shape[:-1]), seq_first), found.captured)


def _on_matrices(fn: Function, lead: tuple[int, ...], seq_first: bool) -> Function:
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

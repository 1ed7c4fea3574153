"""A layer's activation: a name, or a function that has no row of its own, on its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_remat.graph.build import captured_params
from fused_remat.layers.autocast import Precision
from fused_remat.ops.activation import Recallable, activation_name, prepare
from fused_remat.spec import USER_FUNCTION
from fused_remat.steps.user_function import Function


@dataclass(frozen=True)
class LayerActivation:
    """A row of the activations, or `USER_FUNCTION` with what it captures and calls."""

    name: str
    captured: Mapping[str, Tensor]
    functions: Mapping[str, Function]


def of_layer(
    layer: Any, src: Tensor, seq_first: bool, precision: Precision | None = None
) -> LayerActivation | str:
    """The activation of a layer with a `linear1`, or why it cannot be called again.

    >>> of_layer(torch.nn.TransformerEncoderLayer(8, 2), torch.zeros(3, 2, 8), True).name
    'relu'
    """
    name = activation_name(layer.activation)
    if name is not None:
        return LayerActivation(name, {}, {})
    width = layer.linear1.weight.shape[0]
    found = prepare_for(src, layer.activation, width, seq_first, precision)
    if isinstance(found, str):
        return found
    names = captured_params(len(found.captured))
    captured = dict(zip(names, found.captured, strict=True))
    return LayerActivation(USER_FUNCTION, captured, {"activation": found.fn})


def prepare_for(
    src: Tensor,
    activation: Any,
    width: int,
    seq_first: bool,
    precision: Precision | None = None,
) -> Recallable | str:
    """`activation` on matrices of tokens and what it captures, or why it cannot be called again.

    `width` is that of the tensor it is applied to, `src` the layer's input, (S, B, D) if
    `seq_first`; `precision` has the dtypes under autocast. It is tried on one token, and given
    whole tensors in the layout in which the stock layer calls it.

    >>> import torch
    >>> prepare_for(torch.zeros(2, 1, 3), lambda x: x.cumsum(0), 4, True).fn(torch.ones(2, 4))
    tensor([[1., 1., 1., 1.],
            [2., 2., 2., 2.]])
    """
    if torch.compiler.is_compiling():
        return "its activation is a function that cannot be called again in a compiled backward"
    dtype = src.dtype if precision is None else precision.compute or precision.stream
    token = src.new_zeros((*(1,) * (src.dim() - 1), width), dtype=dtype)
    found = prepare(activation, token, None if precision is None else precision.autocast)
    if isinstance(found, str):
        return f"its activation {found}"
    return Recallable(_on_matrices(found.fn, tuple(src.shape[:-1]), seq_first), found.captured)


def _on_matrices(fn: Function, lead: tuple[int, ...], seq_first: bool) -> Function:
    def call(up: Tensor) -> Tensor:
        if seq_first:
            made = fn(up.view(lead[1], lead[0], -1).transpose(0, 1).contiguous())
            made = made.transpose(0, 1) if made.dim() == 3 else made
        else:
            made = fn(up.view(*lead, -1))
        return made.reshape(up.shape) if made.numel() == up.numel() else made

    return call

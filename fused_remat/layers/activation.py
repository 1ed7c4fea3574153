"""The activation of a layer of torch.nn: a row of the activations, or a function of the user's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_remat.layers.eligibility import Unsupported
from fused_remat.layers.precision import Precision
from fused_remat.ops.activation import Activation, activation_name, prepare
from fused_remat.steps.user_function import Function


def read_activation(
    activation: Any, x: Tensor, width: int, seq_first: bool, precision: Precision | None
) -> Activation:
    """The activation of a layer whose MLP is `width` wide, called on `x`.

    A function without a row in the table of activations is called once on one token, to find out
    what it reads. In a block it is given whole tensors, in the layout in which the stock layer
    calls it: `seq_first` is for x of (S, B, D). `precision` has the dtypes under autocast.

    Raises: Unsupported if backward cannot call it again.

    >>> def running_sum(x):
    ...     return x.cumsum(0)
    >>> _, _, functions = read_activation(running_sum, torch.zeros(2, 1, 3), 4, True, None)
    >>> functions["activation"](torch.ones(2, 4))
    tensor([[1., 1., 1., 1.],
            [2., 2., 2., 2.]])
    """
    name = activation_name(activation)
    if name is not None:
        return Activation(name, {}, {})
    if torch.compiler.is_compiling():
        raise Unsupported("a compiled backward cannot call the activation function again")
    dtype = x.dtype if precision is None else precision.compute or precision.stream
    token = x.new_zeros((*(1,) * (x.dim() - 1), width), dtype=dtype)
    found = prepare(activation, token, None if precision is None else precision.autocast)
    if isinstance(found, str):
        raise Unsupported(f"the activation function {found}")
    function = _on_matrices(found.functions["activation"], tuple(x.shape[:-1]), seq_first)
    return found._replace(functions={"activation": function})


def _on_matrices(function: Function, lead: tuple[int, ...], seq_first: bool) -> Function:
    """`function`, which takes tensors of shape (*lead, F), on matrices (tokens, F)."""

    def call(up: Tensor) -> Tensor:
        if seq_first:
            made = function(up.view(lead[1], lead[0], -1).transpose(0, 1).contiguous())
            made = made.transpose(0, 1) if made.dim() == 3 else made
        else:
            made = function(up.view(*lead, -1))
        return made.reshape(up.shape) if made.numel() == up.numel() else made

    return call

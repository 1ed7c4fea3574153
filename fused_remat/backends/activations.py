"""Activation functions: a row each, forward and derivative, in ATen ops, and what they go by.

A row is `name: Activation(fwd, bwd, functions, modules)`. `fwd(x)` returns a new tensor;
`bwd(dy, x, out)` returns dy * act'(x), written to `out` when it is not None (`out` may be `dy`
itself). `functions` and `modules` are the callables and module types that mean this activation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation function, its derivative, and the objects that stand for it elsewhere."""

    fwd: Callable[[Tensor], Tensor]
    bwd: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    functions: tuple[Callable[..., Tensor], ...] = ()
    modules: tuple[type[nn.Module], ...] = ()


def _into(op: Any, dy: Tensor, out: Tensor | None, *args: object, **kwargs: object) -> Tensor:
    """Call an ATen backward op, writing to `out` if given (some ops have no such overload)."""
    result: Tensor
    if out is not None and hasattr(op, "grad_input"):
        result = op.grad_input(dy, *args, **kwargs, grad_input=out)
        return result
    result = op.default(dy, *args, **kwargs)
    return result if out is None else out.copy_(result)


def _tanh_bwd(dy: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    return _into(_aten.tanh_backward, dy, out, torch.tanh(x))


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        torch.relu,
        lambda dy, x, out: _into(_aten.threshold_backward, dy, out, x, 0.0),
        functions=(F.relu, torch.relu),
        modules=(nn.ReLU,),
    ),
    "gelu": Activation(
        F.gelu,
        lambda dy, x, out: _into(_aten.gelu_backward, dy, out, x),
        functions=(F.gelu,),
    ),
    "gelu_tanh": Activation(
        lambda x: F.gelu(x, approximate="tanh"),
        lambda dy, x, out: _into(_aten.gelu_backward, dy, out, x, approximate="tanh"),
    ),
    "silu": Activation(
        F.silu,
        lambda dy, x, out: _into(_aten.silu_backward, dy, out, x),
        functions=(F.silu,),
        modules=(nn.SiLU,),
    ),
    "tanh": Activation(torch.tanh, _tanh_bwd, functions=(F.tanh, torch.tanh), modules=(nn.Tanh,)),
}

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def activation_name(activation: Any) -> str | None:
    """The name of the row that a function or module stands for, or None.

    >>> activation_name(nn.GELU(approximate="tanh")), activation_name(torch.sin)
    ('gelu_tanh', None)
    """
    if isinstance(activation, nn.Module):
        if "forward" in activation.__dict__:
            return None
        if type(activation) is nn.GELU:
            return _GELU.get(activation.approximate)
        return next((n for n, row in ACTIVATIONS.items() if type(activation) in row.modules), None)
    if isinstance(activation, functools.partial) and activation.func is F.gelu:
        if activation.args or set(activation.keywords) - {"approximate"}:
            return None
        return _GELU.get(activation.keywords.get("approximate", "none"))
    for name, row in ACTIVATIONS.items():
        for function in row.functions:
            if activation is function:
                return name
    return None

"""Activation functions: a row each, forward and derivative, in ATen ops.

A row is `name: Activation(fwd, bwd)`. `fwd(x)` returns a new tensor; `bwd(dy, x, out)` returns
dy * act'(x), written to `out` when it is not None (`out` may be `dy` itself).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation function and its derivative."""

    fwd: Callable[[Tensor], Tensor]
    bwd: Callable[[Tensor, Tensor, Tensor | None], Tensor]


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
        torch.relu, lambda dy, x, out: _into(_aten.threshold_backward, dy, out, x, 0.0)
    ),
    "gelu": Activation(
        torch.nn.functional.gelu, lambda dy, x, out: _into(_aten.gelu_backward, dy, out, x)
    ),
    "gelu_tanh": Activation(
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda dy, x, out: _into(_aten.gelu_backward, dy, out, x, approximate="tanh"),
    ),
    "silu": Activation(
        torch.nn.functional.silu, lambda dy, x, out: _into(_aten.silu_backward, dy, out, x)
    ),
    "tanh": Activation(torch.tanh, _tanh_bwd),
}

"""Activations of an MLP: the table of functions, two operations, and the step.

A new activation is an entry of `ACTIVATIONS`. A user's own function needs none: it is a replay
(`steps.replay`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.random import DropoutMask
from fused_remat.steps.linear import bias_grad
from fused_remat.steps.node import Input, Mask, Node
from fused_remat.steps.operations import operation

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """An activation function: a row of `ACTIVATIONS`."""

    fwd: Callable[[Tensor], Tensor]  # fwd(x) returns act(x), a new tensor
    # bwd(dy, x, out) returns dy * act'(x), written to `out` unless that is None. `out` may be
    # `dy` itself.
    bwd: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    # functions, modules: the callables and module classes that a model may use for this
    # function
    functions: tuple[Callable[..., Tensor], ...] = ()
    modules: tuple[type[nn.Module], ...] = ()


def _into(op: Any, dy: Tensor, out: Tensor | None, *args: object, **kwargs: object) -> Tensor:
    """Call an ATen backward op that writes to `out`; some ops lack such an overload."""
    result: Tensor
    if out is not None and hasattr(op, "grad_input"):
        result = op.grad_input(dy, *args, **kwargs, grad_input=out)
        return result
    result = op.default(dy, *args, **kwargs)
    return result if out is None else out.copy_(result)


def _tanh_bwd(dy: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    return _into(_aten.tanh_backward, dy, out, torch.tanh(x))


def _relu2_bwd(dy: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    dx = torch.relu(x).mul_(2.0).mul_(dy)
    into = dx if out is None else out
    return _into(_aten.threshold_backward, dx, into, x, 0.0)  # 0 also for an infinite dy


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(
        torch.relu,
        lambda dy, x, out: _into(_aten.threshold_backward, dy, out, x, 0.0),
        functions=(F.relu, torch.relu),
        modules=(nn.ReLU,),
    ),
    "gelu": Activation(
        F.gelu, lambda dy, x, out: _into(_aten.gelu_backward, dy, out, x), functions=(F.gelu,)
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
    "relu2": Activation(lambda x: torch.relu(x).square(), _relu2_bwd),
    "tanh": Activation(torch.tanh, _tanh_bwd, functions=(F.tanh, torch.tanh), modules=(nn.Tanh,)),
}

_GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def activation_name(activation: Any) -> str | None:
    """Return the name of the entry of `ACTIVATIONS` that a function or module computes, or None."""
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
    known = [(name, function) for name, row in ACTIVATIONS.items() for function in row.functions]
    return next((name for name, function in known if activation is function), None)


@operation(key=lambda act, gate, up, _: (act, up.dtype, up.device), description="pointwise, eager")
def activation_fwd(act: str, gate: Tensor | None, up: Tensor, mask: DropoutMask | None) -> Tensor:
    """Return mask * act(up), or mask * act(gate) * up, where `act` is a row of `ACTIVATIONS`."""
    function = ACTIVATIONS[act].fwd
    y = function(up) if gate is None else function(gate).mul_(up)
    return y if mask is None else y.mul_(mask.tensor())


@operation(key=lambda act, dy, *_, **__: (act, dy.dtype, dy.device), description="pointwise, eager")
def activation_bwd(
    act: str,
    dy: Tensor,
    gate: Tensor | None,
    up: Tensor | None,
    mask: DropoutMask | None,
    owned: bool,
    needs_grad: tuple[bool, bool] = (True, True),
    needs_sum: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of gate and up; one that `needs_grad` does not mark is None.

    At last the sum of up's over tokens, as `bias_grad` does, if `needs_sum` and there is no gate,
    else None. `up` is read only for the gradient of a gate, or where there is none; else it may be
    None. dy may be overwritten if `owned`.
    """
    row = ACTIVATIONS[act]
    if mask is not None:
        dy = dy.mul_(mask.tensor()) if owned else torch.mul(dy, mask.tensor()).to(dy.dtype)
        owned = True
    if gate is None:
        assert up is not None
        dx = row.bwd(dy, up, dy if owned else None)
        return None, dx, bias_grad(dx) if needs_sum else None
    dup = row.fwd(gate).mul_(dy) if needs_grad[1] else None
    if not needs_grad[0]:
        return None, dup, None
    assert up is not None
    dy = dy.mul_(up) if owned else dy * up
    return row.bwd(dy, gate, dy), dup, None


@dataclass(frozen=True, kw_only=True)
class MLPActivation(Node):
    """name = mask * act(up), or mask * act(gate) * up: SwiGLU with "silu", GeGLU with "gelu"."""

    gate: Input = ""
    up: Input
    act: str  # an entry of `ACTIVATIONS`
    mask: Mask = ""

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        if not self.gate:
            return (self.up, *self.masks)
        return (self.gate, *((self.up,) if self.gate in needs_grad else ()), *self.masks)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        gate, mask = chunk[self.gate] if self.gate else None, chunk.mask(self.mask)
        chunk.put(self.name, chunk.ops[activation_fwd](self.act, gate, chunk[self.up], mask))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        gate, mask = chunk[self.gate] if self.gate else None, chunk.mask(self.mask)
        up = chunk[self.up] if not self.gate or self.gate in needs_grad else None
        marks = self.gate in needs_grad, self.up in needs_grad
        needs_sum = self.up in chunk.owner.execution.summed
        given = self.act, dy, gate, up, mask, owned, marks, needs_sum
        dgate, dup, total = chunk.ops[activation_bwd](*given)
        if dgate is not None:
            chunk.add_grad(self.gate, dgate, owned=True)
        if dup is not None:
            chunk.add_grad(self.up, dup, owned=True, total=total)

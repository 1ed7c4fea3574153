"""Activations of an MLP: the operations, the step, and a row for each function.

A row is `name: Activation(fwd, bwd, functions, modules)`. `fwd(x)` returns a new tensor;
`bwd(dy, x, out)` returns dy * act'(x), written to `out` when it is not None (`out` may be `dy`
itself). `functions` and `modules` are the callables and module types that mean this activation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.formats import Loaded, Quantized
from fused_remat.random import DropoutMask
from fused_remat.spec import USER_FUNCTION
from fused_remat.steps import user_function
from fused_remat.steps.node import Input, Mask, Node, Params
from fused_remat.steps.operations import operation
from fused_remat.steps.residual import dropout
from fused_remat.steps.storage import format_of

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk

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


def _empty(x: Loaded) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _parts(x: Loaded | None, *beside: Loaded | None) -> Iterator[tuple[slice, list[Any]]]:
    """The rows of each, a few at a time: nothing that is packed is unpacked whole."""
    packed = next(y for y in (x, *beside) if isinstance(y, Quantized))
    for first, last in packed.spans():
        yield (
            slice(first, last),
            [None if y is None
             else y.rows(first, last) if isinstance(y, Quantized) else y[first:last]
             for y in (x, *beside)],
        )  # fmt: skip


def says_pointwise(formats: tuple[str, ...]) -> str:
    """What a pointwise step in ATen does, of inputs in these formats."""
    packed = " and ".join(dict.fromkeys(filter(None, formats)))
    return f"pointwise, eager{packed and f', from {packed} a few rows at a time'}"


def activation_key(act: str, *given: Loaded | None) -> tuple[Any, ...]:
    """The function, dtype, device and formats of the inputs."""
    x = next(y for y in given if y is not None)
    return act, x.dtype, x.device, tuple([format_of(y) for y in given])


@operation(
    key=lambda act, gate, up, mask: activation_key(act, gate, up),
    says=lambda key, *_: says_pointwise(key[3]),
)
def activation_fwd(act: str, gate: Loaded | None, up: Loaded, mask: DropoutMask | None) -> Tensor:
    """mask * act(up), or mask * act(gate) * up: `act` is a row of `ACTIVATIONS`.

    What is packed is unpacked where it is read, each element rounded to its dtype, so that results
    are those of unpacking first.
    """
    function = ACTIVATIONS[act].fwd
    if isinstance(gate, Quantized) or isinstance(up, Quantized):
        y = _empty(up)
        for rows, (g, u) in _parts(gate, up):
            if g is None:
                y[rows].copy_(function(u))
            else:
                torch.mul(function(g), u, out=y[rows])
    else:
        y = function(up) if gate is None else function(gate).mul_(up)
    return y if mask is None else y.mul_(mask.tensor())


@operation(
    key=lambda act, dy, gate, up, *_: activation_key(act, gate, up),
    says=lambda key, *_: says_pointwise(key[3]),
)
def activation_bwd(
    act: str,
    dy: Tensor,
    gate: Loaded | None,
    up: Loaded | None,
    mask: DropoutMask | None,
    owned: bool,
    needs_grad: tuple[bool, bool] = (True, True),
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `activation_fwd` in gate and up: those that `needs_grad` marks, else None.

    up is not read, and may be None, where the gate's gradient is not wanted; may overwrite dy when
    `owned`.
    """
    row = ACTIVATIONS[act]
    if mask is not None:
        dy = dy.mul_(mask.tensor()) if owned else torch.mul(dy, mask.tensor()).to(dy.dtype)
        owned = True
    if isinstance(gate, Quantized) or isinstance(up, Quantized):
        return _packed_bwd(row, dy, gate, up, owned, needs_grad)
    if gate is None:
        assert up is not None
        return None, row.bwd(dy, up, dy if owned else None)
    dup = row.fwd(gate).mul_(dy) if needs_grad[1] else None
    if not needs_grad[0]:
        return None, dup
    assert up is not None
    dy = dy.mul_(up) if owned else dy * up
    return row.bwd(dy, gate, dy), dup


def _packed_bwd(
    row: Activation,
    dy: Tensor,
    gate: Loaded | None,
    up: Loaded | None,
    owned: bool,
    needs_grad: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    like = up if gate is None else gate
    assert like is not None
    dgate = dy if owned or (gate is not None and not needs_grad[0]) else _empty(like)
    dup = _empty(like) if gate is not None and needs_grad[1] else None
    for rows, (g, u) in _parts(gate, up):
        part = dy[rows]
        if g is None:
            row.bwd(part, u, dgate[rows])
            continue
        if dup is not None:
            dup[rows] = row.fwd(g).mul_(part)
        if needs_grad[0]:
            torch.mul(part, u, out=dgate[rows])
            row.bwd(dgate[rows], g, dgate[rows])
    if gate is None:
        return None, dgate
    return dgate if needs_grad[0] else None, dup


@dataclass(frozen=True, kw_only=True)
class MLPActivation(Node):
    """name = keep * act(up), or keep * act(gate) * up: SwiGLU with "silu", GeGLU with "gelu".

    `act` is a row of `ACTIVATIONS`, or `USER_FUNCTION`: any function of up that autograd can
    differentiate, `Pass.functions["activation"]`, so that graphs stay plain data. `captured` names
    the tensors besides up that it is differentiable in; they reach the function by themselves (a
    closure, a module's parameters), and are the block's params for their gradients' sake.
    """

    gate: Input = ""
    up: Input
    act: str
    mask: Mask = ""
    captured: Params = ()

    @property
    def says(self) -> tuple[str, str]:
        if self.act != USER_FUNCTION:
            return "", ""
        return "the caller's function; in backward again, under autograd", ""

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        if not self.gate:
            return (self.up, *self.masks)
        return (self.gate, *((self.up,) if self.gate in needs_grad else ()), *self.masks)

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.captured

    def backward_choice(self, chunk: Chunk) -> tuple[Callable[..., Any], Any] | None:
        if not self.quantized:
            return None
        formats = {pack.x: pack.stored for pack in self.quantized}
        stored = tuple([formats.get(name, "") for name in (self.gate, self.up)])
        return activation_bwd, (self.act, chunk.dtype_of(self.up), chunk.owner.device, stored)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        mask = chunk.mask(self.mask)
        if self.act == USER_FUNCTION:
            y = user_function.forward(chunk.owner.functions["activation"], chunk[self.up])
            chunk.put(self.name, y if mask is None else torch.mul(y, mask.tensor()).to(y.dtype))
            return
        if self.quantized:
            gate = self.load(chunk, self.gate) if self.gate else None
            chunk.put(
                self.name,
                chunk.ops[activation_fwd](self.act, gate, self.load(chunk, self.up), mask),
            )
            return
        gate = chunk[self.gate] if self.gate else None
        chunk.put(self.name, chunk.ops[activation_fwd](self.act, gate, chunk[self.up], mask))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        mask = chunk.mask(self.mask)
        if self.act == USER_FUNCTION:
            self._user_backward(
                chunk, dy if mask is None else chunk.ops[dropout](dy, mask), needs_grad
            )
            return
        load = functools.partial(self.load, chunk) if self.quantized else chunk.__getitem__
        gate = load(self.gate) if self.gate else None
        up = load(self.up) if not self.gate or self.gate in needs_grad else None
        marks = self.gate in needs_grad, self.up in needs_grad
        dgate, dup = chunk.ops[activation_bwd](self.act, dy, gate, up, mask, owned, marks)
        if dgate is not None:
            chunk.add_grad(self.gate, dgate, owned=True)
        if dup is not None:
            chunk.add_grad(self.up, dup, owned=True)

    def _user_backward(self, chunk: Chunk, dy: Tensor, needs_grad: Collection[str]) -> None:
        function, captured = chunk.owner.functions["activation"], {}
        for name in self.captured:
            tensor = chunk.param(name)
            if tensor is not None:
                captured[name] = tensor
        wanted = [name for name in captured if name in needs_grad]
        wanted += [""] if self.up in needs_grad else []
        dx, grads = user_function.backward(function, dy, chunk[self.up], captured, wanted)
        if dx is not None:
            chunk.add_grad(self.up, *dx)
        for name, grad in grads.items():
            chunk.add_param_grad(name, grad)

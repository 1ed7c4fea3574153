"""Pointwise steps: activations, plain, gated and the caller's own, and the residual sum."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fused_remat.blocks.custom import hooks_off, leaves
from fused_remat.blocks.frame import Frame
from fused_remat.blocks.nodes import Node
from fused_remat.formats import Loaded
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.residual import dropout, residual_add


@dataclass(frozen=True, kw_only=True)
class Pointwise(Node):
    """name = keep * act(x), `act` a row of `steps.activation.ACTIVATIONS`."""

    x: str
    act: str
    keep: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def masks(self) -> tuple[str, ...]:
        return (self.keep,) if self.keep else ()

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.x, *self.masks)

    def load(self, f: Frame, name: str) -> Loaded:
        """An input as the routine takes it."""
        return f[name]

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        x, keep = self.load(f, self.x), f.keep(self.keep)
        f.put(self.name, f.ops[activation_fwd](self.act, None, x, keep))

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        x, keep = self.load(f, self.x), f.keep(self.keep)
        _, dx = f.ops[activation_bwd](self.act, dy, None, x, keep, owned)
        assert dx is not None
        f.add_grad(self.x, dx, owned=True)


@dataclass(frozen=True, kw_only=True)
class Gated(Node):
    """name = keep * act(gate) * up: SwiGLU with "silu", GeGLU with "gelu", ReGLU with "relu"."""

    gate: str
    up: str
    act: str
    keep: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.gate, self.up)

    @property
    def masks(self) -> tuple[str, ...]:
        return (self.keep,) if self.keep else ()

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        up = (self.up,) if self.gate in wants else ()
        return (self.gate, *up, *self.masks)

    def load(self, f: Frame, name: str) -> Loaded:
        """An input as the routine takes it."""
        return f[name]

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        gate, up = self.load(f, self.gate), self.load(f, self.up)
        f.put(self.name, f.ops[activation_fwd](self.act, gate, up, f.keep(self.keep)))

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        gate, keep = self.load(f, self.gate), f.keep(self.keep)
        up = self.load(f, self.up) if self.gate in wants else None
        marks = self.gate in wants, self.up in wants
        dgate, dup = f.ops[activation_bwd](self.act, dy, gate, up, keep, owned, marks)
        if dgate is not None:
            f.add_grad(self.gate, dgate, owned=True)
        if dup is not None:
            f.add_grad(self.up, dup, owned=True)


@dataclass(frozen=True, kw_only=True)
class Custom(Node):
    """name = keep * fn(x), `fn` any function of tensors that autograd can differentiate.

    The function is `Run.functions["activation"]`, so that graphs stay plain data. `captured` names
    the tensors besides x that it is differentiable in; they reach the function by themselves (a
    closure, a module's parameters), and are the block's params for their gradients' sake.
    """

    x: str
    captured: tuple[str, ...] = ()
    keep: str = ""
    says: ClassVar[tuple[str, str]] = (
        "the caller's function; in backward again, under autograd",
        "",
    )

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def params(self) -> tuple[str, ...]:
        return self.captured

    @property
    def masks(self) -> tuple[str, ...]:
        return (self.keep,) if self.keep else ()

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.x, *self.masks)

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return self.captured

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        x = f[self.x]
        with torch.no_grad():
            # On a copy: it may work in place, and x may be kept.
            y = _checked(f.run.functions["activation"](x.clone()), x)
        keep = f.keep(self.keep)
        f.put(self.name, y if keep is None else torch.mul(y, keep.tensor()).to(y.dtype))

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        keep = f.keep(self.keep)
        if keep is not None:
            dy = f.ops[dropout](dy, keep)
        with torch.enable_grad():
            x = f[self.x].detach().requires_grad_()
            y = _checked(f.run.functions["activation"](x.clone()), x)
        given = {n: t for n in self.captured if (t := f.param(n)) is not None}
        # By edge: a saved tensor comes back from hooks as another object.
        known = {torch.autograd.graph.get_gradient_edge(t) for t in (x, *given.values())
                 if t.requires_grad}  # fmt: skip
        stray = [t for t in leaves(y) if torch.autograd.graph.get_gradient_edge(t) not in known]
        if stray:
            raise RuntimeError(
                "fused_remat: the activation function reads a tensor in backward that it did not "
                f"read in forward, of shape {tuple(stray[0].shape)}"
            )
        sources = {n: t for n, t in {self.x: x, **given}.items() if n in wants}
        if not y.requires_grad:
            grads: tuple[Tensor | None, ...] = (None,) * len(sources)
        else:
            # Kept for the next piece: what the function captured may have a graph of its own.
            with hooks_off(given.values()):
                grads = torch.autograd.grad(
                    y, list(sources.values()), dy, retain_graph=True, allow_unused=True
                )
        for (name, source), grad in zip(sources.items(), grads, strict=True):
            if name == self.x:
                dx = torch.zeros_like(source) if grad is None else grad
                # It may be dy itself, or a view of it.
                mine = dx is not dy and dx._base is None and 0 not in dx.stride()
                f.add_grad(name, dx, owned=mine)
            elif grad is not None:  # a sum over pieces in float32; a copy, it may be expanded
                wide = torch.promote_types(grad.dtype, torch.float32)
                f.add_param_grad(name, grad.to(wide, copy=True))


def _checked(y: Tensor, x: Tensor) -> Tensor:
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(
            f"the activation function must keep shape and dtype: it made {tuple(y.shape)} "
            f"{y.dtype} of {tuple(x.shape)} {x.dtype}"
        )
    return y


@dataclass(frozen=True, kw_only=True)
class Add(Node):
    """name = residual + keep * x; `keep` may be absent ("")."""

    x: str
    residual: str
    keep: str = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x, self.residual)

    @property
    def masks(self) -> tuple[str, ...]:
        return (self.keep,) if self.keep else ()

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return self.masks if self.x in wants else ()

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        y = f.ops[residual_add](f[self.x], f[self.residual], f.keep(self.keep), out=out)
        f.put(self.name, y)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        if self.x in wants:
            keep = f.keep(self.keep)
            dx = dy if keep is None else f.ops[dropout](dy, keep)
            f.add_grad(self.x, dx, owned=keep is not None)
        if self.residual in wants:
            f.add_grad(self.residual, dy, owned=False)

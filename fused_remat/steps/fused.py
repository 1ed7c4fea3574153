"""Operations that fuse several steps, and their nodes.

The body of each operation runs the steps one after the other. `graph.fusions` uses an operation
where a backend has a faster implementation of it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fused_remat.random import DropoutMask
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import MLPActivation, activation_bwd, activation_fwd
from fused_remat.steps.linear import (
    Affine,
    Linear,
    add_weight_grad,
    bias_grad,
    dropped,
    linear_dx,
    linear_fwd,
)
from fused_remat.steps.modulation import GatedLinear
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm, norm_fwd
from fused_remat.steps.operations import operation
from fused_remat.steps.residual import residual_add

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


@operation(key=lambda act, x, *_: (act, x.dtype, x.device), description="step by step")
def mlp_up_fwd(
    act: str,
    x: Tensor,
    gate: Affine | None,
    up: Affine,
    mask: DropoutMask | None,
    kept: tuple[bool, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return y = mask * act(up(x)), or mask * act(gate(x)) * up(x), and the products.

    `kept` has an entry for gate(x), if there is a gate, and one for up(x): whether the product is
    returned, else None.
    """
    products = [linear_fwd(x, *affine) for affine in (gate, up) if affine is not None]
    pres = tuple([pre if keep else None for pre, keep in zip(products, kept, strict=True)])
    return activation_fwd(act, products[0] if gate else None, products[-1], mask), pres


@operation(key=lambda act, dy, x, *_, **__: (act, x.dtype, x.device), description="step by step")
def mlp_bwd(
    act: str,
    dy: Tensor,
    x: Tensor,
    gate: Affine | None,
    up: Affine,
    down: Tensor | None,
    mask: DropoutMask | None,
    needs_act: bool,
    needs_sum: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:
    """Return y of `mlp_up_fwd` if `needs_act`, and the gradients of gate(x) and of up(x).

    At last the sum of up(x)'s over tokens, as in `activation_bwd`. dy (T, D) is the gradient of the
    MLP's last layer, whose weight is `down`.
    """
    g, u = None if gate is None else linear_fwd(x, *gate), linear_fwd(x, *up)
    y = activation_fwd(act, g, u, mask) if needs_act else None
    grads = activation_bwd(act, linear_dx(dy, down), g, u, mask, True, needs_sum=needs_sum)
    dgate, dup, total = grads
    assert dup is not None
    return y, dgate, dup, total


@operation(
    key=lambda x, weight, bias, residual, mask, spec, norm_weight, norm_bias, out=None: (
        spec.kind, x.dtype, x.device, residual.shape[1]
    ),
    description="step by step",
)  # fmt: skip
def linear_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    mask: DropoutMask | None,
    spec: NormSpec,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Return total = residual + mask * (x @ weight.T + bias), norm(total) and its statistics.

    The sum has the dtype of the residual, which may differ from that of x; `out` takes the norm.
    """
    if residual.dtype is x.dtype:
        total = linear_fwd(x, weight, bias, residual, mask)
    else:
        total = residual_add(linear_fwd(x, weight, bias), residual, mask)
    return total, *norm_fwd(spec, total, norm_weight, norm_bias, out)


@dataclass(frozen=True, kw_only=True)
class MlpUp(Node):
    """name = act(up(x)), or act(gate(x)) * up(x), in one step."""

    ups: tuple[Linear, ...]  # the layer `up`; or the layers `gate` and `up`
    act: MLPActivation  # the activation
    # for each layer, whether another step reads its result, so that it is written
    kept: tuple[bool, ...]

    @functools.cached_property
    def makes(self) -> tuple[str, ...]:
        names = [up.name for up, kept in zip(self.ups, self.kept, strict=True) if kept]
        return (*names, self.name)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.ups[0].reads, *self.act.masks)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        act, (*gates, up) = self.act, [layer.affine(chunk) for layer in self.ups]
        y, pres = chunk.ops[mlp_up_fwd](
            act.act, self.ups[0].operand(chunk), gates[0] if gates else None, up,
            chunk.mask(act.mask), self.kept,
        )  # fmt: skip
        for layer, pre in zip(self.ups, pres, strict=True):
            if pre is not None:
                chunk.put(layer.name, pre)
        chunk.put(self.name, y)


@dataclass(frozen=True, kw_only=True)
class LinearNorm(Node):
    """name = the norm of a linear layer's result and a residual, in one step with that sum."""

    linear: Linear  # linear, norm: the two steps
    norm: Norm

    @functools.cached_property
    def makes(self) -> tuple[str, ...]:
        return (self.linear.name, self.name, *self.norm.stats)

    @property
    def reads(self) -> tuple[str, ...]:
        return self.linear.reads

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        linear, norm = self.linear, self.norm
        residual = chunk[linear.residual]
        total, y, *stats = chunk.ops[linear_norm_fwd](
            linear.operand(chunk), *linear.affine(chunk), residual, chunk.mask(linear.mask),
            norm.spec, chunk.param(norm.weight), chunk.param(norm.bias), norm.target(residual, out),
        )  # fmt: skip
        chunk.put(linear.name, total)
        chunk.put(self.name, y)
        for stat, value in zip(norm.stats, stats, strict=True):
            chunk.put(stat, value)


@dataclass(frozen=True, kw_only=True)
class MlpBackward(Node):
    """Backward of out(act(ups(x))), which rebuilds the results of `ups` without writing them."""

    ups: tuple[Linear, ...]  # the layer `up`; or the layers `gate` and `up`
    act: MLPActivation  # act, out: the activation, and the MLP's last layer
    out: Linear

    @property
    def label(self) -> str:
        return f"{self.out.name} and {self.act.name}"

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        out, x = self.out, self.ups[0].operand(chunk)
        if isinstance(out, GatedLinear):
            dz = out.product_grad(chunk, dy)
        else:
            dz = dropped(chunk, dy, out, needs_grad)
        *gates, up = [layer.affine(chunk) for layer in self.ups]
        act, *dups, total = chunk.ops[mlp_bwd](
            self.act.act, dz, x, gates[0] if gates else None, up, chunk.param(out.weight),
            chunk.mask(self.act.mask), out.x in out.needs(needs_grad),
            self.act.up in chunk.owner.execution.summed,
        )  # fmt: skip
        for layer, dup in zip(self.ups, dups if gates else dups[1:], strict=True):
            assert dup is not None
            chunk.add_grad(layer.name, dup, True, total if layer is self.ups[-1] else None)
        rest = needs_grad
        if act is not None and isinstance(out, GatedLinear):
            rest = out.add_gate_grad(chunk, dy, act, needs_grad)
        if act is not None and out.weight in rest:
            add_weight_grad(chunk, out.weight, dz, act)
        if out.bias in rest:
            total = chunk.sums.pop(out.name, None)
            chunk.add_param_grad(out.bias, chunk.ops[bias_grad](dz) if total is None else total)
        if out.residual in needs_grad:
            chunk.add_grad(out.residual, dy, owned)

"""Operations of several steps at once: the body of each is those steps, one after the other; nodes.

`graph.fusions` has them computed in one where a backend has a faster implementation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fused_remat.formats import Parts
from fused_remat.random import DropoutMask
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import MLPActivation, activation_bwd, activation_fwd
from fused_remat.steps.linear import Affine, Linear, bias_grad, linear_dx, linear_fwd
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm, norm_fwd
from fused_remat.steps.operations import operation
from fused_remat.steps.residual import dropout, residual_add
from fused_remat.steps.storage import Quantize, QuantizeCall, format_of, quantize

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


def mlp_key(act: str, x: Tensor) -> tuple[Any, ...]:
    """Of `mlp_up_fwd` and `mlp_bwd`."""
    return act, x.dtype, x.device


@operation(
    key=lambda act, x, gate, up, mask, kept, storages: (
        *mlp_key(act, x), tuple(map(format_of, storages))
    ),
    says="step by step",
)  # fmt: skip
def mlp_up_fwd(
    act: str,
    x: Tensor,
    gate: Affine | None,
    up: Affine,
    mask: DropoutMask | None,
    kept: tuple[bool, ...],
    storages: tuple[QuantizeCall | None, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Parts, ...]]:
    """mask * act(up(x)), or mask * act(gate(x)) * up(x); the products that are `kept`, else None;
    and packed, those that have a packing.

    `kept` and `storages` are of gate(x), if there is a gate, and of up(x).
    """
    made = [linear_fwd(x, *affine) for affine in (gate, up) if affine is not None]
    pairs = zip(made, storages, strict=True)
    parts = tuple([() if how is None else quantize(pre, how) for pre, how in pairs])
    pres = tuple([pre if mask else None for pre, mask in zip(made, kept, strict=True)])
    return activation_fwd(act, made[0] if gate else None, made[-1], mask), pres, parts


@operation(
    key=lambda act, dy, x, gate, up, down, mask, needs_act: mlp_key(act, x), says="step by step"
)
def mlp_bwd(
    act: str,
    dy: Tensor,
    x: Tensor,
    gate: Affine | None,
    up: Affine,
    down: Tensor | None,
    mask: DropoutMask | None,
    needs_act: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """What `mlp_up_fwd` makes of x, if it is needed, and the gradients of gate(x), None without a
    gate, and of up(x): from dy (T, D), that of the MLP, whose last weight is `down`."""
    g, u = None if gate is None else linear_fwd(x, *gate), linear_fwd(x, *up)
    y = activation_fwd(act, g, u, mask) if needs_act else None
    dgate, dup = activation_bwd(act, linear_dx(dy, down), g, u, mask, owned=True)
    assert dup is not None
    return y, dgate, dup


@operation(
    key=lambda x, weight, bias, residual, mask, spec, norm_weight, norm_bias, out=None: (
        spec.kind, x.dtype, x.device, residual.shape[1]
    ),
    says="step by step",
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
    """sum = residual + mask * (x @ weight.T + bias), norm(sum) (into `out`), its statistics.

    The sum is of the dtype of the residual, which may be another than that of x.
    """
    if residual.dtype is x.dtype:
        total = linear_fwd(x, weight, bias, residual, mask)
    else:
        total = residual_add(linear_fwd(x, weight, bias), residual, mask)
    return total, *norm_fwd(spec, total, norm_weight, norm_bias, out)


@dataclass(frozen=True, kw_only=True)
class MlpUp(Node):
    """act(up(x)), or act(gate(x)) * up(x); what the layers give is made if somebody else reads it.

    `ups` is the layer, or the gate's and the other one's; `kept`: whether what each gives is made;
    `packed`: by which it is packed.
    """

    ups: tuple[Linear, ...]
    act: MLPActivation
    kept: tuple[bool, ...]
    packed: tuple[Quantize | None, ...]

    @functools.cached_property
    def makes(self) -> tuple[str, ...]:
        names = [up.name for up, kept in zip(self.ups, self.kept, strict=True) if kept]
        parts = [name for pack in self.packed if pack is not None for name in pack.makes]
        return (*names, *parts, self.name)

    @property
    def reads(self) -> tuple[str, ...]:
        return (*self.ups[0].reads, *self.act.masks)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        act, (*gates, up) = self.act, [layer.affine(chunk) for layer in self.ups]
        storages = tuple([None if pack is None else pack.storage(chunk) for pack in self.packed])
        y, pres, parts = chunk.ops[mlp_up_fwd](
            act.act, self.ups[0].operand(chunk), gates[0] if gates else None, up,
            chunk.mask(act.mask), self.kept, storages,
        )  # fmt: skip
        for layer, pre, pack, codes in zip(self.ups, pres, self.packed, parts, strict=True):
            if pre is not None:
                chunk.put(layer.name, pre)
            if pack is not None:
                pack.put(chunk, codes)
        chunk.put(self.name, y)


@dataclass(frozen=True, kw_only=True)
class LinearNorm(Node):
    """A residual sum that ends a linear layer, and its norm; both are made, and the sum packed.

    `pack`: by which it is packed; None if it is not.
    """

    linear: Linear
    norm: Norm
    pack: Quantize | None

    @functools.cached_property
    def makes(self) -> tuple[str, ...]:
        packed = self.pack.makes if self.pack else ()
        return (self.linear.name, *packed, self.name, *self.norm.stats)

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
        if self.pack is not None:
            self.pack.forward(chunk)
        chunk.put(self.name, y)
        for stat, value in zip(norm.stats, stats, strict=True):
            chunk.put(stat, value)


@dataclass(frozen=True, kw_only=True)
class MlpBackward(Node):
    """Backward of out(act(ups(x))), which rebuilds ups(x) without ever writing it.

    `ups` is the pre-activation's layer, or the gate's and the other one's. `name` is that of `out`.
    """

    ups: tuple[Linear, ...]
    act: MLPActivation
    out: Linear

    @property
    def label(self) -> str:
        return f"{self.out.name} and {self.act.name}"

    def backward_choice(self, chunk: Chunk) -> tuple[Callable[..., Any], Any]:
        owner = chunk.owner
        return mlp_bwd, (self.act.act, owner.execution.compute or owner.dtype, owner.device)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        out, x = self.out, self.ups[0].operand(chunk)
        mask, dtype = chunk.mask(out.mask), out.compute or dy.dtype
        dz = dy.to(dtype) if mask is None else chunk.ops[dropout](dy, mask, dtype)
        *gates, up = [layer.affine(chunk) for layer in self.ups]
        act, *dups = chunk.ops[mlp_bwd](
            self.act.act, dz, x, gates[0] if gates else None, up, chunk.param(out.weight),
            chunk.mask(self.act.mask), out.weight in needs_grad,
        )  # fmt: skip
        for layer, dup in zip(self.ups, dups if gates else dups[1:], strict=True):
            assert dup is not None
            chunk.add_grad(layer.name, dup, owned=True)
        if act is not None:
            chunk.add_weight_grad(out.weight, dz, act)
        if out.bias in needs_grad:
            chunk.add_param_grad(out.bias, chunk.ops[bias_grad](dz))
        if out.residual in needs_grad:
            chunk.add_grad(out.residual, dy, owned)

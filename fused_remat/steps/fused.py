"""Operations of several steps at once; the body of each is those steps, one after the other.

`blocks.fusions` has them computed in one where a backend has a faster implementation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fused_remat.formats import Parts
from fused_remat.random import Keep
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import activation_bwd, activation_fwd
from fused_remat.steps.linear import linear_dx, linear_fwd
from fused_remat.steps.norm import norm_fwd
from fused_remat.steps.operations import operation
from fused_remat.steps.residual import residual_add
from fused_remat.steps.storage import Packing, format_of, quantize

#: A weight and a bias, either of which may be absent.
Affine = tuple[Tensor | None, Tensor | None]


def mlp_key(act: str, x: Tensor) -> tuple[Any, ...]:
    """Of `mlp_up_fwd` and `mlp_bwd`."""
    return act, x.dtype, x.device


@operation(
    key=lambda act, x, gate, up, mask, kept, packings: (
        *mlp_key(act, x), tuple(map(format_of, packings))
    ),
    says="step by step",
)  # fmt: skip
def mlp_up_fwd(
    act: str,
    x: Tensor,
    gate: Affine | None,
    up: Affine,
    mask: Keep | None,
    kept: tuple[bool, ...],
    packings: tuple[Packing | None, ...],
) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Parts, ...]]:
    """mask * act(up(x)), or mask * act(gate(x)) * up(x); the products that are `kept`, else None;
    and packed, those that have a packing.

    `kept` and `packings` are of gate(x), if there is a gate, and of up(x).
    """
    made = [linear_fwd(x, *affine) for affine in (gate, up) if affine is not None]
    pairs = zip(made, packings, strict=True)
    parts = tuple([() if how is None else quantize(pre, how) for pre, how in pairs])
    pres = tuple([pre if keep else None for pre, keep in zip(made, kept, strict=True)])
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
    mask: Keep | None,
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
        residual.shape[1], x.dtype, x.device
    ),
    says="step by step",
)  # fmt: skip
def linear_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor,
    mask: Keep | None,
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

"""Experts: operations on the pairs of a token and one of its experts, sorted by expert.

T tokens have k experts each: P = T * k pairs. `Order` sorts them. An index below 0, or of no
expert, drops the pair; such pairs come last and are never computed. A stack holds the matrices of
all experts. The bodies of the operations run grouped products where these read nothing on the host,
else one expert after the other: then the host reads the numbers of tokens, once for an operation.
On a GPU of compute capability 9 or 10 the former run in bfloat16, if the matrices have widths in
multiples of 16 and low-rank updates ranks in multiples of 8; float64, quantized matrices and other
GPUs take the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fused_remat.moe_spec import ExpertsSpec
from fused_remat.steps import experts_grouped as grouped
from fused_remat.steps.experts_loop import ATEN, Grads, bwd, bwd_stages, down_fwd, fwd, up_fwd
from fused_remat.steps.operations import operation
from fused_remat.steps.stacks import FORMS, Operands, Order, Stack, StackGrads


def order_key(indices: Tensor, experts: int) -> Any:
    """Return what the choice of an implementation of `experts_order` depends on."""
    return indices.device, experts


@operation(key=order_key, description="ATen's stable sort")
def experts_order(indices: Tensor, experts: int) -> Order:
    """Return the order of the pairs of `indices` (T, k), which is stable.

    Nothing is read on the host.
    """
    flat = indices.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    ids, pairs = torch.sort(flat, stable=True)
    bounds = torch.arange(experts, device=flat.device)
    return Order(pairs, torch.searchsorted(ids, bounds, right=True).int())


def key(
    spec: ExpertsSpec, x: Tensor, order: Order, up: Stack, down: Stack | None = None, **_: Any
) -> Any:
    """Return what the choice of an implementation depends on; the rows of an expert on average."""
    rows = -(-len(order.pairs) // spec.experts)
    forms = {stack.form for stack in (up, down) if stack is not None}
    sizes = up.out_features, x.shape[1]
    return spec, x.dtype, x.device, rows, sizes, up.weight.dtype, max(forms, key=FORMS.index)


def describe(key: Any, *_: Any, **__: Any) -> str:
    """Describe experts for `explain`."""
    reason, dtype = grouped.unsupported_reason(key), key[1]
    if reason is None:
        return "PyTorch's grouped products"
    loop = "ATen's products, one expert after the other"
    if key[2].type == "cpu" and dtype == torch.float32:
        loop += " (in PyTorch's grouped products where experts have few tokens)"
    return loop + (f"; not grouped products: {reason}" if reason else "")


# The pre-activations of all pairs in their order are kept as (T, k * columns).
@operation(key=lambda spec, x, weights, order, up: key(spec, x, order, up), description=describe)
def experts_up_fwd(
    spec: ExpertsSpec, x: Tensor, weights: Tensor | None, order: Order, up: Stack
) -> Tensor:
    """Return the pre-activations (P, columns) of all pairs, those of dropped pairs undefined.

    x (T, D); `weights` (T, k) are read if they weigh the input.
    """
    if grouped.supports(key(spec, x, order, up), up):
        return grouped.up_fwd(spec, x, weights, order, up)
    return up_fwd(ATEN, spec, x, weights, order, up)


@operation(
    key=lambda spec, pre, weights, order, down: key(spec, pre, order, down), description=describe
)
def experts_down_fwd(
    spec: ExpertsSpec, pre: Tensor, weights: Tensor, order: Order, down: Stack
) -> Tensor:
    """Return the sum (T, D) of each token's experts, from `experts_up_fwd`, in the dtype of pre."""
    if grouped.supports(key(spec, pre, order, down), down):
        return grouped.down_fwd(spec, pre, weights, order, down)
    return down_fwd(ATEN, spec, pre, weights, order, down)


@operation(
    key=lambda spec, x, weights, order, up, down: key(spec, x, order, up, down),
    description=describe,
)
def experts_fwd(
    spec: ExpertsSpec, x: Tensor, weights: Tensor, order: Order, up: Stack, down: Stack
) -> Tensor:
    """Return `experts_down_fwd` of `experts_up_fwd`, without writing the pre-activations."""
    if grouped.supports(key(spec, x, order, up, down), up, down):
        pre = grouped.up_fwd(spec, x, weights, order, up)
        return grouped.down_fwd(spec, pre, weights, order, down)
    return fwd(ATEN, spec, x, weights, order, up, down)


def key_bwd(read: Operands, *_: Any) -> Any:
    """Return what the choice of an implementation of backward depends on."""
    return key(read.spec, read.dy, read.order, read.up, read.down)


@operation(key=key_bwd, description=describe)
def experts_bwd(read: Operands, up_grads: StackGrads, down_grads: StackGrads) -> Grads:
    """Return the gradients of x and of the weights, or None; add those of stacks to buffers.

    With p = dy @ down, the gradient of a weight is p . act: no product of forward is repeated for
    it.
    """
    if grouped.supports(key_bwd(read), read.up, read.down, up_grads, down_grads):
        *_, grads = grouped.bwd_stages(read, lambda: up_grads, down_grads)
        return grads
    return bwd(ATEN, read, up_grads, down_grads)


@operation(key=key_bwd, description=describe)
def experts_bwd_stages(
    read: Operands, up_grads: Callable[[], StackGrads], down_grads: StackGrads
) -> Iterator[Grads]:
    """Yield what `experts_bwd` returns, after a pair of None when down's gradients are complete.

    Then `up_grads` is called. The gradients of the pre-activations of all pairs exist at once.
    """
    if grouped.supports(key_bwd(read), read.up, read.down, down_grads):
        return grouped.bwd_stages(read, up_grads, down_grads)
    return bwd_stages(ATEN, read, up_grads, down_grads)

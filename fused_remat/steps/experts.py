"""Experts: operations on the pairs of a token and one of its experts, sorted by expert.

T tokens have k experts each: P = T * k pairs. `Order` sorts them. An index below 0, or of no
expert, drops the pair; such pairs come last and are never computed. A stack holds the matrices of
all experts. The bodies of the operations run one expert after the other: the rows of its tokens are
gathered once, and no transient is larger than the tokens of one expert. They read the numbers of
tokens on the host; on a device with grouped products (`grouped`) nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.moe_spec import CLAMPED, ExpertsSpec
from fused_remat.spec import PackedSpec
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.linear import LOW, linear_dw, linear_dx, linear_fwd, widens
from fused_remat.steps.operations import operation
from fused_remat.steps.packed import dequantize


class Order(NamedTuple):
    """The pairs sorted by expert: the numbers of pairs (P,), and where each expert's end (E,)."""

    pairs: Tensor  # int64: t * k + j
    ends: Tensor  # int32


class Adapter(NamedTuple):
    """Low-rank updates of all experts, + scale * b @ a: (E, rank, in) and (E, out, rank)."""

    a: Tensor
    b: Tensor
    scale: float


class Stack(NamedTuple):
    """The matrices of all experts, with their biases (E, out) and low-rank updates."""

    weight: Tensor  # (E, out, in), or (E, in, out) if transposed; bytes of a quantized one
    bias: Tensor | None = None
    transposed: bool = False
    adapters: tuple[Adapter, ...] = ()
    packed: PackedSpec | None = None  # of one expert's matrix; its other tensors follow
    parts: tuple[Tensor, ...] = ()

    @property
    def out_features(self) -> int:
        shape = self.packed.shape if self.packed else self.weight.shape[1:]
        return int(shape[1 if self.transposed else 0])

    @property
    def is_plain(self) -> bool:
        return not (self.adapters or self.packed)

    def matrix(self, expert: int, dtype: torch.dtype) -> Tensor:
        """Return the matrix (out, in) of an expert; of a quantized one, a copy in `dtype`."""
        if self.packed is None:
            matrix = self.weight[expert].to(dtype)
        else:
            own = (t[expert] if t.dim() else t for t in (self.weight, *self.parts))
            matrix = dequantize(self.packed, [*own], dtype)
        return matrix.t() if self.transposed else matrix


class Into(NamedTuple):
    """A buffer of a gradient, whose first dimension counts the experts."""

    grad: Tensor
    fresh: bool  # uninitialized, rather than added to
    exact: bool = False  # products of 16 bits are computed in float32


class StackGrads(NamedTuple):
    """Buffers of the gradients of a stack, like its tensors; None for those not needed."""

    weight: Into | None = None
    bias: Into | None = None
    adapters: tuple[tuple[Into | None, Into | None], ...] = ()


class Products(NamedTuple):
    """Products of one expert's rows."""

    fwd: Callable[..., Tensor]
    dx: Callable[..., Tensor]
    dw: Callable[..., Tensor]


ATEN = Products(linear_fwd, linear_dx, linear_dw)


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
    plain = up.is_plain and (down is None or down.is_plain)
    return spec, x.dtype, x.device, rows, (up.out_features, x.shape[1]), up.weight.dtype, plain


def describe(key: Any, *_: Any, **__: Any) -> str:
    """Describe experts for `explain`."""
    return "ATen's products, one expert after the other"


# The pre-activations of all pairs in their order are kept as (T, k * columns).
@operation(key=lambda spec, x, weights, order, up: key(spec, x, order, up), description=describe)
def experts_up_fwd(
    spec: ExpertsSpec, x: Tensor, weights: Tensor | None, order: Order, up: Stack
) -> Tensor:
    """Return the pre-activations (P, columns) of all pairs, those of dropped pairs undefined.

    x (T, D); `weights` (T, k) are read if they weigh the input.
    """
    return up_fwd(ATEN, spec, x, weights, order, up)


@operation(
    key=lambda spec, pre, weights, order, down: key(spec, pre, order, down), description=describe
)
def experts_down_fwd(
    spec: ExpertsSpec, pre: Tensor, weights: Tensor, order: Order, down: Stack
) -> Tensor:
    """Return the sum (T, D) of each token's experts, from `experts_up_fwd`, in the dtype of pre."""
    return down_fwd(ATEN, spec, pre, weights, order, down)


@operation(
    key=lambda spec, x, weights, order, up, down: key(spec, x, order, up, down),
    description=describe,
)
def experts_fwd(
    spec: ExpertsSpec, x: Tensor, weights: Tensor, order: Order, up: Stack, down: Stack
) -> Tensor:
    """Return `experts_down_fwd` of `experts_up_fwd`, without writing the pre-activations."""
    return fwd(ATEN, spec, x, weights, order, up, down)


@operation(
    key=lambda spec, dy, x, pre, weights, order, up, down, *_: key(spec, dy, order, up, down),
    description=describe,
)
def experts_bwd(
    spec: ExpertsSpec,
    dy: Tensor,
    x: Tensor | None,
    pre: Tensor | None,
    weights: Tensor,
    order: Order,
    up: Stack,
    down: Stack,
    needs_x: bool,
    needs_weights: bool,
    up_grads: StackGrads,
    down_grads: StackGrads,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x and of the weights, or None; add those of stacks to buffers.

    dy (T, D). `pre` (P, columns): the pre-activations, or None where they are computed again. x is
    None where nothing reads it. With p = dy @ down, the gradient of a weight is p . act: no product
    of forward is repeated for it.
    """
    args = spec, dy, x, pre, weights, order, up, down, needs_x, needs_weights, up_grads, down_grads
    return bwd(ATEN, *args)


# The loop over experts.


class _Rows(NamedTuple):
    """The pairs of one expert."""

    expert: int
    span: slice  # of the pairs in order
    tokens: Tensor
    pairs: Tensor


def _experts(spec: ExpertsSpec, order: Order) -> Iterator[_Rows]:
    """Yield the experts that have tokens."""
    start = 0
    for expert, end in enumerate(order.ends.tolist()):
        if end > start:
            pairs = order.pairs[start:end]
            yield _Rows(expert, slice(start, end), pairs // spec.top_k, pairs)
        start = end


def up_fwd(
    products: Products,
    spec: ExpertsSpec,
    x: Tensor,
    weights: Tensor | None,
    order: Order,
    up: Stack,
) -> Tensor:
    """Compute `experts_up_fwd` by `products`."""
    pre = x.new_empty((len(order.pairs), up.out_features))
    for rows in _experts(spec, order):
        xe = _input(spec, x, weights, rows)
        _product(products, xe, up, rows.expert, pre[rows.span])
    return pre


def down_fwd(
    products: Products, spec: ExpertsSpec, pre: Tensor, weights: Tensor, order: Order, down: Stack
) -> Tensor:
    """Compute `experts_down_fwd` by `products`."""
    y = _zeros(pre, len(weights), down.out_features)
    for rows in _experts(spec, order):
        _add_down(products, spec, pre[rows.span], weights, rows, down, y)
    return y.to(pre.dtype)


def fwd(
    products: Products,
    spec: ExpertsSpec,
    x: Tensor,
    weights: Tensor,
    order: Order,
    up: Stack,
    down: Stack,
) -> Tensor:
    """Compute `experts_fwd` by `products`."""
    y = _zeros(x, len(weights), down.out_features)
    for rows in _experts(spec, order):
        pre = _product(products, _input(spec, x, weights, rows), up, rows.expert)
        _add_down(products, spec, pre, weights, rows, down, y)
        del pre
    return y.to(x.dtype)


def _zeros(like: Tensor, rows: int, width: int) -> Tensor:
    """Return zeros to which experts are added, in at least float32."""
    dtype = torch.float32 if like.dtype in LOW else like.dtype
    return torch.zeros((rows, width), dtype=dtype, device=like.device)


def _input(spec: ExpertsSpec, x: Tensor, weights: Tensor | None, rows: _Rows) -> Tensor:
    xe = x[rows.tokens]
    if not spec.weighs_input:
        return xe
    assert weights is not None
    return xe.mul_(_weights(weights, rows))


def _weights(weights: Tensor, rows: _Rows) -> Tensor:
    return weights.reshape(-1)[rows.pairs].unsqueeze(1)


def _product(
    products: Products, x: Tensor, stack: Stack, expert: int, out: Tensor | None = None
) -> Tensor:
    """Return x @ matrix.T + bias, with low-rank updates."""
    bias = None if stack.bias is None else stack.bias[expert].to(x.dtype)
    y = products.fwd(x, stack.matrix(expert, x.dtype), bias, out=out)
    for adapter in stack.adapters:
        low = F.linear(x, adapter.a[expert].to(x.dtype))
        y.addmm_(low, adapter.b[expert].t().to(x.dtype), alpha=adapter.scale)
    return y


def _add_down(
    products: Products,
    spec: ExpertsSpec,
    pre: Tensor,
    weights: Tensor,
    rows: _Rows,
    down: Stack,
    y: Tensor,
) -> None:
    act = activation(spec, pre)
    if not spec.weighs_input:
        we = _weights(weights, rows)
        if down.bias is None:
            act.mul_(we)
            y.index_add_(0, rows.tokens, _product(products, act, down, rows.expert).to(y.dtype))
            return
        ye = _product(products, act, down, rows.expert).to(y.dtype).mul_(we)
    else:
        ye = _product(products, act, down, rows.expert).to(y.dtype)
    y.index_add_(0, rows.tokens, ye)


def columns(spec: ExpertsSpec, pre: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of the gate and of the up projection, as views."""
    if spec.interleaved:
        return pre[:, ::2], pre[:, 1::2]
    gate, up = pre.chunk(2, 1)
    return gate, up


def activation(spec: ExpertsSpec, pre: Tensor) -> Tensor:
    """Return the activation of pre-activations, a new tensor."""
    if not spec.gated:
        return ACTIVATIONS[spec.activation].fwd(pre)
    gate, up = columns(spec, pre)
    if spec.activation != CLAMPED:
        return ACTIVATIONS[spec.activation].fwd(gate).mul_(up)
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return torch.sigmoid(gate * spec.alpha).mul_(gate).mul_(up.add_(1.0))


def activation_bwd(spec: ExpertsSpec, dact: Tensor, pre: Tensor) -> Tensor:
    """Return the gradient of pre-activations; `dact` is overwritten."""
    d = torch.empty_like(pre)
    if not spec.gated:
        return ACTIVATIONS[spec.activation].bwd(dact, pre, d)
    (gate, up), (dgate, dup) = columns(spec, pre), columns(spec, d)
    if spec.activation != CLAMPED:
        row = ACTIVATIONS[spec.activation]
        torch.mul(row.fwd(gate), dact, out=dup)
        row.bwd(dact.mul_(up), gate, dgate)
        return d
    low, high = -spec.limit, spec.limit
    g, u = gate.clamp(max=high), up.clamp(low, high)
    s = torch.sigmoid(g * spec.alpha)
    torch.mul(dact, g * s, out=dup)
    dup.masked_fill_((up < low) | (up > high), 0.0)
    slope = (1.0 - s).mul_(g).mul_(spec.alpha).add_(1.0).mul_(s)  # of g * sigmoid(alpha * g)
    torch.mul(dact.mul_(u.add_(1.0)), slope, out=dgate)
    dgate.masked_fill_(gate > high, 0.0)
    return d


def bwd(
    products: Products,
    spec: ExpertsSpec,
    dy: Tensor,
    x: Tensor | None,
    pre: Tensor | None,
    weights: Tensor,
    order: Order,
    up: Stack,
    down: Stack,
    needs_x: bool,
    needs_weights: bool,
    up_grads: StackGrads,
    down_grads: StackGrads,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute `experts_bwd` by `products`."""
    like = dy if x is None else x
    dx = _zeros(like, *like.shape) if needs_x else None
    dw = torch.zeros_like(weights) if needs_weights else None
    counts = order.ends.diff(prepend=order.ends.new_zeros(1)).tolist()
    for grads in (up_grads, down_grads):
        _zero_unused(grads, counts)
    needs_up = needs_x or _any(up_grads) or (needs_weights and spec.weighs_input)
    for rows in _experts(spec, order):
        dye, xe = dy[rows.tokens], None if x is None else x[rows.tokens]
        we = _weights(weights, rows)
        scaled = xe
        if spec.weighs_input and xe is not None:
            scaled = (xe * we).to(xe.dtype)
        if pre is None:
            assert scaled is not None
            pre_e = _product(products, scaled, up, rows.expert)
        else:
            pre_e = pre[rows.span]
        dact, dwe = _down_bwd(
            products, spec, dye, pre_e, we, down, down_grads, rows.expert,
            needs_up or (needs_weights and not spec.weighs_input),
        )  # fmt: skip
        del dye
        if needs_up:
            assert dact is not None
            d = activation_bwd(spec, dact, pre_e)
            del dact, pre_e
            dxe = _stack_bwd(
                products, d, scaled, up, up_grads, rows.expert,
                needs_x or (needs_weights and spec.weighs_input),
            )  # fmt: skip
            if spec.weighs_input and dxe is not None:
                assert xe is not None
                dwe = _dot(dxe, xe)
                dxe.mul_(we)
            if dx is not None:
                assert dxe is not None
                dx.index_add_(0, rows.tokens, dxe.to(dx.dtype))
            del d, dxe
        if dw is not None:
            assert dwe is not None
            dw.view(-1)[rows.pairs] = dwe.to(dw.dtype)
    return None if dx is None else dx.to(like.dtype), dw


def _any(grads: StackGrads) -> bool:
    """Return whether a gradient of a stack is needed."""
    adapters = any(part is not None for pair in grads.adapters for part in pair)
    return adapters or grads.weight is not None or grads.bias is not None


def _zero_unused(grads: StackGrads, counts: Sequence[int]) -> None:
    """Set the gradients of experts without tokens to 0."""
    buffers = [grads.weight, grads.bias, *[part for pair in grads.adapters for part in pair]]
    unused = [expert for expert, count in enumerate(counts) if not count]
    for into in buffers:
        if into is not None and into.fresh:
            for expert in unused:
                into.grad[expert].zero_()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of rows, summed in at least float32."""
    dtype = torch.float32 if a.dtype in LOW else a.dtype
    return (a * b).sum(-1, dtype=dtype)


def _down_bwd(
    products: Products,
    spec: ExpertsSpec,
    dy: Tensor,
    pre: Tensor,
    weights: Tensor,
    down: Stack,
    grads: StackGrads,
    expert: int,
    needs_act: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of one expert's activation and of its weights, or None."""
    act = activation(spec, pre)
    if spec.weighs_input:
        dact = _stack_bwd(products, dy, act, down, grads, expert, needs_act)
        return dact, None
    p = _dx(products, dy, down, expert) if needs_act else None
    dw = None if p is None else _dot(p, act)
    if dw is not None and down.bias is not None:
        dw += _dot(dy, down.bias[expert].to(dy.dtype).expand_as(dy))
    if _any(grads):
        wact = act.mul_(weights)
        _add_stack_grads(products, dy, wact, down, grads, expert, weights)
    return None if p is None else p.mul_(weights), dw


def _stack_bwd(
    products: Products,
    dy: Tensor,
    x: Tensor | None,
    stack: Stack,
    grads: StackGrads,
    expert: int,
    needs_x: bool,
) -> Tensor | None:
    """Add the gradients of an expert's matrix, bias and updates; return that of x if needed."""
    if _any(grads):
        _add_stack_grads(products, dy, x, stack, grads, expert, None)
    return _dx(products, dy, stack, expert) if needs_x else None


def _dx(products: Products, dy: Tensor, stack: Stack, expert: int) -> Tensor:
    dx = products.dx(dy, stack.matrix(expert, dy.dtype))
    for adapter in stack.adapters:
        low = dy @ adapter.b[expert].to(dy.dtype)
        dx.addmm_(low, adapter.a[expert].to(dy.dtype), alpha=adapter.scale)
    return dx


def _add_stack_grads(
    products: Products,
    dy: Tensor,
    x: Tensor | None,
    stack: Stack,
    grads: StackGrads,
    expert: int,
    weights: Tensor | None,
) -> None:
    """Add the gradients of an expert's matrix, bias and updates; `weights` are those of dy."""
    if grads.bias is not None:
        wide = dy.to(torch.promote_types(dy.dtype, torch.float32))
        total = wide.sum(0) if weights is None else (wide * weights).sum(0)
        _put(grads.bias, expert, total)
    if grads.weight is not None:
        assert x is not None
        _add_product(products, grads.weight, expert, dy, x, stack.transposed)
    for adapter, (da, db) in zip(stack.adapters, grads.adapters, strict=bool(grads.adapters)):
        assert x is not None
        a, b = adapter.a[expert].to(x.dtype), adapter.b[expert].to(x.dtype)
        if db is not None:
            low = F.linear(x, a).mul_(adapter.scale)
            _add_product(products, db, expert, dy, low, False)
        if da is not None:
            dlow = (dy @ b).mul_(adapter.scale)
            _add_product(products, da, expert, dlow, x, False)


def _add_product(
    products: Products, into: Into, expert: int, dy: Tensor, x: Tensor, transposed: bool
) -> None:
    """Add dy.T @ x to the buffer of an expert, or its transpose."""
    if transposed:
        dy, x = x, dy
    grad = into.grad[expert]
    plain = products.dw is linear_dw and not (into.exact or widens(x))
    if into.fresh and plain and grad.dtype == x.dtype:
        torch.mm(dy.t(), x, out=grad)
    else:
        _put(into, expert, products.dw(dy, x, None, True, into.exact))


def _put(into: Into, expert: int, value: Tensor) -> None:
    grad = into.grad[expert]
    if into.fresh:
        grad.copy_(value)
    else:
        grad.add_(value)

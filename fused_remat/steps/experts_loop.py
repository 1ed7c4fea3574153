"""Experts one after the other, by any products of matrices.

The rows of an expert's tokens are gathered once, and no transient is larger than the tokens of one
expert. The numbers of tokens are read on the host, once for an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.moe_spec import CLAMPED, ExpertsSpec
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.linear import LOW, linear_dw, linear_dx, linear_fwd, widens
from fused_remat.steps.stacks import Into, Operands, Order, Stack, StackGrads

#: Gradients of x and of the weights.
Grads = tuple[Tensor | None, Tensor | None]


class Products(NamedTuple):
    """Products of one expert's rows."""

    fwd: Callable[..., Tensor]  # x, weight, bias, out=None
    dx: Callable[..., Tensor]  # dy, weight
    dw: Callable[[Tensor, Tensor, Tensor, Into], object]  # dy, x, the expert's gradient, of `Into`


def _dw(dy: Tensor, x: Tensor, grad: Tensor, into: Into) -> None:
    if not into.fresh:
        linear_dw(dy, x, grad, True, into.exact)
    elif into.exact or grad.dtype != x.dtype or widens(x):
        grad.copy_(linear_dw(dy, x, None, True, into.exact))
    else:
        torch.mm(dy.t(), x, out=grad)


ATEN = Products(linear_fwd, linear_dx, _dw)


class _Rows(NamedTuple):
    """The pairs of one expert."""

    expert: int
    span: slice  # of the pairs in order
    tokens: Tensor
    weights: Tensor  # (rows, 1); none where the operation has none


def _experts(
    spec: ExpertsSpec, order: Order, weights: Tensor | None, *grads: StackGrads
) -> Iterator[_Rows]:
    """Yield the experts that have tokens, and set the gradients of the others to 0."""
    fresh = [into.grad for each in grads for into in each.buffers if into.fresh]
    tokens, start = order.pairs // spec.top_k, 0
    column = tokens if weights is None else weights.reshape(-1)[order.pairs].unsqueeze(1)
    for expert, end in enumerate(order.ends.tolist()):
        if end > start:
            yield _Rows(expert, slice(start, end), tokens[start:end], column[start:end])
        else:
            for grad in fresh:
                grad[expert].zero_()
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
    for rows in _experts(spec, order, weights):
        _product(products, _input(spec, x, rows), up, rows.expert, pre[rows.span])
    return pre


def down_fwd(
    products: Products, spec: ExpertsSpec, pre: Tensor, weights: Tensor, order: Order, down: Stack
) -> Tensor:
    """Compute `experts_down_fwd` by `products`."""
    y = zeros(pre, len(weights), down.out_features)
    for rows in _experts(spec, order, weights):
        _add_down(products, spec, pre[rows.span], rows, down, y)
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
    y = zeros(x, len(weights), down.out_features)
    for rows in _experts(spec, order, weights):
        pre = _product(products, _input(spec, x, rows), up, rows.expert)
        _add_down(products, spec, pre, rows, down, y)
        del pre
    return y.to(x.dtype)


def zeros(like: Tensor, rows: int, width: int) -> Tensor:
    """Return zeros to which experts are added, in at least float32."""
    dtype = torch.float32 if like.dtype in LOW else like.dtype
    return torch.zeros((rows, width), dtype=dtype, device=like.device)


def _input(spec: ExpertsSpec, x: Tensor, rows: _Rows) -> Tensor:
    xe = x[rows.tokens]
    return xe.mul_(rows.weights) if spec.weighs_input else xe


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
    products: Products, spec: ExpertsSpec, pre: Tensor, rows: _Rows, down: Stack, y: Tensor
) -> None:
    act = activation(spec, pre)
    before = not spec.weighs_input and down.bias is None
    if before:
        act.mul_(rows.weights)
    ye = _product(products, act, down, rows.expert).to(y.dtype)
    y.index_add_(0, rows.tokens, ye if before or spec.weighs_input else ye.mul_(rows.weights))


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


def activation_vjp(spec: ExpertsSpec, pre: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the activation, and a function of its gradient that returns that of `pre`.

    The function overwrites its argument.
    """
    if not spec.gated:
        entry = ACTIVATIONS[spec.activation]
        return entry.fwd(pre), lambda dact: entry.bwd(dact, pre, dact)
    gate, up = columns(spec, pre)
    if spec.activation == CLAMPED:
        return _clamped_vjp(spec, pre, gate, up)
    row = ACTIVATIONS[spec.activation]
    value = row.fwd(gate)

    def vjp(dact: Tensor) -> Tensor:
        d = torch.empty_like(pre)
        dgate, dup = columns(spec, d)
        torch.mul(dact, value, out=dup)
        row.bwd(dact.mul_(up), gate, dgate)
        return d

    return value * up, vjp


def _clamped_vjp(
    spec: ExpertsSpec, pre: Tensor, gate: Tensor, up: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    low, high = -spec.limit, spec.limit
    g, u = gate.clamp(max=high), up.clamp(low, high).add_(1.0)
    s = torch.sigmoid(g * spec.alpha)
    value = g * s

    def vjp(dact: Tensor) -> Tensor:
        d = torch.empty_like(pre)
        dgate, dup = columns(spec, d)
        torch.mul(dact, value, out=dup)
        dup.masked_fill_((up < low) | (up > high), 0.0)
        slope = (1.0 - s).mul_(value).mul_(spec.alpha).add_(s)  # of g * sigmoid(alpha * g)
        torch.mul(dact.mul_(u), slope, out=dgate)
        dgate.masked_fill_(gate > high, 0.0)
        return d

    return value * u, vjp


class _Backward:
    """Backward of both products, an expert at a time."""

    def __init__(
        self, products: Products, read: Operands, up_grads: StackGrads, down_grads: StackGrads
    ) -> None:
        self.products, self.read, self.spec = products, read, read.spec
        self.up_grads, self.down_grads = up_grads, down_grads
        self.like = read.dy if read.x is None else read.x
        self.dx = zeros(self.like, *self.like.shape) if read.needs_x else None
        # of the weights' gradients, in order
        count = len(read.order.pairs)
        self.sums = zeros(read.weights, count, 1) if read.needs_weights else None
        self.needs_input = read.needs_x or (read.needs_weights and self.spec.weighs_input)
        self.needs_up = self.needs_input or up_grads.needed
        self.needs_act = self.needs_up or read.needs_weights

    def experts(self, *grads: StackGrads) -> Iterator[_Rows]:
        return _experts(self.spec, self.read.order, self.read.weights, *grads)

    def input(self, rows: _Rows) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of x, and what the first product reads."""
        xe = None if self.read.x is None else self.read.x[rows.tokens]
        if xe is None or not self.spec.weighs_input:
            return xe, xe
        return xe, (xe * rows.weights).to(xe.dtype)

    def second(self, rows: _Rows, scaled: Tensor | None) -> Tensor | None:
        """Add the gradients of the second product; return that of the pre-activations."""
        read = self.read
        if read.pre is None:
            assert scaled is not None
            pre = _product(self.products, scaled, read.up, rows.expert)
        else:
            pre = read.pre[rows.span]
        act, vjp = activation_vjp(self.spec, pre)
        given = self.products, self.spec, read.dy[rows.tokens], act, rows
        dact, dweights = _down_bwd(*given, read.down, self.down_grads, self.needs_act)
        del act, pre, given
        if self.sums is not None and dweights is not None:
            self.sums[rows.span] = dweights
        if not self.needs_up:
            return None
        assert dact is not None
        return vjp(dact)

    def first(self, rows: _Rows, d: Tensor, xe: Tensor | None, scaled: Tensor | None) -> None:
        """Add the gradients of the first product, from that of its result."""
        given = self.products, d, scaled, self.read.up, self.up_grads, rows.expert
        dxe = _stack_bwd(*given, self.needs_input)
        if dxe is None:
            return
        if self.spec.weighs_input:
            if self.sums is not None:
                assert xe is not None
                self.sums[rows.span] = dot(dxe, xe)
            dxe.mul_(rows.weights)
        if self.dx is not None:
            self.dx.index_add_(0, rows.tokens, dxe.to(self.dx.dtype))

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        dx = None if self.dx is None else self.dx.to(self.like.dtype)
        return dx, unsorted(self.sums, self.read.weights, self.read.order)


def bwd(products: Products, read: Operands, *grads: StackGrads) -> Grads:
    """Compute `experts_bwd` by `products`; `grads`: of the first stack and of the second."""
    both = _Backward(products, read, *grads)
    for rows in both.experts(*grads):
        xe, scaled = both.input(rows)
        d = both.second(rows, scaled)
        if d is not None:
            both.first(rows, d, xe, scaled)
        del d, xe, scaled
    return both.result()


def bwd_stages(
    products: Products, read: Operands, up_grads: Callable[[], StackGrads], down_grads: StackGrads
) -> Iterator[Grads]:
    """Compute `experts_bwd_stages` by `products`."""
    both = _Backward(products, read, StackGrads(), down_grads)
    del down_grads  # the gradients that the caller takes are not held here
    both.needs_up = both.needs_act = True
    ds = read.dy.new_empty((len(read.order.pairs), read.up.out_features))
    for rows in both.experts(both.down_grads):
        d = both.second(rows, both.input(rows)[1])
        assert d is not None
        ds[rows.span] = d
        del d
    both.down_grads = StackGrads()
    yield None, None
    both.up_grads = up_grads()
    for rows in both.experts(both.up_grads):
        both.first(rows, ds[rows.span], *both.input(rows))
    yield both.result()


def unsorted(sums: Tensor | None, weights: Tensor, order: Order) -> Tensor | None:
    """Return numbers of the pairs (P, 1), which are in order, like the weights (T, k)."""
    if sums is None:
        return None
    dw = torch.empty_like(weights, memory_format=torch.contiguous_format)
    dw.view(-1)[order.pairs] = sums.view(-1).to(dw.dtype)
    return dw


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of rows (P, 1), summed in at least float32."""
    dtype = torch.float32 if a.dtype in LOW else a.dtype
    return (a * b).sum(-1, keepdim=True, dtype=dtype)


def _down_bwd(
    products: Products,
    spec: ExpertsSpec,
    dy: Tensor,
    act: Tensor,
    rows: _Rows,
    down: Stack,
    grads: StackGrads,
    needs_act: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of one expert's activation, which is overwritten, and its weights."""
    if spec.weighs_input:
        return _stack_bwd(products, dy, act, down, grads, rows.expert, needs_act), None
    p = _dx(products, dy, down, rows.expert) if needs_act else None
    dw = None if p is None else dot(p, act)
    if dw is not None and down.bias is not None:
        dw += dot(dy, down.bias[rows.expert].to(dy.dtype).expand_as(dy))
    if grads.needed:
        act.mul_(rows.weights)
        _add_stack_grads(products, dy, act, down, grads, rows.expert, rows.weights)
    return None if p is None else p.mul_(rows.weights), dw


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
    if grads.needed:
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
        grad = grads.bias.grad[expert]
        grad.copy_(total) if grads.bias.fresh else grad.add_(total)
    if grads.weight is not None:
        assert x is not None
        pair = (x, dy) if stack.transposed else (dy, x)
        products.dw(*pair, grads.weight.grad[expert], grads.weight)
    for adapter, (da, db) in zip(stack.adapters, grads.adapters, strict=bool(grads.adapters)):
        assert x is not None
        a, b = adapter.a[expert].to(x.dtype), adapter.b[expert].to(x.dtype)
        if db is not None:
            low = F.linear(x, a).mul_(adapter.scale)
            products.dw(dy, low, db.grad[expert], db)
        if da is not None:
            dlow = (dy @ b).mul_(adapter.scale)
            products.dw(dlow, x, da.grad[expert], da)

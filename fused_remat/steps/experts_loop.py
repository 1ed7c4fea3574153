"""Experts one after the other, by any products of matrices.

All but the products is computed for a run of experts at once. A run with more than one expert has
at most `ROWS` rows, so no transient has more rows than that or than the tokens of one expert. The
numbers of tokens are read on the host, once for an operation.

On a CPU, PyTorch's grouped products are the same loop in C++. A run of several experts takes them
in float32, unless its matrices are quantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from fused_remat.moe_spec import ExpertsSpec
from fused_remat.steps.expert_activation import activation, activation_vjp
from fused_remat.steps.linear import LOW, linear_dw, linear_dx, linear_fwd, widens
from fused_remat.steps.stacks import Into, Operands, Order, Stack, StackGrads

#: It takes matrices whose rows are multiples of 16 bytes.
GROUPED: Any = F.grouped_mm
if (_operator := getattr(torch.ops.aten, "_grouped_mm", None)) not in (None, *flop_registry):
    register_flop_formula(_operator)(lambda x, w, *_, **__: 2 * math.prod(x) * w[-1])
#: The most rows of a run with more than one expert: for so few, calls cost more than arithmetic.
ROWS = 256
#: Gradients of x and of the weights.
Grads = tuple[Tensor | None, Tensor | None]


class Products(NamedTuple):
    """Products of one expert's rows; `fwd` and `dx` write to `out`."""

    fwd: Callable[..., object]  # x, weight, bias, out
    dx: Callable[..., object]  # dy, weight, out
    dw: Callable[[Tensor, Tensor, Tensor, Into], object]  # dy, x, the expert's gradient, of `Into`


def _fwd(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if widens(x):
        linear_fwd(x, weight, bias, out=out)
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _dx(dy: Tensor, weight: Tensor, out: Tensor) -> None:
    if widens(dy):
        out.copy_(linear_dx(dy, weight))
    else:
        torch.mm(dy, weight, out=out)


def _dw(dy: Tensor, x: Tensor, grad: Tensor, into: Into) -> None:
    if not into.fresh:
        linear_dw(dy, x, grad, True, into.exact)
    elif into.exact or grad.dtype != x.dtype or widens(x):
        grad.copy_(linear_dw(dy, x, None, True, into.exact))
    else:
        torch.mm(dy.t(), x, out=grad)


ATEN = Products(_fwd, _dx, _dw)


class _Run(NamedTuple):
    """The pairs of experts between the first and the last."""

    experts: list[int]  # those that have pairs
    sizes: list[int]  # numbers of their pairs
    span: slice  # of the pairs in order
    tokens: Tensor
    weights: Tensor  # (rows, 1); none where the operation has none

    def add(self, rows: Tensor, sums: Tensor) -> None:
        """Add rows to those of their tokens, in a fixed order."""
        if sums.device.type == "cpu":  # where ATen adds in order
            sums.index_add_(0, self.tokens, rows)
            return
        for tokens, part in zip(self.split(self.tokens), self.split(rows), strict=True):
            sums.index_add_(0, tokens, part)  # a token has each expert once

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """Return the rows of each expert."""
        return (rows,) if len(self.sizes) == 1 else torch.split_with_sizes(rows, self.sizes)


def _runs(
    spec: ExpertsSpec,
    order: Order,
    weights: Tensor | None,
    *grads: StackGrads,
    rows: int | None = None,
) -> Iterator[_Run]:
    """Yield the experts that have tokens, and set the gradients of the others to 0.

    A run with more than one expert has at most `rows` rows, by default `ROWS`.
    """
    bounds = [0, *order.ends.tolist()]
    counts = [end - start for start, end in pairwise(bounds)]
    if 0 in counts:
        empty = torch.tensor([e for e, count in enumerate(counts) if not count])
        empty = empty.to(order.ends.device)
        for into in (into for each in grads for into in each.buffers if into.fresh):
            into.grad.index_fill_(0, empty, 0)
    rows = ROWS if rows is None else min(ROWS, rows)
    runs: list[list[int]] = []
    for expert in (e for e, count in enumerate(counts) if count):
        if runs and bounds[expert + 1] - bounds[runs[-1][0]] <= rows:
            runs[-1].append(expert)
        else:
            runs.append([expert])
    tokens = order.pairs // spec.top_k
    column = tokens if weights is None else weights.reshape(-1)[order.pairs].unsqueeze(1)
    for experts in runs:
        span = slice(bounds[experts[0]], bounds[experts[-1] + 1])
        yield _Run(experts, [counts[e] for e in experts], span, tokens[span], column[span])


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
    for run in _runs(spec, order, weights):
        _product(products, _input(spec, x, run), up, run, pre[run.span])
    return pre


def down_fwd(
    products: Products, spec: ExpertsSpec, pre: Tensor, weights: Tensor, order: Order, down: Stack
) -> Tensor:
    """Compute `experts_down_fwd` by `products`."""
    y = zeros(pre, len(weights), down.out_features)
    for run in _runs(spec, order, weights):
        _add_down(products, spec, pre[run.span], run, down, y)
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
    for run in _runs(spec, order, weights):
        pre = _product(products, _input(spec, x, run), up, run)
        _add_down(products, spec, pre, run, down, y)
        del pre
    return y.to(x.dtype)


def zeros(like: Tensor, rows: int, width: int) -> Tensor:
    """Return zeros to which experts are added, in at least float32."""
    dtype = torch.float32 if like.dtype in LOW else like.dtype
    return torch.zeros((rows, width), dtype=dtype, device=like.device)


def _input(spec: ExpertsSpec, x: Tensor, run: _Run) -> Tensor:
    xe = x[run.tokens]
    return xe.mul_(run.weights) if spec.weighs_input else xe


def _is_grouped(products: Products, x: Tensor, stack: Stack, run: _Run) -> bool:
    """Return whether PyTorch's grouped products compute what `products` would, with fewer calls."""
    w = stack.weight
    if len(run.experts) == 1 or products is not ATEN or stack.packed or x.device.type != "cpu":
        return False
    has_rows_of_16_bytes = w.is_contiguous() and not any(n % 4 for n in w.shape[1:])
    return x.dtype == w.dtype == torch.float32 and has_rows_of_16_bytes


def _grouped(x: Tensor, stack: Stack, run: _Run, backward: bool) -> Tensor:
    first, last = run.experts[0], run.experts[-1]
    counts = dict(zip(run.experts, run.sizes, strict=True))
    ends = accumulate([counts.get(expert, 0) for expert in range(first, last + 1)])
    offs, matrices = torch.tensor([*ends], dtype=torch.int32), stack.weight[first : last + 1]
    is_direct = stack.transposed != backward
    y: Tensor = GROUPED(x, matrices if is_direct else matrices.transpose(1, 2), offs=offs)
    if stack.bias is not None and not backward:
        for expert, ye in zip(run.experts, run.split(y), strict=True):
            ye.add_(stack.bias[expert])
    return y


def _product(
    products: Products,
    x: Tensor,
    stack: Stack,
    run: _Run,
    out: Tensor | None = None,
    backward: bool = False,
) -> Tensor:
    """Return x @ matrix.T + bias of each expert, with low-rank updates; x @ matrix in backward."""
    columns, dtype = stack.in_features if backward else stack.out_features, x.dtype
    if _is_grouped(products, x, stack, run):
        y = _grouped(x, stack, run, backward)
        y = y if out is None else out.copy_(y)
    else:
        y = x.new_empty((len(x), columns)) if out is None else out
        matrix_of = stack.matrices(run.experts, dtype)
        for expert, xe, ye in zip(run.experts, run.split(x), run.split(y), strict=True):
            if backward:
                products.dx(xe, matrix_of(expert), ye)
            else:
                bias = None if stack.bias is None else stack.bias[expert].to(dtype)
                products.fwd(xe, matrix_of(expert), bias, ye)
    for adapter in stack.adapters:
        a, b = adapter.turned if backward else adapter[:2]
        for expert, xe, ye in zip(run.experts, run.split(x), run.split(y), strict=True):
            ye.addmm_(
                F.linear(xe, a[expert].to(dtype)), b[expert].t().to(dtype), alpha=adapter.scale
            )
    return y


def _add_down(
    products: Products, spec: ExpertsSpec, pre: Tensor, run: _Run, down: Stack, y: Tensor
) -> None:
    act = activation(spec, pre)
    before = not spec.weighs_input and down.bias is None
    if before:
        act.mul_(run.weights)
    ye = _product(products, act, down, run).to(y.dtype)
    run.add(ye if before or spec.weighs_input else ye.mul_(run.weights), y)


class _Backward:
    """Backward of both products, a run of experts at a time."""

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

    def runs(self, *grads: StackGrads, rows: int | None = None) -> Iterator[_Run]:
        return _runs(self.spec, self.read.order, self.read.weights, *grads, rows=rows)

    def input(self, run: _Run) -> tuple[Tensor | None, Tensor | None]:
        """Return the rows of x, and what the first product reads."""
        xe = None if self.read.x is None else self.read.x[run.tokens]
        if xe is None or not self.spec.weighs_input:
            return xe, xe
        return xe, (xe * run.weights).to(xe.dtype)

    def second(self, run: _Run, scaled: Tensor | None, out: Tensor | None = None) -> Tensor | None:
        """Add the gradients of the second product; return that of the pre-activations."""
        read = self.read
        if read.pre is None:
            assert scaled is not None
            pre = _product(self.products, scaled, read.up, run)
        else:
            pre = read.pre[run.span]
        act, vjp = activation_vjp(self.spec, pre)
        given = self.products, self.spec, read.dy[run.tokens], act, run
        dact, dweights = _down_bwd(*given, read.down, self.down_grads, self.needs_act)
        del act, pre, given
        if self.sums is not None and dweights is not None:
            self.sums[run.span] = dweights
        if not self.needs_up:
            return None
        assert dact is not None
        return vjp(dact, out)

    def first(self, run: _Run, d: Tensor, xe: Tensor | None, scaled: Tensor | None) -> None:
        """Add the gradients of the first product, from that of its result."""
        given = self.products, d, scaled, self.read.up, self.up_grads, run
        dxe = _stack_bwd(*given, self.needs_input)
        if dxe is None:
            return
        if self.spec.weighs_input:
            if self.sums is not None:
                assert xe is not None
                self.sums[run.span] = dot(dxe, xe)
            dxe.mul_(run.weights)
        if self.dx is not None:
            run.add(dxe.to(self.dx.dtype), self.dx)

    def result(self) -> tuple[Tensor | None, Tensor | None]:
        dx = None if self.dx is None else self.dx.to(self.like.dtype)
        return dx, unsorted(self.sums, self.read.weights, self.read.order)


def bwd(products: Products, read: Operands, *grads: StackGrads) -> Grads:
    """Compute `experts_bwd` by `products`; `grads`: of the first stack and of the second."""
    both = _Backward(products, read, *grads)
    for run in both.runs(*grads):
        xe, scaled = both.input(run)
        d = both.second(run, scaled)
        if d is not None:
            both.first(run, d, xe, scaled)
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
    for run in both.runs(both.down_grads):
        both.second(run, both.input(run)[1], ds[run.span])
    both.down_grads = StackGrads()
    yield None, None
    both.up_grads = up_grads()
    # The gradients of all pre-activations are held here, so runs of small batches are shorter.
    for run in both.runs(both.up_grads, rows=len(read.weights)):
        both.first(run, ds[run.span], *both.input(run))
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
    run: _Run,
    down: Stack,
    grads: StackGrads,
    needs_act: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a run's activation, which is overwritten, and of its weights."""
    if spec.weighs_input:
        return _stack_bwd(products, dy, act, down, grads, run, needs_act), None
    p = _product(products, dy, down, run, backward=True) if needs_act else None
    dw = None if p is None else dot(p, act)
    if dw is not None and down.bias is not None:
        for expert, dye, dwe in zip(run.experts, run.split(dy), run.split(dw), strict=True):
            dwe += dot(dye, down.bias[expert].to(dy.dtype))
    if grads.needed:
        act.mul_(run.weights)
        _add_stack_grads(products, dy, act, down, grads, run, run.weights)
    return None if p is None else p.mul_(run.weights), dw


def _stack_bwd(
    products: Products,
    dy: Tensor,
    x: Tensor | None,
    stack: Stack,
    grads: StackGrads,
    run: _Run,
    needs_x: bool,
) -> Tensor | None:
    """Add the gradients of the experts' matrices, biases and updates; return x's if needed."""
    if grads.needed:
        _add_stack_grads(products, dy, x, stack, grads, run, None)
    return _product(products, dy, stack, run, backward=True) if needs_x else None


def _add_stack_grads(
    products: Products,
    dy: Tensor,
    x: Tensor | None,
    stack: Stack,
    grads: StackGrads,
    run: _Run,
    weights: Tensor | None,
) -> None:
    """Add the gradients of the experts' matrices, biases and updates; `weights` are dy's."""
    none = [None] * len(run.experts)
    xs, ws = (none if t is None else run.split(t) for t in (x, weights))
    for expert, dye, xe, we in zip(run.experts, run.split(dy), xs, ws, strict=True):
        _add_expert_grads(products, stack, grads, expert, dye, xe, we)


def _add_expert_grads(
    products: Products,
    stack: Stack,
    grads: StackGrads,
    expert: int,
    dy: Tensor,
    x: Tensor | None,
    weights: Tensor | None,
) -> None:
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

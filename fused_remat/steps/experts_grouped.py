"""Experts by products of all groups at once, on GPUs that need no counts on the host for them.

`torch.nn.functional.grouped_mm` reads where groups end on the device in bfloat16 on the compute
capabilities 9 and 10. Elsewhere it copies them to the host for every product: there the loop runs,
which does so once for an operation. Sums over the experts of a token are in their order, without
atomics. Rows of dropped pairs are not computed, and are set to 0 where they would be read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.moe_spec import ExpertsSpec
from fused_remat.steps.expert_activation import activation, activation_vjp
from fused_remat.steps.experts_loop import GROUPED, Grads, dot, unsorted
from fused_remat.steps.stacks import Into, Operands, Order, Stack, StackGrads

_MOST_EXPERTS = 1024
#: The gradient of a stack is computed in so many parts: the function cannot write into a buffer.
_PARTS = 8


def unsupported_reason(key: Any) -> str | None:
    """Return why grouped products do not run for a key of `experts.key`, or None if they do."""
    spec, dtype, device, _, sizes, weight_dtype, form = key
    if device.type != "cuda" or torch.version.hip:
        return ""
    major = torch.cuda.get_device_capability(device)[0]
    if dtype != torch.bfloat16 or major not in (9, 10) or spec.experts > _MOST_EXPERTS:
        return "they read counts on the host for this dtype and GPU"
    if weight_dtype != dtype:
        return "the matrices are of another dtype"
    if form not in ("plain", "adapted"):
        return f"the matrices are {form}"
    return "widths are not multiples of 16" if any(size % 16 for size in sizes) else None


def supports(key: Any, *parts: Stack | StackGrads) -> bool:
    """Return whether grouped products run for a key and these stacks and gradients."""
    if unsupported_reason(key) is not None:
        return False
    stacks = [part for part in parts if isinstance(part, Stack)]
    grads = [into for part in parts if isinstance(part, StackGrads) for into in part.buffers]
    lows = [low for stack in stacks for low in stack.adapters]
    read = [*[stack.weight for stack in stacks], *[low.a for low in lows]]
    offsets = [t.storage_offset() for t in (*read, *[low.b for low in lows])]
    aligned = all(t.is_contiguous() for t in read) and not any(n % 8 for n in offsets)
    return aligned and not any(into.exact for into in grads)


class _Pairs:
    """The pairs in order, P in number."""

    def __init__(self, spec: ExpertsSpec, order: Order, weights: Tensor | None) -> None:
        self.order, self.top_k = order, spec.top_k
        self.tokens = order.pairs // spec.top_k
        self.numbers = torch.arange(len(order.pairs), device=order.pairs.device)
        self.dropped = (self.numbers >= order.ends[-1]).unsqueeze(1)
        flat = None if weights is None else weights.reshape(-1)
        self.weights = self.dropped if flat is None else flat[order.pairs].unsqueeze(1)

    def product(self, x: Tensor, stack: Stack, backward: bool = False) -> Tensor:
        """Return x @ matrix.T + bias of each pair's expert; x @ matrix in backward."""
        matrices = stack.weight if stack.transposed == backward else stack.weight.transpose(1, 2)
        y = self.grouped(x, matrices)
        for adapter in stack.adapters:
            a, b = adapter.turned if backward else adapter[:2]
            y.add_(self.grouped(self.grouped(x, a), b), alpha=adapter.scale)
        return y if backward or stack.bias is None else y.add_(self.bias(stack.bias, y))

    def grouped(self, x: Tensor, matrices: Tensor) -> Tensor:
        """Return x @ matrix.T of each pair's expert, of matrices (E, out, in)."""
        y: Tensor = GROUPED(x, matrices.transpose(1, 2), offs=self.order.ends)
        return y

    def bias(self, bias: Tensor, like: Tensor) -> Tensor:
        """Return the bias of each pair's expert."""
        expert = torch.searchsorted(self.order.ends, self.numbers, right=True, out_int32=True)
        return bias.to(like.dtype)[expert.clamp_(max=len(bias) - 1)]

    def sum(self, rows: Tensor) -> Tensor:
        """Return the sums (T, columns) over the pairs of a token; rows are overwritten."""
        sorted_back = torch.empty_like(rows)
        sorted_back[self.order.pairs] = rows.masked_fill_(self.dropped, 0.0)
        wide = torch.promote_types(rows.dtype, torch.float32)
        total = sorted_back.view(-1, self.top_k, rows.shape[1]).sum(1, dtype=wide)
        return total.to(rows.dtype)

    def add_grads(
        self, stack: Stack, grads: StackGrads, dy: Tensor, x: Tensor | None, column: Tensor
    ) -> None:
        """Add the gradients of a stack, those of biases by a column (P, 1) of their weights."""
        if grads.bias is not None:
            eight = F.pad(column.to(dy.dtype), (0, 7))
            self._add(grads.bias, slice(None), dy, eight, 0)
        if grads.weight is not None:
            assert x is not None
            left, right = (x, dy) if stack.transposed else (dy, x)
            step = -(-left.shape[1] // (8 * _PARTS)) * 8
            for first in range(0, left.shape[1], step):
                columns = slice(first, first + step)
                self._add(grads.weight, columns, left[:, columns], right)
        for adapter, (da, db) in zip(stack.adapters, grads.adapters, strict=bool(grads.adapters)):
            assert x is not None
            if db is not None:
                self._add(db, slice(None), dy, self.grouped(x, adapter.a).mul_(adapter.scale))
            if da is not None:
                low = self.grouped(dy, adapter.turned[0]).mul_(adapter.scale)
                self._add(da, slice(None), low, x)

    def _add(
        self, into: Into, rows: slice, dy: Tensor, x: Tensor, column: int | None = None
    ) -> None:
        """Add dy.T @ x of each expert, or one column of it, to rows of its gradient."""
        part: Tensor = GROUPED(dy.t(), x, offs=self.order.ends)
        part = part if column is None else part[..., column]
        counts = self.order.ends.diff(prepend=self.order.ends.new_zeros(1))
        part.masked_fill_((counts == 0).view(-1, *[1] * (part.dim() - 1)), 0.0)
        grad = into.grad[:, rows]
        grad.copy_(part) if into.fresh else grad.add_(part)


def up_fwd(spec: ExpertsSpec, x: Tensor, weights: Tensor | None, order: Order, up: Stack) -> Tensor:
    """Compute `experts_up_fwd`."""
    pairs, up = _Pairs(spec, order, weights), up.prepared(x.dtype)
    xe = x[pairs.tokens]
    return pairs.product(xe.mul_(pairs.weights) if spec.weighs_input else xe, up)


def down_fwd(spec: ExpertsSpec, pre: Tensor, weights: Tensor, order: Order, down: Stack) -> Tensor:
    """Compute `experts_down_fwd`."""
    pairs, act = _Pairs(spec, order, weights), activation(spec, pre)
    down = down.prepared(pre.dtype)
    before = not spec.weighs_input and down.bias is None
    ye = pairs.product(act.mul_(pairs.weights) if before else act, down)
    return pairs.sum(ye if before or spec.weighs_input else ye.mul_(pairs.weights))


def bwd_stages(
    read: Operands, up_grads: Callable[[], StackGrads], down_grads: StackGrads
) -> Iterator[Grads]:
    """Compute `experts_bwd_stages`."""
    spec, dy, x, pre, weights, order, up, down, needs_x, needs_weights = read
    pairs, outer = _Pairs(spec, order, weights), not spec.weighs_input
    up, down = up.prepared(dy.dtype), down.prepared(dy.dtype)
    w, ones = pairs.weights, torch.ones_like(pairs.weights)
    xe = None if x is None else x[pairs.tokens]
    scaled = xe if outer or xe is None else (xe * w).to(xe.dtype)
    if pre is None:
        assert scaled is not None
        pre = pairs.product(scaled, up)
    act, vjp = activation_vjp(spec, pre)
    dye, sums = dy[pairs.tokens], None
    needs_input = needs_x or (needs_weights and not outer)
    dx: Tensor | None = pairs.product(dye, down, backward=True)
    if needs_weights and outer:
        assert dx is not None
        sums = dot(dx, act)
        if down.bias is not None:
            sums += dot(dye, pairs.bias(down.bias, dye))
    if down_grads.needed:
        act = act.mul_(w) if outer else act
        pairs.add_grads(down, down_grads, dye, act, w if outer else ones)
    del act, dye, down_grads
    yield None, None
    grads = up_grads()
    if needs_input or grads.needed:
        assert dx is not None
        d = vjp(dx.mul_(w) if outer else dx)
        del dx, vjp, pre
        if grads.needed:
            pairs.add_grads(up, grads, d, scaled, ones)
        dx = pairs.product(d, up, backward=True) if needs_input else None
        if dx is not None and not outer:
            assert xe is not None
            sums = dot(dx, xe)
            dx.mul_(w)
    total = None
    if needs_x:
        assert dx is not None
        total = pairs.sum(dx)
    sums = sums.masked_fill_(pairs.dropped, 0.0) if sums is not None and needs_weights else None
    yield total, unsorted(sums, weights, order)

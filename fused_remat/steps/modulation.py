"""Modulation by a condition: norms with a weight and a bias for each sequence, and gated sums.

A diffusion block computes norm(x) * (1 + scale) + shift and x + gate * linear(h), where scale,
shift and gate are vectors of each sequence, or of each token. A norm of such a weight and bias is
the same norm, one sequence at a time; the backward of a linear layer with a gate of each sequence
does not read its product.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_remat.steps.chunk import Chunk
from fused_remat.steps.chunk import spans as chunk_spans
from fused_remat.steps.linear import Linear, bias_grad, linear_dw, linear_fwd
from fused_remat.steps.modulation_aten import (
    Rows,
    gated_add,
    gated_add_bwd,
    modulated_norm_bwd,
    modulated_norm_fwd,
)
from fused_remat.steps.node import Node, Param
from fused_remat.steps.norm import Norm
from fused_remat.steps.residual import Add

#: Tokens of a sequence from which on the gradient of a gate is taken from the sequence's own
#: weight gradient, which costs passes over the weight's elements, and not from a second product.
_LONG_CPU, _LONG_DEVICE = 64, 1024
#: Most elements of that gradient at a time.
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 20, 1 << 22


def rows_of(chunk: Chunk, node: ModulatedNorm | GatedAdd | GatedLinear) -> Rows:
    """Return the sequences of a step's activation in a chunk."""
    tokens = 1 if node.by_token else chunk.owner.execution.lengths[node.name]
    return Rows(chunk.first_row(node.name), tokens)


def condition(chunk: Chunk, name: str) -> Tensor | None:
    """Return a tensor (B, 1, D) or (B, S, D) of the block as a matrix of rows, or None for ""."""
    value = chunk.param(name)
    return value if value is None else value.reshape(-1, value.shape[-1])


def add_condition_grad(chunk: Chunk, node: Node, name: str, grad: Tensor, rows: Rows) -> None:
    """Add a gradient, a row for each sequence of `rows`, to that of a tensor of the block."""
    grads, batch = chunk.owner.param_grads, chunk.owner.chunks.batch
    each = chunk.owner.execution.lengths[node.name] // rows.tokens
    if name not in grads and len(grad) == batch * each:
        grads[name] = grad.view(batch, each, -1)
        return
    if name not in grads:
        grads[name] = grad.new_zeros((batch, each, grad.shape[1]))
    first = rows.first // rows.tokens
    grads[name].view(batch * each, -1)[first : first + len(grad)].add_(grad)


@dataclass(frozen=True, kw_only=True)
class ModulatedNorm(Norm):
    """A norm with a weight and a bias (B, 1, D) of each sequence, or one of them.

    `by_token`: they are (B, S, D), of each token.
    """

    by_token: bool = False

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x, stats = chunk[self.x], None
        if self.stats[0] in chunk:
            stats = tuple([chunk[stat] for stat in self.stats])
        weight, bias = condition(chunk, self.weight), condition(chunk, self.bias)
        rows, out = rows_of(chunk, self), self.target(x, out)
        made = chunk.ops[modulated_norm_fwd](self.spec, x, weight, bias, rows, out, stats)
        for name, value in zip(self.makes, made, strict=True):
            chunk.put(name, value)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        marks = (self.x in needs_grad, self.weight in needs_grad, self.bias in needs_grad)
        rows = rows_of(chunk, self)
        if not (marks[0] or marks[1]):
            if self.by_token:
                sums = dy.to(torch.promote_types(dy.dtype, torch.float32), copy=True)
            else:
                spans = rows.spans(len(dy))
                sums = torch.stack([chunk.ops[bias_grad](dy[lo:hi]) for _, lo, hi in spans])
            add_condition_grad(chunk, self, self.bias, sums, rows)
            return
        prior, _ = chunk.grads.pop(self.x, (None, False))
        stats = tuple([chunk[stat] for stat in self.stats])
        weight = condition(chunk, self.weight)
        dx, *others = chunk.ops[modulated_norm_bwd](
            self.spec, dy, chunk[self.x], stats, weight, rows, marks, prior
        )
        if dx is not None:
            chunk.add_grad(self.x, dx, owned=True)
        for name, grad in zip((self.weight, self.bias), others, strict=True):
            if grad is not None:
                add_condition_grad(chunk, self, name, grad, rows)


@dataclass(frozen=True, kw_only=True)
class GatedAdd(Add):
    """name = residual + gate * x, with the gate (B, 1, D) of each sequence.

    `by_token`: it is (B, S, D), of each token.
    """

    gate: Param
    by_token: bool = False

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return {}

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.x,) if self.gate in needs_grad else ()

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.gate,) if self.x in needs_grad else ()

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        gate, rows = condition(chunk, self.gate), rows_of(chunk, self)
        assert gate is not None
        y = chunk.ops[gated_add](chunk[self.x], chunk[self.residual], gate, rows, out)
        chunk.put(self.name, y)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        rows = rows_of(chunk, self)
        x = chunk[self.x] if self.gate in needs_grad else None
        gate = condition(chunk, self.gate) if self.x in needs_grad else None
        dx, sums = chunk.ops[gated_add_bwd](dy, x, gate, rows, self.compute or dy.dtype)
        if sums is not None:
            add_condition_grad(chunk, self, self.gate, sums, rows)
        if dx is not None:
            chunk.add_grad(self.x, dx, owned=True)
        if self.residual in needs_grad:
            chunk.add_grad(self.residual, dy, owned)


@dataclass(frozen=True, kw_only=True)
class GatedLinear(Linear):
    """name = residual + gate * (x @ weight.T + bias), with the gate of each sequence.

    With M = dy.T @ x of one sequence, the weight's gradient is the sum of gate[:, None] * M, and
    the gate's is the sum of weight * M over columns: backward does not read the product. A gate of
    each token (`by_token`) needs the product for its own gradient.
    """

    gate: Param
    by_token: bool = False

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        return (*super().params, self.gate)

    @functools.cached_property
    def _product(self) -> Linear:
        return Linear(
            name=self.name, x=self.x, weights=self.weights, biases=self.biases, part=self.part,
            compute=self.compute,
        )  # fmt: skip

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return {name: dtype for name, dtype in super().casts.items() if name != self.gate}

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.x,) if self.weight in needs_grad or self.gate in needs_grad else ()

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        read = {self.weight: (self.x, self.gate), self.bias: (self.gate,)}
        read[self.gate] = (self.x, self.weight, self.bias)
        return tuple([n for n, of in read.items() if n and not set(of).isdisjoint(needs_grad)])

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        residual, gate = chunk[self.residual], condition(chunk, self.gate)
        assert gate is not None
        y = chunk.ops[linear_fwd](self.operand(chunk), *self.affine(chunk))
        into = y if out is None and y.dtype is residual.dtype else out
        rows = rows_of(chunk, self)
        chunk.put(self.name, chunk.ops[gated_add](y, residual, gate, rows, into))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        rows, rest, y = rows_of(chunk, self), set(needs_grad) - {self.gate}, None
        if self._is_by_sequence(dy, rows, needs_grad):
            self._gradients_by_sequence(chunk, dy, chunk.last(self.x), rows, needs_grad)
            rest -= self._affine
        elif self.gate in needs_grad:
            y = chunk.ops[linear_fwd](self.operand(chunk), *self.affine(chunk))
        needs_product = not rest.isdisjoint((self.x, *self._affine))
        if y is not None or needs_product:
            gate = condition(chunk, self.gate) if needs_product else None
            dtype = self.compute or dy.dtype
            into = y if y is not None and y.dtype is dtype else None
            dz, sums = chunk.ops[gated_add_bwd](dy, y, gate, rows, dtype, into)
            del y, into
            if sums is not None:
                add_condition_grad(chunk, self, self.gate, sums, rows)
            if dz is not None:
                self._product.backward(chunk, dz, True, rest)
        if self.residual in needs_grad:
            chunk.add_grad(self.residual, dy, owned)

    def product_grad(self, chunk: Chunk, dy: Tensor) -> Tensor:
        """Return the gradient of the product."""
        gate, rows = condition(chunk, self.gate), rows_of(chunk, self)
        dz, _ = chunk.ops[gated_add_bwd](dy, None, gate, rows, self.compute or dy.dtype)
        assert dz is not None
        return dz

    def add_gate_grad(
        self, chunk: Chunk, dy: Tensor, x: Tensor, needs_grad: Collection[str]
    ) -> Collection[str]:
        """Add the gradient of the gate, if needed, from x; return what else needs a gradient."""
        rows = rows_of(chunk, self)
        if self.gate not in needs_grad:
            return needs_grad
        if self._is_by_sequence(dy, rows, needs_grad):
            self._gradients_by_sequence(chunk, dy, x, rows, needs_grad)
            return set(needs_grad) - {self.gate} - self._affine
        y = chunk.ops[linear_fwd](x, *self.affine(chunk))
        _, sums = chunk.ops[gated_add_bwd](dy, y, None, rows, y.dtype)
        assert sums is not None
        add_condition_grad(chunk, self, self.gate, sums, rows)
        return set(needs_grad) - {self.gate}

    def _is_by_sequence(self, dy: Tensor, rows: Rows, needs_grad: Collection[str]) -> bool:
        """Return whether the gate's gradient is taken from each sequence's weight gradient."""
        long = _LONG_CPU if dy.is_cpu else _LONG_DEVICE
        is_long = not self.by_token and len(dy) >= long * len(rows.spans(len(dy)))
        return is_long and self.part is None and {self.weight, self.gate} <= set(needs_grad)

    def _gradients_by_sequence(
        self, chunk: Chunk, dy: Tensor, x: Tensor, rows: Rows, needs_grad: Collection[str]
    ) -> None:
        """Add the gradients of the weight, the bias and the gate.

        Of some of the weight's rows at a time, so that a product is smaller than the weight.
        """
        owner, (weight, bias) = chunk.owner, self.affine(chunk)
        gate, spans = condition(chunk, self.gate), rows.spans(len(dy))
        assert weight is not None and gate is not None
        x, dy = (t if self.compute is None else t.to(self.compute) for t in (x, dy))
        wide = torch.promote_types(x.dtype, torch.float32)
        is_first, grads = self.weight not in owner.param_grads, owner.param_grads
        if is_first:
            is_sum = owner.partial or len(spans) > 1
            grads[self.weight] = torch.empty_like(weight, dtype=wide if is_sum else x.dtype)
        sums = torch.empty((len(spans), len(weight)), dtype=wide, device=x.device)
        step = max(1, (_CPU_ELEMENTS if x.is_cpu else _DEVICE_ELEMENTS) // weight.shape[1])
        for a, b in chunk_spans(len(weight), step):
            for n, (i, lo, hi) in enumerate(spans):
                dw = chunk.ops[linear_dw](dy[lo:hi, a:b], x[lo:hi], None, True, owner.exact)
                own, into = gate[i, a:b, None], grads[self.weight][a:b]
                if is_first and n == 0:
                    torch.mul(dw, own, out=into)
                else:
                    into.addcmul_(dw, own)
                torch.sum(dw.mul_(weight[a:b]), 1, out=sums[n, a:b])
        if bias is not None:
            totals = torch.stack([chunk.ops[bias_grad](dy[lo:hi]) for _, lo, hi in spans])
            sums.addcmul_(totals, bias)
            if self.bias in needs_grad:
                own = gate[spans[0][0] : spans[-1][0] + 1]
                chunk.add_param_grad(self.bias, (totals * own).sum(0))
        add_condition_grad(chunk, self, self.gate, sums, rows)

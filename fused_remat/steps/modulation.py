"""Modulation by a condition: norms with a weight and a bias for each sequence, and gated sums.

A diffusion block computes norm(x) * (1 + scale) + shift and x + gate * linear(h), where scale,
shift and gate are vectors of each sequence, or of each token. A norm of such a weight and bias is
the same norm, one sequence at a time; the backward of a linear layer with a gate of each sequence
does not read its product.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.spec import NormSpec
from fused_remat.steps.chunk import Chunk
from fused_remat.steps.chunk import spans as chunk_spans
from fused_remat.steps.linear import Linear, bias_grad, linear_dw, linear_fwd
from fused_remat.steps.node import Node, Param
from fused_remat.steps.norm import NORMS, Grads, Norm, Stats, norm_bwd, norm_fwd, shifted
from fused_remat.steps.operations import operation
from fused_remat.steps.residual import Add

#: Tokens of a sequence from which on the gradient of a gate is taken from the sequence's own
#: weight gradient, which costs passes over the weight's elements, and not from a second product.
_LONG_CPU, _LONG_DEVICE = 64, 1024
#: Most elements of that gradient at a time.
_CPU_ELEMENTS, _DEVICE_ELEMENTS = 1 << 20, 1 << 22


class Rows(NamedTuple):
    """The sequences of a matrix's rows: row r is of sequence (first + r) // tokens of the call.

    Where each token has its own condition, it counts as a sequence.
    """

    first: int
    tokens: int  # of a sequence

    @classmethod
    def of(cls, chunk: Chunk, node: ModulatedNorm | GatedAdd | GatedLinear) -> Rows:
        """Return those of a step's activation in a chunk."""
        tokens = 1 if node.by_token else chunk.owner.execution.lengths[node.name]
        return cls(chunk.first_row(node.name), tokens)

    def spans(self, rows: int) -> list[tuple[int, int, int]]:
        """Return each sequence's number, its first of the rows, and the row after its last."""
        found, lo = list[tuple[int, int, int]](), 0
        while lo < rows:
            sequence = (self.first + lo) // self.tokens
            hi = min(rows, (sequence + 1) * self.tokens - self.first)
            found.append((sequence, lo, hi))
            lo = hi
        return found

    def parts(self, rows: int) -> list[tuple[slice, slice]]:
        """Return spans of rows and of their sequences, all of as many rows within a part."""
        found: list[tuple[slice, slice]] = []
        if self.tokens == 1:
            return [(slice(0, rows), slice(self.first, self.first + rows))]
        for sequence, lo, hi in self.spans(rows):
            a, b = found[-1] if found else (slice(0, 0), slice(0, 1))
            if found and a.stop - a.start == (hi - lo) * (b.stop - b.start):
                found[-1] = slice(a.start, hi), slice(b.start, sequence + 1)
            else:
                found.append((slice(lo, hi), slice(sequence, sequence + 1)))
        return found


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


def _describe_norm(key: Any, *_: Any, **__: Any) -> str:
    return f"{NORMS[key[0]].description}, of each sequence"


@operation(
    key=lambda spec, x, *_, **__: (spec.kind, x.dtype, x.device, x.shape[1]),
    description=_describe_norm,
)
def modulated_norm_fwd(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    rows: Rows,
    out: Tensor | None = None,
    stats: Stats | None = None,
) -> tuple[Tensor, ...]:
    """Return `norm_fwd` with the weight and the bias (B, D) of each row's sequence."""
    if rows.tokens == 1:
        normed, *known_stats = norm_fwd(spec, x.to(_wide(x)), None, None, None, stats)
        first, count = rows.first, len(x)
        scale, shift = _of_rows(weight, first, count, spec.offset), _of_rows(bias, first, count)
        if scale is not None:
            normed.mul_(scale)
        if shift is not None:
            normed.add_(shift)
        return (normed.to(x.dtype) if out is None else out.copy_(normed), *known_stats)
    spans, made = rows.spans(len(x)), list[tuple[Tensor, ...]]()
    y = x.new_empty(x.shape) if out is None and len(spans) > 1 else out
    for i, lo, hi in spans:
        w, b = (_row(t, i, x.dtype) for t in (weight, bias))
        into = None if y is None else y[lo:hi]
        known = None if stats is None else tuple([stat[lo:hi] for stat in stats])
        made.append(norm_fwd(spec, x[lo:hi], w, b, into, known))
    if y is None:
        return made[0]
    return (y, *(stats or map(torch.cat, list(zip(*made, strict=True))[1:])))


@operation(
    key=lambda spec, dy, x, *_, **__: (spec.kind, x.dtype, x.device, x.shape[1]),
    description=_describe_norm,
)
def modulated_norm_bwd(
    spec: NormSpec,
    dy: Tensor,
    x: Tensor,
    stats: Stats,
    weight: Tensor | None,
    rows: Rows,
    needs_grad: tuple[bool, ...],
    add: Tensor | None = None,
) -> Grads:
    """Return `norm_bwd` with the weight (B, D) of each row's sequence.

    The gradients of the weight and of the bias are matrices, of the sequences of x in order.
    """
    if rows.tokens == 1:
        return _norm_bwd_by_token(spec, dy, x, stats, weight, rows.first, needs_grad, add)
    spans, found = rows.spans(len(x)), list[Grads]()
    dx = x.new_empty(x.shape) if len(spans) > 1 and needs_grad[0] else None
    for i, lo, hi in spans:
        own = _row(weight, i, x.dtype)
        known = tuple([stat[lo:hi] for stat in stats])
        prior = add if dx is None else None
        found.append(norm_bwd(spec, dy[lo:hi], x[lo:hi], known, own, needs_grad, prior))
        own_dx = found[-1][0]
        if dx is not None and own_dx is not None:
            torch.add(own_dx, 0 if add is None else add[lo:hi], out=dx[lo:hi])
            found[-1] = None, *found[-1][1:]
    dweight, dbias = (_stacked([grads[i] for grads in found]) for i in (1, 2))
    return (found[0][0] if dx is None else dx), dweight, dbias


def _norm_bwd_by_token(
    spec: NormSpec,
    dy: Tensor,
    x: Tensor,
    stats: Stats,
    weight: Tensor | None,
    first: int,
    needs_grad: tuple[bool, ...],
    add: Tensor | None,
) -> Grads:
    wide, dx, dweight = x.to(_wide(x)), None, None
    grad = dy.to(wide.dtype, copy=needs_grad[2])
    if needs_grad[1]:
        dweight = norm_fwd(spec, wide, None, None, None, stats)[0].mul_(grad)
    if needs_grad[0]:
        scale = _of_rows(weight, first, len(x), spec.offset)
        g = grad if scale is None else grad * scale
        dx, *_ = norm_bwd(spec, g, wide, stats, None, (True, False, False), add)
    return (None if dx is None else dx.to(x.dtype)), dweight, grad if needs_grad[2] else None


def _of_rows(t: Tensor | None, first: int, rows: int, offset: float = 0.0) -> Tensor | None:
    return None if t is None else shifted(t[first : first + rows], offset)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _row(t: Tensor | None, i: int, dtype: torch.dtype) -> Tensor | None:
    """Return the weight or the bias of a sequence, no narrower than `dtype`: as ATen requires."""
    return t if t is None else t[i].to(torch.promote_types(t.dtype, dtype))


def _stacked(grads: Sequence[Tensor | None]) -> Tensor | None:
    known = [grad for grad in grads if grad is not None]
    return torch.stack(known) if known else None


def _pointwise_key(x: Tensor, *_: Any, **__: Any) -> Any:
    return x.dtype, x.device


@operation(key=_pointwise_key, description="pointwise, eager")
def gated_add(
    x: Tensor, residual: Tensor, gate: Tensor, rows: Rows, out: Tensor | None = None
) -> Tensor:
    """Return residual + gate * x, with the gate (B, D) of each row's sequence, rounded once.

    In the dtype of the residual; `out` may be x.
    """
    y = torch.empty(x.shape, dtype=residual.dtype, device=x.device) if out is None else out
    for part, sequences in rows.parts(len(x)):
        (a, b, into), own = _by_sequence((x, residual, y), part, sequences), gate[sequences, None]
        if a.dtype is b.dtype is own.dtype:
            torch.addcmul(b, a, own, out=into)
        else:
            wide = torch.promote_types(torch.promote_types(a.dtype, b.dtype), own.dtype)
            into.copy_(torch.addcmul(b.to(wide), a.to(wide), own.to(wide)))
    return y


@operation(key=_pointwise_key, description="pointwise, and ATen's sum")
def gated_add_bwd(
    dy: Tensor,
    x: Tensor | None,
    gate: Tensor | None,
    rows: Rows,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return gate * dy in `dtype`, and the sums of dy * x over each sequence's rows (N, D).

    Without the gate (B, D) or x, None. The sums are in float32 at least; `out` may be x.
    """
    dx, wide, sums = out, torch.promote_types(dy.dtype, torch.float32), list[Tensor]()
    if dx is None and gate is not None:
        dx = torch.empty(dy.shape, dtype=dtype, device=dy.device)
    for part, sequences in rows.parts(len(dy)):
        (a,) = _by_sequence((dy,), part, sequences)
        if x is not None:
            sums.append(torch.mul(a.to(wide), *_by_sequence((x,), part, sequences)).sum(1))
        if gate is not None and dx is not None:
            (into,) = _by_sequence((dx,), part, sequences)
            torch.mul(a.to(torch.promote_types(a.dtype, dtype)), gate[sequences, None], out=into)
    total = None if x is None else sums[0] if len(sums) == 1 else torch.cat(sums)
    return None if gate is None else dx, total


def _by_sequence(matrices: Sequence[Tensor], part: slice, sequences: slice) -> list[Tensor]:
    """Return rows of matrices as (sequences, rows of each, D)."""
    count = sequences.stop - sequences.start
    return [t[part].unflatten(0, (count, -1)) for t in matrices]


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
        rows, out = Rows.of(chunk, self), self.target(x, out)
        made = chunk.ops[modulated_norm_fwd](self.spec, x, weight, bias, rows, out, stats)
        for name, value in zip(self.makes, made, strict=True):
            chunk.put(name, value)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        marks = (self.x in needs_grad, self.weight in needs_grad, self.bias in needs_grad)
        rows = Rows.of(chunk, self)
        if not (marks[0] or marks[1] or self.by_token):
            sums = [chunk.ops[bias_grad](dy[lo:hi]) for _, lo, hi in rows.spans(len(dy))]
            add_condition_grad(chunk, self, self.bias, torch.stack(sums), rows)
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
        gate, rows = condition(chunk, self.gate), Rows.of(chunk, self)
        assert gate is not None
        y = chunk.ops[gated_add](chunk[self.x], chunk[self.residual], gate, rows, out)
        chunk.put(self.name, y)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        rows = Rows.of(chunk, self)
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
        rows = Rows.of(chunk, self)
        chunk.put(self.name, chunk.ops[gated_add](y, residual, gate, rows, into))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        rows, rest, y = Rows.of(chunk, self), set(needs_grad) - {self.gate}, None
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
        gate, rows = condition(chunk, self.gate), Rows.of(chunk, self)
        dz, _ = chunk.ops[gated_add_bwd](dy, None, gate, rows, self.compute or dy.dtype)
        assert dz is not None
        return dz

    def add_gate_grad(
        self, chunk: Chunk, dy: Tensor, x: Tensor, needs_grad: Collection[str]
    ) -> Collection[str]:
        """Add the gradient of the gate, if needed, from x; return what else needs a gradient."""
        rows = Rows.of(chunk, self)
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
                torch.linalg.vecdot(dw, weight[a:b].to(wide), out=sums[n, a:b])
                own, into = gate[i, a:b, None], grads[self.weight][a:b]
                if is_first and n == 0:
                    torch.mul(dw, own, out=into)
                else:
                    into.addcmul_(dw, own)
        if bias is not None:
            totals = torch.stack([chunk.ops[bias_grad](dy[lo:hi]) for _, lo, hi in spans])
            sums.addcmul_(totals, bias)
            if self.bias in needs_grad:
                own = gate[spans[0][0] : spans[-1][0] + 1]
                chunk.add_param_grad(self.bias, (totals * own).sum(0))
        add_condition_grad(chunk, self, self.gate, sums, rows)

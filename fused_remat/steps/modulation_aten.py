"""Modulation by a condition, with ATen: the operations of `steps.modulation`.

Each takes conditions as matrices, of which a sequence, or a token, has one row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.spec import NormSpec
from fused_remat.steps.norm import NORMS, Grads, Stats, norm_bwd, norm_fwd, shifted
from fused_remat.steps.operations import operation


class Rows(NamedTuple):
    """The sequences of a matrix's rows: row r is of sequence (first + r) // tokens of the call.

    Where each token has its own condition, it counts as a sequence.
    """

    first: int
    tokens: int  # of a sequence

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

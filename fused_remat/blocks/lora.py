"""Low-rank updates of linear layers (LoRA) as steps: x @ A.T, and its product with B added.

    lora.0 = (keep * x) @ A.T        `LowRank`, as wide as the rank
    y      = base + scale * lora.0 @ B.T        `Adapted`

The layer itself is a step of its own, `base`. A frozen weight is not asked for anything, so what a
step keeps and rebuilds follows from which gradients are wanted, as everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fused_remat.blocks.frame import Frame
from fused_remat.blocks.nodes import Node, Shapes
from fused_remat.random import Keep
from fused_remat.steps.linear import linear_dx, linear_fwd, low_rank_add
from fused_remat.steps.residual import dropout


@dataclass(frozen=True, kw_only=True)
class LowRank(Node):
    """name = (keep * x) @ weight.T; computed in `to`, None for the dtype of x.

    `compute`: what params are converted to under autocast; None where they are as given.
    """

    x: str
    weight: str
    keep: str = ""
    to: torch.dtype | None = None
    compute: torch.dtype | None = None

    @property
    def dtype(self) -> torch.dtype | None:
        return self.to

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def params(self) -> tuple[str, ...]:
        return (self.weight,)

    @property
    def masks(self) -> tuple[str, ...]:
        return (self.keep,) if self.keep else ()

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return {} if self.compute is None else {self.weight: self.compute}

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return shapes[self.weight][0]

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        return 2 * shapes[self.weight][0] * shapes[self.weight][1]

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return ((self.x,) if self.weight in wants else ()) + self.masks

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.weight,) if self.x in wants else ()

    def _dtype(self, x: Tensor) -> torch.dtype:
        return self.to or self.compute or x.dtype

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        x, keep, weight = f[self.x], f.keep(self.keep), f.param(self.weight)
        dtype = self._dtype(x)
        y = x.new_empty((x.shape[0], f.run.widths[self.name]), dtype=dtype)
        for rows in _pieces(x, dtype):
            # A multiplier of its own: one that the frame holds would stay until backward.
            operand = _dropped(f, x[rows], _of_rows(keep, rows), dtype)
            f.ops[linear_fwd](operand, weight, None, out=y[rows])
        f.put(self.name, y)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        keep, weight = f.keep(self.keep), f.param(self.weight)
        dx = self._target(f, dy.shape[0]) if self.x in wants else None
        x = f[self.x] if self.weight in wants else None
        wide = dy.new_empty((dy.shape[0], 0), dtype=f.dtype_of(self.x))
        for rows in _pieces(wide, dy.dtype):
            mine = _of_rows(keep, rows)
            if x is not None:
                operand = _dropped(f, x[rows], mine, dy.dtype)
                cut = rows.stop - rows.start < dy.shape[0]
                f.add_weight_grad(self.weight, dy[rows], operand, partial=cut)
                del operand
            if dx is None:
                continue
            if mine is None and dx.dtype == dy.dtype:
                f.ops[linear_dx](dy[rows], weight, into=dx[rows])
            else:
                part = f.ops[linear_dx](dy[rows], weight)
                dx[rows].add_(part if mine is None else f.ops[dropout](part, mine))

    def _target(self, f: Frame, rows: int) -> Tensor:
        """The gradient of x, to be added to."""
        grad, owned = f.grads.get(self.x, (None, False))
        if grad is None or not owned:
            shape, dtype = (rows, f.run.widths[self.x]), f.dtype_of(self.x)
            f.add_grad(self.x, torch.zeros(shape, dtype=dtype, device=f.run.device), owned=True)
            grad, _ = f.grads[self.x]
        return grad


#: So many tokens are converted at a time where adapters are of another dtype than the block.
_ROWS = 4096


def _pieces(x: Tensor, dtype: torch.dtype) -> Iterator[slice]:
    """The rows of x, in pieces if x is to be converted to `dtype`: no copy is larger than one."""
    rows = x.shape[0]
    step = max(rows, 1) if x.dtype == dtype else _ROWS
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _of_rows(keep: Keep | None, rows: slice) -> Keep | None:
    return None if keep is None else keep.of_rows(rows.start, rows.stop - rows.start)


def _dropped(f: Frame, x: Tensor, keep: Keep | None, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if keep is None else f.ops[dropout](x, keep, dtype)


@dataclass(frozen=True)
class Term:
    """One update: `low` times `weight`.T times `scale`, added to columns `start` to `stop`.

    `stop` 0: to all.
    """

    low: str
    weight: str
    scale: float
    start: int = 0
    stop: int = 0

    def of(self, y: Tensor) -> Tensor:
        """The columns of y that it is added to."""
        return y[:, self.start : self.stop] if self.stop else y


@dataclass(frozen=True, kw_only=True)
class Adapted(Node):
    """name = x + the sum of `terms`; written over x where nobody else reads that."""

    x: str
    terms: tuple[Term, ...]
    compute: torch.dtype | None = None
    in_place: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x, *[term.low for term in self.terms])

    @property
    def params(self) -> tuple[str, ...]:
        return tuple([term.weight for term in self.terms])

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return {} if self.compute is None else dict.fromkeys(self.params, self.compute)

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        return sum(2 * shapes[t.weight][0] * shapes[t.weight][1] for t in self.terms)

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return tuple([term.low for term in self.terms if term.weight in wants])

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return tuple([term.weight for term in self.terms if term.low in wants])

    def overwriting(self, spare: Collection[str]) -> Node:
        return replace(self, in_place=True) if self.x in spare else self

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        y = f[self.x] if self.in_place else f[self.x].clone()
        for term in self.terms:
            low, weight = f[term.low], f.param(term.weight)
            for rows in _pieces(y, low.dtype):
                f.ops[low_rank_add](term.of(y[rows]), low[rows], weight, term.scale)
        f.put(self.name, y)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        for term in self.terms:
            self._term_backward(f, dy, term, wants)
        if self.x in wants:
            f.add_grad(self.x, dy, owned)

    def _term_backward(self, f: Frame, dy: Tensor, term: Term, wants: Collection[str]) -> None:
        dtype, dlow = f.dtype_of(term.low), []
        for rows in _pieces(dy, dtype):
            mine = term.of(dy[rows]).to(dtype)
            if term.weight in wants:
                f.add_weight_grad(term.weight, mine, f[term.low][rows] * term.scale)
            if term.low in wants:
                dlow.append(f.ops[linear_dx](mine, f.param(term.weight)).mul_(term.scale))
        if term.low in wants:
            f.add_grad(term.low, dlow[0] if len(dlow) == 1 else torch.cat(dlow), owned=True)

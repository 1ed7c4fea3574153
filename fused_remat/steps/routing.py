"""Routing: which experts each token is sent to, and with which weights.

The chosen experts are statistics: they are always kept, so that no rounding in a rebuild can choose
others. Backward runs a router of the caller again, under autograd, with these experts.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_remat.moe_spec import RouterSpec
from fused_remat.steps.node import Shapes
from fused_remat.steps.replay import At, Parts, Replay

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fused_remat.steps.chunk import Chunk


def index_dtype(experts: int) -> torch.dtype:
    """Return the smallest dtype that has the indices of experts, and one of none."""
    return torch.uint8 if experts < 256 else torch.int32


def route(
    spec: RouterSpec, logits: Tensor, correction: Tensor | None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the weights (T, k), in at least float32, and the experts (T, k) of `logits` (T, E).

    `chosen`: the experts, if they are known.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide
    if spec.scores != "top_k_softmax":
        scores = wide.softmax(-1) if spec.scores == "softmax" else wide.sigmoid()
    if chosen is None:
        chosen = _chosen(spec, scores.detach(), correction)
    weights = scores.gather(1, chosen.long())
    if spec.scores == "top_k_softmax":
        weights = weights.softmax(-1)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights if spec.scale == 1.0 else weights * spec.scale, chosen


def route_bwd(spec: RouterSpec, dy: Tensor, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the gradient of `logits` (T, E) in `route`, from `dy` (T, k), that of the weights."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    index, scores = chosen.long(), wide
    if spec.scores != "top_k_softmax":
        scores = wide.softmax(-1) if spec.scores == "softmax" else wide.sigmoid()
    own, d = scores.gather(1, index), dy.to(wide.dtype) * spec.scale
    if spec.scores == "top_k_softmax":
        own = own.softmax(-1)
    if spec.normalize:
        total = own.sum(-1, keepdim=True) + 1e-20
        d = (d - (d * own / total).sum(-1, keepdim=True)) / total
    if spec.scores == "top_k_softmax":
        d = own * (d - (d * own).sum(-1, keepdim=True))
    dscores = torch.zeros_like(scores).scatter_(1, index, d)
    if spec.scores == "softmax":
        dscores = scores * (dscores - (dscores * scores).sum(-1, keepdim=True))
    elif spec.scores == "sigmoid":
        dscores.mul_(scores).mul_(1.0 - scores)
    return dscores.to(logits.dtype)


def _chosen(spec: RouterSpec, scores: Tensor, correction: Tensor | None) -> Tensor:
    """Return the experts with the largest scores, of the best groups."""
    if correction is not None:
        scores = scores + correction.detach()
    if spec.groups > 1:
        grouped = scores.view(len(scores), spec.groups, -1)
        best = grouped.topk(spec.best, -1).values.sum(-1).topk(spec.top_groups, -1).indices
        kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        grouped = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf)
        scores = grouped.view_as(scores)
    return scores.topk(spec.top_k, -1).indices


@dataclass(frozen=True, kw_only=True)
class Routing(Replay):
    """name = the weights of a token's experts (T, k), whose numbers are the statistic `chosen`.

    Without a `router`, the function is called with the numbers, or None, as a fourth argument, and
    returns both.
    """

    chosen: str
    experts: int
    top_k: int
    router: RouterSpec | None = None  # else a function of the caller

    widens: bool = True  # type: ignore[misc]

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return (self.chosen,)

    @property
    def description(self) -> tuple[str, str]:
        how = "computes them again, under autograd, of the same experts"
        if self.router is not None:
            how = "has a formula for the same experts"
        return f"{self.what}; backward {how}", ""

    @property
    def unsure(self) -> tuple[str, ...]:
        return self.tensors  # a correction has influence on the numbers alone

    @property
    def stat_dtype(self) -> torch.dtype:
        return index_dtype(self.experts)

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (*super().needs(needs_grad), self.chosen)

    def stat_width(self, width: int) -> int:
        return self.top_k

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return self.top_k

    def _run(
        self, chunk: Chunk, at: At, xs: Sequence[Tensor], tensors: Sequence[Tensor | None]
    ) -> Tensor:
        known = chunk.get(self.chosen)
        if self.router is not None:
            weights, chosen = route(self.router, xs[0], [*tensors, None][0], known)
        else:
            function = chunk.owner.functions[self.function]
            weights, chosen = function(at, xs, tensors, known)
        if known is None:  # an index of no expert drops the pair
            none = (chosen < 0) | (chosen >= self.experts)
            chosen = torch.where(none, self.experts, chosen)
            chunk.put(self.chosen, chosen.to(self.stat_dtype))
        return weights

    def backward_in_parts(
        self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str], parts: Parts
    ) -> Iterator[None]:
        if self.router is None:
            yield from super().backward_in_parts(chunk, dy, owned, needs_grad, parts)
        else:  # not under autograd, which is off inside a compiled block's operator
            (logits,) = self.xs
            if logits in needs_grad:
                grad = route_bwd(self.router, dy, chunk[logits], chunk[self.chosen])
                chunk.add_grad(logits, grad, owned=True)
            yield from [None] * len(parts)

    def _spans(self, chunk: Chunk) -> list[tuple[At, slice]]:
        rows, batch = chunk.rows_of(self.name), 1
        if chunk.parent is None:
            batch = chunk.seqs[1] - chunk.seqs[0]
            rows = chunk.owner.execution.lengths[self.name]
        return [(At(batch, rows, chunk.first_row(self.name)), slice(None))]

"""residual + dropout(x), p = 0.1: y, and the gradients of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.dropout_masks import SIGMAS
from bench.kernels.problem import Function, Op, Problem
from bench.kernels.shapes import Size
from bench.measure.contest import P, Results, Rig, Work, WrongResultError
from fused_remat import ops

#: Of 1 + |residual|: an x above shows in y whether it was kept, in any dtype.
_SHOWS = 0.1


@dataclass(eq=False)
class Dropout(Problem):
    """x and residual (T, D). Everyone draws a mask, a new one at every call, and shows it in y."""

    name: str = field(default="dropout + residual", init=False)
    tokens: int
    width: int
    _seen: list[Tensor] = field(default_factory=list, init=False)  # masks of all checked calls

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("x", "residual"), (self.tokens, self.width))

    def reference(self, *inputs: Tensor) -> Tensor:
        x, residual = inputs
        return residual + F.dropout(x, P)

    def work(self, direction: str) -> Work:
        """x, residual and y; or dy and dx: the residual's gradient is dy itself."""
        matrix = self.tokens * self.width * self.rig.dtype.itemsize
        return Work(bytes={"fwd": 3.0, "bwd": 2.0}[direction] * matrix)

    def truth(self, direction: str) -> Results:
        """Nobody's: see `truth_of`."""
        return {}

    def truth_of(self, direction: str) -> Callable[[Results], Results]:
        """What the results should be under the mask that y shows.

        Raises: WrongResultError where it keeps too many or too few, or the mask was there before.
        """

        def truth(found: Mapping[str, Tensor]) -> Results:
            x, residual = (t.double() for t in self.sets[0].values())
            added, dy = found["y"].double() - residual, self.dys[0].double()
            kept, shows = _nearer(added, x / (1.0 - P)), x.abs() > _SHOWS * (1.0 + residual.abs())
            share, count = kept[shows].double().mean().item(), int(shows.sum())
            if abs(share - (1.0 - P)) > SIGMAS * (P * (1.0 - P) / count) ** 0.5:
                raise WrongResultError(f"it keeps {share:.4f} of {count}, expected {1.0 - P:.4f}")
            if any(torch.equal(kept & shows, before) for before in self._seen):
                raise WrongResultError("the mask is that of a call before")
            self._seen.append(kept & shows)
            if direction == "fwd":
                return {"y": residual + kept * x / (1.0 - P)}
            scaled = dy / (1.0 - P)
            kept = torch.where(shows, kept, _nearer(found["dx"].double(), scaled))
            return {"dx": kept * scaled, "dresidual": dy}

        return truth


def _nearer(value: Tensor, kept: Tensor) -> Tensor:
    """Whether a value is what is kept rather than 0."""
    return (value - kept).abs() < value.abs()


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    """At the model's width, whether it is trained with dropout or not."""
    yield Dropout(rig, size.tokens, size.model.d_model)


OP = Op("dropout", of_model)
OP.add_stock()


def _ours(p: Dropout, backend: str) -> Function:
    """The mask is drawn again in the backward."""
    return lambda x, residual: ops.dropout_add(x, residual, P, backend=backend)


OP.add_ours(_ours)

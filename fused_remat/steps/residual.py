"""The residual sum, dropout, and the multipliers of dropout sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fused_remat.random import Keep
from fused_remat.steps.node import Input, Mask, Node, Shapes
from fused_remat.steps.operations import operation

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Frame


@operation(key=lambda x, residual, *_, **__: (residual.dtype, x.device), says="pointwise, eager")
def residual_add(
    x: Tensor, residual: Tensor, mask: Keep | None, out: Tensor | None = None
) -> Tensor:
    """residual + mask * x, rounded once, in the dtype of the residual."""
    if mask is None:
        return torch.add(x, residual, out=out)
    y = torch.addcmul(residual.to(mask.dtype), x, mask.tensor())
    return y.to(residual.dtype) if out is None else out.copy_(y)


@operation(key=lambda x, *_: (x.dtype, x.device), says="pointwise, eager")
def dropout(x: Tensor, mask: Keep, dtype: torch.dtype | None = None) -> Tensor:
    """mask * x, a new tensor, in `dtype` or that of x."""
    return torch.mul(x, mask.tensor()).to(dtype or x.dtype)


@dataclass(frozen=True, kw_only=True)
class KeepScale(Node):
    """A dropout site's multiplier: 0 or 1/(1-p) for each element, a function of the seed alone.

    `like` has its width: a param, by its first dimension, or an activation. `of`: whose tokens.
    """

    site: int
    p: float
    like: str
    of: str = "input"
    says: ClassVar[tuple[str, str]] = ("the counter-based generator, from the seed", "")
    keepable: ClassVar[bool] = False
    params: ClassVar[tuple[str, ...]] = ("seed",)

    @property
    def follows(self) -> str:
        return self.of

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return widths[self.like] if self.like in widths else shapes[self.like][0]

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        run, width = f.run, f.run.widths[self.name]
        dtype = torch.promote_types(run.dtype, torch.float32)
        key = run.site_key(self.site)
        row0, rows = f.first_row(self.name), f.rows_of(self.name)
        f.keeps[self.name] = Keep(key, row0, rows, width, self.p, dtype)


@dataclass(frozen=True, kw_only=True)
class Add(Node):
    """name = residual + keep * x; `keep` may be absent ("")."""

    x: Input
    residual: Input
    keep: Mask = ""

    def needs(self, wants: Collection[str]) -> tuple[str, ...]:
        return self.masks if self.x in wants else ()

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        f.put(self.name, f.ops[residual_add](f[self.x], f[self.residual], f.keep(self.keep), out))

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        dx: Tensor | None = None
        if self.x in wants:
            keep, dtype = f.keep(self.keep), self.compute or dy.dtype
            dx = dy.to(dtype) if keep is None else f.ops[dropout](dy, keep, dtype)
            f.add_grad(self.x, dx, owned=dx is not dy)
        if self.residual in wants:
            f.add_grad(self.residual, dy, owned and dx is not dy)

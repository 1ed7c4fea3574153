"""The residual sum and dropout: two operations, and the steps that draw a mask and that add."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.random import DropoutMask
from fused_remat.steps.node import Input, Mask, Node, Shapes
from fused_remat.steps.operations import operation

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk, Pass


@operation(
    key=lambda x, residual, *_, **__: (residual.dtype, x.device), description="pointwise, eager"
)
def residual_add(
    x: Tensor, residual: Tensor, mask: DropoutMask | None, out: Tensor | None = None
) -> Tensor:
    """Return residual + mask * x, rounded once to the dtype of the residual."""
    if mask is None:
        return torch.add(x, residual, out=out)
    into = out if out is not None and out.dtype is mask.dtype else None
    y = torch.addcmul(residual.to(mask.dtype), x, mask.tensor(), out=into)
    if out is None:
        return y.to(residual.dtype)
    return y if y is out else out.copy_(y)


@operation(key=lambda x, *_: (x.dtype, x.device), description="pointwise, eager")
def dropout(x: Tensor, mask: DropoutMask, dtype: torch.dtype | None = None) -> Tensor:
    """Return mask * x as a new tensor, in `dtype` or in that of x."""
    return mask.tensor(keep=False).mul_(x).to(dtype or x.dtype)


@operation(key=lambda seed, first: seed.device, description="pointwise, eager")
def site_keys(seed: Tensor, first: int) -> tuple[Tensor, ...]:
    """Return keys of `random.NUM_SITES` sites from `first` on; keys and `seed` are int64 ()."""
    return random.site_keys(seed, first)


def site_key(owner: Pass, site: int) -> Tensor:
    """Return the random key of a dropout site."""
    index = site % random.NUM_SITES
    keys = owner.site_keys.get(site - index)
    if keys is None:
        seed = owner.tensors["seed"]
        assert seed is not None
        keys = owner.site_keys[site - index] = owner.ops[site_keys](seed, site - index)
    return keys[index]


@dataclass(frozen=True, kw_only=True)
class DrawMask(Node):
    """The mask of a dropout site: 0 or 1/(1-p) for each element, a function of the seed alone."""

    site: int  # site, p: the number of the site (`fused_remat.random`), and the dropout probability
    p: float
    like: str  # an activation as wide as the mask, or a param with as many rows as the mask is wide
    of: str = "input"  # the input or activation whose tokens the mask has
    description: ClassVar[tuple[str, str]] = ("drawn by the counter-based generator", "")
    keepable: ClassVar[bool] = False
    params: ClassVar[tuple[str, ...]] = ("seed",)

    @property
    def follows(self) -> str:
        return self.of

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return widths[self.like] if self.like in widths else shapes[self.like][0]

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        owner, width = chunk.owner, chunk.owner.widths[self.name]
        dtype = torch.promote_types(owner.dtype, torch.float32)
        key = site_key(owner, self.site)
        row0, rows = chunk.first_row(self.name), chunk.rows_of(self.name)
        mask = DropoutMask(key, row0, rows, width, self.p, dtype)
        chunk[self.name] = mask  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Add(Node):
    """name = residual + mask * x; `mask` is "" for no dropout, `residual` for dropout alone."""

    x: Input
    residual: Input = ""
    mask: Mask = ""

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return self.masks if self.x in needs_grad else ()

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x, mask = chunk[self.x], chunk.mask(self.mask)
        if not self.residual:
            assert mask is not None
            y = chunk.ops[dropout](x, mask)
            chunk.put(self.name, y if out is None else out.copy_(y))
            return
        chunk.put(self.name, chunk.ops[residual_add](x, chunk[self.residual], mask, out))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        dx: Tensor | None = None
        if self.x in needs_grad:
            mask, dtype = chunk.mask(self.mask), self.compute or dy.dtype
            dx = dy.to(dtype) if mask is None else chunk.ops[dropout](dy, mask, dtype)
            chunk.add_grad(self.x, dx, owned=dx is not dy)
        if self.residual in needs_grad:
            chunk.add_grad(self.residual, dy, owned and dx is not dy)

"""Storage formats of kept activations: quantize and dequantize, as operations and as steps.

`graph.quantized` puts the steps into a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fused_remat.formats import (
    FORMATS,
    Format,
    Loaded,
    LoadedHeads,
    Packed,
    PackedHeads,
    Parts,
    pack,
    split_name,
)
from fused_remat.random import Uniform
from fused_remat.steps.node import Node, Shapes
from fused_remat.steps.operations import operation

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Frame


@dataclass(frozen=True, eq=False, slots=True)
class Packing:
    """How an activation is to be stored.

    Attributes:
        stored: a row of `formats.FORMATS`.
        uniform: random numbers for each element, where the format is rounded stochastically.
    """

    stored: str
    uniform: Uniform | None = None


def format_of(x: Loaded | Packing | None) -> str:
    """The format of what is stored; "" for a tensor, or None."""
    return x.stored if isinstance(x, Packed | Packing) else ""


@operation(
    key=lambda x, packing: packing.stored,
    says=lambda key, *_, **__: f"packed as {key}, eager, a few rows at a time",
)
def quantize(x: Tensor, packing: Packing) -> Parts:
    """x as it is to be stored: codes, and scales if the format has them; new tensors."""
    return pack(x, packing.stored, packing.uniform)


@operation(
    key=lambda x: x.stored,
    says=lambda key, *_, **__: f"{key} unpacked whole, eager, a few rows at a time",
)
def dequantize(x: Packed) -> Tensor:
    """The whole of x, a new matrix in its dtype."""
    return x.tensor()


def heads_in_memory(
    *heads: LoadedHeads, unpack: Callable[[Packed], Tensor] = dequantize
) -> tuple[Tensor, ...]:
    """Heads in memory; what lies in one packed matrix, in one."""
    matrices: dict[int, Tensor] = {}
    found = []
    for x in heads:
        if isinstance(x, PackedHeads):
            matrix = matrices.get(id(x.whole))
            if matrix is None:
                matrix = matrices[id(x.whole)] = unpack(x.whole)
            x = x.of(matrix)
        found.append(x)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Pack(Node):
    """name = codes of the activation `x` in a format; the scales, if it has any, are a statistic.

    `name` is "x:format". `site` is that of stochastic rounding.
    """

    x: str
    site: int
    keepable: ClassVar[bool] = False
    stats_follow: ClassVar[bool] = True

    @property
    def stored(self) -> str:
        return split_name(self.name)[1]

    @property
    def format(self) -> Format:
        return FORMATS[self.stored]

    @property
    def packs(self) -> str:
        return self.x

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        return ("seed",) if self.format.seeded else ()

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return (f"{self.name}.scale",) if self.format.block else ()

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.x,)  # not an input: no gradient goes this way

    @property
    def follows(self) -> str:
        return self.x

    @property
    def dtype(self) -> torch.dtype:
        return self.format.dtype

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return self.format.code_width(widths[self.x])

    def stat_width(self, width: int) -> int:
        return self.format.scale_width(width)

    def packing(self, f: Frame) -> Packing:
        """What a routine that packs is told."""
        if not self.format.seeded:
            return Packing(self.stored)
        rows, run = f.rows_of(self.x), f.run
        key, row0 = run.site_key(self.site), f.first_row(self.x)
        return Packing(self.stored, Uniform(key, row0, rows, run.widths[self.x]))

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        self.put(f, f.ops[quantize](f[self.x], self.packing(f)))

    def put(self, f: Frame, parts: Iterable[Tensor]) -> None:
        """Put what a routine has packed into the frame."""
        for name, part in zip(self.makes, parts, strict=True):
            f.put(name, part)

    def kept(self, f: Frame) -> Packed:
        """The activation as it is stored."""
        parts = tuple([f[name] for name in self.makes])
        return Packed(self.stored, parts, f.run.widths[self.x], f.dtype_of(self.x))

    def sample(self, f: Frame) -> Packed:
        """As `kept`, of no memory and no values: to choose a routine by where there are none."""
        run, rows = f.run, f.rows_of(self.x)
        parts = tuple([
            torch.empty((1, 1), dtype=f.dtype_of(name), device=run.device).expand(
                rows, run.widths[name]
            )
            for name in self.makes
        ])  # fmt: skip
        return Packed(self.stored, parts, run.widths[self.x], f.dtype_of(self.x))


@dataclass(frozen=True, kw_only=True)
class Unpack(Node):
    """The activation `name` from what the one in `quantized` has stored, whole."""

    undoes: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[str, ...]:
        return self.quantized[0].makes

    def backward_choice(self, f: Frame) -> tuple[Callable[..., Any], Any]:
        return dequantize, self.quantized[0].stored

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        f.put(self.name, f.ops[dequantize](self.quantized[0].kept(f)))

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
    Parts,
    Quantized,
    QuantizedHeads,
    pack,
    split_name,
)
from fused_remat.random import Uniform
from fused_remat.steps.node import Node, Shapes
from fused_remat.steps.operations import operation

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk


@dataclass(frozen=True, eq=False, slots=True)
class QuantizeCall:
    """How an activation is to be stored.

    Attributes:
        stored: a row of `formats.FORMATS`.
        uniform: random numbers for each element, where the format is rounded stochastically.
    """

    stored: str
    uniform: Uniform | None = None


def format_of(x: Loaded | QuantizeCall | None) -> str:
    """The format of what is stored; "" for a tensor, or None."""
    return x.stored if isinstance(x, Quantized | QuantizeCall) else ""


@operation(
    key=lambda x, storage: storage.stored,
    says=lambda key, *_, **__: f"packed as {key}, eager, a few rows at a time",
)
def quantize(x: Tensor, storage: QuantizeCall) -> Parts:
    """x as it is to be stored: codes, and scales if the format has them; new tensors."""
    return pack(x, storage.stored, storage.uniform)


@operation(
    key=lambda x: x.stored,
    says=lambda key, *_, **__: f"{key} unpacked whole, eager, a few rows at a time",
)
def dequantize(x: Quantized) -> Tensor:
    """The whole of x, a new matrix in its dtype."""
    return x.tensor()


def heads_in_memory(
    *heads: LoadedHeads, unpack: Callable[[Quantized], Tensor] = dequantize
) -> tuple[Tensor, ...]:
    """Heads in memory; what lies in one packed matrix, in one."""
    matrices: dict[int, Tensor] = {}
    found = []
    for x in heads:
        if isinstance(x, QuantizedHeads):
            matrix = matrices.get(id(x.whole))
            if matrix is None:
                matrix = matrices[id(x.whole)] = unpack(x.whole)
            x = x.of(matrix)
        found.append(x)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Quantize(Node):
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
    def quantizes(self) -> str:
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

    def storage(self, chunk: Chunk) -> QuantizeCall:
        """What a routine that packs is told."""
        if not self.format.seeded:
            return QuantizeCall(self.stored)
        rows, owner = chunk.rows_of(self.x), chunk.owner
        key, row0 = owner.site_key(self.site), chunk.first_row(self.x)
        return QuantizeCall(self.stored, Uniform(key, row0, rows, owner.widths[self.x]))

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        self.put(chunk, chunk.ops[quantize](chunk[self.x], self.storage(chunk)))

    def put(self, chunk: Chunk, parts: Iterable[Tensor]) -> None:
        """Put what a routine has packed into the frame."""
        for name, part in zip(self.makes, parts, strict=True):
            chunk.put(name, part)

    def kept(self, chunk: Chunk) -> Quantized:
        """The activation as it is stored."""
        parts = tuple([chunk[name] for name in self.makes])
        return Quantized(self.stored, parts, chunk.owner.widths[self.x], chunk.dtype_of(self.x))

    def sample(self, chunk: Chunk) -> Quantized:
        """As `kept`, of no memory and no values: to choose a routine by where there are none."""
        owner, rows = chunk.owner, chunk.rows_of(self.x)
        parts = tuple([
            torch.empty((1, 1), dtype=chunk.dtype_of(name), device=owner.device).expand(
                rows, owner.widths[name]
            )
            for name in self.makes
        ])  # fmt: skip
        return Quantized(self.stored, parts, owner.widths[self.x], chunk.dtype_of(self.x))


@dataclass(frozen=True, kw_only=True)
class Dequantize(Node):
    """The activation `name` from what the one in `quantized` has stored, whole."""

    undoes: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[str, ...]:
        return self.quantized[0].makes

    def backward_choice(self, chunk: Chunk) -> tuple[Callable[..., Any], Any]:
        return dequantize, self.quantized[0].stored

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        chunk.put(self.name, chunk.ops[dequantize](self.quantized[0].kept(chunk)))

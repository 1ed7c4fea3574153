"""Storage of kept activations: quantize and dequantize, as operations and as steps.

`fused_remat.formats` defines the formats; `graph.quantized` adds the steps to a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fused_remat import formats
from fused_remat.formats import Format, Loaded, LoadedHeads, Parts, Quantized, QuantizedHeads
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
        uniform: a random number for each element, if the format rounds stochastically.
    """

    stored: str
    uniform: Uniform | None = None


def format_of(x: Loaded | QuantizeCall | None) -> str:
    """The format of a quantized activation or of a call; "" for a tensor or None."""
    return x.stored if isinstance(x, Quantized | QuantizeCall) else ""


@operation(
    key=lambda x, storage: storage.stored,
    description=lambda key, *_, **__: f"quantized to {key}, eager, a few rows at a time",
)
def quantize(x: Tensor, storage: QuantizeCall) -> Parts:
    """The codes of x, and the scales if the format has blocks, as new tensors."""
    return formats.quantize(x, storage.stored, storage.uniform)


@operation(
    key=lambda x: x.stored,
    description=lambda key, *_, **__: f"{key} dequantized whole, eager, a few rows at a time",
)
def dequantize(x: Quantized) -> Tensor:
    """x as a new matrix in its dtype."""
    return x.tensor()


def dequantized_heads(
    *heads: LoadedHeads, run: Callable[[Quantized], Tensor] = dequantize
) -> tuple[Tensor, ...]:
    """Heads as tensors. `run` dequantizes each matrix once; heads of one matrix are its views."""
    matrices: dict[int, Tensor] = {}
    found = []
    for x in heads:
        if isinstance(x, QuantizedHeads):
            matrix = matrices.get(id(x.whole))
            if matrix is None:
                matrix = matrices[id(x.whole)] = run(x.whole)
            x = x.of(matrix)
        found.append(x)
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Quantize(Node):
    """name = the codes of the activation `x`; scales, if the format has any, are a statistic.

    Attributes:
        name: "x:format".
        x: the activation.
        site: the random site of stochastic rounding.
    """

    x: str
    site: int
    keepable: ClassVar[bool] = False
    stats_follow: ClassVar[bool] = True

    @property
    def stored(self) -> str:
        return formats.split_name(self.name)[1]

    @property
    def format(self) -> Format:
        return formats.FORMATS[self.stored]

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
        return (self.x,)  # not an input: no gradient passes through this step

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
        """How the chunk's rows are quantized."""
        if not self.format.seeded:
            return QuantizeCall(self.stored)
        rows, owner = chunk.rows_of(self.x), chunk.owner
        key, row0 = owner.site_key(self.site), chunk.first_row(self.x)
        return QuantizeCall(self.stored, Uniform(key, row0, rows, owner.widths[self.x]))

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        self.put(chunk, chunk.ops[quantize](chunk[self.x], self.storage(chunk)))

    def put(self, chunk: Chunk, parts: Iterable[Tensor]) -> None:
        """Put codes and scales into the chunk."""
        for name, part in zip(self.makes, parts, strict=True):
            chunk.put(name, part)

    def kept(self, chunk: Chunk) -> Quantized:
        """The activation in its format."""
        parts = tuple([chunk[name] for name in self.makes])
        return Quantized(self.stored, parts, chunk.owner.widths[self.x], chunk.dtype_of(self.x))

    def sample(self, chunk: Chunk) -> Quantized:
        """Like `kept`, but of unset values and almost no memory: to choose an implementation by."""
        owner, parts = chunk.owner, []
        for name in self.makes:
            one = torch.empty((1, 1), dtype=chunk.dtype_of(name), device=owner.device)
            parts.append(one.expand(chunk.rows_of(self.x), owner.widths[name]))
        return Quantized(self.stored, tuple(parts), owner.widths[self.x], chunk.dtype_of(self.x))


@dataclass(frozen=True, kw_only=True)
class Dequantize(Node):
    """The activation `name`, dequantized as a whole from the one step in `quantized`."""

    undoes: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[str, ...]:
        return self.quantized[0].makes

    def backward_choice(self, chunk: Chunk) -> tuple[Callable[..., Any], Any]:
        return dequantize, self.quantized[0].stored

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        chunk.put(self.name, chunk.ops[dequantize](self.quantized[0].kept(chunk)))

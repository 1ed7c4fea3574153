"""Storage formats of kept activations: quantize and dequantize."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fused_remat.formats import Loaded, LoadedHeads, Packed, PackedHeads, Parts, pack
from fused_remat.random import Uniform
from fused_remat.steps.operations import operation


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

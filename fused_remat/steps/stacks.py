"""Stacks of the matrices of all experts, their gradients, and the order of pairs by expert.

T tokens have k experts each: P = T * k pairs of a token and one of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fused_remat.moe_spec import ExpertsSpec
from fused_remat.spec import PackedSpec
from fused_remat.steps.packed import dequantize

#: Forms of a stack, from the one that most implementations take to the one that fewest do.
FORMS = ("plain", "adapted", "adapted by ranks not in multiples of 8", "quantized")


class Order(NamedTuple):
    """The pairs sorted by expert: the numbers of pairs (P,), and where each expert's end (E,)."""

    pairs: Tensor  # int64: t * k + j
    ends: Tensor  # int32


class Adapter(NamedTuple):
    """Low-rank updates of all experts, + scale * b @ a: (E, rank, in) and (E, out, rank)."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def turned(self) -> tuple[Tensor, Tensor]:
        """Return what `a` and `b` are in the product with the transposed matrix."""
        return self.b.transpose(1, 2), self.a.transpose(1, 2)


class Stack(NamedTuple):
    """The matrices of all experts, with their biases (E, out) and low-rank updates."""

    weight: Tensor  # (E, out, in), or (E, in, out) if transposed; bytes of a quantized one
    bias: Tensor | None = None
    transposed: bool = False
    adapters: tuple[Adapter, ...] = ()
    packed: PackedSpec | None = None  # of one expert's matrix; weight and parts are (E, ...)
    parts: tuple[Tensor, ...] = ()

    @property
    def out_features(self) -> int:
        shape = self.packed.shape if self.packed else self.weight.shape[1:]
        return int(shape[1 if self.transposed else 0])

    @property
    def in_features(self) -> int:
        shape = self.packed.shape if self.packed else self.weight.shape[1:]
        return int(shape[0 if self.transposed else 1])

    @property
    def form(self) -> str:
        """Return one of `FORMS`."""
        if self.packed:
            return FORMS[3]
        if any(adapter.a.shape[1] % 8 for adapter in self.adapters):
            return FORMS[2]
        return FORMS[1] if self.adapters else FORMS[0]

    def prepared(self, dtype: torch.dtype) -> Stack:
        """Return the stack with low-rank updates in `dtype`, in rows without gaps."""
        lows = [(low.a.to(dtype), low.b.to(dtype).contiguous(), low.scale) for low in self.adapters]
        return self._replace(adapters=tuple([Adapter(*low) for low in lows]))

    def matrices(self, experts: Sequence[int], dtype: torch.dtype) -> Callable[[int], Tensor]:
        """Return a function of an expert that gives its matrix (out, in), converted if need be.

        `experts`: those that it is called with, in order.
        """
        first, last = experts[0], experts[-1]
        each = [t[first : last + 1].unbind() for t in (self.weight, *self.parts)]

        def matrix_of(expert: int) -> Tensor:
            own = [views[expert - first] for views in each]
            if self.packed is None:
                matrix = own[0].to(dtype)
            else:
                matrix = dequantize(self.packed, own, self.packed.dtype or dtype).to(dtype)
            return matrix.t() if self.transposed else matrix

        return matrix_of


class Into(NamedTuple):
    """A buffer of a gradient, whose first dimension counts the experts."""

    grad: Tensor
    fresh: bool  # uninitialized, rather than added to
    exact: bool = False  # products of 16 bits are computed in float32


class StackGrads(NamedTuple):
    """Buffers of the gradients of a stack, like its tensors; None for those not needed."""

    weight: Into | None = None
    bias: Into | None = None
    adapters: tuple[tuple[Into | None, Into | None], ...] = ()

    @property
    def buffers(self) -> list[Into]:
        every = (self.weight, self.bias, *[part for pair in self.adapters for part in pair])
        return [into for into in every if into is not None]

    @property
    def needed(self) -> bool:
        """Whether any gradient is needed."""
        return bool(self.buffers)


class Operands(NamedTuple):
    """Operands of the backward of experts, and whether x and the weights need gradients."""

    spec: ExpertsSpec
    dy: Tensor  # (T, D)
    x: Tensor | None  # (T, D); None where nothing reads it
    pre: Tensor | None  # (P, columns), pre-activations; None where they are computed again
    weights: Tensor  # (T, k)
    order: Order
    up: Stack
    down: Stack
    needs_x: bool
    needs_weights: bool

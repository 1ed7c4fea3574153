"""What the ops of products share: inputs drawn by shape, the work that the shapes say."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bench.kernels.problem import Problem
from bench.measure.contest import Results, Rig, Way, Work
from fused_remat.steps.activation import ACTIVATIONS

#: Our name of an activation -> QuACK's, alone and where its result multiplies another matrix.
QUACK_PLAIN = {"relu": "relu", "gelu_tanh": "gelu_tanh_approx", "silu": "silu", "tanh": "tanh"}
QUACK_GATED = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu"}


class Products(Problem):
    """x (..., D) times weights as `nn.Linear` holds them, all with gradients.

    Attributes:
        act: name of the activation, or None.
        shapes: of the inputs by name, in the order in which functions take them; x first.
        out: width of the result.
    """

    def __init__(
        self,
        rig: Rig,
        name: str,
        sizes: Mapping[str, Any],
        act: str | None,
        shapes: Mapping[str, tuple[int, ...]],
        out: int,
    ) -> None:
        if act is not None and act not in ACTIVATIONS:
            raise ValueError(f"unknown activation {act!r}; valid: {', '.join(ACTIVATIONS)}")
        super().__init__(rig, name)
        self.sizes = dict(sizes)
        self.act, self.shapes, self.out = act, dict(shapes), out

    @property
    def tokens(self) -> int:
        """Rows of x."""
        return math.prod(self.shapes["x"][:-1])

    def draw(self) -> dict[str, Tensor]:
        """Weights are scaled, so that results are about as large as x."""
        return {
            name: self.rig.normal(*shape, scale=shape[-1] ** -0.5 if "weight" in name else 1.0)
            for name, shape in self.shapes.items()
        }

    def activate(self, x: Tensor) -> Tensor:
        """`act` of x; x itself where there is none."""
        return x if self.act is None else ACTIVATIONS[self.act].fwd(x)

    def work(self, direction: str) -> Work:
        """A product per weight, two backward; no activation is kept or read again.

        Bytes forward: inputs and y. Backward: x, weights and dy, the gradients of all inputs.
        """
        sizes = {name: math.prod(shape) for name, shape in self.shapes.items()}
        weights = sum(size for name, size in sizes.items() if "weight" in name)
        y = self.tokens * self.out
        moved = sum(sizes.values()) + y
        if direction == "bwd":
            moved += sizes["x"] + weights
        flops = {"fwd": 2.0, "bwd": 4.0}[direction] * self.tokens * weights
        return Work(flops=flops, bytes=float(moved * self.rig.dtype.itemsize))

    def way(
        self,
        run: Callable[..., Results],
        prepare: Callable[[int], tuple[Any, ...]],
        truth: Callable[..., Results],
    ) -> Way:
        """Products alone, `run` on what `prepare` gives; right is what `truth` gives in float64."""

        def exact(found: Results) -> Results:
            return truth(*(t.detach().double() for t in prepare(0)))

        return Way(lambda given: run(*given), exact, prepare=prepare)


def gradients(function: Callable[..., Tensor], dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Of all inputs of a function, by autograd."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(function(*leaves), leaves, dy)

"""Several linear layers of one input as a step: q, k and v with weights of their own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_remat.blocks.frame import Frame
from fused_remat.blocks.nodes import Node, Shapes
from fused_remat.steps.linear import bias_grad, linear_dx, linear_fwd


@dataclass(frozen=True, kw_only=True)
class Projections(Node):
    """name = x @ weight.T + bias of every layer in `layers`, side by side in one matrix.

    Attributes:
        sizes: how many columns each layer makes.
        compute: what x and params are converted to under autocast; None where they are as given.
    """

    x: str
    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    compute: torch.dtype | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def weights(self) -> tuple[str, ...]:
        return tuple([f"{layer}.weight" for layer in self.layers])

    @property
    def biases(self) -> tuple[str, ...]:
        return tuple([f"{layer}.bias" for layer in self.layers])

    @property
    def params(self) -> tuple[str, ...]:
        return self.weights + self.biases

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return {} if self.compute is None else dict.fromkeys(self.params, self.compute)

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return sum(self.sizes)

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        return sum(2 * shapes[weight][0] * shapes[weight][1] for weight in self.weights)

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.x,) if any(weight in wants for weight in self.weights) else ()

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return self.weights if self.x in wants else ()

    def _parts(self, y: Tensor) -> Iterator[tuple[str, str, Tensor]]:
        """Each layer's weight, bias and columns of y."""
        return zip(self.weights, self.biases, y.split(self.sizes, 1), strict=True)

    def _operand(self, x: Tensor) -> Tensor:
        return x if self.compute is None else x.to(self.compute)

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        x = self._operand(f[self.x])
        y = x.new_empty((x.shape[0], sum(self.sizes)))
        for weight, bias, part in self._parts(y):
            f.ops[linear_fwd](x, f.param(weight), f.param(bias), out=part)
        f.put(self.name, y)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        dx: Tensor | None = None
        for weight, bias, part in self._parts(dy):
            if self.x in wants:
                dx = f.ops[linear_dx](part, f.param(weight), into=dx)
            if bias in wants:
                f.add_param_grad(bias, f.ops[bias_grad](part))
        wanted = [(weight, part) for weight, _, part in self._parts(dy) if weight in wants]
        if wanted:
            x = self._operand(f.last(self.x))
            for weight, part in wanted:
                f.add_weight_grad(weight, part, x)
        if dx is not None:
            f.add_grad(self.x, dx.to(f.dtype_of(self.x)), owned=True)

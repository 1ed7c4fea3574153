"""Cross-entropy over a linear layer as a step, and as a graph of its own."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fused_remat import collectives
from fused_remat.blocks.frame import Frame
from fused_remat.blocks.nodes import Node, Shapes
from fused_remat.blocks.program import Graph
from fused_remat.blocks.recipe import builder, part
from fused_remat.spec import ParallelSpec
from fused_remat.steps.cross_entropy import (
    CrossEntropyCall,
    cross_entropy_bwd,
    cross_entropy_fwd,
)


@part
@dataclass(frozen=True, kw_only=True)
class LinearCrossEntropy(Node):
    """name = the loss of each token whose logits are x @ weight.T + bias, one element wide.

    Logits are made again in backward, a block at a time, from x and two statistics: their maximum
    and log(sum(exp(logits - maximum))). The blocks are the operation's, over all tokens.

    Attributes:
        weight, bias, target: names of the params; `target` holds a column for each token.
        ignore_index, label_smoothing, z_loss, softcap, logits: as `CrossEntropyCall`'s.
        parallel: of a vocabulary divided among ranks, as many rows of weight and bias on each.
    """

    x: str
    weight: str
    bias: str
    target: str
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    logits: int = 0
    parallel: ParallelSpec | None = None
    per_batch: bool = True
    widens: ClassVar[bool] = True

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def params(self) -> tuple[str, ...]:
        return (self.weight, self.bias, self.target)

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return (f"{self.name}.max", f"{self.name}.log_sum")

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return 1

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        return 2 * shapes[self.weight][0] * shapes[self.weight][1]

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.x, *self.stats)

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return self.params

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        weight, bias = f.param(self.weight), f.param(self.bias)
        assert weight is not None
        made = f.ops[cross_entropy_fwd](f[self.x], weight, bias, self.call(f), out)
        for name, value in zip(self.makes, made, strict=True):
            f.put(name, value)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        names = (self.x, self.weight, self.bias)
        weight, bias = f.param(self.weight), f.param(self.bias)
        assert weight is not None
        high, log_sum = (f[stat] for stat in self.stats)
        marks = tuple([name in wants for name in names])
        dx, dweight, dbias = f.ops[cross_entropy_bwd](
            dy, f[self.x], weight, bias, (high, log_sum), self.call(f), marks, f.run.exact
        )
        if dx is not None:
            if self.parallel is not None:
                dx = collectives.total(dx, self.parallel.group, owned=True)
            f.add_grad(self.x, dx, owned=True)
        if dweight is not None:
            f.add_param_grad(self.weight, dweight)
        if dbias is not None:
            f.add_param_grad(self.bias, dbias)

    def call(self, f: Frame) -> CrossEntropyCall:
        """The targets of the frame's tokens, and the options."""
        target = f.param(self.target)
        assert target is not None
        call = CrossEntropyCall(
            target.reshape(-1)[f.token0 : f.token0 + f.rows],
            self.ignore_index,
            self.label_smoothing,
            self.z_loss,
            self.softcap,
            self.logits,
        )
        return call if self.parallel is None else self._own(f, call, self.parallel)

    def _own(self, f: Frame, call: CrossEntropyCall, parallel: ParallelSpec) -> CrossEntropyCall:
        """The call of this rank's columns; whoever divided the vocabulary checked the targets."""
        weight = f.param(self.weight)
        assert weight is not None
        count = len(weight)
        at = call.target - parallel.rank * count
        at = at.masked_fill((at < 0) | (at >= count), -1)
        return replace(
            call,
            target=at.masked_fill(call.target == call.ignore_index, -2),
            ignore_index=-2,
            group=parallel.group,
            classes=count * parallel.size,
        )


@builder
def linear_cross_entropy_graph(loss: LinearCrossEntropy) -> Graph:
    """The graph of a loss, which is one node; its name must be "output".

    >>> node = LinearCrossEntropy(
    ...     name="output", x="input", weight="head.weight", bias="head.bias", target="target")
    >>> linear_cross_entropy_graph(node).nodes[0].stats
    ('output.max', 'output.log_sum')
    """
    return Graph("linear_cross_entropy", (loss,), loss.params)

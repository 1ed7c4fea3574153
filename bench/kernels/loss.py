"""The loss of a head, mean cross-entropy over hidden · Wᵀ: and the gradients of both."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem
from bench.kernels.shapes import Size
from bench.measure.contest import Rig, Work
from fused_remat import ops

#: Of a vocabulary, on a CPU: what is exact, in float64, is to fit its memory.
_CPU_VOCAB = 1 << 15


@dataclass(eq=False)
class Loss(Problem):
    """Of x (T, D), weight (V, D) and fixed targets; the result is rounded to x's dtype, as all."""

    name: str = field(default="loss", init=False)
    tokens: int
    width: int
    vocab: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.tokens, self.width), "weight": (self.vocab, self.width)}

    @functools.cached_property
    def target(self) -> Tensor:
        """Every token counts."""
        return torch.randint(self.vocab, (self.tokens,), device=self.rig.device)

    def reference(self, *inputs: Tensor) -> Tensor:
        x, weight = inputs
        logits = F.linear(x, weight)
        wide = logits.to(torch.promote_types(x.dtype, torch.float32))
        return F.cross_entropy(wide, self.target).to(x.dtype)

    def work(self, direction: str) -> Work:
        """One product, two backward, of logits that are not kept; x and weight, their gradients."""
        product = 2.0 * self.tokens * self.width * self.vocab
        given = (self.tokens + self.vocab) * self.width * self.rig.dtype.itemsize
        backward = direction == "bwd"
        return Work(flops=product * (1 + backward), bytes=float(given * (1 + backward)))


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    """The model's head, if it predicts tokens."""
    model = size.model
    if model.vocab:
        vocab = min(model.vocab, _CPU_VOCAB) if rig.device.type == "cpu" else model.vocab
        yield Loss(rig, size.tokens, model.d_model, vocab)


OP = Op("loss", of_model)
OP.add_stock()


@OP.provider("liger", module="liger_kernel", needs="cuda")
def liger(p: Loss) -> Function:
    """Liger-Kernel's: gradients are computed in forward, and backward scales them."""
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    apply = LigerFusedLinearCrossEntropyFunction.apply
    return lambda x, weight: apply(x, weight, p.target)[0].to(x.dtype)


def _ours(p: Loss, backend: str) -> Function:
    loss = ops.linear_cross_entropy
    return lambda x, weight: loss(x, weight, p.target, backend=backend).to(x.dtype)


OP.add_ours(_ours)

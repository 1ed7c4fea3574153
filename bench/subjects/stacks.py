"""The model that plans are compared on: an embedding, encoder layers, a head, a loss; their peers.

Peers are builders in a registry, as those of layers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.measure import case
from bench.measure.case import DTYPES, Forward, Subject, perturb
from bench.measure.registry import Absent, Registry
from bench.subjects import layers
from bench.subjects.layers import NORMS

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Case(case.Case):
    """A stack and its input; dtype and norm are keys of `DTYPES` and `NORMS`."""

    layers: int
    dtype: str
    norm: str
    dropout: float
    batch: int
    seq_len: int
    width: int
    heads: int
    causal: bool = False

    def __post_init__(self) -> None:
        sizes = self.layers, self.batch, self.seq_len
        self.sizes_fit(self.width, self.heads, self.dropout, *sizes)

    def subject(self, device: torch.device | str) -> Subject:
        self.seed()
        kind = self.width, self.heads, self.dropout, self.norm
        with torch.device(device):
            mask = nn.Transformer.generate_square_subsequent_mask(self.seq_len)
            stack = Stack(
                [layers.encoder_layer(*kind) for _ in range(self.layers)],
                mask if self.causal else None,
                nn.Embedding(VOCABULARY, self.width),
                nn.LayerNorm(self.width) if NORMS[self.norm] else nn.Identity(),
                nn.Linear(self.width, VOCABULARY),
            )
            perturb(stack)
            x = torch.randint(VOCABULARY, (self.batch, self.seq_len + 1))
            dy = torch.randn(self.batch, self.seq_len) / self.seq_len
        dtype = DTYPES[self.dtype]
        given = stack.to(dtype), x, dy.to(dtype), self.dropout
        return Subject(*given, fused=fused, fresh=True)


class Stack(nn.Module):
    """Predicts the next byte: tokens (B, S + 1) to losses (B, S)."""

    def __init__(self, layers: Iterable[Any], mask: Tensor | None, *ends: nn.Module) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = ends
        self.layers = nn.ModuleList(layers)
        self.register_buffer("mask", mask, persistent=False)

    def of(self, layer: nn.Module) -> Forward:
        if self.mask is None:
            return layer
        return lambda h: layer(h, self.mask, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x, map(self.of, self.layers))

    def through(self, x: Tensor, forwards: Iterable[Forward]) -> Tensor:
        """Run the stack with other forwards in place of the layers."""
        h = self.embedding(x[:, :-1])
        for forward in forwards:
            h = forward(h)
        logits = self.head(self.norm(h)).flatten(0, 1)
        losses = F.cross_entropy(logits, x[:, 1:].flatten(), reduction="none")
        return losses.view(x.shape[0], -1)


def fused(module: Any, policy: str = "full", backend: str = "auto") -> Stack:
    parts = [layers.fused(layer, policy, backend) for layer in module.layers]
    return Stack(parts, module.mask, module.embedding, module.norm, module.head)


#: In the order of the tables. Traits as of `layers.WAYS`.
PEERS: Registry[Callable[[Subject], Forward]] = Registry(
    draws="stock", kept_by="autograd", compiled=False
)  # fmt: skip
BASELINE = "eager"
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
EVERY = (2, 4)


@PEERS.provider(BASELINE, baseline=True)
def eager(subject: Subject) -> Forward:
    return subject.module


def _each(subject: Subject, way: str, every: int = 1) -> Forward:
    """Run every so many layers, from the first on, by a way of layers; the others as stock."""
    stack: Any = subject.module
    if every > 1 and len(stack.layers) <= every // 2:
        raise Absent(f"the same as every {every // 2}")

    def built(layer: nn.Module) -> Forward:
        alone = dataclasses.replace(subject, module=layer, stock=stack.of)
        return layers.WAYS[way].build(alone)

    forwards = [(stack.of if i % every else built)(o) for i, o in enumerate(stack.layers)]
    return lambda x: stack.through(x, forwards)


PEERS.provider("checkpoint")(functools.partial(_each, way="checkpoint"))
for _k in EVERY:
    _build = functools.partial(_each, way="checkpoint", every=_k)
    PEERS.provider(f"checkpoint_every_{_k}")(_build)


@PEERS.provider("checkpoint_sqrt")
def segments(subject: Subject) -> Forward:
    """Checkpoint every segment of ⌈√n⌉ layers (Chen et al. 2016)."""
    stack: Any = subject.module
    count = len(stack.layers)
    length = math.isqrt(count - 1) + 1
    if length == 1:
        raise Absent("the same as checkpoint")

    def segment(first: int) -> Forward:
        def run(h: Any) -> Any:
            for layer in stack.layers[first : first + length]:
                h = stack.of(layer)(h)
            return h

        return functools.partial(checkpoint, run, use_reentrant=False)

    forwards = [segment(first) for first in range(0, count, length)]
    return lambda x: stack.through(x, forwards)


_way = "selective_matmuls"  # in every layer the results of products are kept
PEERS.provider(_way, kept_by="allocator")(functools.partial(_each, way=_way))


def _compiled(subject: Subject, budget: float) -> Forward:
    return layers.Compiled(eager(subject), subject, budget)


for _budget in BUDGETS:
    _build = functools.partial(_compiled, budget=_budget)
    PEERS.provider(f"compile_budget_{_budget:g}", draws="own", compiled=True)(_build)

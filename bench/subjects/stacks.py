"""The model that plans are compared on: an embedding, a stack of encoder layers, a head, a loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import case
from bench.measure.case import DTYPES, Forward, Subject, perturb
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

    def check(self) -> None:
        self.one_of(dtype=DTYPES, norm=NORMS)
        sizes = self.layers, self.batch, self.seq_len
        self.sizes_fit(self.width, self.heads, self.dropout, *sizes)

    def subject(self, device: torch.device | str) -> Subject:
        """A stack with random parameters, and random bytes."""
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
        return Subject(*given, fused=fused, causal=self.causal, fresh=True)


class Stack(nn.Module):
    """Predicts the next byte: tokens (B, S + 1) to losses (B, S)."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        mask: Tensor | None,
        embedding: nn.Module,
        norm: nn.Module,
        head: nn.Module,
    ) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = embedding, norm, head
        self.layers = nn.ModuleList(layers)
        self.register_buffer("mask", mask, persistent=False)

    def of(self, layer: nn.Module) -> Forward:
        """A layer's forward, with the mask."""
        if self.mask is None:
            return layer
        return lambda h: layer(h, self.mask, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x, map(self.of, self.layers))

    def through(self, x: Tensor, forwards: Iterable[Forward]) -> Tensor:
        """The same with other forwards in the layers' place."""
        h = self.embedding(x[:, :-1])
        for forward in forwards:
            h = forward(h)
        logits = self.head(self.norm(h)).flatten(0, 1)
        losses = F.cross_entropy(logits, x[:, 1:].flatten(), reduction="none")
        return losses.view(x.shape[0], -1)


def fused(module: Any, policy: str = "full", backend: str = "auto") -> Stack:
    """Ours, on the very parameters of a stack."""
    parts = [layers.fused(layer, policy, backend) for layer in module.layers]
    return Stack(parts, module.mask, module.embedding, module.norm, module.head)

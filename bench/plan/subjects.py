"""The model that plans are compared on: an embedding, a stack of encoder layers, a head, a loss."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.layers.subjects import DTYPES, NORMS, Forward, Sample, Subject, perturb
from fused_remat import FusedRematLayer

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Case:
    """A stack and its input; the feed-forward is four times as wide.

    Attributes:
        dtype, norm: keys of `DTYPES` and `NORMS`.

    Raises: ValueError for what is not among those, sizes below 1, or heads that do not divide the
        width.
    """

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
        if self.dtype not in DTYPES or self.norm not in NORMS:
            raise ValueError(f"unknown dtype or norm: {self.dtype!r}, {self.norm!r}")
        sizes = (self.layers, self.batch, self.seq_len, self.width, self.heads)
        if min(sizes) < 1 or self.width % self.heads:
            raise ValueError(f"sizes must be positive, and the width a multiple of heads: {sizes}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    def subject(self, device: torch.device | str) -> Subject:
        """A stack with random parameters, and random bytes."""
        torch.manual_seed(zlib.crc32(repr(self).encode()))
        with torch.device(device):
            stack = Stack(
                [self._layer() for _ in range(self.layers)],
                self._mask(),
                nn.Embedding(VOCABULARY, self.width),
                nn.LayerNorm(self.width) if NORMS[self.norm] else nn.Identity(),
                nn.Linear(self.width, VOCABULARY),
            )
            perturb(stack)
            x = torch.randint(VOCABULARY, (self.batch, self.seq_len + 1))
            dy = torch.randn(self.batch, self.seq_len) / self.seq_len
        dtype = DTYPES[self.dtype]
        sample = TokenSample(stack.to(dtype), x, dy.to(dtype), self.dropout)
        return Subject(sample, lambda module: module, fused, causal=self.causal)

    def _layer(self) -> nn.TransformerEncoderLayer:
        return nn.TransformerEncoderLayer(
            self.width, self.heads, 4 * self.width, self.dropout, "gelu", batch_first=True,
            norm_first=NORMS[self.norm],
        )  # fmt: skip

    def _mask(self) -> Tensor | None:
        if not self.causal:
            return None
        return nn.Transformer.generate_square_subsequent_mask(self.seq_len)


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


@dataclass
class TokenSample(Sample):
    """Tokens, which want no gradient."""

    def __post_init__(self) -> None:
        self.zero()

    def zero(self) -> None:
        """Gradients are there, and 0: the checks add to them."""
        for leaf in self.leaves().values():
            leaf.grad = torch.zeros_like(leaf)

    def leaves(self) -> dict[str, Tensor]:
        return dict(self.layer.named_parameters())

    def clear(self) -> None:
        """No gradients are there, as after `zero_grad()`."""
        for leaf in self.leaves().values():
            leaf.grad = None

    def loss(self, y: Tensor) -> Tensor:
        """Of the model's output; the gradient of the output is dy."""
        return (y * self.dy).sum()

    def double(self) -> TokenSample:
        stack = copy.deepcopy(self.layer).double()
        return TokenSample(stack, self.x, self.dy.double(), self.dropout)


def fused(module: nn.Module, policy: str = "full", backend: str = "auto") -> Stack:
    """Ours, on the very parameters of a stack."""
    assert isinstance(module, Stack)
    layers = [FusedRematLayer.from_layer(layer, policy, backend) for layer in module.layers]  # type: ignore[arg-type]
    return Stack(layers, module.mask, module.embedding, module.norm, module.head)

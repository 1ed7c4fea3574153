"""Builds models of the sizes in `shapes`, from embedding to loss, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import ops
from fused_remat.layers import FusedRematCausalLayer, FusedRematLayer
from fused_remat.layers.causal import CausalLayer
from fused_remat.scale.shapes import Model

#: Vision models: numbers per patch (16 × 16 pixels of 3 colors), and classes.
PATCH, CLASSES = 768, 1000


class LanguageModel(nn.Module):
    """A language model that returns its loss: causal, or bidirectional like BERT.

    Shapes: tokens, targets (B, S) int64; returns ().
    """

    def __init__(
        self, shape: Model, seq: int, dropout: float = 0.0, stock: bool = False, **where: Any
    ) -> None:
        super().__init__()
        width = shape.d_model
        norm = nn.RMSNorm if shape.norm == "rms_norm" else nn.LayerNorm
        self.embed = nn.Embedding(shape.vocab, width, **where)
        nn.init.normal_(self.embed.weight, std=0.02)
        count = max(seq, shape.seq_len)
        self.positions = None if shape.rope else nn.Embedding(count, width, **where)
        self.embed_norm = nn.Identity() if shape.causal else norm(width, **where)
        self.dropout = nn.Dropout(dropout)
        self.layers = _layers(shape, dropout, stock, where)
        self.norm = norm(width, **where) if shape.causal else nn.Identity()
        self.head = nn.Linear(width, shape.vocab, bias=False, **where)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.stock, self.causal = stock, shape.causal
        cos, sin = _rope(shape, seq, where.get("device")) if shape.rope else (None, None)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens)
        if self.positions is not None:
            h = h + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        h = self.dropout(self.embed_norm(h))
        rope = (self.cos, self.sin) if self.causal and self.cos is not None else None
        for layer in self.layers:
            h = layer(h) if rope is None else layer(h, rope)
        h = self.norm(h)
        if self.stock:
            return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())
        return ops.linear_cross_entropy(h, self.head.weight, targets)


class ImageClassifier(nn.Module):
    """A vision transformer that classifies the mean of its tokens and returns its loss.

    Shapes: patches (B, S, 768), labels (B,) int64; returns ().
    """

    def __init__(
        self, shape: Model, seq: int, dropout: float = 0.0, stock: bool = False, **where: Any
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, shape.d_model, **where)
        self.positions = nn.Parameter(torch.zeros(seq, shape.d_model, **where))
        self.layers = _layers(shape, dropout, stock, where)
        self.norm = nn.LayerNorm(shape.d_model, **where)
        self.head = nn.Linear(shape.d_model, CLASSES, **where)

    def forward(self, patches: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(patches) + self.positions
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(self.norm(h).mean(1)), labels)


def _layers(shape: Model, dropout: float, stock: bool, where: dict[str, Any]) -> nn.ModuleList:
    """Return the layers: pre-norm, but post-norm in a bidirectional language model."""
    sizes = (shape.d_model, shape.nhead, shape.d_ff, dropout, shape.activation)
    if shape.causal:
        causal = CausalLayer if stock else FusedRematCausalLayer
        return nn.ModuleList(
            causal(
                *sizes, kv_heads=shape.kv_heads, head_dim=shape.head_dim, norm=shape.norm,
                gated=shape.gated, bias=shape.bias, qkv_bias=shape.qkv_bias, qk_norm=shape.qk_norm,
                **where,
            )
            for _ in range(shape.layers)
        )  # fmt: skip
    encoder = nn.TransformerEncoderLayer if stock else FusedRematLayer
    first = not shape.vocab
    return nn.ModuleList(
        encoder(*sizes, batch_first=True, norm_first=first, **where) for _ in range(shape.layers)
    )


def _rope(shape: Model, seq: int, device: Any) -> tuple[Tensor, Tensor]:
    half = shape.head_dim // 2
    frequencies = 10000.0 ** -(torch.arange(half, device=device) / half)
    angles = torch.outer(torch.arange(seq, device=device), frequencies)
    return angles.cos(), angles.sin()


def build(
    shape: Model,
    batch: int,
    seq: int,
    dropout: float = 0.0,
    stock: bool = False,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a model that computes its loss, and (tokens, targets) or (patches, labels).

    `stock`: use plain PyTorch layers and, in a language model, compute the loss from all logits.

    >>> import dataclasses
    >>> from fused_remat.scale.shapes import MODELS
    >>> small = dataclasses.replace(MODELS["smollm-135m"], layers=1, vocab=100)
    >>> model, inputs = build(small, batch=2, seq=8)
    >>> model(*inputs).backward()
    """
    where = {"device": device, "dtype": dtype}
    if not shape.vocab:
        patches = torch.randn(batch, seq, PATCH, **where)  # type: ignore[call-overload]
        labels = torch.randint(CLASSES, (batch,), device=device)
        return ImageClassifier(shape, seq, dropout, stock, **where), (patches, labels)
    tokens = torch.randint(shape.vocab, (batch, seq + 1), device=device)
    inputs = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return LanguageModel(shape, seq, dropout, stock, **where), inputs

"""Shapes of real models: the sizes at which kernels are compared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fused_remat.scale.shapes import MODELS, Model

__all__ = ["MODELS", "Model", "Size", "at_tokens", "tiny"]


@dataclass(frozen=True)
class Size:
    """A model's shapes at a batch (B) and sequence length (S)."""

    model: Model
    batch: int
    seq_len: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len


def at_tokens(model: Model, tokens: int) -> Size:
    """About so many tokens: whole sequences of the model's length, or one shorter sequence.

    >>> size = at_tokens(MODELS["vit-l"], 1024)
    >>> size.batch, size.seq_len
    (5, 197)
    """
    seq_len = min(model.seq_len, tokens)
    return Size(model, max(1, tokens // seq_len), seq_len)


def tiny(model: Model) -> Model:
    """Return the same kind of model in sizes that show only whether it runs."""
    kv_heads = 2 if model.kv_heads < model.nhead else 4
    sizes = {"d_model": 32, "nhead": 4, "kv_heads": kv_heads, "head_dim": 8, "d_ff": 48}
    sizes["vocab"] = min(model.vocab, 100)
    return dataclasses.replace(model, seq_len=min(model.seq_len, 16), **sizes)

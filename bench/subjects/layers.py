"""An encoder layer, alone or with a causal mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.measure import case
from bench.measure.case import DTYPES, Forward, Subject, perturb
from fused_remat import FusedRematLayer

NORMS = {"pre": True, "post": False}
ACTIVATIONS = ("gelu", "relu")


@dataclass(frozen=True)
class Case(case.Case):
    """An encoder layer and its input; names of `DTYPES`, `NORMS` and `ACTIVATIONS`."""

    dtype: str
    norm: str
    dropout: float
    batch: int
    seq_len: int
    d_model: int
    nhead: int
    activation: str = "gelu"
    causal: bool = False
    attention_dropout: float | None = None  # None: as everywhere else

    def __post_init__(self) -> None:
        self.sizes_fit(self.d_model, self.nhead, self.dropout, self.batch, self.seq_len)

    def subject(self, device: torch.device | str) -> Subject:
        """Return a layer with random parameters, biases and norms included, and random data."""
        self.seed()
        dtype = DTYPES[self.dtype]
        kind = self.d_model, self.nhead, self.dropout, self.norm, self.activation
        with torch.device(device):
            layer = encoder_layer(*kind)
            if self.attention_dropout is not None:
                layer.self_attn.dropout = self.attention_dropout
            perturb(layer)
            x, dy = torch.randn(2, self.batch, self.seq_len, self.d_model).unbind()
            # In the layer's dtype: of a bool mask the stock layer would make such a one every time.
            make = nn.Transformer.generate_square_subsequent_mask
            masks = (make(self.seq_len, dtype=dtype),) if self.causal else ()

        def stock(module: nn.Module) -> Forward:
            if not self.causal:
                return module
            return lambda x: module(x, masks[0].to(x.dtype), is_causal=True)

        return Subject(
            layer.to(dtype),
            # clone: of their own, not halves of one storage, whose bytes would be counted twice
            x.to(dtype).clone(), dy.to(dtype).clone(), self.dropout, stock,
            lambda *ours: stock(fused(*ours)), self.causal, masks,
        )  # fmt: skip


def encoder_layer(
    width: int, heads: int, dropout: float, norm: str, activation: str = "gelu"
) -> nn.TransformerEncoderLayer:
    """Return a layer whose feed-forward is four times as wide."""
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout, activation, batch_first=True, norm_first=NORMS[norm]
    )


def fused(module: Any, policy: str, backend: str) -> FusedRematLayer:
    return FusedRematLayer.from_layer(module, policy, backend)

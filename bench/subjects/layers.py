"""An encoder layer, alone or with a causal mask; and an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bench.measure import case
from bench.measure.case import DTYPES, Forward, Subject, perturb
from fused_remat import FusedRematLayer, ops

NORMS = {"pre": True, "post": False}
ACTIVATIONS = ("gelu", "relu")


@dataclass(frozen=True)
class Case(case.Case):
    """An encoder layer and its input.

    Attributes:
        dtype, norm, activation: keys of `DTYPES` and `NORMS`, one of `ACTIVATIONS`.
        attention_dropout: of the probabilities; None: as everywhere else.
    """

    dtype: str
    norm: str
    dropout: float
    batch: int
    seq_len: int
    d_model: int
    nhead: int
    activation: str = "gelu"
    causal: bool = False
    attention_dropout: float | None = None

    def check(self) -> None:
        self.one_of(dtype=DTYPES, norm=NORMS, activation=ACTIVATIONS)
        self.sizes_fit(self.d_model, self.nhead, self.dropout, self.batch, self.seq_len)

    def subject(self, device: torch.device | str) -> Subject:
        """A layer with random parameters, biases and norms included, and random data."""
        self.seed()
        dtype = DTYPES[self.dtype]
        with torch.device(device):
            layer = encoder_layer(
                self.d_model, self.nhead, self.dropout, self.norm, self.activation
            )
            if self.attention_dropout is not None:
                layer.self_attn.dropout = self.attention_dropout
            perturb(layer)
            x, dy = torch.randn(2, self.batch, self.seq_len, self.d_model).unbind()
        layer.to(dtype)
        # clone: of their own, not halves of one storage, whose bytes would be counted twice
        given = layer, x.to(dtype).clone(), dy.to(dtype).clone(), self.dropout
        return causal(*given) if self.causal else Subject(*given, fused=fused)


def encoder_layer(
    width: int, heads: int, dropout: float, norm: str, activation: str = "gelu"
) -> nn.TransformerEncoderLayer:
    """The feed-forward is four times as wide."""
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout, activation, batch_first=True, norm_first=NORMS[norm]
    )


def fused(module: Any, policy: str, backend: str) -> Forward:
    """Ours, on the module's own submodules."""
    return FusedRematLayer.from_layer(module, policy, backend)


def causal(*given: Any) -> Subject:
    """A layer that is called with a causal mask."""
    _, x, *_ = given
    # In the layer's dtype: of a bool mask the stock layer would make such a one at every call.
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)

    def masked(module: nn.Module) -> Forward:
        return lambda x: module(x, mask.to(x.dtype), is_causal=True)

    def masked_fused(module: nn.Module, policy: str, backend: str) -> Forward:
        return masked(fused(module, policy, backend))

    return Subject(*given, stock=masked, fused=masked_fused, causal=True, masks=(mask,))


def mlp(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Subject:
    """Linear, GELU, linear, of (tokens, width, hidden width)."""
    tokens, width, hidden = sizes
    with torch.device(device):
        module = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        perturb(module)
        x, dy = (torch.randn(tokens, width).to(dtype) for _ in range(2))
    module.to(dtype)

    def fused(module: Any, policy: str, backend: str) -> Forward:
        first, _, last = module
        weights = first.weight, first.bias, last.weight, last.bias
        return lambda x: ops.mlp(x, *weights, "gelu", policy=policy, backend=backend)

    return Subject(module, x, dy, fused=fused)

"""Shapes of real models: the sizes at which kernels are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What the sizes of a model's kernels follow from; from its published configuration.

    Attributes:
        d_ff: width of the feed-forward's hidden half.
        norm: "layer_norm" or "rms_norm".
        gated: whether the feed-forward multiplies by act(gate).
        bias: of the feed-forward's linears.
        seq_len: tokens that it is usually trained or run with.
        rope: whether queries and keys are rotated.
        vocab: tokens that its head predicts; 0 for none.
    """

    name: str
    d_model: int
    nhead: int
    kv_heads: int
    head_dim: int
    d_ff: int
    norm: str
    activation: str
    gated: bool
    bias: bool
    causal: bool
    seq_len: int
    rope: bool
    vocab: int


def _plain(
    name: str, d_model: int, activation: str, causal: bool, seq_len: int, vocab: int = 0
) -> Model:
    """Heads of 64, a feed-forward of 4·D, LayerNorm, biases."""
    heads = d_model // 64
    return Model(
        name, d_model, heads, heads, 64, 4 * d_model, "layer_norm", activation, False, True,
        causal, seq_len, False, vocab,
    )  # fmt: skip


def _llama(
    name: str, d_model: int, nhead: int, kv_heads: int, d_ff: int, seq_len: int, vocab: int
) -> Model:
    """RMSNorm, rotated and shared heads, SwiGLU, no biases in the feed-forward."""
    return Model(
        name, d_model, nhead, kv_heads, d_model // nhead, d_ff, "rms_norm", "silu", True, False,
        True, seq_len, True, vocab,
    )  # fmt: skip


#: By name, as their papers and model cards give them.
MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        _plain("bert-base", 768, "gelu", False, 512, 30522),
        _plain("gpt2", 768, "gelu_tanh", True, 1024, 50257),
        _plain("vit-l", 1024, "gelu", False, 197),
        _llama("smollm-135m", 576, 9, 3, 1536, 2048, 49152),
        _llama("qwen2-1.5b", 1536, 12, 2, 8960, 4096, 151936),
        _llama("llama3-8b", 4096, 32, 8, 14336, 8192, 128256),
    )
}


@dataclass(frozen=True)
class Size:
    """A model's shapes at a batch (B) and sequence length (S).

    >>> Size(MODELS["gpt2"], 4, 1024).tokens
    4096
    """

    model: Model
    batch: int
    seq_len: int

    @property
    def tokens(self) -> int:
        """B·S."""
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
    """The same kind of model in sizes that show nothing but whether it runs.

    >>> tiny(MODELS["llama3-8b"]).nhead, tiny(MODELS["llama3-8b"]).kv_heads
    (4, 2)
    """
    kv_heads = 2 if model.kv_heads < model.nhead else 4
    sizes = {"d_model": 32, "nhead": 4, "kv_heads": kv_heads, "head_dim": 8, "d_ff": 48}
    sizes["vocab"] = min(model.vocab, 100)
    return dataclasses.replace(model, seq_len=min(model.seq_len, 16), **sizes)


def sweep(model: Model, seq_lens: Iterable[int]) -> list[Size]:
    """One sequence of each length."""
    return [Size(model, 1, seq_len) for seq_len in seq_lens]

"""Sizes of published models: `report` and `plan` build them, benchmarks use their shapes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Sizes of a model, from its published configuration.

    Attributes:
        d_ff: hidden width of the MLP.
        norm: "layer_norm" or "rms_norm".
        gated: whether the MLP multiplies by act(gate).
        bias: whether the linear layers of the MLP have biases.
        seq_len: usual sequence length.
        rope: whether queries and keys have rotary embeddings.
        vocab: size of the vocabulary; 0 for a vision model.
        layers: number of layers.
        qkv_bias: whether the linear layers of queries, keys and values have biases.
        tied: whether the head shares the embedding's weight.
        qk_norm: whether query and key heads are normalized.
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
    layers: int
    qkv_bias: bool
    tied: bool
    qk_norm: bool = False


def _plain(
    name: str,
    d_model: int,
    layers: int,
    activation: str,
    causal: bool,
    seq_len: int,
    vocab: int = 0,
) -> Model:
    """Return a model with heads of width 64, an MLP of width 4·D, LayerNorm and biases."""
    heads = d_model // 64
    return Model(
        name, d_model, heads, heads, 64, 4 * d_model, "layer_norm", activation, False, True,
        causal, seq_len, False, vocab, layers, True, vocab > 0,
    )  # fmt: skip


def _llama(
    name: str,
    d_model: int,
    layers: int,
    nhead: int,
    kv_heads: int,
    d_ff: int,
    seq_len: int,
    vocab: int,
    qkv_bias: bool = False,
    tied: bool = True,
) -> Model:
    """Return a model with RMSNorm, rotary embeddings, shared key heads, SwiGLU, no biases."""
    return Model(
        name, d_model, nhead, kv_heads, d_model // nhead, d_ff, "rms_norm", "silu", True, False,
        True, seq_len, True, vocab, layers, qkv_bias, tied,
    )  # fmt: skip


#: Models by name, with the sizes of their papers and model cards.
MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        _plain("bert-base", 768, 12, "gelu", False, 512, 30522),
        _plain("gpt2", 768, 12, "gelu_tanh", True, 1024, 50257),
        _plain("vit-l", 1024, 24, "gelu", False, 197),
        _llama("smollm-135m", 576, 30, 9, 3, 1536, 2048, 49152),
        _llama("qwen2-1.5b", 1536, 28, 12, 2, 8960, 4096, 151936, qkv_bias=True),
        _llama("llama3-8b", 4096, 32, 32, 8, 14336, 8192, 128256, tied=False),
    )
}

#: Models that are too large for one device, for `scale` alone, by name.
LARGE: dict[str, Model] = {
    model.name: model
    for model in (
        Model(
            "gpt3-175b", 12288, 96, 96, 128, 49152, "layer_norm", "gelu_tanh", False, True,
            True, 2048, False, 50257, 96, True, True,
        ),
        Model(
            "qwen3-32b", 5120, 64, 8, 128, 25600, "rms_norm", "silu", True, False,
            True, 8192, True, 151936, 64, False, False, True,
        ),
        _llama("llama3-70b", 8192, 80, 64, 8, 28672, 8192, 128256, tied=False),
        _llama("llama3-405b", 16384, 126, 128, 8, 53248, 8192, 128256, tied=False),
    )
}  # fmt: skip

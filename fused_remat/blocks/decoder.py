"""The transformer decoder block, pre- and post-norm, as graphs of named activations."""

from __future__ import annotations

from dataclasses import dataclass

from fused_remat import random
from fused_remat.blocks.attention import Attention, CrossAttention
from fused_remat.blocks.encoder import columns_of
from fused_remat.blocks.lora import Lora, lora_params, of_layers
from fused_remat.blocks.parallel import Parallel
from fused_remat.blocks.program import Graph
from fused_remat.blocks.recipe import builder, part
from fused_remat.blocks.sketch import NOT_WEIGHTS, Sketch, captured_params, linear_params

#: Tensors of the block besides its inputs, by name; besides these, what its activation captures.
WEIGHTS = linear_params(
    "qkv", "proj", "cross", "cross_proj", "fc1", "fc2", "norm1", "norm2", "norm3"
)
#: Instead of those of "qkv" and "cross" in a block whose projections have weights of their own.
SPLIT = linear_params("q", "k", "v", "cross_q", "cross_k", "cross_v")
#: Linear layers that may have low-rank updates.
LINEARS = ("qkv", "proj", "cross_proj", "fc1", "fc2")
PARAMS = (*WEIGHTS, *NOT_WEIGHTS)


@part
@dataclass(frozen=True)
class DecoderConfig:
    """Plain numbers of a decoder block; equal configs share one graph.

    Attributes:
        norm_first: pre-norm if True, else post-norm.
        nhead, head_dim: of both attentions; the scale is head_dim ** -0.5.
        loras: as in `blocks.transformer.TransformerConfig`, of the layers in `LINEARS`.
        activation, captured: as in `blocks.encoder.EncoderConfig`.
        eps1, eps2, eps3: of the norms.
        p_attention, p_residual1, p_cross, p_cross_residual, p_mlp, p_residual2: dropout
            probabilities, 0 where not training.
        causal: of the attention to the input itself: keys after the query are excluded.
        memory_causal: of the attention to the memory: query i sees keys 0 to i.
        split, parallel: as in `blocks.encoder.EncoderConfig`, of both attentions.
        has_mask, has_padding, has_memory_mask, has_memory_padding: whether "mask", "padding",
            "memory_mask" and "memory_padding" are passed; True in a bool one is excluded.
    """

    norm_first: bool
    nhead: int
    head_dim: int
    activation: str
    eps1: float
    eps2: float
    eps3: float
    p_attention: float = 0.0
    p_residual1: float = 0.0
    p_cross: float = 0.0
    p_cross_residual: float = 0.0
    p_mlp: float = 0.0
    p_residual2: float = 0.0
    causal: bool = False
    memory_causal: bool = False
    has_mask: bool = False
    has_padding: bool = False
    has_memory_mask: bool = False
    has_memory_padding: bool = False
    captured: int = 0
    loras: tuple[Lora, ...] = ()
    split: bool = False
    parallel: Parallel | None = None

    @property
    def kind(self) -> str:
        return "decoder_prenorm" if self.norm_first else "decoder_postnorm"

    @property
    def dropout_ps(self) -> tuple[float, ...]:
        """In the order in which they are applied."""
        return (
            self.p_attention, self.p_residual1, self.p_cross, self.p_cross_residual, self.p_mlp,
            self.p_residual2,
        )  # fmt: skip


@builder
def decoder_graph(cfg: DecoderConfig) -> Graph:
    """The graph of a decoder block; the same object for equal configs.

    Its inputs are "input", (B, S, D), and "memory", (B, M, D), whose tokens `kv` has.

    >>> cfg = DecoderConfig(True, 4, 16, activation="gelu", eps1=1e-5, eps2=1e-5, eps3=1e-5)
    >>> decoder_graph(cfg).names  # doctest: +NORMALIZE_WHITESPACE
    ('norm1', 'qkv', 'attn', 'mid1', 'norm2', 'query', 'kv', 'cross', 'mid2', 'norm3', 'up', 'act')
    """
    sketch = Sketch(of_layers(cfg.loras, LINEARS), cfg.parallel)
    width = cfg.nhead * cfg.head_dim
    columns = columns_of("qkv", width) if cfg.split else None
    attention = _self_attention(cfg, sketch.site(random.ATTENTION))
    cross = _cross_attention(cfg, sketch.site(random.CROSS_ATTENTION))

    def self_half(x: str, name: str) -> None:
        sketch.attention_half(x, "input", name, attention, cfg.p_residual1, columns=columns)

    def cross_half(x: str, name: str) -> None:
        p = cfg.p_cross_residual
        sketch.cross_half(x, "memory", "mid1", name, cross, width, p, cfg.split)

    def mlp_half(x: str, name: str) -> None:
        sketch.mlp_half(
            x, "mid2", name, cfg.activation, cfg.p_mlp, cfg.p_residual2, cfg.captured,
            per_batch=True,
        )  # fmt: skip

    if cfg.norm_first:
        sketch.norm("norm1", "input", "norm1", cfg.eps1)
        self_half("norm1", "mid1")
        sketch.norm("norm2", "mid1", "norm2", cfg.eps2)
        cross_half("norm2", "mid2")
        sketch.norm("norm3", "mid2", "norm3", cfg.eps3)
        mlp_half("norm3", "output")
    else:
        self_half("input", "sum1")
        sketch.norm("mid1", "sum1", "norm1", cfg.eps1)
        cross_half("mid1", "sum2")
        sketch.norm("mid2", "sum2", "norm2", cfg.eps2)
        mlp_half("mid2", "sum3")
        sketch.norm("output", "sum3", "norm3", cfg.eps3)
    params = (*(SPLIT if cfg.split else ()), *PARAMS)
    params += captured_params(cfg.captured) + lora_params(len(cfg.loras))
    return Graph(cfg.kind, tuple(sketch.nodes), params, ("input", "memory"))


def _self_attention(cfg: DecoderConfig, site: int) -> Attention:
    return Attention(
        name="attn", qkv="qkv", nhead=cfg.nhead, kv_heads=cfg.nhead, scale=cfg.head_dim**-0.5,
        right=0 if cfg.causal else -1, site=site, p=cfg.p_attention,
        mask="mask" if cfg.has_mask else "", padding="padding" if cfg.has_padding else "",
    )  # fmt: skip


def _cross_attention(cfg: DecoderConfig, site: int) -> CrossAttention:
    return CrossAttention(
        name="cross", q="query", kv="kv", nhead=cfg.nhead, kv_heads=cfg.nhead,
        scale=cfg.head_dim**-0.5, causal=cfg.memory_causal,
        site=site, p=cfg.p_cross,
        mask="memory_mask" if cfg.has_memory_mask else "",
        padding="memory_padding" if cfg.has_memory_padding else "",
    )  # fmt: skip

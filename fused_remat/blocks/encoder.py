"""The transformer encoder block, pre- and post-norm, as graphs of named activations."""

from __future__ import annotations

from dataclasses import dataclass

from fused_remat import random
from fused_remat.blocks.attention import Attention
from fused_remat.blocks.lora import Lora, lora_params, of_layers
from fused_remat.blocks.parallel import Parallel
from fused_remat.blocks.program import Graph
from fused_remat.blocks.recipe import builder, part
from fused_remat.blocks.sketch import Sketch, captured_params, linear_params

#: Tensors of the block besides its input, by name; besides these, what its activation captures.
WEIGHTS = linear_params("qkv", "proj", "fc1", "fc2", "norm1", "norm2")
#: Instead of those of "qkv" in a block whose q, k and v have weights of their own.
SPLIT = linear_params("q", "k", "v")
#: Linear layers that may have low-rank updates.
LINEARS = ("qkv", "proj", "fc1", "fc2")
PARAMS = (*WEIGHTS, "mask", "padding", "seed")


def columns_of(layers: str, width: int) -> dict[str, tuple[int, int]]:
    """The columns of a packed projection that each of `layers`, of one `width`, makes.

    >>> columns_of("qkv", 8)
    {'q': (0, 8), 'k': (8, 16), 'v': (16, 24)}
    """
    return {layer: (i * width, (i + 1) * width) for i, layer in enumerate(layers)}


@part
@dataclass(frozen=True)
class EncoderConfig:
    """Plain numbers of an encoder block; equal configs share one graph.

    Attributes:
        norm_first: pre-norm if True, else post-norm.
        nhead, causal: of the attention; `causal` excludes keys after the query.
        activation: a name in `backends.activations.ACTIVATIONS`, or `sketch.CUSTOM`: a function
            of the caller's, given whole tensors, which captures `captured` tensors.
        eps1, eps2: of the two norms.
        p_attention, p_residual1, p_mlp, p_residual2: dropout probabilities, 0 where not training.
        has_mask, has_padding: whether "mask" and "padding" are passed.
        mask_keeps: True in a bool mask takes part, else is excluded.
        loras: as in `blocks.transformer.TransformerConfig`, of the layers in `LINEARS`.
        head_dim: width of a head; the scale is head_dim ** -0.5.
        split: q, k and v have weights of their own; else one "qkv".
        parallel: as in `blocks.transformer.TransformerConfig`.
    """

    norm_first: bool
    nhead: int
    head_dim: int
    activation: str
    eps1: float
    eps2: float
    p_attention: float = 0.0
    p_residual1: float = 0.0
    p_mlp: float = 0.0
    p_residual2: float = 0.0
    causal: bool = False
    has_mask: bool = False
    has_padding: bool = False
    mask_keeps: bool = False
    captured: int = 0
    loras: tuple[Lora, ...] = ()
    split: bool = False
    parallel: Parallel | None = None

    @property
    def kind(self) -> str:
        return "encoder_prenorm" if self.norm_first else "encoder_postnorm"


@builder
def encoder_graph(cfg: EncoderConfig) -> Graph:
    """The graph of an encoder block; the same object for equal configs.

    >>> cfg = EncoderConfig(True, nhead=4, head_dim=16, activation="gelu", eps1=1e-5, eps2=1e-5)
    >>> encoder_graph(cfg).names
    ('norm1', 'qkv', 'attn', 'mid', 'norm2', 'up', 'act')
    """
    sketch = Sketch(of_layers(cfg.loras, LINEARS), cfg.parallel)
    columns = columns_of("qkv", cfg.nhead * cfg.head_dim) if cfg.split else None
    attention = Attention(
        name="attn", qkv="qkv", nhead=cfg.nhead, kv_heads=cfg.nhead, scale=cfg.head_dim**-0.5,
        right=0 if cfg.causal else -1, site=sketch.site(random.ATTENTION), p=cfg.p_attention,
        mask="mask" if cfg.has_mask else "", padding="padding" if cfg.has_padding else "",
        mask_keeps=cfg.mask_keeps,
    )  # fmt: skip

    def attention_half(x: str, name: str) -> None:
        sketch.attention_half(x, "input", name, attention, cfg.p_residual1, columns=columns)

    def mlp_half(x: str, name: str) -> None:
        sketch.mlp_half(
            x, "mid", name, cfg.activation, cfg.p_mlp, cfg.p_residual2, cfg.captured, per_batch=True
        )

    if cfg.norm_first:
        sketch.norm("norm1", "input", "norm1", cfg.eps1)
        attention_half("norm1", "mid")
        sketch.norm("norm2", "mid", "norm2", cfg.eps2)
        mlp_half("norm2", "output")
    else:
        attention_half("input", "sum1")
        sketch.norm("mid", "sum1", "norm1", cfg.eps1)
        mlp_half("mid", "sum2")
        sketch.norm("output", "sum2", "norm2", cfg.eps2)
    params = (*(SPLIT if cfg.split else ()), *PARAMS)
    params += captured_params(cfg.captured) + lora_params(len(cfg.loras))
    return Graph(cfg.kind, tuple(sketch.nodes), params)

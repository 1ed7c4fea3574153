"""The transformer encoder block, pre- and post-norm, as graphs of named activations."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from fused_remat import random
from fused_remat.blocks.nodes import Attention, KeepScale, Linear, Node, Norm, Pointwise
from fused_remat.blocks.program import Graph

#: Tensors of the block besides its input, by name.
PARAMS = (
    "qkv.weight", "qkv.bias", "proj.weight", "proj.bias",
    "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias",
    "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias",
    "mask", "padding", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class EncoderConfig:
    """Plain numbers of an encoder block; equal configs share one graph.

    Attributes:
        norm_first: pre-norm if True, else post-norm.
        nhead, causal: of the attention; `causal` excludes keys after the query.
        activation: a name in `backends.activations.ACTIVATIONS`.
        eps1, eps2: of the two norms.
        p_attention, p_residual1, p_mlp, p_residual2: dropout probabilities, 0 where not training.
        has_mask, has_padding: whether "mask" and "padding" are passed.
        head_dim: width of a head; the scale is head_dim ** -0.5.
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

    @property
    def kind(self) -> str:
        return "encoder_prenorm" if self.norm_first else "encoder_postnorm"

    @property
    def uses_dropout(self) -> bool:
        return max(self.p_attention, self.p_residual1, self.p_mlp, self.p_residual2) > 0.0


@functools.lru_cache(maxsize=1024)
def encoder_graph(cfg: EncoderConfig) -> Graph:
    """The graph of an encoder block; the same object for equal configs.

    >>> cfg = EncoderConfig(True, nhead=4, head_dim=16, activation="gelu", eps1=1e-5, eps2=1e-5)
    >>> encoder_graph(cfg).names
    ('norm1', 'qkv', 'attn', 'mid', 'norm2', 'up', 'act')
    """
    nodes: list[Node] = []

    def keep(name: str, site: int, p: float, like: str) -> str:
        if p == 0.0:
            return ""
        nodes.append(KeepScale(name=name, site=site, p=p, like=like))
        return name

    def norm(name: str, x: str, weights: str, eps: float) -> None:
        weight, bias = f"{weights}.weight", f"{weights}.bias"
        nodes.append(Norm(name=name, x=x, weight=weight, bias=bias, eps=eps))

    def linear(name: str, x: str, weights: str, residual: str = "", drop: str = "") -> None:
        weight, bias = f"{weights}.weight", f"{weights}.bias"
        nodes.append(Linear(name=name, x=x, weight=weight, bias=bias, residual=residual, keep=drop))

    def attention_half(x: str, residual: str, name: str) -> None:
        linear("qkv", x, "qkv")
        nodes.append(
            Attention(
                name="attn", qkv="qkv", nhead=cfg.nhead, causal=cfg.causal,
                scale=cfg.head_dim**-0.5, site=random.ATTENTION, p=cfg.p_attention,
                mask="mask" if cfg.has_mask else "", padding="padding" if cfg.has_padding else "",
            )
        )  # fmt: skip
        drop = keep("keep1", random.RESIDUAL1, cfg.p_residual1, "proj.weight")
        linear(name, "attn", "proj", residual, drop)

    def mlp_half(x: str, residual: str, name: str) -> None:
        linear("up", x, "fc1")
        drop = keep("keep_mlp", random.MLP, cfg.p_mlp, "fc1.weight")
        nodes.append(Pointwise(name="act", x="up", act=cfg.activation, keep=drop))
        drop = keep("keep2", random.RESIDUAL2, cfg.p_residual2, "fc2.weight")
        linear(name, "act", "fc2", residual, drop)

    if cfg.norm_first:
        norm("norm1", "input", "norm1", cfg.eps1)
        attention_half("norm1", residual="input", name="mid")
        norm("norm2", "mid", "norm2", cfg.eps2)
        mlp_half("norm2", residual="mid", name="output")
    else:
        attention_half("input", residual="input", name="sum1")
        norm("mid", "sum1", "norm1", cfg.eps1)
        mlp_half("mid", residual="mid", name="sum2")
        norm("output", "sum2", "norm2", cfg.eps2)
    return Graph(cfg.kind, tuple(nodes), PARAMS)

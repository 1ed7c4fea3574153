"""The transformer block of language and vision models, as a graph of named activations.

Pre-norm, post-norm or both ("sandwich", Gemma); LayerNorm or RMSNorm; rotated heads, shared and
normed ones; plain or gated MLP; low-rank updates of any linear layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from fused_remat import random
from fused_remat.blocks.attention import Attention
from fused_remat.blocks.lora import Lora, lora_params, of_layers
from fused_remat.blocks.parallel import Parallel
from fused_remat.blocks.program import Graph
from fused_remat.blocks.recipe import builder, part
from fused_remat.blocks.rotary import Rotary
from fused_remat.blocks.sketch import Sketch, linear_params

#: Tensors of the block besides its input and weights.
CONSTANTS = ("cos", "sin", "mask", "padding", "lengths", "cu_q", "cu_k", "seed")


@part
@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Plain numbers of a block; equal configs share one graph.

    Attributes:
        placement: of the norms: "pre", "post", or "sandwich": before and after each half.
        norm, eps, offset: of all norms; `offset` is added to their weights (1 for Gemma).
        nhead, kv_heads, head_dim, scale, softcap, left, right: of `blocks.attention.Attention`.
        split: q, k and v have weights of their own; else one "qkv".
        rotary, interleaved, qk_norm, qk_eps: of `blocks.rotary.Rotary`.
        activation, gated: of the MLP; a name in `backends.activations.ACTIVATIONS`.
        p_attention, p_residual1, p_mlp, p_residual2: dropout probabilities, 0 where not training.
        masks: those of "mask", "padding", "lengths" and "packed" (cu_q, cu_k) that are passed.
        mask_keeps: True in a bool mask takes part, else is excluded.
        loras: low-rank updates of linear layers: the matrices of the i-th are "lora.i.A", ".B".
        parallel: of a block divided among ranks: `nhead`, `kv_heads` and the weights are its own.
    """

    placement: str
    norm: str
    eps: float
    nhead: int
    kv_heads: int
    head_dim: int
    scale: float
    activation: str
    offset: float = 0.0
    softcap: float = 0.0
    left: int = -1
    right: int = -1
    split: bool = False
    rotary: bool = False
    interleaved: bool = False
    qk_norm: bool = False
    qk_eps: float = 1e-6
    gated: bool = False
    p_attention: float = 0.0
    p_residual1: float = 0.0
    p_mlp: float = 0.0
    p_residual2: float = 0.0
    masks: tuple[str, ...] = ()
    mask_keeps: bool = True
    loras: tuple[Lora, ...] = ()
    parallel: Parallel | None = None

    @property
    def kind(self) -> str:
        heads = "qk_norm_" if self.qk_norm else "rotary_" if self.rotary else ""
        placement = "sandwich" if self.placement == "sandwich" else f"{self.placement}norm"
        return f"{heads}transformer_{placement}"

    @property
    def norm_first(self) -> bool:
        """Whether a norm is the first step of each half, and a sum the last."""
        return self.placement != "post"

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear layers."""
        projections = ("q", "k", "v") if self.split else ("qkv",)
        return (*projections, "proj", *(("gate",) if self.gated else ()), "fc1", "fc2")

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms over the width of the block."""
        return ("norm1", "norm2", *(("post1", "post2") if self.placement == "sandwich" else ()))

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of all weights, those of low-rank updates included."""
        heads = ("q_norm.weight", "k_norm.weight") if self.qk_norm else ()
        layers = linear_params(*self.linears, *self.norms)
        return (*layers, *heads, *lora_params(len(self.loras)))

    def columns(self, layer: str) -> tuple[int, int]:
        """The columns of the packed projection that a layer makes; (0, 0): all of what it makes."""
        if layer not in ("q", "k", "v"):
            return 0, 0
        ends = (0, self.nhead, self.nhead + self.kv_heads, self.nhead + 2 * self.kv_heads)
        first = "qkv".index(layer)
        return ends[first] * self.head_dim, ends[first + 1] * self.head_dim


@builder
def transformer_graph(cfg: TransformerConfig) -> Graph:
    """The graph of a block; the same object for equal configs.

    >>> cfg = TransformerConfig(placement="pre", norm="rms_norm", eps=1e-6, nhead=4, kv_heads=2,
    ...     head_dim=16, scale=0.25, right=0, rotary=True, activation="silu", gated=True)
    >>> transformer_graph(cfg).names
    ('norm1', 'qkv', 'rotated', 'attn', 'mid', 'norm2', 'gate', 'up', 'act')

    Raises: ValueError for an unknown placement, or an update of a layer that is not there.
    """
    if cfg.placement not in ("pre", "post", "sandwich"):
        raise ValueError(f"placement must be 'pre', 'post' or 'sandwich', got {cfg.placement!r}")
    sketch = Sketch(of_layers(cfg.loras, cfg.linears), cfg.parallel)
    _attention_half(sketch, cfg)
    _mlp_half(sketch, cfg)
    return Graph(cfg.kind, tuple(sketch.nodes), (*cfg.weights, *CONSTANTS))


def _norm(sketch: Sketch, cfg: TransformerConfig, name: str, x: str, weights: str) -> None:
    sketch.norm(name, x, weights, cfg.eps, cfg.norm, cfg.offset)


def _attention_half(sketch: Sketch, cfg: TransformerConfig) -> None:
    """mid = input + proj(attention(norm(input))), with the norms where the placement has them."""
    x = "input"
    if cfg.placement != "post":
        _norm(sketch, cfg, "norm1", "input", "norm1")
        x = "norm1"
    x = sketch.enter(x, sequences=True)
    if cfg.split:
        columns = {layer: cfg.columns(layer) for layer in ("q", "k", "v")}
        sketch.projections("qkv", x, columns)
    else:
        sketch.linear("qkv", x, "qkv")
    heads = "qkv"
    if cfg.rotary or cfg.qk_norm:
        heads = "rotated"
        sketch.nodes.append(_rotary(cfg))
    sketch.nodes.append(_attention(cfg, heads, sketch.site(random.ATTENTION)))
    keep = sketch.keep("keep1", random.RESIDUAL1, cfg.p_residual1, "proj.weight")
    if cfg.placement == "pre":
        sketch.leave("mid", "attn", "proj", "input", keep, sequences=True)
    elif cfg.placement == "post":
        sketch.leave("sum1", "attn", "proj", "input", keep, sequences=True)
        _norm(sketch, cfg, "mid", "sum1", "norm1")
    else:
        sketch.leave("proj", "attn", "proj", sequences=True)
        _norm(sketch, cfg, "post1", "proj", "post1")
        sketch.add("mid", "post1", "input", keep)


def _mlp_half(sketch: Sketch, cfg: TransformerConfig) -> None:
    """output = mid + mlp(norm(mid)), with the norms where the placement has them."""
    x = "mid"
    if cfg.placement != "post":
        _norm(sketch, cfg, "norm2", "mid", "norm2")
        x = "norm2"
    sketch.up_half(x, cfg.activation, cfg.gated, cfg.p_mlp)
    keep = sketch.keep("keep2", random.RESIDUAL2, cfg.p_residual2, "fc2.weight")
    if cfg.placement == "pre":
        sketch.leave("output", "act", "fc2", "mid", keep)
    elif cfg.placement == "post":
        sketch.leave("sum2", "act", "fc2", "mid", keep)
        _norm(sketch, cfg, "output", "sum2", "norm2")
    else:
        sketch.leave("down", "act", "fc2")
        _norm(sketch, cfg, "post2", "down", "post2")
        sketch.add("output", "post2", "mid", keep)


def _rotary(cfg: TransformerConfig) -> Rotary:
    cos, sin = ("cos", "sin") if cfg.rotary else ("", "")
    q_weight, k_weight = ("q_norm.weight", "k_norm.weight") if cfg.qk_norm else ("", "")
    return Rotary(
        name="rotated", x="qkv", nhead=cfg.nhead, kv_heads=cfg.kv_heads, cos=cos, sin=sin,
        q_weight=q_weight, k_weight=k_weight, eps=cfg.qk_eps, offset=cfg.offset,
        interleaved=cfg.interleaved,
    )  # fmt: skip


def _attention(cfg: TransformerConfig, heads: str, site: int) -> Attention:
    def named(kind: str, name: str) -> str:
        return name if kind in cfg.masks else ""

    return Attention(
        name="attn", qkv=heads, nhead=cfg.nhead, kv_heads=cfg.kv_heads, scale=cfg.scale,
        left=cfg.left, right=cfg.right, softcap=cfg.softcap, site=site,
        p=cfg.p_attention, mask=named("mask", "mask"), padding=named("padding", "padding"),
        lengths=named("lengths", "lengths"), cu_q=named("packed", "cu_q"),
        cu_k=named("packed", "cu_k"), mask_keeps=cfg.mask_keeps,
    )  # fmt: skip

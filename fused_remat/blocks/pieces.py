"""Parts of transformer blocks as graphs of their own: norm, MLP, attention, residual sum.

Each function is cached: equal arguments, one graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from fused_remat import random
from fused_remat.blocks.attention import Attention, HeadsAttention
from fused_remat.blocks.lora import Lora
from fused_remat.blocks.pointwise import Add
from fused_remat.blocks.program import Graph
from fused_remat.blocks.recipe import builder, part
from fused_remat.blocks.rotary import Rotary
from fused_remat.blocks.sketch import Sketch, captured_params, linear_params

for _node in (Attention, HeadsAttention, Lora, Rotary):  # what builders here take besides numbers
    part(_node)

# The caller's own tensors that attention reads.
_ATTENTION = ("mask", "padding", "lengths", "cu_q", "cu_k", "seed")


@builder
def norm_graph(kind: str, eps: float) -> Graph:
    """output = norm(input), `kind` "layer_norm" or "rms_norm".

    >>> norm_graph("rms_norm", 1e-6).nodes[0].stats
    ('output.rstd',)
    """
    sketch = Sketch()
    sketch.norm("output", "input", "norm", eps, kind)
    return Graph("norm", tuple(sketch.nodes), linear_params("norm"))


@builder
def dropout_add_graph(p: float) -> Graph:
    """output = residual + dropout(input).

    >>> [node.name for node in dropout_add_graph(0.1).nodes]
    ['keep1', 'output']
    """
    sketch = Sketch()
    keep = sketch.keep("keep1", random.RESIDUAL1, p, "input")
    sketch.nodes.append(Add(name="output", x="input", residual="residual", keep=keep))
    return Graph("dropout_add", tuple(sketch.nodes), ("seed",), ("input", "residual"))


@part
@dataclass(frozen=True)
class MlpConfig:
    """An MLP: activation (`captured` as in EncoderConfig), gate, dropout, and norm if a block.

    Attributes:
        activation, captured: a registered name, or `sketch.CUSTOM` and how many it captures.
        gated: act(gate(x)) * fc1(x) instead of act(fc1(x)).
        p_mlp, p_residual: dropout after the activation, and of what is added to the residual.
        norm, eps: "" for the MLP alone; else input + dropout(mlp(norm(input))).
    """

    activation: str
    gated: bool = False
    captured: int = 0
    p_mlp: float = 0.0
    p_residual: float = 0.0
    norm: str = ""
    eps: float = 1e-5


@builder
def mlp_graph(cfg: MlpConfig) -> Graph:
    """The graph of an MLP, alone or with its norm and residual.

    >>> mlp_graph(MlpConfig("silu", gated=True, norm="rms_norm")).names
    ('norm', 'gate', 'up', 'act')
    """
    sketch = Sketch()
    x, residual = ("norm", "input") if cfg.norm else ("input", "")
    if cfg.norm:
        sketch.norm("norm", "input", "norm", cfg.eps, cfg.norm)
    if cfg.gated:
        sketch.gated_half(x, residual, "output", cfg.activation, cfg.p_mlp, cfg.p_residual)
    else:
        sketch.mlp_half(
            x, residual, "output", cfg.activation, cfg.p_mlp, cfg.p_residual, cfg.captured
        )
    weights = (("norm",) if cfg.norm else ()) + (("gate",) if cfg.gated else ()) + ("fc1", "fc2")
    params = (*linear_params(*weights), "seed", *captured_params(cfg.captured))
    kind = ("gated_" if cfg.gated else "") + "mlp" + ("_block" if cfg.norm else "")
    return Graph(kind, tuple(sketch.nodes), params)


@builder
def attention_graph(attention: HeadsAttention) -> Graph:
    """The graph of attention over heads, which is one node; its name must be "output".

    >>> node = HeadsAttention(name="output", nhead=8, kv_heads=2, scale=0.125, site=0, p=0.0)
    >>> attention_graph(node).inputs
    ('input', 'key', 'value')
    """
    return Graph("attention", (attention,), _ATTENTION, attention.inputs)


#: What a rotary step takes besides its input.
ROTARY_PARAMS = ("cos", "sin", "q_norm.weight", "k_norm.weight")


@builder
def attention_block_graph(
    attention: Attention, p_residual: float, norm: str, eps: float, rotary: Rotary | None = None
) -> Graph:
    """output = input + dropout(proj(attention(rotary(qkv(norm(input)))))).

    >>> node = Attention(name="attn", qkv="qkv", nhead=8, kv_heads=8, scale=0.125, site=0, p=0.0)
    >>> attention_block_graph(node, 0.0, "layer_norm", 1e-5).names
    ('norm', 'qkv', 'attn')
    """
    sketch = Sketch()
    sketch.norm("norm", "input", "norm", eps, norm)
    sketch.attention_half("norm", "input", "output", attention, p_residual, rotary)
    params = (*linear_params("norm", "qkv", "proj"), *_ATTENTION)
    if rotary is None:
        return Graph("attention_block", tuple(sketch.nodes), params)
    kind = "qk_norm_attention_block" if rotary.q_weight else "rotary_attention_block"
    return Graph(kind, tuple(sketch.nodes), params + ROTARY_PARAMS)


@builder
def rotary_graph(rotary: Rotary) -> Graph:
    """The graph of a rotary step, which is one node; its name must be "output".

    >>> node = Rotary(name="output", x="input", nhead=8, kv_heads=2, cos="cos", sin="sin")
    >>> rotary_graph(node).names  # backward rotates back, and reads no activation
    ()
    """
    return Graph("rotary", (rotary,), ROTARY_PARAMS)

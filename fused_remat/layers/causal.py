"""`FusedRematCausalLayer`, a layer of a language model in a fraction of the activation memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fused_remat.graph.build import block_graph
from fused_remat.layer_specs import transformer_spec
from fused_remat.layers.eligibility import Reason
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.layers.plain_causal import CausalLayer, check_window
from fused_remat.layers.read import BlockInputs, LayerMap, Parts, read_block
from fused_remat.ops.checks import check_p, masks_given, read_masks
from fused_remat.ops.parts import rotary_tensors, split_rope
from fused_remat.spec import BlockSpec, attention_fields


class FusedRematCausalLayer(FusedLayer, CausalLayer):
    """A layer of a language model, by default Llama's, that rebuilds what backward needs.

    h = x + proj(attention(rotary(q, k), v)), h + down(act(gate(norm2(h))) * up(norm2(h))), with
    q, k, v linear layers of norm1(x).

    Submodules are `nn.Linear` (q, k, v, proj, gate, up, down) and `nn.RMSNorm` or `nn.LayerNorm`
    (norm1, norm2; with qk_norm also q_norm and k_norm, with "sandwich" post1 and post2). Linear
    layers may be wrapped by PEFT's LoRA. If a submodule is of another class or has hooks, or if a
    call is exported, transformed or traced, the layer calls its submodules in ordinary PyTorch; in
    training under `torch.utils.checkpoint`, with one `FusedRematWarning`.

    Args:
        d_model, nhead, dim_feedforward, dropout: as in `nn.TransformerEncoderLayer`.
        activation: "relu", "gelu", "gelu_tanh", "silu", "relu2", "tanh", or the function itself.
        kv_heads: heads of keys and values, a divisor of nhead; None: nhead. head_dim: None for
            d_model / nhead.
        norm, norm_eps: "rms_norm" or "layer_norm"; qk_norm: an RMSNorm of each query and key head
            (Qwen3). placement: "pre"; "post": after the sums; "sandwich": before and after each
            half (Gemma-2).
        gated: act(gate) * up, else act(up). bias: of linear layers (and LayerNorms); qkv_bias: of
            q, k and v, None for `bias` (True in Qwen2).
        window: number of keys before its own position that a query attends to (and after it, if
            not causal); None for all. softcap: of the scores, 0 for none. attention_dropout: of
            probabilities, None for dropout.
        rope_interleaved: rotated pairs are neighbors; else i and i + R/2.
        policy, backend, accumulate_into: as in `FusedRematLayer`.

    Shapes: x (B, S, d_model); returns the same, in x.dtype; under autocast in the dtype of
        ordinary operations.
    Units: bytes kept per token at 16 bits, with Q = nhead * head_dim, K = kv_heads * head_dim and F
        gated, pre-norm: full 2·D, lean 2·D + 2·Q, balanced 4·D + 2·Q, fast 4·D + 4·Q + 4·K, none
        4·F more, plus statistics (8 bytes, and 4·nhead where `attn` is kept).
    Raises: ValueError, TypeError for arguments and inputs that do not fit; RuntimeError for mixed
        dtypes, and in backward as `FusedRematLayer`.
    Source: Touvron et al. 2023; GQA: Ainslie et al. 2023; RoPE: Su et al. 2021.

    >>> import torch
    >>> layer = FusedRematCausalLayer(64, 4, 128, kv_heads=2, policy="lean")
    >>> angles = torch.outer(torch.arange(16), 10000 ** -(torch.arange(8) / 8))
    >>> x = torch.randn(2, 16, 64, requires_grad=True)
    >>> layer(x, rope=(angles.cos(), angles.sin())).sum().backward()
    >>> x.grad.shape
    torch.Size([2, 16, 64])
    """

    stock = CausalLayer
    _owner = "its unfused"

    def forward(  # type: ignore[override]  # that of the base takes the tables one by one
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer on x (B, S, d_model).

        rope: (cos, sin), (S, R/2) or (B, S, R/2): the first R elements of a head are rotated.
        attn_mask: broadcasts to (B, nhead, S, S); bool (**True: attended**, as in SDPA) or float.
        key_padding_mask: (B, S); bool (**True: excluded**) or float; on either side.
        key_lengths, cu_seqlens: of padded and of packed sequences, as in `ops.attention`.
        """
        cos, sin = split_rope(rope)
        out: Tensor = self._call(
            x=x, cos=cos, sin=sin, attn_mask=attn_mask, key_padding_mask=key_padding_mask,
            key_lengths=key_lengths, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        return out

    @property
    def _map(self) -> LayerMap:  # type: ignore[override]
        return map_of(self)

    def _example_spec(self) -> BlockSpec:
        return transformer_spec(
            "rms_norm", 1e-6, "relu", placement=self.placement, gated=self.gate is not None,
            num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, projection="split", rotary=True,
            qk_norm_eps=None if self.q_norm is None else 1e-6,
        )  # fmt: skip

    def _heads(self) -> dict[str, int]:
        return {"heads": self.nhead, "key and value heads": self.kv_heads}

    def _read(self, **arguments: Any) -> BlockInputs | Reason:
        return read_call(self, **arguments)

    def _unsupported_reason(self, rope: Any = None, **arguments: Any) -> str | None:
        cos, sin = split_rope(rope)
        return super()._unsupported_reason(cos=cos, sin=sin, **arguments)


def map_of(layer: Any) -> LayerMap:
    """Return the layout of a `CausalLayer`: with or without gate, post-norms and head norms."""
    return _MAPS[layer.gate is not None, layer.placement == "sandwich", layer.q_norm is not None]


def read_call(
    layer: Any,
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> BlockInputs | Reason:
    """Return the block of a call of a `CausalLayer`, or why the fused path does not support it."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got {type(x).__name__}")
    if x.dim() != 3 or x.shape[-1] != layer.d_model or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}, expected floating (B, S, {layer.d_model})"
        )
    grid = (x.shape[0], layer.nhead, x.shape[1], x.shape[1])
    arguments = {
        "x": x,
        **rotary_tensors(x, layer.head_dim, cos, sin, None, None),
        **read_masks(x, grid, attn_mask, key_padding_mask, key_lengths, cu_seqlens),
    }
    return read_block(layer, map_of(layer), arguments)


def _describe(parts: Parts, arguments: Mapping[str, Tensor | None]) -> BlockInputs:
    layer = parts.layer  # its attributes may have been set since
    p = check_p("dropout", layer.dropout) if layer.training else 0.0
    p_attention = check_p("attention_dropout", layer.attention_dropout)
    check_window(layer.window)  # -1 would mean no window to a block
    heads = layer.nhead, layer.kv_heads, layer.head_dim
    window = (-1, -1) if layer.window is None else (layer.window, layer.window)
    spec = transformer_spec(
        parts.norm,
        parts.one_eps(),
        layer.activation,
        placement=layer.placement,
        gated=layer.gate is not None,
        dropout=(p_attention if layer.training else 0.0, p, p, p),
        loras=parts.loras,
        **attention_fields(*heads, layer.is_causal, window, None, layer.softcap),
        projection="split",
        rotary="cos" in arguments,
        interleaved=layer.rope_interleaved,
        qk_norm_eps=parts.one_head_eps(),
        masks=masks_given(arguments),
    )
    tensors = {**parts.weights, **arguments}
    tensors["input"] = tensors.pop("x")
    return BlockInputs(block_graph(spec), tensors, spec)


def _layer_map(gated: bool, sandwich: bool, normed_heads: bool) -> LayerMap:
    norms = ("norm1", "post1", "norm2", "post2") if sandwich else ("norm1", "norm2")
    linears = ("q", "k", "v", "proj", "gate") if gated else ("q", "k", "v", "proj")
    return LayerMap(
        package=CausalLayer.__module__,
        layer=CausalLayer.__qualname__,
        describe=_describe,
        input="x",
        linears={**{name: name for name in linears}, "fc1": "up", "fc2": "down"},
        norms={name: name for name in norms},
        head_norms={name: name for name in ("q_norm", "k_norm") if normed_heads},
    )


#: By whether the MLP is gated, norms are before and after, and heads are normed.
_MAPS = {key: _layer_map(*key) for key in itertools.product((False, True), repeat=3)}

"""`FusedRematCausalLayer`, a layer of a language model, and `CausalLayer`, the same unfused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.graph.build import block_graph, with_side_outputs
from fused_remat.graph.graph import Graph
from fused_remat.layer_specs import attention_fields, transformer_spec
from fused_remat.layers.eligibility import Reason
from fused_remat.layers.experts import StackedExperts, add_experts, mixture, moe_of
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.layers.read import BlockInputs, LayerMap, Parts, read_block
from fused_remat.moe_spec import RouterSpec
from fused_remat.ops.activation import ActivationLike, known_activation
from fused_remat.ops.checks import check_heads, check_norm_kind, check_p, masks_given, read_masks
from fused_remat.ops.parts import rotary_tensors, split_rope
from fused_remat.policies import Policy
from fused_remat.spec import check_one_of
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.norm import NORMS


class CausalLayer(nn.Module):
    """Attention and an MLP, or a mixture of experts, with norms and residuals.

    The constructor is that of `FusedRematCausalLayer`, whose docstring describes it; policy,
    backend and accumulate_into have no effect here.

    >>> layer = CausalLayer(16, 4, 32, kv_heads=2)
    >>> layer(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    #: Choice of experts; a class attribute, for layers that were pickled before there were any.
    routing: RouterSpec | None = None

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int,
        dropout: float = 0.0,
        activation: ActivationLike = "silu",
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: str = "rms_norm",
        norm_eps: float = 1e-6,
        gated: bool = True,
        bias: bool = False,
        qkv_bias: bool | None = None,
        qk_norm: bool = False,
        window: int | None = None,
        softcap: float = 0.0,
        attention_dropout: float | None = None,
        is_causal: bool = True,
        rope_interleaved: bool = False,
        placement: str = "pre",
        experts: RouterSpec | None = None,
        shared_feedforward: int = 0,
        shared_gate: bool = False,
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = nhead if kv_heads is None else kv_heads
        check_heads(nhead, kv_heads)
        check_norm_kind(norm)
        check_one_of("placement", placement, "pre", "post", "sandwich")
        check_window(window)
        if softcap < 0.0:
            raise ValueError(f"softcap must be positive, or 0 for none, got {softcap}")
        if head_dim is None and d_model % nhead:
            raise ValueError(
                f"nhead must divide d_model, got {nhead} and {d_model}; or pass head_dim"
            )
        self.d_model, self.nhead, self.kv_heads = d_model, nhead, kv_heads
        self.head_dim = d_model // nhead if head_dim is None else head_dim
        self.dropout = check_p("dropout", dropout)
        p = self.dropout if attention_dropout is None else attention_dropout
        self.attention_dropout = check_p("attention_dropout", p)
        self.activation = known_activation(activation)
        self.window, self.softcap, self.is_causal = window, float(softcap), bool(is_causal)
        self.rope_interleaved, self.placement = bool(rope_interleaved), placement
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        queries, keys = nhead * self.head_dim, kv_heads * self.head_dim
        qkv_bias = bias if qkv_bias is None else qkv_bias
        self.q = nn.Linear(d_model, queries, qkv_bias, **factory)
        self.k = nn.Linear(d_model, keys, qkv_bias, **factory)
        self.v = nn.Linear(d_model, keys, qkv_bias, **factory)
        self.proj = nn.Linear(queries, d_model, bias, **factory)
        if experts is not None:
            self.routing, self.gate = experts, None
            sizes = dim_feedforward, shared_feedforward, bool(shared_gate)
            add_experts(self, experts, *sizes, gated, bias, factory)
        elif shared_feedforward or shared_gate:
            raise ValueError("shared_feedforward and shared_gate need experts, got experts=None")
        else:
            self.gate = nn.Linear(d_model, dim_feedforward, bias, **factory) if gated else None
            self.up = nn.Linear(d_model, dim_feedforward, bias, **factory)
            self.down = nn.Linear(dim_feedforward, d_model, bias, **factory)
        affine = factory if norm == "rms_norm" else {**factory, "bias": bias}
        for name in ("norm1", "norm2", *(("post1", "post2") if placement == "sandwich" else ())):
            setattr(self, name, NORMS[norm].module(d_model, norm_eps, **affine))
        for name in ("q_norm", "k_norm"):
            setattr(self, name, nn.RMSNorm(self.head_dim, norm_eps, **factory) if qk_norm else None)
        self._set_options(policy, backend, accumulate_into)

    @property
    def _map(self) -> LayerMap:
        layer: Any = self
        head_norms = layer.q_norm is not None
        mlp: tuple[str, ...] = ("gate", "up", "down") if self.gate is not None else ("up", "down")
        if self.routing is not None:
            mlp = tuple([name for name in _MIXTURE if name in self._modules])
        return _MAPS[mlp, self.placement == "sandwich", head_norms]

    def _set_options(self, policy: str | Policy, backend: str, accumulate_into: str | None) -> None:
        """Do nothing; `FusedLayer` has these options."""

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_router_logits: bool = False,
    ) -> Any:
        """Compute `FusedRematCausalLayer.forward`."""
        if return_router_logits:
            _check_experts(self)
        masks = (attn_mask, key_padding_mask, key_lengths, cu_seqlens)
        layer: Any = self
        post, sandwich = self.placement == "post", self.placement == "sandwich"
        y = _attended(layer, x if post else layer.norm1(x), rope, masks)
        y = F.dropout(layer.post1(y) if sandwich else y, layer.dropout, layer.training)
        mid = layer.norm1(x + y) if post else x + y
        read = mid if post else layer.norm2(mid)
        y, logits = (_mlp(layer, read), None) if layer.routing is None else mixture(layer, read)
        y = F.dropout(layer.post2(y) if sandwich else y, layer.dropout, layer.training)
        out: Tensor = layer.norm2(mid + y) if post else mid + y
        return (out, logits) if return_router_logits else out


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
        gated: act(gate) * up, else act(up). experts: a mixture of experts instead of the MLP, with
            dim_feedforward hidden units each, which this `RouterSpec` chooses from;
            shared_feedforward: hidden units of a shared expert, 0 for none; shared_gate: its result
            is multiplied by sigmoid(shared_router(x)) (Qwen2-MoE). Experts have no dropout inside.
        bias: of linear layers (and LayerNorms); qkv_bias: of
            q, k and v, None for `bias` (True in Qwen2).
        window: number of keys before its own position that a query attends to (and after it, if
            not causal); None for all. softcap: of the scores, 0 for none. attention_dropout: of
            probabilities, None for dropout.
        rope_interleaved: rotated pairs are neighbors; else i and i + R/2.
        policy, backend, accumulate_into: as in `FusedRematLayer`.

    Shapes: x (B, S, d_model); returns the same, in x.dtype; under autocast in the dtype of
        ordinary operations. With experts, `layer(x, return_router_logits=True)` returns a pair of
        that and the router's logits (B * S, E), differentiable; they are kept, E elements a token,
        and compiled graphs break at such a call.
    Units: bytes kept per token at 16 bits, with Q = nhead * head_dim, K = kv_heads * head_dim and F
        gated, pre-norm: full 2·D, lean 2·D + 2·Q, balanced 4·D + 2·Q, fast 4·D + 4·Q + 4·K, none
        4·F more, plus statistics (8 bytes, and 4·nhead where `attn` is kept); with experts, a byte
        for each chosen expert, and what `ops.moe` lists.
    Raises: ValueError, TypeError for arguments and inputs that do not fit, and router logits of a
        layer without experts; RuntimeError for mixed dtypes, and in backward as `FusedRematLayer`.
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

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_router_logits: bool = False,
    ) -> Any:
        """Compute the layer on x (B, S, d_model).

        rope: (cos, sin), (S, R/2) or (B, S, R/2): the first R elements of a head are rotated.
        attn_mask: broadcasts to (B, nhead, S, S); bool (**True: attended**, as in SDPA) or float.
        key_padding_mask: (B, S); bool (**True: excluded**) or float; on either side.
        key_lengths, cu_seqlens: of padded and of packed sequences, as in `ops.attention`.
        return_router_logits: return (y, logits), with the router's logits (B * S, E); the losses of
        `fused_remat.ops` take them.
        """
        return self._call(
            x=x, rope=rope, attn_mask=attn_mask, key_padding_mask=key_padding_mask,
            key_lengths=key_lengths, cu_seqlens=cu_seqlens,
            return_router_logits=return_router_logits,
        )  # fmt: skip

    def _example(self) -> Graph:
        spec = transformer_spec(
            "rms_norm", 1e-6, "relu", placement=self.placement, gated=self.gate is not None,
            num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, projection="split", rotary=True,
            qk_norm_eps=None if self.q_norm is None else 1e-6,
            moe=None if self.routing is None else moe_of(self),
        )  # fmt: skip
        return block_graph(spec)

    def _heads(self) -> dict[str, int]:
        return {"heads": self.nhead, "key and value heads": self.kv_heads}

    def _read(self, **arguments: Any) -> BlockInputs | Reason:
        return read_call(self, **arguments)


def read_call(
    layer: Any,
    x: Tensor,
    rope: Any = None,
    attn_mask: Any = None,
    key_padding_mask: Any = None,
    key_lengths: Any = None,
    cu_seqlens: Any = None,
    return_router_logits: bool = False,
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
        **rotary_tensors(x, layer.head_dim, *split_rope(rope), None, None),
        **read_masks(x, grid, attn_mask, key_padding_mask, key_lengths, cu_seqlens),
    }
    if not return_router_logits:
        return read_block(layer, layer._map, arguments)
    _check_experts(layer)
    if torch.compiler.is_compiling():
        return Reason("router logits are not an output of a compiled block", uncompiled=True)
    inputs = read_block(layer, layer._map, arguments)
    if isinstance(inputs, BlockInputs):
        inputs.graph, inputs.finish = with_side_outputs(inputs.graph, ("router",)), _with_logits
    return inputs


def _with_logits(out: Tensor, *logits: Tensor) -> tuple[Tensor, Tensor]:
    return out, logits[0].flatten(0, 1)


def _check_experts(layer: Any) -> None:
    if layer.routing is None:
        raise ValueError("return_router_logits=True needs experts, got a layer with experts=None")


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
        moe=None if layer.routing is None else moe_of(layer),
        dropout=(p_attention if layer.training else 0.0, p, p, p),
        loras=parts.loras,
        packed=parts.packed,
        **attention_fields(*heads, layer.is_causal, window, None, layer.softcap),
        projection="split",
        rotary="cos" in arguments,
        interleaved=layer.rope_interleaved,
        qk_norm_eps=parts.one_eps(of_heads=True),
        masks=masks_given(arguments),
    )
    if layer.routing is not None:
        parts.weights |= layer.experts.tensors()
        parts.weights["router.correction"] = layer._buffers.get("router_correction")
    tensors = {**parts.weights, **arguments}
    tensors["input"] = tensors.pop("x")
    return BlockInputs(block_graph(spec), tensors, spec)


#: Linear layers of mixtures of experts, in order.
_MIXTURE = ("router", "shared_router", "shared_gate", "shared_up", "shared_down")
#: By the linear layers of the MLP: with and without a gate, or a mixture.
_MLPS = (
    ("up", "down"), ("gate", "up", "down"), ("router",), ("router", *_MIXTURE[3:]),
    ("router", *_MIXTURE[2:]), (*_MIXTURE[:2], *_MIXTURE[3:]), _MIXTURE,
)  # fmt: skip


def _layer_map(mlp: tuple[str, ...], sandwich: bool, normed_heads: bool) -> LayerMap:
    norms = ("norm1", "post1", "norm2", "post2") if sandwich else ("norm1", "norm2")
    linears = {name: name for name in ("q", "k", "v", "proj")}
    linears |= {name.replace("up", "fc1").replace("down", "fc2"): name for name in mlp}
    mixes = "router" in mlp
    return LayerMap(
        describe=_describe,
        input="x",
        package=StackedExperts.__module__,
        containers={"experts": StackedExperts.__qualname__} if mixes else {},
        linears=linears,
        norms={name: name for name in norms},
        head_norms={name: name for name in ("q_norm", "k_norm") if normed_heads},
    )


#: By the MLP, whether norms are before and after, and whether heads are normed.
_MAPS = {key: _layer_map(*key) for key in itertools.product(_MLPS, (False, True), (False, True))}


def check_window(window: int | None) -> None:
    """Raise ValueError unless `window` is None or a count of keys."""
    if window is not None and (type(window) is not int or window < 0):
        raise ValueError(f"window must be a count of keys or None, got {window!r}")


def _mlp(layer: Any, x: Tensor) -> Tensor:
    act = ACTIVATIONS[layer.activation].fwd
    y = act(layer.up(x)) if layer.gate is None else act(layer.gate(x)) * layer.up(x)
    down: Tensor = layer.down(F.dropout(y, layer.dropout, layer.training))
    return down


def _attended(
    layer: Any, x: Tensor, rope: tuple[Tensor, Tensor] | None, masks: tuple[Tensor | None, ...]
) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (-1, layer.head_dim)) for part in (layer.q, layer.k, layer.v))
    if layer.q_norm is not None:
        q, k = layer.q_norm(q), layer.k_norm(k)
    if rope is not None:
        q, k = (_rotated(t, *rope, layer.rope_interleaved).to(v.dtype) for t in (q, k))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    p = layer.attention_dropout if layer.training else 0.0
    if all(mask is None for mask in masks) and layer.window is None and not layer.softcap:
        y = F.scaled_dot_product_attention(
            q, k, v, None, p, layer.is_causal, enable_gqa=layer.nhead != layer.kv_heads
        )
    else:
        y = _masked(q, k, v, p, _mask(layer, x, masks), layer.softcap)
    out: Tensor = layer.proj(y.transpose(1, 2).flatten(2))
    return out


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the first elements of heads (B, S, H, E), in float32 at least."""
    wide, rotated = torch.promote_types(x.dtype, torch.float32), 2 * cos.shape[-1]
    cos, sin = (t.unsqueeze(-2).to(wide) for t in (cos, sin))
    turned, rest = x[..., :rotated].to(wide), x[..., rotated:].to(wide)
    if interleaved:
        x1, x2 = turned.unflatten(-1, (-1, 2)).unbind(-1)
        y = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).flatten(-2)
    else:
        x1, x2 = turned.chunk(2, -1)
        y = torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1)
    return torch.cat((y, rest), -1).to(x.dtype)


def _mask(layer: Any, x: Tensor, masks: tuple[Tensor | None, ...]) -> Tensor:
    """Return one mask, (B, H, S, S), that is added to the scores; reads no value of `masks`."""
    attn_mask, padding, lengths, cu = masks
    position = torch.arange(x.shape[1], device=x.device)
    before = position[:, None] - position  # how far before the query the key is
    seen = before >= 0 if layer.is_causal else torch.ones_like(before, dtype=torch.bool)
    if layer.window is not None:
        seen = seen & (before.abs() <= layer.window)
    if cu is not None:
        sequence = (position[:, None] >= cu).sum(-1)  # 0 and len(cu) stand for none
        inside = (sequence > 0) & (sequence < cu.shape[0])
        seen = seen & (sequence[:, None] == sequence) & inside
    seen = seen[None, None]
    if lengths is not None:
        seen = seen & (position < lengths[:, None])[:, None, None]
    added = []
    for mask, excludes in ((attn_mask, False), (padding, True)):
        if mask is None:
            continue
        mask = mask[:, None, None] if excludes else mask
        if mask.dtype == torch.bool:
            seen = seen & (~mask if excludes else mask)
        else:
            added.append(mask)
    scores = torch.zeros((), dtype=torch.float32, device=x.device).masked_fill(~seen, -torch.inf)
    for mask in added:
        scores = scores + mask
    return scores


def _masked(q: Tensor, k: Tensor, v: Tensor, p: float, mask: Tensor, softcap: float) -> Tensor:
    """Compute attention with a mask that is added; queries without any key give 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    if not softcap:
        return F.scaled_dot_product_attention(q, k, v, mask.to(q.dtype), p)
    scores = softcap * torch.tanh((q @ k.mT) * (q.shape[-1] ** -0.5 / softcap)) + mask
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    probs = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    return F.dropout(probs, p).to(v.dtype) @ v

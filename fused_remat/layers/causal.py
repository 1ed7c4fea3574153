"""`FusedRematCausalLayer`: a layer of a language model in a fraction of the activation memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.layers import eligibility
from fused_remat.layers.fused_layer import DropInLayer
from fused_remat.layers.linears import (
    LinearParts,
    block_tensors,
    is_readable,
    read_linear,
    tensor_of,
    unwrapped,
)
from fused_remat.layers.plain_causal import CausalLayer, check_window
from fused_remat.layers.precision import low_dtype, precision_of, why_not_autocast
from fused_remat.layers.read import LayerCall, Place, in_module
from fused_remat.ops.activation import ActivationLike, has_hooks
from fused_remat.ops.checks import check_p, lengths_of, mask_of, masks_given, padding_of
from fused_remat.ops.pieces import rotary_tensors
from fused_remat.policies import Policy
from fused_remat.spec import (
    AttentionOptions,
    BlockSpec,
    LoraSpec,
    score_fields,
    transformer_spec,
)
from fused_remat.steps.norm import NORMS


class FusedRematCausalLayer(DropInLayer, CausalLayer):
    """A layer of a language model, Llama's by default, that rebuilds what backward asks for.

    h = x + proj(attention(rotary(q, k), v)), h + down(act(gate(norm2(h))) * up(norm2(h))), with
    q, k, v linear layers of norm1(x).

    Submodules are `nn.Linear` (q, k, v, proj, gate, up, down) and `nn.RMSNorm` or `nn.LayerNorm`
    (norm1, norm2, with qk_norm q_norm and k_norm, with "sandwich" post1 and post2). Linear ones may
    be PEFT's LoRA on `nn.Linear`. Where a submodule is of another kind or has hooks, and where a
    call is exported, transformed or traced, the same is computed by calling the submodules in
    ordinary PyTorch; in training under non-reentrant checkpoint, with one `FusedRematWarning`.

    Args:
        d_model, nhead, dim_feedforward, dropout: as in `nn.TransformerEncoderLayer`.
        activation: a name ("relu", "gelu", "gelu_tanh", "silu", "tanh"), or its function.
        kv_heads: heads of keys and values, which divide nhead; None: nhead. head_dim: None for
            d_model / nhead.
        norm, norm_eps: "rms_norm" or "layer_norm"; qk_norm: an RMSNorm of each query and key head
            (Qwen3). placement: "pre"; "post": after the sums; "sandwich": before and after each
            half (Gemma-2).
        gated: act(gate) * up, else act(up). bias: of linear layers (and LayerNorms); qkv_bias: of
            q, k and v, None for `bias` (True in Qwen2).
        window: how many keys before its own place a query sees (and after it, if not causal); None
            for all. softcap: of the scores. attention_dropout: of probabilities, None for dropout.
        rope_interleaved: rotated pairs are neighbours; else i and i + R/2.
        policy, backend, accumulate_into: as in `FusedRematLayer`.

    Shapes: x (B, S, d_model); returns the same, in x.dtype, under autocast in the dtype that the
        same in ordinary operations has.
    Units: bytes kept a token at 16 bits, with Q = nhead * head_dim, K = kv_heads * head_dim and F
        gated, pre-norm: full 2·D, lean 2·D + 2·Q, balanced 4·D + 2·Q, fast 4·D + 4·Q + 4·K, none
        4·F more, plus statistics (8 bytes, and 4·nhead where `attn` is kept).
    Raises: ValueError, TypeError for arguments and inputs that do not fit; RuntimeError for mixed
        dtypes, and in backward as `FusedRematLayer`.
    Source: Touvron et al. 2023; GQA: Ainslie et al. 2023; RoPE: Su et al. 2021.

    >>> layer = FusedRematCausalLayer(64, 4, 128, kv_heads=2, policy="lean")
    >>> angles = torch.outer(torch.arange(16), 10000 ** -(torch.arange(8) / 8))
    >>> x = torch.randn(2, 16, 64, requires_grad=True)
    >>> layer(x, rope=(angles.cos(), angles.sin())).sum().backward()
    >>> x.grad.shape
    torch.Size([2, 16, 64])
    """

    stock = CausalLayer

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
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, kv_heads=kv_heads,
            head_dim=head_dim, norm=norm, norm_eps=norm_eps, gated=gated, bias=bias,
            qkv_bias=qkv_bias, qk_norm=qk_norm, window=window, softcap=softcap,
            attention_dropout=attention_dropout, is_causal=is_causal,
            rope_interleaved=rope_interleaved, placement=placement, device=device, dtype=dtype,
        )  # fmt: skip
        self.policy = policy
        self.backend = backend
        self.accumulate_into = accumulate_into

    def forward(  # type: ignore[override]  # that of the base takes the tables one by one
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """The layer on x (B, S, d_model).

        rope: (cos, sin), (S, R/2) or (B, S, R/2): the first R elements of a head are rotated.
        attn_mask: broadcasts to (B, nhead, S, S); bool (**True takes part**, as in SDPA) or float.
        key_padding_mask: (B, S); bool (**True is excluded**) or float; on either side.
        key_lengths, cu_seqlens: of padded and of packed sequences, as in `ops.attention`.
        """
        cos, sin = _tables(rope)
        return self._serve(x, cos, sin, attn_mask, key_padding_mask, key_lengths, cu_seqlens)

    def why_not_fused(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> str | None:
        """Why this call of `forward` would not take the fused path, or None if it would.

        >>> layer = FusedRematCausalLayer(16, 2, 32)
        >>> layer.up = torch.nn.Bilinear(2, 3, 4)
        >>> layer.why_not_fused(torch.zeros(1, 5, 16))
        'its up is a Bilinear, not a Linear'
        """
        cos, sin = _tables(rope)
        return self._why_not(x, cos, sin, attn_mask, key_padding_mask, key_lengths, cu_seqlens)

    def _example(self) -> Graph:
        spec = transformer_spec(
            "rms_norm", 1e-6, "relu", placement=self.placement, gated=self.gate is not None,
            num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, projection="split", rotary=True,
            qk_norm_eps=None if self.q_norm is None else 1e-6,
        )  # fmt: skip
        return block_graph(spec)

    def _places(self) -> tuple[Place, ...]:
        return PLACES

    def _heads(self) -> dict[str, int]:
        return {"heads": self.nhead, "key and value heads": self.kv_heads}

    def _choose(self, *args: Any) -> LayerCall | str:
        return call_of(self, *args)


def _tables(rope: Any) -> tuple[Any, Any]:
    if rope is None:
        return None, None
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise TypeError(f"rope takes two Tensors, (cos, sin), got {rope!r}")
    return rope[0], rope[1]


#: The block's names of the linear layers, and the layer's own.
_LINEARS = {
    "q": "q", "k": "k", "v": "v", "proj": "proj", "gate": "gate", "fc1": "up", "fc2": "down",
}  # fmt: skip
_NORMS = ("norm1", "norm2", "post1", "post2", "q_norm", "k_norm")
#: Where a layer may have its block's weights.
PLACES = (
    *(in_module(name, own) for name, own in _LINEARS.items()),
    *(in_module(name, name) for name in _NORMS),
)
_KINDS = {row.module: kind for kind, row in NORMS.items()}
_FORWARDS: dict[Any, Any] = {module: module.forward for module in _KINDS}
_PLAIN = (Tensor, nn.Parameter)


def call_of(
    layer: Any,
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> LayerCall | str:
    """The block that serves this call of a `CausalLayer`, or why the fused path cannot.

    Raises: TypeError, ValueError, RuntimeError for inputs that do not fit.

    >>> import torch
    >>> from fused_remat.layers.plain_causal import CausalLayer
    >>> call_of(CausalLayer(8, 2, 16), torch.zeros(1, 3, 8)).spec.linears
    ('q', 'k', 'v', 'proj', 'gate', 'fc1', 'fc2')
    """
    inputs = inputs_of(layer, x, cos, sin, attn_mask, key_padding_mask, key_lengths, cu_seqlens)
    reason = eligibility.why_not_context(x, "x") or eligibility.why_not_global_hooks()
    if reason is not None:
        return reason
    if type(x) not in _PLAIN:
        return f"x is a {type(x).__name__}"
    linears = _linears(layer)
    if isinstance(linears, str):
        return linears
    norms = _norms(layer)
    if isinstance(norms, str):
        return norms
    kind, eps, qk_eps, affine = norms
    low = low_dtype(x)
    weights, loras = block_tensors(linears, x.dtype if low is None else None)
    params = {**weights, **affine}
    spec = _spec(layer, kind, eps, qk_eps, inputs, loras)
    reason = why_not_weights(x, params, spec, low, "x")
    if reason is not None:
        return reason
    precision = None
    if low is not None:
        precision = precision_of(x, params, low, layer.placement != "post")
    return LayerCall(spec, {**params, **inputs}, {}, False, False, precision)


def inputs_of(
    layer: Any,
    x: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> dict[str, Tensor | None]:
    """What a call is given, by the block's names, checked."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a Tensor, got {type(x).__name__}")
    if x.dim() != 3 or x.shape[-1] != layer.d_model or not x.is_floating_point():
        raise ValueError(
            f"x is {x.dtype} of shape {tuple(x.shape)}, expected floating (B, S, {layer.d_model})"
        )
    grid = (x.shape[0], layer.nhead, x.shape[1], x.shape[1])
    rope = None if cos is None and sin is None else (cos, sin)
    return {
        "input": x,
        **rotary_tensors(x, layer.head_dim, rope, None, None),
        "mask": mask_of(attn_mask, grid, x),
        "padding": padding_of(key_padding_mask, grid, x),
        **lengths_of(key_lengths, cu_seqlens, None, grid, x, "cu_seqlens"),
    }


def _linears(layer: Any) -> dict[str, LinearParts] | str:
    """The linear layers by the block's names, or why one of them cannot be read."""
    found = {}
    for name, own in _LINEARS.items():
        if own == "gate" and layer.gate is None:
            continue
        parts = read_linear(layer._modules.get(own))
        if isinstance(parts, str):
            return f"its {own} {parts}"
        found[name] = parts
    return found


def _norms(layer: Any) -> tuple[str, float, float, dict[str, Tensor | None]] | str:
    """The kind and eps of the norms, the eps of the heads', and their tensors; or why not."""
    names = ["norm1", "norm2", *(["post1", "post2"] if layer.placement == "sandwich" else [])]
    heads = ["q_norm", "k_norm"] if layer.q_norm is not None else []
    eps: dict[str, set[Any]] = {"": set(), "heads": set()}
    kinds, affine = set(), {}
    for name in names + heads:
        norm: Any = unwrapped(layer._modules.get(name))
        if isinstance(norm, str):
            return f"its {name} {norm}"
        kind = type(norm)
        if kind not in _KINDS or (name in heads and kind is not nn.RMSNorm):
            return f"its {name} is a {kind.__name__}, not a norm that a block has there"
        if has_hooks(norm):
            return f"its {name} has hooks"
        if "forward" in norm.__dict__ or kind.forward is not _FORWARDS[kind]:
            return f"its {name}.forward was replaced"
        width = (layer.head_dim if name in heads else layer.d_model,)
        if tuple(norm.normalized_shape) != width:
            return f"its {name} is over {tuple(norm.normalized_shape)}, not {width}"
        eps["heads" if name in heads else ""].add(norm.eps)
        kinds |= set() if name in heads else {kind}
        affine[f"{name}.weight"], bias = tensor_of(norm, "weight"), tensor_of(norm, "bias")
        if name not in heads:
            affine[f"{name}.bias"] = bias
    if len(kinds) > 1 or any(len(found) > 1 or None in found for found in eps.values()):
        return "its norms differ in kind or eps, or have no eps"
    if any(affine[f"{name}.weight"] is None for name in heads):
        return "its q_norm or k_norm has no weight"
    (block_eps,) = eps[""]
    (head_eps,) = eps["heads"] or (block_eps,)
    return _KINDS[kinds.pop()], float(block_eps), float(head_eps), affine


def _spec(
    layer: Any,
    norm: str,
    eps: float,
    qk_eps: float,
    inputs: Mapping[str, Tensor | None],
    loras: tuple[LoraSpec, ...],
) -> BlockSpec:
    """What a call computes.

    Raises: ValueError for what the layer was set to and no layer has.
    """
    p = check_p("dropout", layer.dropout) if layer.training else 0.0
    p_attention = check_p("attention_dropout", layer.attention_dropout)
    check_window(layer.window)  # -1 would be none to a block
    options: AttentionOptions = {"softcap": float(layer.softcap)}
    if layer.window is not None:
        options["window"] = (layer.window, layer.window)
    return transformer_spec(
        norm,
        eps,
        layer.activation,
        placement=layer.placement,
        gated=layer.gate is not None,
        dropout=(p_attention if layer.training else 0.0, p, p, p),
        loras=loras,
        num_heads=layer.nhead,
        num_kv_heads=layer.kv_heads,
        head_dim=layer.head_dim,
        **score_fields(layer.head_dim, layer.is_causal, options),
        projection="split",
        rotary="cos" in inputs,
        interleaved=layer.rope_interleaved,
        qk_norm_eps=None if layer.q_norm is None else qk_eps,
        masks=masks_given(inputs),
    )


def why_not_weights(
    x: Tensor,
    tensors: Mapping[str, Tensor | None],
    spec: BlockSpec,
    low: torch.dtype | None,
    called: str,
) -> str | None:
    """Why a block of `spec` cannot take `x`, (B, S, D), with these weights of a layer.

    `low` is autocast's dtype, None if it is off; `called`, what the layer calls `x`.

    >>> from fused_remat.spec import nn_layer_spec
    >>> spec = nn_layer_spec(True, 1, 8, "gelu")
    >>> widths = {"qkv": (24, 8), "proj": (8, 8), "fc1": (32, 8), "fc2": (8, 30)}
    >>> weights = {f"{name}.weight": torch.zeros(shape) for name, shape in widths.items()}
    >>> why_not_weights(torch.zeros(1, 3, 8), weights, spec, None, "x")
    'fc2.weight has shape (8, 30), expected (8, 32)'
    """
    compiling = torch.compiler.is_compiling()  # Dynamo would see through a cache, and say so
    names = spec.weights if compiling else _weights_of(spec)
    given = {name: tensors.get(name) for name in names}
    for name, p in given.items():
        if p is None:
            continue
        if type(p) not in _PLAIN and not is_readable(p):
            return f"{name} is a {type(p).__name__}"
        wide = low is not None or (name.startswith("lora") and p.dtype == torch.float32)
        if (p.dtype is not x.dtype and not wide) or p.device != x.device:
            return f"{called} is {x.dtype} on {x.device} but {name} is {p.dtype} on {p.device}"
    reason = None if low is None else why_not_autocast(x, given, low)
    if reason is not None:
        return reason.replace("src", called)
    shapes = tuple([None if p is None else p.shape for p in given.values()])
    why_not = _why_not_shapes.__wrapped__ if compiling else _why_not_shapes
    return why_not(x.shape[-1], names, shapes, spec)


@functools.lru_cache(maxsize=1024)
def _weights_of(spec: BlockSpec) -> tuple[str, ...]:
    return spec.weights


@functools.lru_cache(maxsize=1024)
def _why_not_shapes(
    width: int,
    names: tuple[str, ...],
    shapes: tuple[torch.Size | None, ...],
    spec: BlockSpec,
) -> str | None:
    given = dict(zip(names, shapes, strict=True))
    fc1 = given["fc1.weight"]
    assert fc1 is not None
    linears = spec.linear_shapes(width, fc1[0])
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in linears.items():
        expected |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in spec.norms:
        expected |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    expected |= {f"{name}_norm.weight": (spec.attention.head_dim,) for name in "qk"}
    for name, wanted in expected.items():
        found = given.get(name)
        if found is not None and tuple(found) != wanted:
            return f"{name} has shape {tuple(found)}, expected {wanted}"
    for i, lora in enumerate(spec.loras):
        a, b = given[f"lora.{i}.A"], given[f"lora.{i}.B"]
        out, columns = linears[lora.layer]
        if a is None or b is None or (*a, *b) != (a[0], columns, out, a[0]):
            return f"an adapter of its {lora.layer} has matrices that do not fit"
    return None

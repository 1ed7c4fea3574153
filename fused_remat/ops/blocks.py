"""Blocks as functions: a transformer encoder's, a language model's, and the attention half."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.graph.build import block_graph
from fused_remat.layer_specs import nn_layer_spec, transformer_spec
from fused_remat.ops.activation import (
    ActivationLike,
    known_activation,
    on_matrices,
    resolve_activation,
)
from fused_remat.ops.checks import (
    argument_name,
    check_alike,
    check_heads,
    check_norm_kind,
    check_p,
    check_shape,
    check_tensor,
    check_weights,
    hidden_width,
    masks_given,
    read_masks,
    seed_tensor,
)
from fused_remat.ops.parts import rotary_fields, rotary_tensors, split_rope
from fused_remat.policies import Policy
from fused_remat.spec import (
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    LoraSpec,
    NormSpec,
    attention_fields,
    lora_params,
)

#: A low-rank update: the name of a layer, A (rank, in), B (out, rank), scale; DoRA's magnitudes.
Update = tuple[str, Tensor, Tensor, float] | tuple[str, Tensor, Tensor, float, Tensor]


def encoder_block(
    x: Tensor,
    weights: Mapping[str, Tensor | None],
    nhead: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    norm_first: bool = False,
    activation: ActivationLike = "relu",
    eps: float = 1e-5,
    lora: Sequence[Update] = (),
    lora_dropout_p: float = 0.0,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute a transformer encoder block, pre- or post-norm, that keeps what `policy` names.

    Shapes: x (B, S, D); returns the same, in x.dtype. `weights` maps names to tensors:
        "qkv.weight" (3D, D), "proj.weight" (D, D), "fc1.weight" (F, D), "fc2.weight" (D, F);
        optional are "norm1.weight" and "norm2.weight" (D,), and a ".bias" of each of the six.
    attn_mask, key_padding_mask, is_causal: as in `attention`.
    dropout_p: of all four sites: attention's probabilities, both residual branches, the MLP.
    activation: as in `mlp`; a function is called with entire (B, S, F) tensors.
    lora, lora_dropout_p: updates of "qkv", "proj", "fc1" and "fc2", as in `causal_block`.
    Units: bytes kept a token at 16 bits = 2·D (full) to 22·D (none), plus statistics.
    Raises: ValueError for shapes that do not fit, unknown or missing weights, an unknown policy or
        activation; RuntimeError for mixed dtypes or devices.
    Source: Vaswani et al. 2017; pre-norm after Xiong et al. 2020.

    >>> import torch
    >>> shapes = {"qkv": (24, 8), "proj": (8, 8), "fc1": (16, 8), "fc2": (8, 16)}
    >>> weights = {f"{k}.weight": torch.randn(s, requires_grad=True) for k, s in shapes.items()}
    >>> y = encoder_block(torch.randn(3, 5, 8), weights, nhead=2, norm_first=True, policy="lean")
    >>> y.sum().backward(); y.shape, weights["fc1.weight"].grad.shape
    (torch.Size([3, 5, 8]), torch.Size([16, 8]))
    """
    _check_stream(x, weights)
    *lead, d_model = x.shape
    check_heads(d_model, nhead, "x's width", "nhead")
    act = resolve_activation(activation, x, (1, 2, hidden_width(x, weights)))
    functions = {name: on_matrices(fn, lead) for name, fn in act.functions.items()}
    tensors = _inputs(x, nhead, seed, attn_mask, key_padding_mask)
    spec = nn_layer_spec(
        norm_first,
        nhead,
        d_model // nhead,
        act.name,
        (float(eps), float(eps)),
        check_p("dropout_p", dropout_p),
        causal=is_causal,
        masks=masks_given(tensors),
        true_means="attend",
        captured=len(act.captured),
        loras=_lora_specs(lora, lora_dropout_p, x),
    )
    tensors |= {**_weights(x, weights, spec, lora), **act.captured}
    return run_block(
        block_graph(spec), policy, tensors, backend=backend, functions=functions,
        preserve_strides=norm_first,
    )  # fmt: skip


def causal_block(
    x: Tensor,
    weights: Mapping[str, Tensor | None],
    nhead: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    kv_heads: int | None = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_interleaved: bool = False,
    placement: str = "pre",
    norm: str = "rms_norm",
    eps: float = 1e-6,
    norm_offset: float = 0.0,
    qk_norm_eps: float | None = None,
    activation: ActivationLike = "silu",
    attention_dropout_p: float | None = None,
    lora: Sequence[Update] = (),
    lora_dropout_p: float = 0.0,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Compute a block of a language model, by default Llama's, that keeps what `policy` names.

    h = x + proj(attention(rotary(qkv(norm1(x))))), h + fc2(act(gate(norm2(h))) * fc1(norm2(h)))

    Shapes: x (B, S, D); returns the same, in x.dtype. `weights` maps names to tensors, with H query
        and Hkv key heads, each E wide:
        "qkv.weight" ((H + 2·Hkv)·E, D), or "q.weight" (H·E, D), "k.weight" and "v.weight"
        (Hkv·E, D); "proj.weight" (D, H·E); "fc1.weight" (F, D), "fc2.weight" (D, F); with a
        "gate.weight" (F, D) the MLP is gated, as above; without, it is fc2(act(fc1)).
        Optional are "norm1.weight" and "norm2.weight" (D,), a ".bias" of each of the above,
        "q_norm.weight" and "k_norm.weight" (E,), and with placement "sandwich" "post1.weight" and
        "post2.weight" (D,).
    placement: "pre"; "post": norm1(x + attention), norm2(h + mlp); "sandwich": both branches have
        a norm before and after, x + post1(attention(norm1(x))) (Gemma-2).
    norm: "rms_norm" or "layer_norm". norm_offset: added to the weights of all norms in float32 (1
        for Gemma). qk_norm_eps: of q_norm and k_norm, None for eps.
    activation: a name, or a function or module that has one (`F.silu`, `nn.GELU("tanh")`).
    dropout_p: of attention's probabilities, both residual branches and the MLP;
        attention_dropout_p: of the first alone, None for dropout_p.
    rope, rope_interleaved: (cos, sin), (S, R/2) or (B, S, R/2), as in `rotary`; positions of tokens
        are in these tables alone.
    is_causal, window, attn_mask, key_padding_mask, key_lengths, scale, softcap: as in `attention`.
        cu_seqlens: as its cu_seqlens_q.
    lora: (layer, A, B, scale): adds scale * dropout(x) @ A.T @ B.T to a layer of the names above;
        A (rank, in), B (out, rank), in x.dtype or float32. With magnitudes (out,) as a fifth, it is
        DoRA, and the layer's only update. lora_dropout_p: of x, for each update.
    Units: bytes kept a token at 16 bits = 2·D (full), 2·(D + H·E) (lean), 4·D + 2·H·E (balanced),
        and 2·(H + 2·Hkv)·E (fast), and 4·F (none; 2·F not gated), plus statistics.
    Raises: ValueError for shapes that do not fit, unknown or missing weights, an unknown policy,
        activation, norm or placement; RuntimeError for mixed dtypes or devices.
    Source: Touvron et al. 2023; GQA: Ainslie et al. 2023; LoRA: Hu et al. 2021.

    >>> import torch
    >>> shapes = {"q": (8, 8), "k": (4, 8), "v": (4, 8), "proj": (8, 8), "gate": (16, 8),
    ...           "fc1": (16, 8), "fc2": (8, 16), "norm1": (8,), "norm2": (8,)}
    >>> weights = {f"{k}.weight": torch.randn(s, requires_grad=True) for k, s in shapes.items()}
    >>> angles = torch.outer(torch.arange(5), torch.tensor([1.0, 0.01]))
    >>> rope = (angles.cos(), angles.sin())
    >>> y = causal_block(torch.randn(3, 5, 8), weights, nhead=2, kv_heads=1, rope=rope)
    >>> y.sum().backward(); y.shape, weights["gate.weight"].grad.shape
    (torch.Size([3, 5, 8]), torch.Size([16, 8]))
    """
    _check_stream(x, weights)
    heads = _heads(x, weights, nhead, kv_heads)
    tensors = _inputs(x, nhead, seed, attn_mask, key_padding_mask, key_lengths, cu_seqlens)
    q_norm, k_norm = weights.get("q_norm.weight"), weights.get("k_norm.weight")
    tensors |= rotary_tensors(x, heads[2], *split_rope(rope), q_norm, k_norm)
    qk_norm_eps = eps if qk_norm_eps is None else qk_norm_eps
    p = check_p("dropout_p", dropout_p)
    p_attention = p if attention_dropout_p is None else attention_dropout_p
    spec = transformer_spec(
        check_norm_kind(norm),
        float(eps),
        known_activation(activation),
        offset=float(norm_offset),
        placement=placement,
        gated=weights.get("gate.weight") is not None,
        dropout=(check_p("attention_dropout_p", p_attention), p, p, p),
        loras=_lora_specs(lora, lora_dropout_p, x),
        **attention_fields(*heads, is_causal, window, scale, softcap),
        projection="split" if weights.get("qkv.weight") is None else "packed",
        rotary="cos" in tensors,
        interleaved=bool(rope_interleaved),
        qk_norm_eps=None if q_norm is None else float(qk_norm_eps),
        masks=masks_given(tensors),
    )
    tensors |= _weights(x, weights, spec, lora)
    return run_block(block_graph(spec), policy, tensors, backend=backend)


def attention_block(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    nhead: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    residual_dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    kv_heads: int | None = None,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    norm: str = "layer_norm",
    eps: float = 1e-5,
    rope: tuple[Tensor, Tensor] | None = None,
    rope_interleaved: bool = False,
    q_norm_weight: Tensor | None = None,
    k_norm_weight: Tensor | None = None,
    qk_norm_eps: float = 1e-6,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Compute x + dropout(proj(attention(qkv(norm(x))))), the first half of a pre-norm block.

    Shapes: x (B, S, D), norm_weight and norm_bias (D,) or None, qkv_weight ((H + 2·Hkv)·E, D) with
        the query heads first, then the key heads, then the value heads, qkv_bias of its rows,
        proj_weight (D, H·E), proj_bias (D,); returns (B, S, D) in x.dtype. Hkv: `kv_heads`, or H.
    norm: "layer_norm" or "rms_norm".
    cu_seqlens: as cu_seqlens_q of `attention`; a token of no sequence becomes x + dropout(proj(0)).
    rope, rope_interleaved: (cos, sin) that rotate queries and keys, as in `rotary`.
    q_norm_weight, k_norm_weight, qk_norm_eps: of the RMSNorm of each head before, as in `rotary`.
    All others: as in `attention`.
    Units: bytes kept = the input and the norm's statistics; lean and balanced: and attention's
        output with its logsumexp; fast and none: and the packed projection (as attention reads
        it; where heads are normed, as it was before).
    Raises: as `attention` and `rotary`.
    Source: Vaswani et al. 2017; pre-norm after Xiong et al. 2020.

    >>> import torch
    >>> x = torch.randn(2, 5, 8, requires_grad=True)
    >>> qkv, proj = torch.randn(24, 8), torch.randn(8, 8)
    >>> attention_block(x, torch.ones(8), None, qkv, None, proj, None, nhead=2).shape
    torch.Size([2, 5, 8])
    """
    weights = {
        "norm.weight": norm_weight, "norm.bias": norm_bias, "qkv.weight": qkv_weight,
        "qkv.bias": qkv_bias, "proj.weight": proj_weight, "proj.bias": proj_bias,
    }  # fmt: skip
    if qkv_weight is None or proj_weight is None:
        raise TypeError("qkv_weight and proj_weight must be Tensors, got None")
    _check_stream(x, weights, argument_name)
    heads = _heads(x, weights, nhead, kv_heads, argument_name)
    tensors = _inputs(x, nhead, seed, attn_mask, key_padding_mask, key_lengths, cu_seqlens)
    tensors |= rotary_tensors(x, heads[2], *split_rope(rope), q_norm_weight, k_norm_weight)
    spec = AttentionSpec(
        **attention_fields(*heads, is_causal, window, scale, softcap),
        dropout=check_p("dropout_p", dropout_p),
        masks=masks_given(tensors),
        **rotary_fields(tensors, rope_interleaved, qk_norm_eps),
    )
    branch = BranchSpec(
        op=spec,
        norm=NormSpec(kind=check_norm_kind(norm), eps=float(eps)),
        dropout=check_p("residual_dropout_p", residual_dropout_p),
    )
    block = BlockSpec(kind=f"{spec.heads_kind}attention_block", branches=(branch,))
    check_weights(x, weights, block, argument_name)
    tensors |= weights
    return run_block(block_graph(block), policy, tensors, backend=backend)


def _check_stream(
    x: Tensor, weights: Mapping[str, Tensor | None], shown: Callable[[str], str] = str
) -> None:
    """Raise unless x is (B, S, D), and the weights have its dtype and device."""
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must map names to tensors, got {type(weights).__name__}")
    check_alike({"x": x, **{shown(name): t for name, t in weights.items()}})
    check_shape("x", x, ("B", "S", "D"))


def _heads(
    x: Tensor,
    weights: Mapping[str, Tensor | None],
    nhead: int,
    kv_heads: int | None,
    shown: Callable[[str], str] = str,
) -> tuple[int, int, int]:
    """Return H, Hkv and E, from the rows of the packed or the query projection."""
    kv_heads = nhead if kv_heads is None else kv_heads
    check_heads(nhead, kv_heads)
    packed, q = weights.get("qkv.weight"), weights.get("q.weight")
    if (packed is None) == (q is None):
        raise ValueError("weights must have either qkv.weight, or q.weight, k.weight and v.weight")
    name, heads = ("q.weight", nhead) if packed is None else ("qkv.weight", nhead + 2 * kv_heads)
    weight = weights[name]
    assert weight is not None
    check_shape(shown(name), weight, (f"{heads}·E", x.shape[-1]), {"x": x})
    rows = weight.shape[0]
    if rows % heads:
        raise ValueError(
            f"{shown(name)} has shape {tuple(weight.shape)}, expected rows in multiples of {heads} "
            f"heads to go with x of shape {tuple(x.shape)}"
        )
    return nhead, kv_heads, rows // heads


def _inputs(
    x: Tensor,
    nhead: int,
    seed: int | Tensor | None,
    attn_mask: Tensor | None,
    padding: Tensor | None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """Return the tensors of a block other than its weights, checked."""
    grid = (x.shape[0], nhead, x.shape[1], x.shape[1])
    masks = read_masks(x, grid, attn_mask, padding, lengths, cu_seqlens)
    return {"input": x, "seed": seed_tensor(seed, x.device), **masks}


def _lora_specs(given: Sequence[Update], p: float, x: Tensor) -> tuple[LoraSpec, ...]:
    """Return the specs of low-rank updates in a block of `x`, with dropout `p` of their inputs."""
    p, specs = check_p("lora_dropout_p", p), []
    for update in given:
        if not isinstance(update, tuple) or len(update) not in (4, 5):
            size = f" of {len(update)}" if isinstance(update, tuple) else ""
            raise TypeError(f"lora takes (layer, A, B, scale), got {type(update).__name__}{size}")
        layer, a, b, scale, *magnitudes = update
        check_tensor(f"A of {layer}", a, (x.dtype, torch.float32), x)
        check_tensor(f"B of {layer}", b, (a.dtype,), x, ", as A")
        for m in magnitudes:
            check_tensor(f"magnitudes of {layer}", m, (x.dtype, torch.float32), x)
        own, is_dora = None if a.dtype == x.dtype else a.dtype, bool(magnitudes)
        specs.append(LoraSpec(layer=layer, scale=float(scale), dropout=p, dtype=own, dora=is_dora))
    return tuple(specs)


def _weights(
    x: Tensor, weights: Mapping[str, Tensor | None], spec: BlockSpec, lora: Sequence[Update]
) -> dict[str, Tensor | None]:
    """Return `weights` and the matrices of updates by the names of the block `spec`, checked."""
    unknown = sorted(set(weights).difference(spec.weights))
    if unknown:
        valid = ", ".join(sorted(spec.weights))
        raise ValueError(f"unknown weights {unknown}; valid: {valid}")
    check_weights(x, weights, spec)
    for layer, a, b, _, *magnitudes in lora:
        if layer not in spec.linears:
            raise ValueError(
                f"lora: there is no layer {layer!r} to update; valid: {', '.join(spec.linears)}"
            )
        weight = weights[f"{layer}.weight"]
        assert weight is not None
        out, width = weight.shape
        check_shape(f"A of {layer}", a, ("rank", width), {f"{layer}.weight": weight})
        check_shape(f"B of {layer}", b, (out, a.shape[0]), {"A": a, f"{layer}.weight": weight})
        for m in magnitudes:
            check_shape(f"magnitudes of {layer}", m, (out,), {f"{layer}.weight": weight})
    matrices = [matrix for _, a, b, _, *rest in lora for matrix in (a, b, *rest)]
    return {**weights, **dict(zip(lora_params(spec.loras), matrices, strict=True))}

"""The block of language models as a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from typing_extensions import Unpack

from fused_remat.graph.build import block_graph
from fused_remat.ops.activation import ActivationLike
from fused_remat.ops.inputs import (
    check_alike,
    check_heads,
    check_norm_kind,
    check_p,
    check_shape,
    check_weights,
    lists_attention_options,
    resolve_activation,
    seed_tensor,
)
from fused_remat.ops.layer import run_layer
from fused_remat.ops.lora import check_loras, lora_tensors, loras_of
from fused_remat.ops.masks import lengths_of, mask_of, masks_given, padding_of
from fused_remat.ops.rotary import rotary_tensors
from fused_remat.policies import Policy
from fused_remat.spec import AttentionOptions, score_fields, transformer_spec


@lists_attention_options
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
    lora: Sequence[tuple[str, Tensor, Tensor, float]] = (),
    lora_dropout_p: float = 0.0,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """A whole block of a language model, keeping what `policy` names: Llama's, by default.

    h = x + proj(attention(rotary(qkv(norm1(x))))), h + fc2(act(gate(norm2(h))) * fc1(norm2(h)))

    Shapes: x (B, S, D); returns the same, in x.dtype. `weights` maps names to tensors, of H query
        and Hkv key heads, each E wide:
        "qkv.weight" ((H + 2·Hkv)·E, D), or "q.weight" (H·E, D), "k.weight" and "v.weight"
        (Hkv·E, D); "proj.weight" (D, H·E); "fc1.weight" (F, D), "fc2.weight" (D, F); a
        "gate.weight" (F, D) makes the MLP gated, as above, and without it is fc2(act(fc1)).
        Where they are to be: "norm1.weight", "norm2.weight" (D,), a ".bias" of each of the above,
        "q_norm.weight" and "k_norm.weight" (E,), with placement "sandwich" "post1.weight" and
        "post2.weight" (D,).
    placement: "pre"; "post": norm1(x + attention), norm2(h + mlp); "sandwich": both halves normed
        before and after, x + post1(attention(norm1(x))) (Gemma-2).
    norm: "rms_norm" or "layer_norm". norm_offset: added to all norms' weights, in float32 (1 for
        Gemma). qk_norm_eps: None for eps.
    activation: a name, or a function or module that has one (`F.silu`, `nn.GELU("tanh")`).
    dropout_p: of attention's probabilities, both residual branches and the MLP;
        attention_dropout_p: of the first alone, None for dropout_p.
    rope, rope_interleaved: (cos, sin), (S, R/2) or (B, S, R/2), as in `rotary`: the first R
        elements of a head are rotated.
    is_causal, window, attn_mask, key_padding_mask, key_lengths, cu_seqlens, scale, softcap: as in
        `attention_block`: an attn_mask's True **takes part**, a key_padding_mask's True is
        **excluded**; padding may be on either side. Positions are those of the rope tables.
    lora: (layer, A, B, scale): + scale * dropout(x) @ A.T @ B.T for a layer by its name above;
        A (rank, in), B (out, rank), in x.dtype or float32. lora_dropout_p: of x, each of its own.
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
    kv_heads = nhead if kv_heads is None else kv_heads
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must map names to tensors, got {type(weights).__name__}")
    check_alike(x, weights)
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, S, D)")
    check_heads(nhead, kv_heads, "nhead and kv_heads")
    head_dim = _head_dim(weights, nhead, kv_heads, x)
    grid = (x.shape[0], nhead, x.shape[1], x.shape[1])
    p, p_lora = check_p("dropout_p", dropout_p), check_p("lora_dropout_p", lora_dropout_p)
    p_attention = p if attention_dropout_p is None else attention_dropout_p
    act, _, functions = resolve_activation(activation, x, (1, 2))
    if functions:
        raise ValueError(f"a transformer block takes the name of an activation, got {activation!r}")
    lengths = lengths_of(key_lengths, cu_seqlens, None, grid, x, "cu_seqlens")
    q_norm, k_norm = weights.get("q_norm.weight"), weights.get("k_norm.weight")
    tensors: dict[str, Tensor | None] = {
        **weights, **lengths, **rotary_tensors(x, head_dim, rope, q_norm, k_norm),
        "mask": mask_of(attn_mask, grid, x), "padding": padding_of(key_padding_mask, grid, x),
        "seed": seed_tensor(seed, x.device),
    }  # fmt: skip
    qk_eps = float(eps if qk_norm_eps is None else qk_norm_eps)
    spec = transformer_spec(
        check_norm_kind(norm),
        float(eps),
        act,
        offset=float(norm_offset),
        placement=_one_of("placement", placement, ("pre", "post", "sandwich")),
        gated=weights.get("gate.weight") is not None,
        dropout=(check_p("attention_dropout_p", p_attention), p, p, p),
        loras=loras_of(lora, p_lora, x),
        num_heads=nhead,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **score_fields(head_dim, is_causal, options),
        projection="split" if weights.get("qkv.weight") is None else "packed",
        rotary=rope is not None,
        interleaved=bool(rope_interleaved),
        qk_norm_eps=None if q_norm is None else qk_eps,
        masks=masks_given(tensors),
    )
    tensors.update(lora_tensors(lora))
    check_weights(x, weights, spec)
    check_loras(lora, spec.linears, tensors)
    tensors["input"] = x
    return run_layer(block_graph(spec), tensors, policy=policy, backend=backend)


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> str:
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}")
    return value


def _head_dim(weights: Mapping[str, Tensor | None], nhead: int, kv_heads: int, x: Tensor) -> int:
    """E, from the projection's rows.

    Raises: ValueError if there is none, both kinds, or rows that are no multiple of the heads.
    """
    packed, q = weights.get("qkv.weight"), weights.get("q.weight")
    if (packed is None) == (q is None):
        raise ValueError("weights must have either qkv.weight, or q.weight, k.weight and v.weight")
    name, heads = ("qkv", nhead + 2 * kv_heads) if packed is not None else ("q", nhead)
    weight = weights[f"{name}.weight"]
    assert weight is not None
    check_shape(f"{name}.weight", weight, (f"{heads}·E", x.shape[-1]), "x", x)
    if weight.shape[0] % heads or not weight.shape[0]:
        raise ValueError(
            f"{name}.weight has shape {tuple(weight.shape)}, expected rows in multiples of "
            f"{heads} heads to go with x of shape {tuple(x.shape)}"
        )
    return weight.shape[0] // heads

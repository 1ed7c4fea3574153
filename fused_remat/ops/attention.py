"""Attention as functions: over heads, and with its norm, projections and residual."""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from fused_remat.autograd import run_block
from fused_remat.graph.build import attention_graph, block_graph
from fused_remat.ops.checks import (
    check_alike,
    check_heads,
    check_norm,
    check_p,
    check_shape,
    lengths_of,
    lists_attention_options,
    mask_of,
    masks_given,
    padding_of,
    seed_tensor,
)
from fused_remat.ops.pieces import rotary_fields, rotary_tensors
from fused_remat.policies import Policy
from fused_remat.spec import (
    AttentionOptions,
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    NormSpec,
    score_fields,
)


@lists_attention_options
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    policy: str | Policy = "lean",
    seed: int | Tensor | None = None,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """dropout(softmax(scale * query @ key.T + mask)) @ value, in the layout of SDPA.

    Shapes: query (B, H, S_q, E), key (B, Hkv, S_k, E), value (B, Hkv, S_k, Ev), of any strides;
        returns (B, H, S_q, Ev) in query.dtype, a view of (B, S_q, H, Ev). Hkv divides H: query
        head h reads key head h // (H / Hkv).
    attn_mask: broadcasts to (B, H, S_q, S_k); bool (**True takes part**, as in SDPA) or float
        (added; gets its gradient if it requires one).
    key_padding_mask: (B, S_k); bool (**True is excluded**, as in `nn.MultiheadAttention`) or float.
    key_lengths: (B,) of integers: sequence b has key_lengths[b] keys, those after are excluded.
        is_causal and window are as without: they go by the padded S_q and S_k.
    cu_seqlens_q, cu_seqlens_k: (N + 1,) of integers: N packed sequences, side by side in a batch of
        1. Queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] see keys cu_seqlens_k[n] to
        cu_seqlens_k[n + 1] only; is_causal and window go by the lengths of these, each sequence by
        itself. Masks are over all tokens. cu_seqlens_k None: as cu_seqlens_q. Tokens before the
        first and after the last bound are of no sequence: 0, and so are their gradients.
        On a GPU only the eager backend checks the values, as it waits for the device to read them.
    is_causal: query i sees keys up to i + S_k - S_q: the last query sees all keys. With S_q = S_k
        that is SDPA's; with S_q != S_k SDPA aligns the first query with the first key instead.
    window: (left, right), how many keys before and after its own place a query sees; -1: no limit.
    scale: of the scores, None for E ** -0.5. softcap: scores become softcap * tanh(s / softcap).
    A row whose keys are all excluded is 0.
    policy: "full" keeps query, key and value only; all other presets the output too (which the
        caller's next layer holds anyway) and its logsumexp.
    Units: FLOPs = 4·S_k·E a query and head, of packed sequences with the S_k of its own.
    Raises: ValueError for shapes or lengths that do not fit, dropout_p outside [0, 1], a negative
        softcap, a window below -1; RuntimeError for mixed dtypes or devices.
    Source: Vaswani et al. 2017; backward after Dao et al. 2022; GQA: Ainslie et al. 2023.

    >>> import torch
    >>> q, k, v = (torch.randn(2, h, 5, 4, requires_grad=True) for h in (4, 2, 2))
    >>> y = attention(q, k, v, is_causal=True)
    >>> y.sum().backward(); y.shape, k.grad.shape
    (torch.Size([2, 4, 5, 4]), torch.Size([2, 2, 5, 4]))

    Two sequences, of 2 and 3 tokens:

    >>> q, k, v = (torch.randn(1, 4, 5, 4) for _ in range(3))
    >>> y = attention(q, k, v, is_causal=True, cu_seqlens_q=torch.tensor([0, 2, 5]))
    >>> second = attention(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], is_causal=True)
    >>> torch.equal(y[:, :, 2:], second)
    True
    """
    check_alike(query, {"key": key, "value": value})
    _check_heads(query, key, value)
    batch, nhead, q_len, width = query.shape
    grid = (batch, nhead, q_len, key.shape[2])
    tensors = {
        "input": query, "key": key, "value": value,
        "mask": mask_of(attn_mask, grid, query),
        "padding": padding_of(key_padding_mask, grid, query),
        "seed": seed_tensor(seed, query.device),
        **lengths_of(key_lengths, cu_seqlens_q, cu_seqlens_k, grid, query),
    }  # fmt: skip
    spec = AttentionSpec(
        num_heads=nhead,
        num_kv_heads=key.shape[1],
        head_dim=width,
        **score_fields(width, is_causal, options),
        dropout=check_p("dropout_p", dropout_p),
        masks=masks_given(tensors),
    )
    graph = attention_graph(spec)
    out = run_block(graph, policy, tensors, backend=backend)
    return out.view(batch, q_len, nhead, value.shape[-1]).transpose(1, 2)


@lists_attention_options
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
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """x + dropout(proj(attention(qkv(norm(x))))): the first half of a pre-norm transformer block.

    Shapes: x (B, S, D), norm_weight and norm_bias (D,) or None, qkv_weight ((H + 2·Hkv)·E, D) with
        the query heads first, then the key heads, then the value heads, qkv_bias alike,
        proj_weight (D, H·E), proj_bias (D,); returns (B, S, D) in x.dtype. Hkv: `kv_heads`, or H.
    norm: "layer_norm" or "rms_norm". cu_seqlens: of queries and keys; a token of no sequence passes
        through, x + dropout(proj(0)).
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
    check_alike(x, {"qkv_weight": qkv_weight, "qkv_bias": qkv_bias,
                    "proj_weight": proj_weight, "proj_bias": proj_bias})  # fmt: skip
    if qkv_weight is None or proj_weight is None:
        raise TypeError("qkv_weight and proj_weight must be Tensors, got None")
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, S, D)")
    check_norm(x, norm_weight, norm_bias, norm)
    kv_heads = nhead if kv_heads is None else kv_heads
    head_dim = _check_projections(x, qkv_weight, qkv_bias, proj_weight, proj_bias, nhead, kv_heads)
    grid = (x.shape[0], nhead, x.shape[1], x.shape[1])
    tensors: dict[str, Tensor | None] = {
        "input": x, "norm.weight": norm_weight, "norm.bias": norm_bias,
        "qkv.weight": qkv_weight, "qkv.bias": qkv_bias,
        "proj.weight": proj_weight, "proj.bias": proj_bias,
        "mask": mask_of(attn_mask, grid, x), "padding": padding_of(key_padding_mask, grid, x),
        "seed": seed_tensor(seed, x.device),
        **lengths_of(key_lengths, cu_seqlens, None, grid, x, "cu_seqlens"),
    }  # fmt: skip
    rope_tensors = rotary_tensors(x, head_dim, rope, q_norm_weight, k_norm_weight)
    spec = AttentionSpec(
        num_heads=nhead,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **score_fields(head_dim, is_causal, options),
        dropout=check_p("dropout_p", dropout_p),
        masks=masks_given(tensors),
        **rotary_fields(rope_tensors, rope_interleaved, qk_norm_eps),
    )
    p_residual = check_p("residual_dropout_p", residual_dropout_p)
    branch = BranchSpec(op=spec, norm=NormSpec(kind=norm, eps=float(eps)), dropout=p_residual)
    graph = block_graph(BlockSpec(kind=f"{spec.heads_kind}attention_block", branches=(branch,)))
    return run_block(graph, policy, {**tensors, **rope_tensors}, backend=backend)


def _check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, expected (B, heads, S, E)")
    batch, nhead, _, width = query.shape
    check_shape("key", key, (batch, "Hkv", "S_k", width), "query", query)
    check_shape("value", value, (batch, key.shape[1], key.shape[2], "Ev"), "key", key)
    check_heads(nhead, key.shape[1], f"query {tuple(query.shape)} and key {tuple(key.shape)}")


def _check_projections(
    x: Tensor,
    qkv_weight: Tensor,
    qkv_bias: Tensor | None,
    proj_weight: Tensor,
    proj_bias: Tensor | None,
    nhead: int,
    kv_heads: int,
) -> int:
    """Check the shapes of an attention block's weights; returns the width of a head."""
    check_heads(nhead, kv_heads, "nhead and kv_heads")
    width, heads = x.shape[-1], nhead + 2 * kv_heads
    check_shape("qkv_weight", qkv_weight, (f"{heads}·E", width), "x", x)
    rows = qkv_weight.shape[0]
    if rows % heads:
        raise ValueError(
            f"qkv_weight has shape {tuple(qkv_weight.shape)}, expected rows in multiples of "
            f"{heads} heads to go with x of shape {tuple(x.shape)}"
        )
    check_shape("qkv_bias", qkv_bias, (rows,), "qkv_weight", qkv_weight)
    head_dim = rows // heads
    check_shape("proj_weight", proj_weight, (width, nhead * head_dim), "qkv_weight", qkv_weight)
    check_shape("proj_bias", proj_bias, (width,), "proj_weight", proj_weight)
    return head_dim

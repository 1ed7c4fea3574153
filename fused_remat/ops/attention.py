"""Attention over heads as a function; documents the options that other ops share."""

from __future__ import annotations

from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.graph.build import attention_graph
from fused_remat.layer_specs import attention_fields
from fused_remat.ops.checks import (
    check_alike,
    check_heads,
    check_p,
    check_shape,
    masks_given,
    read_masks,
    seed_tensor,
)
from fused_remat.policies import Policy
from fused_remat.spec import AttentionSpec


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
    window: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute dropout(softmax(scale * query @ key.T + mask)) @ value, in the layout of SDPA.

    Shapes: query (B, H, S_q, E), key (B, Hkv, S_k, E), value (B, Hkv, S_k, Ev), of any strides;
        returns (B, H, S_q, Ev) in query.dtype, a view of (B, S_q, H, Ev). Hkv divides H: query
        head h reads key head h // (H / Hkv).
    attn_mask: broadcasts to (B, H, S_q, S_k); bool (**True takes part**, as in SDPA) or float
        (added; gets its gradient if it requires one).
    key_padding_mask: (B, S_k); bool (**True is excluded**, as in `nn.MultiheadAttention`) or float.
        Padding may be on either side.
    key_lengths: (B,) of integers: sequence b has key_lengths[b] keys; those after are excluded.
        is_causal and window go by the padded S_q and S_k.
    cu_seqlens_q, cu_seqlens_k: (N + 1,) of integers: N packed sequences, side by side in a batch of
        1. Queries cu_seqlens_q[n] to cu_seqlens_q[n + 1] see only the keys cu_seqlens_k[n] to
        cu_seqlens_k[n + 1]; is_causal and window go by the lengths of each sequence, while masks
        are over all tokens. cu_seqlens_k None: as cu_seqlens_q. Tokens before the first and after
        the last bound belong to no sequence: their results and gradients are 0. The values are
        checked on a CPU, and on a GPU by the eager backend, which waits there to read them.
    is_causal: query i sees keys up to i + S_k - S_q, so that the last query sees all keys. With
        S_q = S_k that is SDPA's; else SDPA aligns the first query with the first key instead.
    window: (left, right), how many keys before and after its own position a query sees; -1: no
        limit.
    scale: of the scores, None for E ** -0.5. softcap: scores become softcap * tanh(s / softcap).
    sinks: (H,), a score of each head that takes part in every softmax and has no value (gpt-oss);
        gets its gradient if it requires one.
    A row whose keys are all excluded is 0.
    policy: "full" keeps query, key and value only; all other presets keep the output too (which the
        caller's next layer holds anyway) and its logsumexp.
    seed: of dropout: an int, an int64 tensor () on query's device, or None to draw one.
    Units: FLOPs = 4·S_k·E a query and head; in a packed sequence S_k is its own number of keys.
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
    check_alike({"query": query, "key": key, "value": value})
    check_shape("query", query, ("B", "heads", "S", "E"))
    batch, nhead, q_len, width = query.shape
    check_shape("key", key, (batch, "Hkv", "S_k", width), {"query": query})
    kv_heads, kv_len = key.shape[1:3]
    check_shape("value", value, (batch, kv_heads, kv_len, "Ev"), {"key": key})
    names = f"H of query {tuple(query.shape)}", f"Hkv of key {tuple(key.shape)}"
    check_heads(nhead, kv_heads, *names)
    grid = (batch, nhead, q_len, kv_len)
    bounds = (cu_seqlens_q, cu_seqlens_k, "cu_seqlens_q")
    masks = read_masks(query, grid, attn_mask, key_padding_mask, key_lengths, *bounds)
    spec = AttentionSpec(
        **attention_fields(nhead, kv_heads, width, is_causal, window, scale, softcap),
        dropout=check_p("dropout_p", dropout_p),
        masks=masks_given(masks),
        sinks=sinks is not None,
    )
    tensors = {"input": query, "key": key, "value": value, **masks}
    if sinks is not None:
        check_alike({"query": query, "sinks": sinks})
        check_shape("sinks", sinks, (nhead,), {"query": query})
        tensors["sinks"] = sinks
    tensors["seed"] = seed_tensor(seed, query.device)
    out = run_block(attention_graph(spec), policy, tensors, backend=backend)
    return out.view(batch, q_len, nhead, value.shape[-1]).transpose(1, 2)

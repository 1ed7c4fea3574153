"""The core of attention: alone under checkpoint, and a head at a time where it is exact."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.layers.subjects import Forward, Subject
from bench.measure.registry import Absent

_MOST_SCORES = 2**31  # bytes of scores in float64 that are written at once


@contextlib.contextmanager
def exact_by_head(most: int = _MOST_SCORES) -> Iterator[None]:
    """PyTorch's attention in float64, a head at a time where all scores would take more bytes.

    A GPU has no flash kernel for float64: all scores are written, several times, 34 GB each at 16
    heads of 16384 tokens. Where a head's own take more, and nothing is masked but what comes later,
    it is some rows of queries at a time. Backward replays each part.
    """
    whole = F.scaled_dot_product_attention

    def by_head(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        scores = q.shape[:-1].numel() * k.shape[-2] * q.itemsize
        if q.dtype != torch.float64 or scores <= most:
            return whole(q, k, v, attn_mask, dropout_p, is_causal, **options)
        rows = max(1, most // (k.shape[-2] * q.itemsize))
        plain = attn_mask is None and not dropout_p

        def one(*head: Tensor) -> Tensor:
            if plain and rows < q.shape[-2]:
                return _by_rows(whole, head, is_causal, rows, options)
            attend = functools.partial(whole, **options)
            return checkpoint(attend, *head, attn_mask, dropout_p, is_causal, use_reentrant=False)

        heads = zip(*(t.flatten(0, -3).split(1) for t in (q, k, v)), strict=True)
        return torch.cat([one(*head) for head in heads]).view_as(q)

    F.scaled_dot_product_attention = by_head
    try:
        yield
    finally:
        F.scaled_dot_product_attention = whole


def _by_rows(
    attend: Callable[..., Tensor], head: Sequence[Tensor], causal: bool, rows: int, options: Any
) -> Tensor:
    """Attention of so many queries at a time, each time of the keys that they may see."""
    q, k, v = head
    made = []
    for first in range(0, q.shape[-2], rows):
        some = q[..., first : first + rows, :]
        seen = min(first + rows, k.shape[-2]) if causal else k.shape[-2]

        def part(q: Tensor, k: Tensor, v: Tensor, first: int = first) -> Tensor:
            shape = q.shape[-2], k.shape[-2]
            mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril(first)
            return attend(q, k, v, mask if causal else None, **options)

        given = some, k[..., :seen, :], v[..., :seen, :]
        made.append(checkpoint(part, *given, use_reentrant=False))
    return torch.cat(made, -2)


def replayed_core(subject: Subject) -> Forward:
    """Of an encoder layer, on its own parameters; what is outside of the core is PyTorch's.

    Shapes: x (B, S, D); inside q, k, v (B, H, S, E), views of what the projection gave.
    Raises: Absent for a module without attention.
    """
    layer = subject.sample.layer
    if not isinstance(layer, nn.TransformerEncoderLayer):
        raise Absent("the module has no attention")
    attention = layer.self_attn

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = attention.dropout if attention.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, None, p, subject.causal)

    def attend(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)  # as nn.MultiheadAttention does, so that products are the same
        seq_len, batch, width = x.shape
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        parts = qkv.unflatten(-1, (3, width)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        split = (seq_len, batch * attention.num_heads, attention.head_dim)
        heads = [t.view(split).transpose(0, 1) for t in parts.contiguous()]
        by_head = (batch, attention.num_heads, seq_len, attention.head_dim)
        out = checkpoint(core, *(t.view(by_head) for t in heads), use_reentrant=False)
        out = out.permute(2, 0, 1, 3).contiguous().view(seq_len * batch, width)
        return attention.out_proj(out).view(seq_len, batch, width).transpose(0, 1)

    def mlp(x: Tensor) -> Tensor:
        return layer.dropout2(layer.linear2(layer.dropout(layer.activation(layer.linear1(x)))))

    def forward(x: Tensor) -> Tensor:
        if layer.norm_first:
            x = x + layer.dropout1(attend(layer.norm1(x)))
            return x + mlp(layer.norm2(x))
        x = layer.norm1(x + layer.dropout1(attend(x)))
        return layer.norm2(x + mlp(x))

    return forward

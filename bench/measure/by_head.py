"""PyTorch's attention in float64, a head at a time where all scores would take too much memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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

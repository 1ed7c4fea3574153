"""Packed sequences, one after the other: where each lies, and the attention call that it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor

from fused_remat.backends.base import AttentionCall


def bounds(cu: Tensor, tokens: int, name: str) -> list[int]:
    """The values of `cu` (N + 1,): sequence n is tokens bounds[n] to bounds[n + 1] of `tokens`.

    On a GPU this waits for the device.

    Raises: ValueError for values that decrease or are outside 0 to `tokens`.

    >>> import torch
    >>> bounds(torch.tensor([0, 3, 3, 7]), 8, "cu_seqlens")
    [0, 3, 3, 7]
    """
    values: list[int] = cu.tolist()
    last = 0
    for i, value in enumerate(values):
        if not 0 <= value <= tokens:
            raise ValueError(
                f"{name}[{i}] is {value}, expected 0 to {tokens}, the tokens there are"
            )
        if value < last:
            raise ValueError(f"{name}[{i}] is {value}, less than {last} before it")
        last = value
    return values


def bounds_of(call: AttentionCall) -> tuple[list[int], list[int]]:
    """The bounds of the queries and of the keys of a call's packed sequences."""
    assert call.cu_q is not None and call.cu_k is not None
    of_queries = bounds(call.cu_q, call.q_len, "cu_seqlens of the queries")
    return of_queries, bounds(call.cu_k, call.kv_len, "cu_seqlens of the keys")


def sequences(
    call: AttentionCall, of_queries: list[int], of_keys: list[int]
) -> Iterator[tuple[slice, slice, AttentionCall]]:
    """Each packed sequence: its queries, its keys, and its call, in which masks are views."""
    for n in range(len(of_queries) - 1):
        rows = slice(of_queries[n], of_queries[n + 1])
        keys = slice(of_keys[n], of_keys[n + 1])
        yield (
            rows,
            keys,
            dataclasses.replace(
                call,
                q_len=rows.stop - rows.start,
                kv_len=keys.stop - keys.start,
                mask=_part(call.mask, rows, keys),
                dmask=_part(call.dmask, rows, keys),
                padding=None if call.padding is None else call.padding[:, keys],
                dpadding=None if call.dpadding is None else call.dpadding[:, keys],
                row0=call.row0 + rows.start,
                head_rows=call.q_len,
                col0=keys.start,
                cu_q=None,
                cu_k=None,
            ),
        )


def _part(mask: Tensor | None, rows: slice, keys: slice) -> Tensor | None:
    """The rows and columns of a mask; one of all rows, or of all columns, stays one."""
    if mask is None:
        return None
    if mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    return mask[..., keys] if mask.shape[-1] > 1 else mask

"""Attention from views of heads of any strides: the operations, and who serves a call in ATen.

A library kernel where one does (`attention_library.why_not`), else blocks of query rows
(`attention_rows`): chosen by the call and never by what is kept. Both give 0, and no NaN, for a row
whose keys are all excluded. Packed sequences are calls of their own, one after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fused_remat.formats import LoadedHeads
from fused_remat.steps import attention_library, attention_rows, linear
from fused_remat.steps.attention_library import attention_key, why_not, why_not_call
from fused_remat.steps.attention_rows import (
    AttentionCall,
    AttentionKey,
    bounds_of,
    varlen_sequences,
)
from fused_remat.steps.operations import operation
from fused_remat.steps.storage import heads_in_memory

Heads = tuple[Tensor, Tensor, Tensor]


def says(
    key: AttentionKey, q: Tensor | None = None, v: Tensor | None = None, call: Any = None
) -> str:
    """Which kernels serve a call in ATen, and why faster ones do not; of a key, or of a call."""
    if q is not None and v is not None and call.cu_q is not None:
        found = [
            says(attention_key(a, b, one), a, b, one)
            for rows, keys, one in varlen_sequences(call, *bounds_of(call))
            for a, b in ((q[:, :, rows], v[:, :, keys]),)
        ]
        return "packed sequences, one at a time: " + ("; ".join(dict.fromkeys(found)) or "none")
    if key.varlen:
        return "packed sequences, one at a time"
    if q is None or v is None:
        why = why_not(key, key.widths, key.dtype, key.device)
    else:
        why = why_not_call(q, v, call)
    said = f"blocks of query rows: {why}" if why else attention_library.says(key)
    return f"{said}; heads unpacked first" if key.packed else said


def as_heads(x: Tensor, call: AttentionCall) -> Tensor:
    """(B*S_q, H*E) as (B, H, S_q, E), a view."""
    width = x.shape[1] // call.spec.num_heads  # not -1: there may be no rows
    return x.view(call.batch, call.q_len, call.spec.num_heads, width).transpose(1, 2)


@operation(
    key=lambda q, k, v, call, out=None: attention_key(q, v, call),
    says=lambda key, q=None, k=None, v=None, call=None, out=None: says(key, q, v, call),
)
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over q (B, H, S_q, E), k and v (B, Hkv, S_k, E) of any strides.

    Returns attn (B*S_q, H*E) in the dtype of q, and lse, B*H*S_q elements in that order, in float32
    (float64 for float64).
    """
    shape = call.batch * call.q_len, call.spec.num_heads * v.shape[-1]
    if call.cu_q is not None:
        out = q.new_empty(shape) if out is None else out
        return out, _varlen_forward(q, k, v, call, out)
    if why_not_call(q, v, call) is None:
        wide = linear.widens(q)
        rows, lse = attention_library.forward(q, k, v, call, wide)
        if out is None:
            attn = rows.reshape(shape)
            return attn.to(q.dtype) if wide else attn, lse
        out.view(rows.shape).copy_(rows)
        return out, lse
    call = attention_library.lengths_as_padding(call)
    if out is None:
        out = q.new_empty(shape)
    heads = as_heads(out, call)
    parts = [
        attention_rows.forward(q[part], k[part], v[part], one, heads[part])
        for part, one in attention_rows.sequences(call)
    ]
    return out, parts[0] if len(parts) == 1 else torch.cat(parts)


@operation(
    key=lambda dattn, q, k, v, attn, lse, call, grads: attention_key(q, v, call, k),
    says=lambda key, *_: says(key),
)
def attention_bwd(
    dattn: Tensor,
    q: LoadedHeads,
    k: LoadedHeads,
    v: LoadedHeads,
    attn: Tensor,
    lse: Tensor,
    call: AttentionCall,
    grads: Heads | None,
) -> None:
    """Fills `grads`, shaped like q, k and v; adds to call.dmask and call.dpadding.

    What is packed is unpacked for the time of it.
    """
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        q, k, v = heads_in_memory(q, k, v)
    if call.cu_q is not None:
        _varlen_backward(dattn, q, k, v, attn, lse, call, grads)
        return
    do, o = as_heads(dattn, call), as_heads(attn, call)
    if why_not_call(q, v, call) is None:
        if grads is not None:
            attention_library.backward(do, q, k, v, o, lse, call, grads, linear.widens(q))
        return
    call = attention_library.lengths_as_padding(call)
    for part, one in attention_rows.sequences(call):
        mine = None if grads is None else (grads[0][part], grads[1][part], grads[2][part])
        attention_rows.backward(do[part], q[part], k[part], v[part], o[part], one, mine)


# --- packed sequences: their rows and keys are views of the whole


def _outside(bounds: list[int]) -> tuple[slice, slice]:
    """The tokens of no sequence: before the first and after the last."""
    return slice(0, bounds[0]), slice(bounds[-1], None)


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: Tensor) -> Tensor:
    """Fills `out` (S_q, H*E); returns lse (H, S_q), +inf where there is no sequence."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((call.spec.num_heads, call.q_len), dtype=dtype)
    bounds = bounds_of(call)  # the one wait for the device, if that is a GPU
    for rows, keys, one in varlen_sequences(call, *bounds):
        _, made = attention_fwd(q[:, :, rows], k[:, :, keys], v[:, :, keys], one, out[rows])
        lse[:, rows] = made.view(call.spec.num_heads, one.q_len)
    for rows in _outside(bounds[0]):
        out[rows] = 0.0
        lse[:, rows] = torch.inf
    return lse


def _varlen_backward(
    dattn: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    lse: Tensor,
    call: AttentionCall,
    grads: Heads | None,
) -> None:
    lse = lse.view(call.spec.num_heads, call.q_len)
    bounds = bounds_of(call)  # waits for the device again
    for rows, keys, one in varlen_sequences(call, *bounds):
        parts = (rows, keys, keys)
        q_one, k_one, v_one = (x[:, :, part] for x, part in zip((q, k, v), parts, strict=True))
        mine = None
        if grads is not None:
            mine = (grads[0][:, :, rows], grads[1][:, :, keys], grads[2][:, :, keys])
        attention_bwd(
            dattn[rows], q_one, k_one, v_one, attn[rows], lse[:, rows].reshape(-1), one, mine
        )
    if grads is not None:
        for grad, own in zip(grads, (bounds[0], bounds[1], bounds[1]), strict=True):
            for part in _outside(own):
                grad[:, :, part] = 0.0

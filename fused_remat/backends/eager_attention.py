"""Attention in ATen ops, forward and backward, from views of heads of any strides.

Two routes, chosen by the call and never by the policy: ATen's fused kernel for the device where one
serves (`why_not_flash`; on CUDA devices, `cuda_attention`); else blocks of query rows against the
keys they can see, so that the transient is a block of scores, never (S_q, S_k). Both give 0, and no
NaN, for a row whose keys are all excluded.
Query heads that share a key head (GQA) are rows of one product, or one flash call each; packed
sequences are calls of their own, one after the other, each on its own route.
Source: the backward of Dao et al. 2022, with dS = P * (dP - rowsum(dO * O)).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_remat.backends import attention_blocks, cuda_attention, packed
from fused_remat.backends.base import AttentionCall

# A row whose largest mask value is finite and below this is not for the flash kernel: its logsumexp
# is the mask's value, rounded, and its backward off by up to the number of keys.
_FAR = -1e3
_FLASH_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
Heads = tuple[Tensor, Tensor, Tensor]


def why_not_flash(q: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    """Why ATen's fused kernel cannot serve the call, or None if it can."""
    if call.cu_q is not None:
        return "packed sequences are calls of their own"
    return _why_not_flash(q, v, _lengths_as_padding(call))


def _why_not_flash(q: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    """The same for a call with its lengths as padding, of no packed sequences."""
    if not (q.is_cpu or q.is_cuda):
        return f"the fused kernels used here are for CPU and CUDA, q is on {q.device}"
    if call.p > 0.0:
        return "dropout draws this library's own bits"
    if call.mask_grad:
        return "a mask wants a gradient"
    if call.softcap != 0.0 or call.left >= 0 or call.right > 0:
        return "soft-cap or a sliding window"
    if call.right == 0 and (call.masked or call.q_len != call.kv_len):
        return "causal beside a mask or key lengths, or with S_q other than S_k"
    if call.q_len == 0 or call.kv_len == 0:
        return "there are no queries or no keys"
    if q.shape[-1] != v.shape[-1]:
        return f"head dims {q.shape[-1]} and {v.shape[-1]} differ"
    if q.is_cuda:
        return cuda_attention.why_not(q, call)
    if call.masked and _has_far_row(call, q.dtype):
        return f"a row of masks is finite and below {_FAR:g} everywhere"
    return None


def route(q: Tensor, v: Tensor, call: AttentionCall) -> str:
    """Which kernels serve the call, and why faster ones do not."""
    if call.cu_q is not None:
        parts = packed.sequences(call, *packed.bounds_of(call))
        routes = [route(q[:, :, rows], v[:, :, keys], one) for rows, keys, one in parts]
        return "packed sequences, one at a time: " + ("; ".join(dict.fromkeys(routes)) or "none")
    reason = why_not_flash(q, v, call)
    if reason:
        return f"blocks of query rows: {reason}"
    if q.device.type == "cpu":
        return "ATen's flash kernel for CPUs"
    return f"ATen's {cuda_attention.kernel(q, _lengths_as_padding(call))} kernel"


def _lengths_as_padding(call: AttentionCall) -> AttentionCall:
    """The call with its key lengths as a part of its padding."""
    if call.lengths is None:
        return call
    beyond = torch.arange(call.kv_len, device=call.lengths.device) >= call.lengths[:, None]
    if call.padding is None:
        padding = beyond
    elif call.padding.dtype == torch.bool:
        padding = call.padding | beyond
    else:
        padding = call.padding.masked_fill(beyond, -torch.inf)
    return dataclasses.replace(call, padding=padding, lengths=None)


def _has_far_row(call: AttentionCall, dtype: torch.dtype) -> bool:
    masks = [m for m in (call.mask, call.padding) if m is not None and m.dtype != torch.bool]
    if not masks:
        return False
    merged = _merged_mask(call, dtype)
    assert merged is not None
    top = merged.amax(-1)
    return bool(((top < _FAR) & (top > -torch.inf)).any())


def _additive(mask: Tensor, dtype: torch.dtype, keeps: bool) -> Tensor:
    if mask.dtype == torch.bool:
        excluded = mask.logical_not() if keeps else mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(excluded, -torch.inf)
    return mask.to(dtype)


def _merged_mask(call: AttentionCall, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one additive tensor that broadcasts to (B, H, S_q, S_k), for the flash route.

    In float32 for 16-bit dtypes too, as the kernel takes it.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    mask = None if call.mask is None else _additive(call.mask, dtype, call.mask_keeps)
    if call.padding is None:
        return mask
    padding = _additive(call.padding, dtype, False)[:, None, None, :]
    return padding if mask is None else mask + padding


def _as_heads(x: Tensor, call: AttentionCall) -> Tensor:
    """(B*S_q, H*E) as (B, H, S_q, E), a view."""
    width = x.shape[1] // call.nhead  # not -1: there may be no rows
    return x.view(call.batch, call.q_len, call.nhead, width).transpose(1, 2)


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, widen: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """attn (B*S_q, H*E) in the dtype of q; lse, B*H*S_q values in float32 (float64 for float64).

    `widen`: compute in float32 on float32 copies.
    """
    if call.cu_q is not None:
        out = q.new_empty(_matrix(v, call)) if out is None else out
        return out, _packed_forward(q, k, v, call, widen, out)
    call = _lengths_as_padding(call)
    if _why_not_flash(q, v, call) is None:
        rows, lse = _flash_forward(q, k, v, call, widen)
        if out is None:
            attn = rows.reshape(_matrix(v, call))
            return attn.to(q.dtype) if widen else attn, lse
        out.view(rows.shape).copy_(rows)
        return out, lse
    if out is None:
        out = q.new_empty(_matrix(v, call))
    heads = _as_heads(out, call)
    parts = [
        attention_blocks.forward(q[part], k[part], v[part], one, heads[part])
        for part, one in attention_blocks.sequences(call)
    ]
    return out, parts[0] if len(parts) == 1 else torch.cat(parts)


def _matrix(v: Tensor, call: AttentionCall) -> tuple[int, int]:
    return call.batch * call.q_len, call.nhead * v.shape[-1]


def backward(
    dattn: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    lse: Tensor,
    call: AttentionCall,
    grads: Heads | None,
    widen: bool,
) -> None:
    """Fills dq, dk, dv if given; adds the masks' gradients to the call's."""
    if call.cu_q is not None:
        _packed_backward(dattn, q, k, v, attn, lse, call, grads, widen)
        return
    call = _lengths_as_padding(call)
    do, o = _as_heads(dattn, call), _as_heads(attn, call)
    if _why_not_flash(q, v, call) is not None:
        for part, one in attention_blocks.sequences(call):
            mine = None if grads is None else (grads[0][part], grads[1][part], grads[2][part])
            attention_blocks.backward(do[part], q[part], k[part], v[part], o[part], one, mine)
    elif grads is not None:
        _flash_backward(do, q, k, v, o, lse, call, grads, widen)


# --- packed sequences: their rows and keys are views of the whole


def _outside(bounds: list[int]) -> tuple[slice, slice]:
    """The tokens of no sequence: before the first and after the last."""
    return slice(0, bounds[0]), slice(bounds[-1], None)


def _packed_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, widen: bool, out: Tensor
) -> Tensor:
    """Fills `out` (S_q, H*E); returns lse (H, S_q), +inf where there is no sequence."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_empty((call.nhead, call.q_len), dtype=dtype)
    bounds = packed.bounds_of(call)  # the one wait for the device, if that is a GPU
    for rows, keys, one in packed.sequences(call, *bounds):
        _, made = forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], one, widen, out[rows])
        lse[:, rows] = made.view(call.nhead, one.q_len)
    for rows in _outside(bounds[0]):
        out[rows] = 0.0
        lse[:, rows] = torch.inf
    return lse


def _packed_backward(
    dattn: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn: Tensor,
    lse: Tensor,
    call: AttentionCall,
    grads: Heads | None,
    widen: bool,
) -> None:
    lse = lse.view(call.nhead, call.q_len)
    bounds = packed.bounds_of(call)  # waits for the device again
    for rows, keys, one in packed.sequences(call, *bounds):
        parts = (rows, keys, keys)
        q_one, k_one, v_one = (x[:, :, part] for x, part in zip((q, k, v), parts, strict=True))
        mine = None
        if grads is not None:
            mine = (grads[0][:, :, rows], grads[1][:, :, keys], grads[2][:, :, keys])
        lse_one = lse[:, rows].reshape(-1)
        backward(dattn[rows], q_one, k_one, v_one, attn[rows], lse_one, one, mine, widen)
    if grads is not None:
        for grad, own in zip(grads, (bounds[0], bounds[1], bounds[1]), strict=True):
            for part in _outside(own):
                grad[:, :, part] = 0.0


# --- ATen's flash kernel: one call for each query head of a group that shares a key head


def _shared(x: Tensor, call: AttentionCall) -> tuple[Tensor, ...]:
    """(B, H, ...) as one view (B, Hkv, ...) for each member of a group of query heads."""
    group = call.nhead // call.kv_heads
    if x.shape[1] == 1:
        return (x,) * group
    return tuple(x.unflatten(1, (call.kv_heads, group)).unbind(2))


def _rows_in_place(*heads: Tensor) -> Sequence[Tensor]:
    """`heads` with the elements of a row side by side, as the kernel takes them for granted."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in heads]


def _flash_mask(call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    mask = _merged_mask(call, dtype) if call.masked else None
    if mask is None or mask.dim() == 2:
        return (mask,) * (call.nhead // call.kv_heads)
    return _shared(mask, call)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, widen: bool
) -> tuple[Tensor, Tensor]:
    """attn as rows, (B, S_q, heads, E) or with the heads in two dimensions, and lse."""
    if widen:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = _rows_in_place(q, k, v)
    if call.nhead == call.kv_heads:
        mask = _merged_mask(call, q.dtype) if call.masked else None
        heads, lse = _flash(q, k, v, call, mask)
        return heads.transpose(1, 2), lse
    if call.batch == 1 and not call.masked and q.device.type == "cpu":
        # The key heads in place of the batch: one call, whose query heads share a key head.
        groups = q[0].unflatten(0, (call.kv_heads, -1))
        shape = (*groups.shape[:2], *k.shape[2:])
        k_shared, v_shared = k[0][:, None].expand(shape), v[0][:, None].expand(shape)
        heads, lse = _flash(groups, k_shared, v_shared, call, None)
        return heads.permute(2, 0, 1, 3)[None], lse.reshape(1, call.nhead, -1)
    made = [
        _flash(q_one, k, v, call, mask)
        for q_one, mask in zip(_shared(q, call), _flash_mask(call, q.dtype), strict=True)
    ]
    outs, lses = zip(*made, strict=True)
    lse = torch.stack(lses, 2).flatten(1, 2)
    return torch.stack(outs, 2).permute(0, 3, 1, 2, 4), lse


def _flash(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return cuda_attention.forward(q, k, v, call, mask)
    made: tuple[Tensor, Tensor] = _FLASH_CPU(
        q, k, v, 0.0, call.right == 0, attn_mask=mask, scale=call.scale
    )
    return made


def _flash_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    call: AttentionCall,
    grads: Heads,
    widen: bool,
) -> None:
    if widen:
        do, q, k, v, o = do.float(), q.float(), k.float(), v.float(), o.float()
    do, q, k, v, o = _rows_in_place(do, q, k, v, o)
    lse = lse.view(call.batch, call.nhead, call.q_len)
    dq, dk, dv = grads
    if call.nhead == call.kv_heads:
        mask = _merged_mask(call, q.dtype) if call.masked else None
        for grad, made in zip(grads, _flash_grads(do, q, k, v, o, lse, call, mask), strict=True):
            grad.copy_(made)
        return
    sums: list[Tensor] = []
    per_head = (_shared(t, call) for t in (do, q, o, lse, dq))
    masks = _flash_mask(call, q.dtype)
    for do_one, q_one, o_one, lse_one, dq_one, one in zip(*per_head, masks, strict=True):
        dq_made, *rest = _flash_grads(do_one, q_one, k, v, o_one, lse_one, call, one)
        dq_one.copy_(dq_made)
        sums = rest if not sums else [a.add_(b) for a, b in zip(sums, rest, strict=True)]
    dk.copy_(sums[0])
    dv.copy_(sums[1])


def _flash_grads(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    call: AttentionCall,
    mask: Tensor | None,
) -> Heads:
    if q.is_cuda:
        return cuda_attention.backward(do, q, k, v, o, lse, call, mask)
    grads: Heads = _FLASH_CPU_BACKWARD(
        do, q, k, v, o, lse, 0.0, call.right == 0, attn_mask=mask, scale=call.scale
    )
    return grads

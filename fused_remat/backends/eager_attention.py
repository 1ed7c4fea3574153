"""Attention in ATen ops, forward and backward, from packed qkv.

Two routes, chosen by the call and never by the policy: ATen's flash kernel for CPUs, where there
is no dropout, no gradient of a mask, and no row of very negative mask values; else blocks of query
rows against all keys, so that the transient is a block of scores, never (S, S). Both give 0, and no
NaN, for a row whose keys are all excluded. Source: the backward of Dao et al. 2022, with
dS = P * (dP - rowsum(dO * O)).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.backends.base import AttentionCall

# Elements of a block of scores.
_BLOCK = 1 << 18
# A row whose largest mask value is finite and below this is not for the flash kernel: its logsumexp
# is the mask's value, rounded, and its backward off by up to the number of keys.
_FAR = -1e3
_aten = torch.ops.aten


def _heads(qkv: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v as views (B, H, S, E) of the packed projection."""
    packed = qkv.view(call.batch, call.seq_len, 3, call.nhead, -1)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _as_heads(x: Tensor, call: AttentionCall) -> Tensor:
    """(B*S, D) as (B, H, S, E), a view."""
    return x.view(call.batch, call.seq_len, call.nhead, -1).transpose(1, 2)


def _split(x: Tensor, parts: int, call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """(B*S, parts*D) copied to (parts, B*H, S, E) in `dtype`."""
    packed = x.to(dtype).view(call.batch, call.seq_len, parts, call.nhead, -1)
    return packed.permute(2, 0, 3, 1, 4).reshape(parts, -1, call.seq_len, packed.shape[-1])


def _join(x: Tensor, call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """The inverse of `_split`: (parts, B*H, S, E) copied to (B*S, parts*D) in `dtype`."""
    parts, _, seq_len, width = x.shape
    heads = x.view(parts, call.batch, call.nhead, seq_len, width).permute(1, 3, 0, 2, 4)
    return heads.reshape(call.batch * seq_len, -1).to(dtype)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf)
    return mask.to(dtype)


def _merged_mask(call: AttentionCall, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one additive tensor that broadcasts to (B, H, S, S), for the flash route.

    In float32 for 16-bit dtypes too, as the kernel takes it.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    mask = None if call.mask is None else _additive(call.mask, dtype)
    if call.padding is None:
        return mask
    padding = _additive(call.padding, dtype)[:, None, None, :]
    return padding if mask is None else mask + padding


def _flash_route(qkv: Tensor, call: AttentionCall) -> tuple[bool, Tensor | None]:
    """Whether ATen's flash kernel serves the call, and the merged mask to give it."""
    masked = call.mask is not None or call.padding is not None
    if (
        qkv.device.type != "cpu"
        or call.p > 0.0
        or call.mask_grad
        or (call.causal and masked)  # the kernel takes one or the other
    ):
        return False, None
    mask = _merged_mask(call, qkv.dtype)
    if mask is None or not any(
        m is not None and m.dtype != torch.bool for m in (call.mask, call.padding)
    ):
        return True, mask
    top = mask.amax(-1)
    return not bool(((top < _FAR) & (top > -torch.inf)).any()), mask


def forward(qkv: Tensor, call: AttentionCall, widen: bool) -> tuple[Tensor, Tensor]:
    """attn (B*S, D) in the dtype of qkv; lse, B*H*S values in float32 (float64 for float64).

    `widen`: compute in float32 on a float32 copy of qkv.
    """
    dtype = qkv.dtype
    flash, mask = _flash_route(qkv, call)
    if flash:
        wide = qkv.float() if widen else qkv
        q, k, v = _heads(wide, call)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, call.causal, attn_mask=mask, scale=call.scale
        )
        attn = out.transpose(1, 2).reshape(qkv.shape[0], -1)
        return attn.to(dtype) if widen else attn, lse
    acc = torch.promote_types(dtype, torch.float32)
    q, k, v = _split(qkv, 3, call, acc).unbind()
    out = torch.empty_like(q)
    lse = q.new_empty((*q.shape[:2], 1))
    for rows, keys in _blocks(call):
        scores = _scores(q[:, rows], k[:, :keys], rows, call)
        row_lse = torch.logsumexp(scores, -1, keepdim=True, out=lse[:, rows])
        if call.mask is not None or call.padding is not None:
            # A row without keys: +inf makes exp(score - lse) exactly 0, here and in backward.
            row_lse.masked_fill_(row_lse == -torch.inf, torch.inf)
        probs = _softmax(scores, row_lse, call)
        if call.p > 0.0:
            probs.mul_(_keep(rows, keys, call, acc))
        torch.bmm(probs, v[:, :keys], out=out[:, rows])
    return _join(out[None], call, dtype), lse


def backward(
    dattn: Tensor,
    qkv: Tensor,
    attn: Tensor,
    lse: Tensor,
    call: AttentionCall,
    wants_qkv: bool,
    widen: bool,
) -> Tensor | None:
    """dqkv (B*S, 3D) in the dtype of qkv, or None; adds the masks' gradients to the call's."""
    flash, mask = _flash_route(qkv, call)
    if flash:
        wide = qkv
        if widen:
            wide, dattn, attn = qkv.float(), dattn.float(), attn.float()
        q, k, v = _heads(wide, call)
        grads = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _as_heads(dattn, call), q, k, v, _as_heads(attn, call),
            lse, 0.0, call.causal, attn_mask=mask, scale=call.scale,
        )  # fmt: skip
        dqkv = torch.empty_like(qkv)
        for target, grad in zip(_heads(dqkv, call), grads, strict=True):
            target.copy_(grad)
        return dqkv
    acc = torch.promote_types(qkv.dtype, torch.float32)
    qkv_wide = _split(qkv, 3, call, acc)
    q, k, v = qkv_wide.unbind()
    do = _split(dattn, 1, call, acc)[0]
    delta = (do * _split(attn, 1, call, acc)[0]).sum(-1, keepdim=True)
    grads = torch.zeros_like(qkv_wide)
    dq, dk, dv = grads.unbind()
    for rows, keys in _blocks(call):
        q_rows, do_rows, k_rows = q[:, rows], do[:, rows], k[:, :keys]
        probs = _softmax(_scores(q_rows, k_rows, rows, call), lse[:, rows], call)
        dprobs = torch.bmm(do_rows, v[:, :keys].transpose(1, 2))
        dropped = probs
        if call.p > 0.0:
            keep = _keep(rows, keys, call, acc)
            dprobs.mul_(keep)
            dropped = keep.mul_(probs)
        dv[:, :keys].baddbmm_(dropped.transpose(1, 2), do_rows)
        dscores = dprobs.sub_(delta[:, rows]).mul_(probs)
        _add_mask_grads(dscores, rows, keys, call)
        if wants_qkv:
            dk[:, :keys].baddbmm_(dscores.transpose(1, 2), q_rows, alpha=call.scale)
            dq[:, rows].baddbmm_(dscores, k_rows, beta=0.0, alpha=call.scale)
    return _join(grads, call, qkv.dtype) if wants_qkv else None


def _blocks(call: AttentionCall) -> Iterator[tuple[slice, int]]:
    """Blocks of query rows, each with how many keys it can see."""
    rows = max(16, _BLOCK // (call.batch * call.nhead * call.seq_len))
    for start in range(0, call.seq_len, rows):
        stop = min(start + rows, call.seq_len)
        yield slice(start, stop), stop if call.causal else call.seq_len


def _scores(q: Tensor, k: Tensor, rows: slice, call: AttentionCall) -> Tensor:
    """Masked, scaled scores (B*H, rows, keys), a new tensor."""
    scores = q.new_empty((q.shape[0], q.shape[1], k.shape[1]))
    scores.baddbmm_(q, k.transpose(1, 2), beta=0.0, alpha=call.scale)
    if not call.causal and call.mask is None and call.padding is None:
        return scores
    keys = k.shape[1]
    grid = scores.view(call.batch, call.nhead, -1, keys)
    if call.causal:
        later = torch.ones(grid.shape[2:], dtype=torch.bool, device=q.device)
        grid.masked_fill_(later.triu_(rows.start + 1), -torch.inf)
    if call.mask is not None:
        _mask(grid, call.mask[..., rows, :keys])
    if call.padding is not None:
        _mask(grid, call.padding[:, None, None, :keys])
    return scores


def _softmax(scores: Tensor, lse: Tensor, call: AttentionCall) -> Tensor:
    """exp(scores - lse), in place, divided by its own sum.

    The sum is 1 but for the rounding of lse, which is no rounding error where scores are large
    (masks of -1e9, say: lse is then the maximum itself, and the sum the number of keys).
    """
    probs = scores.sub_(lse).exp_()
    total = probs.sum(-1, keepdim=True)
    if call.mask is not None or call.padding is not None:
        total.masked_fill_(total == 0.0, 1.0)  # a row without keys stays 0
    return probs.div_(total)


def _mask(grid: Tensor, mask: Tensor) -> None:
    if mask.dtype == torch.bool:
        grid.masked_fill_(mask, -torch.inf)
    else:
        grid.add_(mask)


def _keep(rows: slice, keys: int, call: AttentionCall, dtype: torch.dtype) -> Tensor:
    """Dropout's multiplier (B*H, rows, keys)."""
    assert call.site_key is not None
    heads, n = call.batch * call.nhead, rows.stop - rows.start
    keep = random.keep_scale(
        call.site_key, call.row0 + rows.start, n, keys, call.p, dtype, heads, call.seq_len
    )
    return keep.view(heads, n, keys)


def _add_mask_grads(dscores: Tensor, rows: slice, keys: int, call: AttentionCall) -> None:
    grid = dscores.view(call.batch, call.nhead, -1, keys)
    if call.dmask is not None:
        target = call.dmask[..., rows, :keys]
        target.add_(grid if target.dim() == 4 else grid.sum((0, 1)))
    if call.dpadding is not None:
        call.dpadding[:, :keys].add_(grid.sum((1, 2)))

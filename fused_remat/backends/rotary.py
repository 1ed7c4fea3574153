"""Rotary position embedding and the RMSNorm of heads, in ATen ops: any device and dtype.

Arithmetic is float32 (float64 for float64), rounded once at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat.backends.base import RotaryCall


def forward(x: Tensor, call: RotaryCall, out: Tensor | None = None, back: bool = False) -> Tensor:
    """See `Backend.rotary_fwd`; `back`: by the opposite angles, the inverse without norms."""
    y = x.new_empty(x.shape) if out is None else out
    (source, values), (target, copied) = _split(x, call), _split(y, call)
    if y is not x:
        copied.copy_(values)
    if call.q_weight is not None:
        source, _ = _normed(source, call)
        _scale(source, call)
    if call.rotated < target.shape[-1] and target.data_ptr() != source.data_ptr():
        target[..., call.rotated :].copy_(source[..., call.rotated :])
    _rotate(source, call, back, target)
    return y


def backward(
    dy: Tensor, x: Tensor | None, call: RotaryCall, wants: tuple[bool, ...], owned: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """With n = x * rstd, g = dy rotated back and w the weight: dw = sum(g * n) over tokens and
    heads, dx = rstd * (g * w - n * mean(g * w * n))."""
    if call.q_weight is None:
        return forward(dy, call, dy if owned else None, back=True), None, None
    assert x is not None
    (dheads, dvalues), (heads, _) = _split(dy, call), _split(x, call)
    normed, rstd = _normed(heads, call)
    g = dheads.to(normed.dtype, copy=True)
    _rotate(dheads, call, True, g)
    product = g * normed
    dq_weight, dk_weight = (
        part.sum((0, 1)) if wanted else None
        for wanted, part in zip(wants[1:], _by_kind(product, call), strict=True)
    )
    if not wants[0]:
        return None, dq_weight, dk_weight
    _scale(g, call)
    mean = torch.mul(g, normed, out=product).mean(-1, keepdim=True)
    dx = dy if owned else dy.new_empty(dy.shape)
    target, copied = _split(dx, call)
    target.copy_(normed.mul_(mean).neg_().add_(g).mul_(rstd))
    if dx is not dy:
        copied.copy_(dvalues)
    return dx, dq_weight, dk_weight


def _split(x: Tensor, call: RotaryCall) -> tuple[Tensor, Tensor]:
    """Query and key heads (T, H + Hkv, E), and value heads (T, Hkv, E), as views."""
    first = call.nhead + call.kv_heads
    count, (rows, width) = first + call.kv_heads, x.shape
    heads = x.view(rows, count, width // count)
    return heads.narrow(1, 0, first), heads.narrow(1, first, call.kv_heads)


def _by_kind(heads: Tensor, call: RotaryCall) -> tuple[Tensor, Tensor]:
    return heads[:, : call.nhead], heads[:, call.nhead :]


def _scale(heads: Tensor, call: RotaryCall) -> None:
    """Multiply by the norms' weights."""
    assert call.q_weight is not None and call.k_weight is not None
    for part, weight in zip(_by_kind(heads, call), (call.q_weight, call.k_weight), strict=True):
        part.mul_(weight)


def _normed(heads: Tensor, call: RotaryCall) -> tuple[Tensor, Tensor]:
    """heads * rstd and rstd = (mean(heads**2) + eps) ** -0.5, over the width of a head."""
    wide = heads.to(torch.promote_types(heads.dtype, torch.float32))
    rstd = wide.square().mean(-1, keepdim=True).add_(call.eps).rsqrt_()
    return wide * rstd, rstd


def _pairs(heads: Tensor, call: RotaryCall) -> tuple[Tensor, Tensor]:
    """The first and the second member of each pair, (T, heads, R/2), as views."""
    if call.interleaved:
        return heads[..., 0 : call.rotated : 2], heads[..., 1 : call.rotated : 2]
    half = call.rotated // 2
    return heads.narrow(-1, 0, half), heads.narrow(-1, half, half)


def _rotate(heads: Tensor, call: RotaryCall, back: bool, out: Tensor) -> None:
    """The rotated pairs of heads into those of `out`, which may be `heads`."""
    if not call.rotated:
        return
    dtype = torch.promote_types(heads.dtype, torch.float32)
    cos, sin = call.cos, call.sin
    assert cos is not None and sin is not None
    rows, seq_len = heads.shape[0], call.seq_len
    if cos.dim() == 2 and rows > seq_len and call.token0 % seq_len == rows % seq_len == 0:
        # Whole sequences, each with the same rows of the tables.
        sizes = (rows // seq_len, seq_len, *heads.shape[1:])
        heads, out = heads.view(sizes), out.view(sizes)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    else:
        cos, sin = _of_tokens(cos, call, rows), _of_tokens(sin, call, rows)
    (x1, x2), (y1, y2) = _pairs(heads, call), _pairs(out, call)
    x1, x2, cos, sin = (t if t.dtype is dtype else t.to(dtype) for t in (x1, x2, cos, sin))
    sign = 1.0 if back else -1.0  # of what is added to the first; the other's is the opposite
    if out.dtype is not dtype:
        y1.copy_((x1 * cos).add_(x2 * sin, alpha=sign))
        y2.copy_((x2 * cos).sub_(x1 * sin, alpha=sign))
        return
    cross = x1 * sin  # before y1, which may be x1
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=sign)
    torch.mul(x2, cos, out=y2).sub_(cross, alpha=sign)


def _of_tokens(table: Tensor, call: RotaryCall, rows: int) -> Tensor:
    """The table's rows of the call's tokens, (T, 1, R/2): a view where they lie in order."""
    if table.dim() == 3:
        flat = table.reshape(-1, table.shape[-1])
        return flat[call.token0 : call.token0 + rows, None]
    first = call.token0 % max(call.seq_len, 1)
    if first + rows <= call.seq_len:
        return table[first : first + rows, None]
    places = torch.arange(first, first + rows, device=table.device) % call.seq_len
    return table[places][:, None]

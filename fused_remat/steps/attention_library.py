"""PyTorch's own attention kernels: which calls they serve, and how they are called.

On CPUs there is a flash kernel; on CUDA devices flash, cuDNN, and a memory-efficient one, of which
PyTorch picks one without a mask, as it would for `scaled_dot_product_attention`; a mask is the
efficient one's. Each kernel's call is over heads (B, H, S, E) with as many key heads as query
heads: query heads that share a key head are one call each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from fused_remat.formats import LoadedHeads, QuantizedHeads
from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention_rows import AttentionCall, AttentionKey

_aten = torch.ops.aten
_FLASH_CPU = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_KERNELS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
}
# The efficient kernel holds lse, and wants masks, in rows of multiples of these.
_LSE_ROWS, _MASK_ROWS = 32, 16
# A mask value that scores lose digits beside.
_FAR = 128.0
# A row whose largest mask value is finite and below this is not for the CPU's flash kernel: its
# logsumexp is the mask's value, rounded, and its backward off by up to the number of keys.
_FAR_ROW = -1e3
#: Options of `AttentionSpec` that the kernels know, of the window causal alone.
_KNOWN = frozenset({"scale", "window", "align", "true_means"})
_REFUSED = {"dropout": "dropout draws this library's own bits"}
Heads = tuple[Tensor, Tensor, Tensor]


def why_not(
    call: AttentionCall | AttentionKey,
    widths: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why the kernels cannot serve a call, or None if they can (but for `why_not_call`).

    `widths` are those of a head in q, k and in v.
    """
    spec = call.spec
    if call.varlen:
        return "packed sequences are calls of their own"
    if device.type not in ("cpu", "cuda"):
        return f"the fused kernels used here are for CPU and CUDA, q is on {device}"
    for option in spec.options:
        if option not in _KNOWN:
            return _REFUSED.get(option, f"they have no {option}")
    if call.mask_grad:
        return "a mask wants a gradient"
    left, right = spec.window
    if left >= 0 or right > 0:
        return "a sliding window"
    if right == 0 and (call.limited or call.q_len != call.kv_len):
        return "causal beside a mask or key lengths, or with S_q other than S_k"
    if call.q_len == 0 or call.kv_len == 0:
        return "there are no queries or no keys"
    if widths[0] != widths[1]:
        return f"head dims {widths[0]} and {widths[1]} differ"
    return _why_not_cuda(call, widths[0], dtype, device) if device.type == "cuda" else None


def why_not_call(q: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    """`why_not`, and of a CPU what the values of masks say."""
    why = why_not(call, (q.shape[3], v.shape[3]), q.dtype, q.device)
    if why or not (call.masked and q.is_cpu and _has_far_row(lengths_as_padding(call), q.dtype)):
        return why
    return f"a row of masks is finite and below {_FAR_ROW:g} everywhere"


def attention_key(
    q: LoadedHeads, v: LoadedHeads, call: AttentionCall, k: LoadedHeads | None = None
) -> AttentionKey:
    """Of forward and of backward: they choose alike. k only where it may be packed."""
    mask, padding, device = call.mask, call.padding, q.device
    packed: tuple[tuple[str, int, int] | None, ...] = ()
    if isinstance(q, QuantizedHeads) or isinstance(v, QuantizedHeads):
        packed = tuple([
            (x.whole.stored, x.width, x.first) if isinstance(x, QuantizedHeads) else None
            for x in (q, k, v)
        ])  # fmt: skip
    return AttentionKey(
        call.spec,
        call.batch,
        call.q_len,
        call.kv_len,
        (q.shape[3], v.shape[3]),
        None if mask is None else mask.dtype,
        None if padding is None else padding.dtype,
        call.lengths is not None,
        call.cu_q is not None,
        call.mask_grad,
        q.dtype,
        device,
        packed,
        switches() if device.type == "cuda" else (),
    )


def _why_not_cuda(
    call: AttentionCall | AttentionKey, width: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    multiple = 16 // dtype.itemsize
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no fused kernel for {dtype}"
    if width % multiple or width > 256:
        return f"head dim {width} is not a multiple of {multiple} up to 256"
    if call.limited and torch.version.hip is not None:
        return "a mask, on an AMD GPU"
    if not call.limited:
        return (
            None
            if _kernel_of(call, width, dtype, device)
            else "PyTorch would take its unfused kernel"
        )
    if torch.are_deterministic_algorithms_enabled():
        return "a mask, and the kernel that takes one may add gradients in any order"
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return "a mask, and the fused kernel that takes one is switched off"
    return None


def switches() -> tuple[bool, ...]:
    """The global switches on which it depends who serves on a CUDA device."""
    cuda = torch.backends.cuda
    return (
        torch.are_deterministic_algorithms_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
    )


def says(key: AttentionKey) -> str:
    """The kernel that serves a call which they serve."""
    if key.device.type == "cpu":
        return "ATen's flash kernel for CPUs"
    return f"ATen's {_kernel_of(key, key.widths[0], key.dtype, key.device)} kernel"


def _kernel_of(
    call: AttentionCall | AttentionKey, width: int, dtype: torch.dtype, device: torch.device
) -> str:
    row = torch.empty((1, 1, 1, width), dtype=dtype, device=device)
    q = row.expand(call.batch, call.spec.num_heads, call.q_len, -1)
    return kernel(q, call.kv_len, call.spec, call.limited)


def kernel(q: Tensor, kv_len: int, spec: AttentionSpec, masked: bool) -> str:
    """The kernel that serves a call over heads like `q`: flash, cudnn, efficient; "" for none.

    That of a training step, also in evaluation: some have a forward that their backward has not.
    """
    if masked:
        return "efficient"
    with torch.enable_grad():
        q = q.detach().requires_grad_()
        k = q if q.shape[2] == kv_len else q.new_empty((*q.shape[:2], kv_len, q.shape[3]))
        causal = spec.window[1] == 0
        try:
            choice = torch._fused_sdp_choice(q, k, k, None, 0.0, causal, scale=spec.scale)
        except RuntimeError:  # every kernel that could is switched off
            return ""
    return _KERNELS.get(choice, "")


def lengths_as_padding(call: AttentionCall) -> AttentionCall:
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
    return bool(((top < _FAR_ROW) & (top > -torch.inf)).any())


def _additive(mask: Tensor, dtype: torch.dtype, keeps: bool) -> Tensor:
    if mask.dtype == torch.bool:
        excluded = mask.logical_not() if keeps else mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(excluded, -torch.inf)
    return mask.to(dtype)


def _merged_mask(call: AttentionCall, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one additive tensor that broadcasts to (B, H, S_q, S_k), for the kernels.

    In float32 for 16-bit dtypes too, as they take it.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    mask = (
        None if call.mask is None else _additive(call.mask, dtype, call.spec.true_means == "attend")
    )
    if call.padding is None:
        return mask
    padding = _additive(call.padding, dtype, False)[:, None, None, :]
    return padding if mask is None else mask + padding


def _shared(x: Tensor, call: AttentionCall) -> tuple[Tensor, ...]:
    """(B, H, ...) as one view (B, Hkv, ...) for each member of a group of query heads."""
    group = call.spec.num_heads // call.spec.num_kv_heads
    if x.shape[1] == 1:
        return (x,) * group
    return tuple(x.unflatten(1, (call.spec.num_kv_heads, group)).unbind(2))


def _rows_in_place(*heads: Tensor) -> Sequence[Tensor]:
    """`heads` with the elements of a row side by side, as the kernel takes them for granted."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in heads]


def _masks(call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    mask = _merged_mask(call, dtype) if call.masked else None
    if mask is None or mask.dim() == 2:
        return (mask,) * (call.spec.num_heads // call.spec.num_kv_heads)
    return _shared(mask, call)


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, widen: bool
) -> tuple[Tensor, Tensor]:
    """attn as rows, (B, S_q, heads, E) or with the heads in two dimensions, and lse.

    `widen`: compute in float32 on float32 copies.
    """
    call = lengths_as_padding(call)
    if widen:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = _rows_in_place(q, k, v)
    if call.spec.num_heads == call.spec.num_kv_heads:
        mask = _merged_mask(call, q.dtype) if call.masked else None
        heads, lse = _flash(q, k, v, call, mask)
        return heads.transpose(1, 2), lse
    if call.batch == 1 and not call.masked and q.device.type == "cpu":
        # The key heads in place of the batch: one call, whose query heads share a key head.
        groups = q[0].unflatten(0, (call.spec.num_kv_heads, -1))
        shape = (*groups.shape[:2], *k.shape[2:])
        k_shared, v_shared = k[0][:, None].expand(shape), v[0][:, None].expand(shape)
        heads, lse = _flash(groups, k_shared, v_shared, call, None)
        return heads.permute(2, 0, 1, 3)[None], lse.reshape(1, call.spec.num_heads, -1)
    made = [
        _flash(q_one, k, v, call, mask)
        for q_one, mask in zip(_shared(q, call), _masks(call, q.dtype), strict=True)
    ]
    outs, lses = zip(*made, strict=True)
    lse = torch.stack(lses, 2).flatten(1, 2)
    return torch.stack(outs, 2).permute(0, 3, 1, 2, 4), lse


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return cuda_forward(q, k, v, call, mask)
    made: tuple[Tensor, Tensor] = _FLASH_CPU(
        q, k, v, 0.0, call.spec.window[1] == 0, attn_mask=mask, scale=call.spec.scale
    )
    return made


def backward(
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
    """Fills dq, dk, dv."""
    call = lengths_as_padding(call)
    if widen:
        do, q, k, v, o = do.float(), q.float(), k.float(), v.float(), o.float()
    do, q, k, v, o = _rows_in_place(do, q, k, v, o)
    lse = lse.view(call.batch, call.spec.num_heads, call.q_len)
    dq, dk, dv = grads
    if call.spec.num_heads == call.spec.num_kv_heads:
        mask = _merged_mask(call, q.dtype) if call.masked else None
        made = _flash_grads(do, q, k, v, o, lse, call, mask)
        for grad, one in zip(grads, made, strict=True):
            grad.copy_(one)
        return
    sums: list[Tensor] = []
    per_head = (_shared(t, call) for t in (do, q, o, lse, dq))
    masks = _masks(call, q.dtype)
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
        return cuda_backward(do, q, k, v, o, lse, call, mask)
    grads: Heads = _FLASH_CPU_BACKWARD(
        do, q, k, v, o, lse, 0.0, call.spec.window[1] == 0, attn_mask=mask, scale=call.spec.scale
    )
    return grads


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask (B, H, S_q, S_k) as the kernel wants it; which rows see no key.

    A row whose maximum is far from 0 is shifted to have it at 0, which changes no probability: the
    kernel's logsumexp would lose a score beside a mask value of -1e9. (Others are not, since a
    16-bit mask would be rounded by it.) Rows that see no key see all.
    """
    if mask is None:
        return None, None
    top = mask.amax(-1, keepdim=True)
    nothing = top == -torch.inf
    shift = top.masked_fill(top.abs() <= _FAR, 0.0).masked_fill(nothing, 0.0)
    shifted = (mask - shift).masked_fill(nothing, 0.0).to(q.dtype)
    shape = (*q.shape[:3], k.shape[2])
    wide = shifted.expand(*shifted.shape[:-1], shape[-1])
    padded = F.pad(wide, (0, -shape[-1] % _MASK_ROWS))
    return padded.narrow(-1, 0, shape[-1]).expand(shape), nothing


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)


def _kernel(q: Tensor, call: AttentionCall) -> str:
    return kernel(q, call.kv_len, call.spec, call.masked)


def cuda_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """attn (B, H, S_q, E) and lse (B, H, S_q); rows that see no key are 0."""
    name, causal, scale = _kernel(q, call), call.spec.window[1] == 0, call.spec.scale
    if name == "flash":
        made = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return made[0], made[1]
    if name == "cudnn":
        made = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale
        )
        return made[0], made[1].reshape(q.shape[:3])
    bias, nothing = _bias(mask, q, k)
    attn, lse, *_ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    if nothing is not None:
        attn = attn.masked_fill(nothing, 0.0)
    return attn, lse.narrow(-1, 0, q.shape[2]).clone()


def cuda_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    call: AttentionCall,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, from what `cuda_forward` made of the same q, k, v and mask."""
    name, causal, scale = _kernel(q, call), call.spec.window[1] == 0, call.spec.scale
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # of its dropout
    # Kernels read these by their own idea of strides; heads of a group are slices of both.
    lse, o = _dense(lse), _dense(o.transpose(1, 2)).transpose(1, 2)
    lengths = (None, None, call.q_len, call.kv_len)
    if name == "flash":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            do, q, k, v, o, lse, *lengths, 0.0, causal, unused, unused, scale=scale
        )
        return dq, dk, dv
    if name == "cudnn":
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse.unsqueeze(-1), unused, unused, None, *lengths, 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    bias, nothing = _bias(mask, q, k)
    if nothing is not None:
        do = do.masked_fill(nothing, 0.0)
    padded = F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, bias, o, padded, unused, unused, 0.0, [True, True, True, False], causal,
        scale=scale,
    )  # fmt: skip
    return dq, dk, dv

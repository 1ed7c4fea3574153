"""PyTorch's own attention kernels: which calls they can serve, and how they are called.

CPUs have a flash kernel. CUDA devices have a flash, a cuDNN and a memory-efficient kernel: without
a mask PyTorch picks one of them, as in `scaled_dot_product_attention`; only the efficient one takes
a mask. A kernel needs as many key heads as query heads: where g query heads share a key head, it is
called g times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention_call import AttentionCall, AttentionKey, Heads

_aten = torch.ops.aten
_FLASH_CPU = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_KERNELS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
}
# The efficient kernel needs rows of lse and of masks that are multiples of these.
_LSE_ROWS, _MASK_ROWS = 32, 16
# Scores lose digits when a mask value of this magnitude is added.
_FAR = 128.0
# The CPU's flash kernel is wrong for a row whose largest mask value is finite and below this: its
# logsumexp is the rounded mask value, and its backward is off by up to the number of keys.
_FAR_ROW = -1e3
#: Options of `AttentionSpec` that the kernels support; of windows, only causal.
_KNOWN = frozenset({"scale", "window", "align", "true_means"})
_REFUSED = {"dropout": "dropout draws this library's own bits"}


def why_not(
    call: AttentionCall | AttentionKey,
    widths: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why the kernels cannot serve a call; None if they can. `why_not_call` also checks values.

    `widths`: of a head in q and k, and in v.
    """
    spec = call.spec
    if call.varlen:
        return "each variable-length sequence is a call of its own"
    if device.type not in ("cpu", "cuda"):
        return f"PyTorch's kernels are used on CPU and CUDA; q is on {device}"
    for option in spec.options:
        if option not in _KNOWN:
            return _REFUSED.get(option, f"they have no {option}")
    if call.mask_grad:
        return "a mask requires a gradient"
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
    """As `why_not`; on a CPU, the values of float masks may be another reason."""
    why = why_not(call, (q.shape[3], v.shape[3]), q.dtype, q.device)
    if why is None and call.masked and q.is_cpu and _has_far_row(call, q.dtype):
        return f"a mask has a row that is finite and below {_FAR_ROW:g} everywhere"
    return why


def says(key: AttentionKey) -> str:
    """Which kernel runs, for `explain`."""
    if key.device.type == "cpu":
        return "ATen's flash kernel for CPUs"
    return f"ATen's {_kernel_of(key, key.widths[0], key.dtype, key.device)} kernel"


def kernel(q: Tensor, kv_len: int, spec: AttentionSpec, masked: bool) -> str:
    """The kernel for a call over heads like `q`: "flash", "cudnn" or "efficient"; "" for none.

    It is the kernel of a training step, in evaluation too: some can do a forward that their
    backward cannot undo.
    """
    if masked:
        return "efficient"
    with torch.enable_grad():
        q = q.detach().requires_grad_()
        k = q if q.shape[2] == kv_len else q.new_empty((*q.shape[:2], kv_len, q.shape[3]))
        causal = spec.window[1] == 0
        try:
            choice = torch._fused_sdp_choice(q, k, k, None, 0.0, causal, scale=spec.scale)
        except RuntimeError:  # all suitable kernels are switched off
            return ""
    return _KERNELS.get(choice, "")


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, widen: bool
) -> tuple[Tensor, Tensor]:
    """attn (B, S_q, H, E), whose heads may be in two dimensions, and lse.

    `widen`: compute in float32 on float32 copies.
    """
    call = call.with_lengths_as_padding()
    if widen:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = _rows_in_place(q, k, v)
    if call.spec.num_heads == call.spec.num_kv_heads:
        mask = _merged_mask(call, q.dtype)
        heads, lse = _flash(q, k, v, call, mask)
        return heads.transpose(1, 2), lse
    if call.batch == 1 and not call.masked and q.device.type == "cpu":
        # One call in which the key heads are the batch, and its query heads share a key head.
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
    """Fill `grads`: dq, dk, dv."""
    call = call.with_lengths_as_padding()
    if widen:
        do, q, k, v, o = do.float(), q.float(), k.float(), v.float(), o.float()
    do, q, k, v, o = _rows_in_place(do, q, k, v, o)
    lse = lse.view(call.batch, call.spec.num_heads, call.q_len)
    dq, dk, dv = grads
    if call.spec.num_heads == call.spec.num_kv_heads:
        mask = _merged_mask(call, q.dtype)
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


def _flash(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """attn (B, H, S_q, E) and lse (B, H, S_q), of as many key heads as query heads."""
    if q.is_cuda:
        return cuda_forward(q, k, v, call, mask)
    made: tuple[Tensor, Tensor] = _FLASH_CPU(
        q, k, v, 0.0, call.spec.window[1] == 0, attn_mask=mask, scale=call.spec.scale
    )
    return made


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


def cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """attn (B, H, S_q, E) and lse (B, H, S_q); rows that see no key are 0."""
    name = kernel(q, call.kv_len, call.spec, call.masked)
    causal, scale = call.spec.window[1] == 0, call.spec.scale
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
    """dq, dk, dv, from the results of `cuda_forward` for the same q, k, v and mask."""
    name = kernel(q, call.kv_len, call.spec, call.masked)
    causal, scale = call.spec.window[1] == 0, call.spec.scale
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the random state of dropout
    # The kernels ignore the strides of these two; the heads of a group are slices of both.
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


def _why_not_cuda(
    call: AttentionCall | AttentionKey, width: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    multiple = 16 // dtype.itemsize
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"PyTorch has no fused kernel for {dtype}"
    if width % multiple or width > 256:
        return f"head dim {width} is not a multiple of {multiple} up to 256"
    if call.limited and torch.version.hip is not None:
        return "a mask, on an AMD GPU"
    if not call.limited:
        found = _kernel_of(call, width, dtype, device)
        return None if found else "PyTorch would take its unfused kernel"
    if torch.are_deterministic_algorithms_enabled():
        return "with a mask, PyTorch's kernel may add gradients in any order"
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return "PyTorch's kernel that takes a mask is switched off"
    return None


def _kernel_of(
    call: AttentionCall | AttentionKey, width: int, dtype: torch.dtype, device: torch.device
) -> str:
    row = torch.empty((1, 1, 1, width), dtype=dtype, device=device)
    q = row.expand(call.batch, call.spec.num_heads, call.q_len, -1)
    return kernel(q, call.kv_len, call.spec, call.limited)


def _has_far_row(call: AttentionCall, dtype: torch.dtype) -> bool:
    """Whether a row of the masks is finite and below `_FAR_ROW` everywhere."""
    if not any(m is not None and m.dtype != torch.bool for m in (call.mask, call.padding)):
        return False
    merged = _merged_mask(call.with_lengths_as_padding(), dtype)
    assert merged is not None
    top = merged.amax(-1)
    return bool(((top < _FAR_ROW) & (top > -torch.inf)).any())


def _additive(mask: Tensor, dtype: torch.dtype, true_attends: bool) -> Tensor:
    if mask.dtype == torch.bool:
        excluded = mask.logical_not() if true_attends else mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(excluded, -torch.inf)
    return mask.to(dtype)


def _merged_mask(call: AttentionCall, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one additive tensor that broadcasts to (B, H, S_q, S_k); None without masks.

    In at least float32, which the kernels accept for 16-bit dtypes too.
    """
    if call.mask is None and call.padding is None:
        return None
    dtype = torch.promote_types(dtype, torch.float32)
    attend = call.spec.true_means == "attend"
    mask = None if call.mask is None else _additive(call.mask, dtype, attend)
    if call.padding is None:
        return mask
    padding = _additive(call.padding, dtype, False)[:, None, None, :]
    return padding if mask is None else mask + padding


def _shared(x: Tensor, call: AttentionCall) -> tuple[Tensor, ...]:
    """(B, H, ...) as one view (B, Hkv, ...) for each member of the groups of query heads."""
    group = call.spec.num_heads // call.spec.num_kv_heads
    if x.shape[1] == 1:
        return (x,) * group
    return tuple(x.unflatten(1, (call.spec.num_kv_heads, group)).unbind(2))


def _rows_in_place(*heads: Tensor) -> Sequence[Tensor]:
    """`heads` with contiguous rows, which the kernels assume."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in heads]


def _masks(call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """The merged mask for each member of the groups of query heads."""
    mask = _merged_mask(call, dtype)
    if mask is None or mask.dim() == 2:
        return (mask,) * (call.spec.num_heads // call.spec.num_kv_heads)
    return _shared(mask, call)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask (B, H, S_q, S_k) as the efficient kernel takes it; the rows without a key.

    A row whose maximum is far from 0 is shifted to a maximum of 0, which changes no probability:
    beside a mask value of -1e9 the kernel's logsumexp would lose the scores. Other rows are not
    shifted, since that would round a 16-bit mask. A row that sees no key is made to see all.
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
    """x, contiguous. Not `x.contiguous()`, which fails for fake CUDA tensors without CUDA."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)

"""PyTorch's own attention kernels: which calls they can serve, and how calls are put to them.

CPUs have a flash kernel. CUDA devices have a flash, a cuDNN and a memory-efficient kernel, and
PyTorch is asked which one it would take (`kernel`), as in `scaled_dot_product_attention`. Masks are
cuDNN's or the efficient kernel's; windows and variable-length sequences are flash's. Flash and
cuDNN take key heads that query heads share; another kernel is called once for each query head of a
group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend

from fused_remat.steps import attention_operators as operators
from fused_remat.steps import cpu_choice
from fused_remat.steps.attention_call import (
    AttentionArgs,
    AttentionKey,
    Heads,
    attention_key,
)
from fused_remat.steps.attention_operators import Kernel

_KERNELS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
}
# Rows of masks are apart by a multiple of this, which the efficient kernel needs.
_MASK_ROWS = 16
# Scores lose digits when a mask value of this magnitude is added.
_FAR = 128.0
# The CPU's flash kernel is wrong for a row whose largest mask value is finite and below this: its
# logsumexp is the rounded mask value, and its backward is off by up to the number of keys.
_FAR_ROW = -1e3
#: Options of `AttentionSpec` that the kernels support.
_KNOWN = frozenset({"scale", "window", "align", "true_means"})
_REFUSED = {"dropout": "dropout draws this library's own bits"}


def unsupported_reason(key: AttentionKey) -> str | None:
    """The reason against the kernels, or None. `unsupported_call_reason` also checks values."""
    why = _why_never(key)
    return _why_blocks(key) if why is None and key.device.type == "cpu" else why


def _why_never(key: AttentionKey) -> str | None:
    """Why the kernels cannot serve a call; None if they can."""
    if key.device.type not in ("cpu", "cuda"):
        return f"PyTorch's kernels are used on CPU and CUDA; q is on {key.device}"
    for option in key.spec.options:
        if option not in _KNOWN:
            return _REFUSED.get(option, f"they have no {option}")
    if key.mask_grad:
        return "a mask requires a gradient"
    if key.q_len == 0 or key.kv_len == 0:
        return "there are no queries or no keys"
    flash = _only_for_flash(key)
    if key.limited and (flash or key.spec.window[1] == 0):
        return f"{flash or 'causal'} beside a mask or key lengths"
    if key.device.type == "cuda":
        return _unsupported_cuda_reason(key)
    return flash or (None if key.widths[0] == key.widths[1] else f"head dims differ: {key.widths}")


def _why_blocks(key: AttentionKey) -> str | None:
    """Return why blocks of query rows run on a CPU: where they are faster. They skip keys that no
    query sees, and take the query heads of a key head as rows of one product."""
    spec, causal = key.spec, key.spec.window[1] == 0
    if key.limited or not (causal or spec.num_heads > spec.num_kv_heads):
        return None
    choice = cpu_choice.forced(cpu_choice.ATTENTION)
    if not choice and causal and cpu_choice.applies(cpu_choice.ATTENTION, key.dtype, key.kv_len):
        choice = "blocks"
    return "faster on this processor" if choice == "blocks" else None


def unsupported_call_reason(q: Tensor, v: Tensor, call: AttentionArgs) -> str | None:
    """As `unsupported_reason`; on a CPU, the values of float masks may be another reason."""
    why = unsupported_reason(attention_key(q, v, call))
    if why is None and call.masked and q.is_cpu and _has_far_row(call, q.dtype):
        return f"a mask has a row that is finite and below {_FAR_ROW:g} everywhere"
    return why


def describe(key: AttentionKey) -> str:
    """Which kernel runs, for `explain`."""
    if key.device.type == "cpu":
        return "ATen's flash kernel for CPUs"
    if name := kernel_of(key):
        public = "PyTorch's scaled_dot_product_attention"
        return public if name == "public" else f"ATen's {name} kernel"
    return f"ATen's {kernel_of(key, members=True)} kernel, once for each query head of a group"


def kernel(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: AttentionArgs | AttentionKey
) -> str:
    """The kernel that PyTorch would take on CUDA: "flash", "cudnn" or "efficient"; "" for none.

    It is the kernel of a training step, in evaluation too: some can do a forward that their
    backward cannot undo. If PyTorch has other operators than those known, it is "public".
    """
    shared, causal = q.shape[1] != k.shape[1], call.spec.window[1] == 0
    if q.is_inference():  # which cannot be made to require a gradient
        q = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    with torch.enable_grad():
        q = q.detach().requires_grad_()
        if _only_for_flash(call):
            given = SDPAParams(q, k, v, bias, 0.0, False, shared)
            can = operators.has("flash") and torch.version.hip is None
            return "flash" if can and can_use_flash_attention(given) else ""
        if not operators.has_operator("_fused_sdp_choice"):
            return "public"
        try:
            choice = torch._fused_sdp_choice(
                q, k, v, bias, 0.0, causal, scale=call.spec.scale, enable_gqa=shared
            )
        except RuntimeError:  # all suitable kernels are switched off
            return ""
    name = _KERNELS.get(choice, "")
    if not name or (shared and name == "efficient"):
        return ""
    return name if operators.has(name) else "public"


@functools.lru_cache(maxsize=4096)
def kernel_of(key: AttentionKey, members: bool = False) -> str:
    """`kernel` for the sizes of a call; for one query head of each group if `members`."""

    def heads(count: int, length: int, width: int) -> Tensor:
        row = torch.empty((1, 1, 1, width), dtype=key.dtype, device=key.device)
        return row.expand(key.batch, count, length, -1)

    kv_heads, (width, v_width) = key.spec.num_kv_heads, key.widths
    q = heads(kv_heads if members else key.spec.num_heads, key.q_len, width)
    k, v = heads(kv_heads, key.kv_len, width), heads(kv_heads, key.kv_len, v_width)
    bias = q.new_empty((1, 1, 1, key.kv_len)).expand(-1, -1, key.q_len, -1)
    return kernel(q, k, v, bias if key.limited else None, key)


def choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionArgs) -> Kernel:
    """The kernel for these heads and their merged mask."""
    shared = q.shape[1] != k.shape[1]
    if q.is_cpu and operators.has("cpu"):
        return Kernel("" if shared else "cpu", mask)
    bias, nothing = _bias(mask, q, k)
    name = kernel(q, k, v, bias, call) if q.is_cuda else "public"
    if not name and (flash := _only_for_flash(call)):
        raise RuntimeError(f"{flash}: flash attention does not take heads of strides {q.stride()}")
    return Kernel(name or ("" if shared else "public"), bias, nothing)


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, widen: bool
) -> tuple[Tensor, Tensor]:
    """attn (B, S_q, H, E), whose heads may be in two dimensions, and lse.

    `widen`: compute in float32 on float32 copies.
    """
    if widen:
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = _contiguous_rows(q, k, v)
    call, mask = _with_one_mask(call, q.dtype)
    at = choose(q, k, v, mask, call)
    if at.name:
        heads, lse = operators.forward(at, q, k, v, call)
        return heads.transpose(1, 2), lse
    if call.batch == 1 and mask is None and q.is_cpu:
        # One call in which the key heads are the batch, and its query heads share a key head.
        groups = q[0].unflatten(0, (call.spec.num_kv_heads, -1))
        shape = (*groups.shape[:2], *k.shape[2:])
        k_shared, v_shared = k[0][:, None].expand(shape), v[0][:, None].expand(shape)
        heads, lse = operators.forward(Kernel("cpu"), groups, k_shared, v_shared, call)
        return heads.permute(2, 0, 1, 3)[None], lse.reshape(1, call.spec.num_heads, -1)
    made = [
        operators.forward(choose(q_one, k, v, one, call), q_one, k, v, call)
        for q_one, one in zip(_shared(q, call), _masks(mask, call), strict=True)
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
    call: AttentionArgs,
    grads: Heads,
    widen: bool,
) -> None:
    """Fill `grads`: dq, dk, dv."""
    if widen:
        do, q, k, v, o = do.float(), q.float(), k.float(), v.float(), o.float()
    do, q, k, v, o = _contiguous_rows(do, q, k, v, o)
    lse = lse.view(call.batch, call.spec.num_heads, call.q_len)
    call, mask = _with_one_mask(call, q.dtype)
    at = choose(q, k, v, mask, call)
    if at.name:
        for grad, one in zip(grads, operators.backward(at, do, q, k, v, o, lse, call), strict=True):
            grad.copy_(one)
        return
    sums: list[Tensor] = []
    per_head = (_shared(t, call) for t in (do, q, o, lse, grads[0]))
    masks = _masks(mask, call)
    for do_one, q_one, o_one, lse_one, dq_one, one in zip(*per_head, masks, strict=True):
        at = choose(q_one, k, v, one, call)
        dq_made, *rest = operators.backward(at, do_one, q_one, k, v, o_one, lse_one, call)
        dq_one.copy_(dq_made)
        sums = rest if not sums else [a.add_(b) for a, b in zip(sums, rest, strict=True)]
    grads[1].copy_(sums[0])
    grads[2].copy_(sums[1])


def _only_for_flash(call: AttentionArgs | AttentionKey) -> str:
    """What of a call only CUDA's flash kernel serves; "" if nothing."""
    if call.varlen:
        return "variable-length sequences"
    if call.spec.window not in ((-1, -1), (-1, 0)):
        return "a sliding window"
    if call.spec.window[1] == 0 and call.q_len != call.kv_len:
        return "causal with S_q other than S_k"
    return ""


def _unsupported_cuda_reason(key: AttentionKey) -> str | None:
    multiple = 16 // key.dtype.itemsize
    if key.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"PyTorch has no fused kernel for {key.dtype}"
    if any(width % multiple or width > 256 for width in key.widths):
        return f"head dims {key.widths} are not multiples of {multiple} up to 256"
    if key.spec.scale < 0.0:
        return f"the scale {key.spec.scale} is negative"
    flash = _only_for_flash(key)
    if flash and key.spec.align == "start" and (key.varlen or key.q_len != key.kv_len):
        return f"{flash}, aligned at the start"
    if key.limited and torch.version.hip is not None:
        return "a mask, on an AMD GPU"
    name = kernel_of(key) or ("" if flash else kernel_of(key, members=True))
    if not name:
        return f"{flash}: flash attention cannot serve" if flash else "PyTorch would not fuse it"
    if key.limited and name == "efficient" and torch.are_deterministic_algorithms_enabled():
        return "with a mask, PyTorch's kernel may add gradients in any order"
    return None


def _has_far_row(call: AttentionArgs, dtype: torch.dtype) -> bool:
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


def _with_one_mask(call: AttentionArgs, dtype: torch.dtype) -> tuple[AttentionArgs, Tensor | None]:
    """The call with its key lengths as padding, and its merged mask."""
    if not call.limited:
        return call, None
    call = call.with_lengths_as_padding()
    return call, _merged_mask(call, dtype)


def _merged_mask(call: AttentionArgs, dtype: torch.dtype) -> Tensor | None:
    """Both masks as one additive tensor that broadcasts to (B, H, S_q, S_k); None without masks.

    In at least float32, which the kernels accept for 16-bit dtypes too.
    """
    if not call.masked:
        return None
    dtype = torch.promote_types(dtype, torch.float32)
    attend = call.spec.true_means == "attend"
    mask = None if call.mask is None else _additive(call.mask, dtype, attend)
    if call.padding is None:
        return mask
    padding = _additive(call.padding, dtype, False)[:, None, None, :]
    return padding if mask is None else mask + padding


def _shared(x: Tensor, call: AttentionArgs) -> tuple[Tensor, ...]:
    """(B, H, ...) as one view (B, Hkv, ...) for each member of the groups of query heads."""
    group = call.spec.num_heads // call.spec.num_kv_heads
    if x.shape[1] == 1:
        return (x,) * group
    return tuple(x.unflatten(1, (call.spec.num_kv_heads, group)).unbind(2))


def _contiguous_rows(*heads: Tensor) -> Sequence[Tensor]:
    """`heads` with contiguous rows, which the kernels assume."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in heads]


def _masks(mask: Tensor | None, call: AttentionArgs) -> tuple[Tensor | None, ...]:
    """The merged mask for each member of the groups of query heads."""
    if mask is None or mask.dim() == 2:
        return (mask,) * (call.spec.num_heads // call.spec.num_kv_heads)
    return _shared(mask, call)


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The additive mask as CUDA's kernels take it, (B, h, S_q, S_k) where h is 1 for all heads.

    Also the rows that see no key, (B or 1, h, S_q or 1, 1), or None. A row whose maximum is far
    from 0 is shifted to a maximum of 0, which changes no probability: beside a mask value of -1e9
    the kernel's logsumexp would lose the scores. Other rows are not shifted, since that would round
    a 16-bit mask. A row that sees no key is made to see all.
    """
    if mask is None:
        return None, None
    if mask.dim() == 2:
        mask = mask.expand(1, 1, -1, -1)
    top = mask.amax(-1, keepdim=True)
    nothing = top == -torch.inf
    shift = top.masked_fill(top.abs() <= _FAR, 0.0).masked_fill(nothing, 0.0)
    shifted = (mask - shift).masked_fill(nothing, 0.0).to(q.dtype)
    length, heads = k.shape[2], mask.shape[1]
    wide = shifted.expand(*shifted.shape[:-1], length)
    padded = F.pad(wide, (0, -length % _MASK_ROWS)).narrow(-1, 0, length)
    return padded.expand(q.shape[0], heads, q.shape[2], -1), nothing

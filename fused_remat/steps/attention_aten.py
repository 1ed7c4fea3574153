"""PyTorch's own attention kernels: which calls they support, and how a call reaches them.

CPUs have a flash kernel. CUDA has a flash, a cuDNN and a memory-efficient kernel, among which
PyTorch chooses (`kernel`). Masks run in cuDNN's or the efficient kernel; windows and
variable-length sequences in flash. Flash and cuDNN support key heads that query heads share;
another kernel is called once for each query head of a group. An operator that has other arguments
than in `SIGNATURES` in this version of PyTorch is not called.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend

from fused_remat.steps import cpu_choice
from fused_remat.steps.attention_call import (
    FAR_ROW,
    AttentionArgs,
    AttentionKey,
    Heads,
    attention_key,
    has_far_row,
    is_near,
)
from fused_remat.steps.linear import widens
from fused_remat.steps.operations import unrecorded

_aten = torch.ops.aten
_SCALED, _WINDOWED, _MASKED = "scale", "scale window_size_left window_size_right", "attn_mask scale"
#: Operator -> the arguments that are passed in order, those by name, and the number of results.
SIGNATURES = {
    "_fused_sdp_choice": ("query key value attn_mask dropout_p is_causal", "scale enable_gqa", 1),
    "_scaled_dot_product_flash_attention_for_cpu": (
        "query key value dropout_p is_causal", _MASKED, 2,
    ),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (
        "grad_out query key value out logsumexp dropout_p is_causal", _MASKED, 3,
    ),
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask",
        _WINDOWED, 5,
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
        " rng_state unused", _WINDOWED, 3,
    ),
    "_scaled_dot_product_cudnn_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal", _SCALED, 9,
    ),
    "_scaled_dot_product_cudnn_attention_backward": (
        "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q"
        " cum_seq_k max_q max_k dropout_p is_causal", _SCALED, 3,
    ),
    "_scaled_dot_product_efficient_attention": (
        "query key value attn_bias compute_log_sumexp dropout_p is_causal", _SCALED, 4,
    ),
    "_scaled_dot_product_efficient_attention_backward": (
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p"
        " grad_input_mask is_causal", _SCALED, 4,
    ),
}  # fmt: skip
_KERNELS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
}
# The efficient kernel needs rows of masks, and of lse, that are apart by a multiple of these.
_MASK_ROWS, _LSE_ROWS = 16, 32
# Scores lose digits when a mask value of this magnitude is added.
_FAR = 128.0
#: Of `AttentionSpec`.
_SUPPORTED_OPTIONS = frozenset({"scale", "window", "align", "true_means", "sinks"})


class Kernel(NamedTuple):
    """The kernel of a call, and the call's mask as the kernel takes it."""

    name: str  # "" if each query head of a group needs a call
    bias: Tensor | None = None  # added to the scores, expands to (B, H, S_q, S_k)
    nothing: Tensor | None = None  # rows that see no key, where the bias lets them see all


def fits(name: str, schema: Any) -> bool:
    """Return whether an operator of this schema can be called as in `SIGNATURES`."""
    in_order, named, results = SIGNATURES[name]
    passed = [*in_order.split(), *named.split()]
    ordered = [a.name for a in schema.arguments if not a.kwarg_only]
    required = {a.name for a in schema.arguments if not a.has_default_value()}
    same_order = ordered[: len(in_order.split())] == in_order.split()
    known = required <= set(passed) <= {a.name for a in schema.arguments}
    return same_order and known and len(schema.returns) == results


@functools.cache
def has(kernel: str) -> bool:
    """Return whether PyTorch has all operators of a kernel, or of the choice, by `SIGNATURES`."""
    starts = {"cpu": "_scaled_dot_product_flash", "flash": "_flash", "choice": "_fused"}
    start = starts.get(kernel, f"_scaled_dot_product_{kernel}")
    operators = [
        (name, getattr(_aten, name, None)) for name in SIGNATURES if name.startswith(start)
    ]
    return all(op is not None and fits(name, op.default._schema) for name, op in operators)


def unsupported_reason(key: AttentionKey) -> str | None:
    """Return the reason against the kernels, or None; `unsupported_call_reason` checks values."""
    if key.device.type not in ("cpu", "cuda"):
        return f"PyTorch's kernels are used on CPU and CUDA; q is on {key.device}"
    for option in key.spec.options:
        if option == "dropout":
            return "dropout draws this library's own bits"
        if option not in _SUPPORTED_OPTIONS:
            return f"they have no {option}"
    if key.mask_grad:
        return "a mask requires a gradient"
    if key.q_len == 0 or key.kv_len == 0:
        return "there are no queries or no keys"
    flash, causal = _only_for_flash(key), key.spec.window[1] == 0
    if key.limited and (flash or causal):
        return f"{flash or 'causal'} with a mask or key lengths"
    if key.device.type == "cuda":
        return _unsupported_cuda_reason(key, flash)
    if not has("cpu"):
        return "this version of PyTorch has another operator"
    if flash or key.widths[0] != key.widths[1]:
        return flash or f"head dims differ: {key.widths}"
    if key.limited or not (causal or key.spec.num_heads > key.spec.num_kv_heads):
        return None
    # Blocks of query rows skip keys that no query sees, and take the query heads of a key head as
    # rows of one product.
    choice = cpu_choice.forced(cpu_choice.ATTENTION)
    if not choice and causal and cpu_choice.applies(cpu_choice.ATTENTION, key.dtype, key.kv_len):
        choice = "blocks"
    return "faster on this processor" if choice == "blocks" else None


def _unsupported_cuda_reason(key: AttentionKey, flash: str) -> str | None:
    multiple = 16 // key.dtype.itemsize
    if key.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"PyTorch has no fused kernel for {key.dtype}"
    if any([width % multiple or width > 256 for width in key.widths]):
        return f"head dims {key.widths} are not multiples of {multiple} up to 256"
    if key.spec.scale < 0.0:
        return f"the scale {key.spec.scale} is negative"
    if flash and key.spec.align == "start" and (key.varlen or key.q_len != key.kv_len):
        return f"{flash}, aligned at the start"
    if key.limited and torch.version.hip is not None:
        return "a mask, on an AMD GPU"
    name = kernel_of(key) or ("" if flash else kernel_of(key, members=True))
    if not name:
        return f"{flash}: not supported by flash attention" if flash else "PyTorch has no kernel"
    if key.limited and name == "efficient" and torch.are_deterministic_algorithms_enabled():
        return "with a mask, PyTorch's kernel may add gradients in any order"
    return None


def unsupported_call_reason(q: Tensor, v: Tensor, call: AttentionArgs) -> str | None:
    """Return the reason against the kernels for a call: on a CPU also by values of float masks."""
    reason = unsupported_reason(attention_key(q, v, call))
    if reason is not None or not q.is_cpu or (call.entire is not None and is_near(call.entire)):
        return reason
    is_float = any([m is not None and m.dtype != torch.bool for m in (call.mask, call.padding)])
    if is_float and has_far_row(call.merged_mask(q.dtype)):  # type: ignore[arg-type]
        return f"a mask has a row that is finite and below {FAR_ROW:g} everywhere"
    return None


def _only_for_flash(call: AttentionArgs | AttentionKey) -> str:
    if call.varlen:
        return "variable-length sequences"
    if call.spec.window not in ((-1, -1), (-1, 0)):
        return "a sliding window"
    if call.spec.window[1] == 0 and call.q_len != call.kv_len:
        return "causal with S_q other than S_k"
    return ""


def describe(key: AttentionKey) -> str:
    """Return which kernel runs, for `explain`."""
    if key.device.type == "cpu":
        return "ATen's flash kernel for CPUs"
    if name := kernel_of(key):
        return f"ATen's {name} kernel"
    return f"ATen's {kernel_of(key, members=True)} kernel, once for each query head of a group"


def kernel(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, call: AttentionArgs | AttentionKey
) -> str:
    """Return the kernel that PyTorch chooses on CUDA, or "" for none.

    It is the kernel of a training step, in evaluation too: some can do a forward that their
    backward cannot undo.
    """
    shared, causal = q.shape[1] != k.shape[1], call.spec.window[1] == 0
    if q.is_inference():  # which cannot be made to require a gradient
        q = torch.empty_strided(q.shape, q.stride(), dtype=q.dtype, device=q.device)
    with unrecorded(), torch.enable_grad():
        q = q.detach().requires_grad_()
        if _only_for_flash(call):
            params = SDPAParams(q, k, v, bias, 0.0, False, shared)
            can = has("flash") and torch.version.hip is None
            return "flash" if can and can_use_flash_attention(params) else ""
        if not has("choice"):
            return ""
        try:
            choice = torch._fused_sdp_choice(
                q, k, v, bias, 0.0, causal, scale=call.spec.scale, enable_gqa=shared
            )
        except RuntimeError:  # all suitable kernels are switched off
            return ""
    name = _KERNELS.get(choice, "")
    return "" if not name or (shared and name == "efficient") or not has(name) else name


@functools.lru_cache(maxsize=4096)
def kernel_of(key: AttentionKey, members: bool = False) -> str:
    """Return `kernel` for the sizes of a call; for one query head of each group if `members`."""
    kv_heads, kv_len, (width, v_width) = key.spec.num_kv_heads, key.kv_len, key.widths
    sizes = kv_heads if members else key.spec.num_heads, key.q_len, width
    q, k, v = (
        torch.empty((1, 1, 1, width), dtype=key.dtype, device=key.device).expand(
            key.batch, heads, length, -1
        )
        for heads, length, width in (sizes, (kv_heads, kv_len, width), (kv_heads, kv_len, v_width))
    )
    bias = q.new_empty((1, 1, 1, key.kv_len)).expand(-1, -1, key.q_len, -1)
    return kernel(q, k, v, bias if key.limited else None, key)


def forward(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Return attn (B, S_q, H, E), whose heads may be in two dimensions, and lse."""
    if widens(q):
        q, k, v = q.float(), k.float(), v.float()
    q, k, v = [x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)]
    mask = call.merged_mask(q.dtype)
    at = _choose(q, k, v, mask, call)
    if at.name:
        heads, lse = run(at, q, k, v, call)
        return heads.transpose(1, 2), lse
    if call.batch == 1 and mask is None and q.is_cpu:
        # One call in which the key heads are the batch, and its query heads share a key head.
        groups = q[0].unflatten(0, (call.spec.num_kv_heads, -1))
        shape = (*groups.shape[:2], *k.shape[2:])
        k_shared, v_shared = k[0][:, None].expand(shape), v[0][:, None].expand(shape)
        heads, lse = run(Kernel("cpu"), groups, k_shared, v_shared, call)
        return heads.permute(2, 0, 1, 3)[None], lse.reshape(1, call.spec.num_heads, -1)
    results = [
        run(_choose(q_one, k, v, mask_one, call), q_one, k, v, call)
        for q_one, mask_one in zip(_members(q, call), _members(mask, call), strict=True)
    ]
    outs, lses = zip(*results, strict=True)
    lse = torch.stack(lses, 2).flatten(1, 2)
    return torch.stack(outs, 2).permute(0, 3, 1, 2, 4), lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: AttentionArgs,
    grads: Heads, own: bool = False,
) -> Heads:  # fmt: skip
    """Return dq, dk and dv: `grads`, or PyTorch's own tensors if `own` and of the same dtype."""
    if widens(q):
        do, q, k, v, o = do.float(), q.float(), k.float(), v.float(), o.float()
    do, q, k, v, o = [x if x.stride(-1) == 1 else x.contiguous() for x in (do, q, k, v, o)]
    lse = lse.view(call.batch, call.spec.num_heads, call.q_len)
    mask = call.merged_mask(q.dtype)
    at = _choose(q, k, v, mask, call)
    if at.name:
        q, k, v = run_backward(at, do, q, k, v, o, lse, call)
        if own and q.dtype is grads[0].dtype:
            return q, k, v
        for grad, one in zip(grads, (q, k, v), strict=True):
            grad.copy_(one)
        return grads
    sums: list[Tensor] = []
    per_head = [_members(t, call) for t in (do, q, o, lse, grads[0], mask)]
    for do_one, q_one, o_one, lse_one, dq_one, mask_one in zip(*per_head, strict=True):
        at = _choose(q_one, k, v, mask_one, call)
        dq, *rest = run_backward(at, do_one, q_one, k, v, o_one, lse_one, call)
        dq_one.copy_(dq)
        sums = rest if not sums else [a.add_(b) for a, b in zip(sums, rest, strict=True)]
    grads[1].copy_(sums[0])
    grads[2].copy_(sums[1])
    return grads


def _choose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: AttentionArgs) -> Kernel:
    shared = q.shape[1] != k.shape[1]
    if q.is_cpu:
        return Kernel("" if shared else "cpu", mask)
    bias, nothing = _bias(mask, q, k, call.spec.sinks)
    name = kernel(q, k, v, bias, call)
    if not name and not shared:
        raise RuntimeError(
            f"fused_remat: PyTorch has no attention kernel for heads of strides {q.stride()}; "
            'pass contiguous heads, or backend="triton"'
        )
    return Kernel(name, bias, nothing)


def _members(x: Tensor | None, call: AttentionArgs) -> tuple[Any, ...]:
    """Return a view (B, Hkv, ...) of x (B, H, ...) for each query head of a group; x for all."""
    group = call.spec.num_heads // call.spec.num_kv_heads
    if x is None or x.dim() == 2 or x.shape[1] == 1:
        return (x,) * group
    return tuple(x.unflatten(1, (call.spec.num_kv_heads, group)).unbind(2))


def _bias(
    mask: Tensor | None, q: Tensor, k: Tensor, sinks: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the mask as CUDA's kernels take it, and the rows that see no key.

    The mask is (B, h, S_q, S_k), where h is 1 for all heads; the rows (B or 1, h, S_q or 1, 1). A
    row whose maximum is far from 0 is shifted to a maximum of 0, which changes no probability: next
    to a mask value of -1e9 the kernel's logsumexp would lose the scores. Other rows are not
    shifted, since that would round a 16-bit mask. A row that sees no key is made to see all. With
    `sinks` a shift would count, and a row far below 0 sees its sink alone.
    """
    if mask is None:
        return None, None
    if mask.dim() == 2:
        mask = mask.expand(1, 1, -1, -1)
    top = mask.amax(-1, keepdim=True)
    nothing = top < -_FAR if sinks else top == -torch.inf
    shift = top.masked_fill((top.abs() <= _FAR) | nothing | sinks, 0.0)
    shifted = (mask - shift).masked_fill(nothing, 0.0).to(q.dtype)
    length, heads = k.shape[2], mask.shape[1]
    wide = shifted.expand(*shifted.shape[:-1], length)
    padded = F.pad(wide, (0, -length % _MASK_ROWS)).narrow(-1, 0, length)
    return padded.expand(q.shape[0], heads, q.shape[2], -1), nothing


def run(at: Kernel, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> tuple[Tensor, Tensor]:
    """Return attn (B, H, S_q, V), 0 in rows without a key, and lse (B, H, S_q)."""
    causal, scale = call.spec.window[1] == 0, call.spec.scale
    if at.name == "cpu":
        attn, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=at.bias, scale=scale
        )
    elif at.name == "flash":
        attn, lse = _flash(q, k, v, call)
    elif at.name == "cudnn":
        attn, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, at.bias, True, 0.0, causal, scale=scale
        )
        lse = lse.reshape(q.shape[:3])
    else:
        bias = None if at.bias is None else at.bias.expand(*q.shape[:3], k.shape[2])
        attn, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, causal, scale=scale
        )
        lse = lse.narrow(-1, 0, q.shape[2]).clone()
    return attn if at.nothing is None else attn.masked_fill(at.nothing, 0.0), lse


def run_backward(
    at: Kernel, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    call: AttentionArgs,
) -> Any:  # fmt: skip
    """Return dq, dk and dv, from the results of `run`."""
    name, bias, nothing = at
    if nothing is not None:  # (B, S, H, E) in memory, as without a mask: cuDNN's plans expect it
        do = do.transpose(1, 2).masked_fill(nothing.transpose(1, 2), 0.0).transpose(1, 2)
    causal, scale = call.spec.window[1] == 0, call.spec.scale
    if name == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    # CUDA's kernels ignore the strides of these two; the heads of a group are slices of both.
    # `contiguous` fails for fake CUDA tensors without CUDA.
    lse, o = [
        x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
        for x in (lse, o.transpose(1, 2))
    ]
    o = o.transpose(1, 2)
    # For the state of a random generator, which only dropout would read.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    if name == "flash":
        return _flash_backward((do, q, k, v, o), lse, call, unused)
    if name == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse.unsqueeze(-1), unused, unused, bias, None, None, call.q_len,
            call.kv_len, 0.0, causal, scale=scale,
        )  # fmt: skip
    padded = F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
    bias = None if bias is None else bias.expand(*q.shape[:3], k.shape[2])
    return _aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, bias, o, padded, unused, unused, 0.0, [True, True, True, False], causal,
        scale=scale,
    )[:3]  # fmt: skip


def _flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> tuple[Tensor, Tensor]:
    heads, bounds, causal, named = _flash_args((q, k, v), call)
    attn, lse, *_ = _aten._flash_attention_forward(
        *heads, *bounds, call.q_len, call.kv_len, 0.0, causal, False, **named
    )
    if not call.varlen:
        return attn.transpose(1, 2), lse
    outside = _outside(bounds[0], call.q_len)  # rows that no kernel has written
    attn = attn.masked_fill(outside.view(-1, 1, 1), 0.0)
    return attn.transpose(0, 1).unsqueeze(0), lse.masked_fill(outside, torch.inf).unsqueeze(0)


def _flash_backward(
    heads: tuple[Tensor, ...], lse: Tensor, call: AttentionArgs, unused: Tensor
) -> tuple[Tensor, ...]:
    heads, bounds, causal, named = _flash_args(heads, call)
    grads = _aten._flash_attention_backward(
        *heads, lse.squeeze(0) if call.varlen else lse, *bounds, call.q_len, call.kv_len, 0.0,
        causal, unused, unused, **named,
    )  # fmt: skip
    if not call.varlen:
        return tuple([grad.transpose(1, 2) for grad in grads])
    q_outside, k_outside = _outside(bounds[0], call.q_len), _outside(bounds[1], call.kv_len)
    return tuple([
        grad.masked_fill(outside.view(-1, 1, 1), 0.0).transpose(0, 1).unsqueeze(0)
        for grad, outside in zip(grads, (q_outside, k_outside, k_outside), strict=True)
    ])  # fmt: skip


def _flash_args(heads: tuple[Tensor, ...], call: AttentionArgs) -> tuple[Any, ...]:
    """Return (B, S, H, E) or (S, H, E), bounds within the tokens, `is_causal`, and the rest.

    A kernel reads between the bounds. A causal window is no other window.
    """
    causal = call.spec.window == (-1, 0)
    left, right = (-1, -1) if causal else call.spec.window
    named = {"scale": call.spec.scale, "window_size_left": left, "window_size_right": right}
    if call.cu_q is None or call.cu_k is None:
        return tuple([x.transpose(1, 2) for x in heads]), (None, None), causal, named
    both = (call.cu_q, call.q_len), (call.cu_k, call.kv_len)
    bounds = tuple([cu.clamp(0, tokens).to(torch.int32) for cu, tokens in both])
    return tuple([x.squeeze(0).transpose(0, 1) for x in heads]), bounds, causal, named


def _outside(bounds: Tensor, tokens: int) -> Tensor:
    """Return which tokens are in no sequence: those before the first and after the last."""
    at = torch.arange(tokens, device=bounds.device)
    return (at < bounds.select(0, 0)) | (at >= bounds.select(0, -1))

"""Calls of PyTorch's attention kernels, most of which only private operators reach.

A kernel is named "cpu", "flash", "cudnn", "efficient" or "public": `scaled_dot_product_attention`
as it is, whose backward runs its forward again. It stands in for a kernel whose operators have
other arguments than those called here, as `SIGNATURES` lists them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.steps.attention_call import AttentionArgs, Heads

_aten = torch.ops.aten
_SCALED, _WINDOWED, _MASKED = "scale", "scale window_size_left window_size_right", "attn_mask scale"
#: Operator -> the arguments that are passed in order, those by name, and the number of results.
SIGNATURES = {
    "_fused_sdp_choice": (
        "query key value attn_mask dropout_p is_causal", "scale enable_gqa", 1,
    ),
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
_OPERATORS = {
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
    "flash": "_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}
# The efficient kernel needs rows of lse that are a multiple of this.
_LSE_ROWS = 32


class Kernel(NamedTuple):
    """How a call is served.

    Attributes:
        name: the kernel's; "" if each query head of a group needs a call.
        bias: the mask as the kernel takes it: added to the scores, expands to (B, H, S_q, S_k).
        nothing: the rows that see no key, if the kernel would see all of them there.
    """

    name: str
    bias: Tensor | None = None
    nothing: Tensor | None = None


def fits(name: str, schema: Any) -> bool:
    """Whether an operator of this schema can be called as `SIGNATURES` says."""
    in_order, named, results = SIGNATURES[name]
    given = [*in_order.split(), *named.split()]
    ordered = [a.name for a in schema.arguments if not a.kwarg_only]
    known = {a.name for a in schema.arguments}
    required = {a.name for a in schema.arguments if not a.has_default_value()}
    same_order = ordered[: len(in_order.split())] == in_order.split()
    return same_order and required <= set(given) <= known and len(schema.returns) == results


@functools.cache
def has(kernel: str) -> bool:
    """Whether this version of PyTorch has the operators of a kernel as they are called here."""
    name = _OPERATORS[kernel]
    forward = f"{name}_forward" if kernel == "flash" else name
    return all(has_operator(one) for one in (forward, f"{name}_backward"))


@functools.cache
def has_operator(name: str) -> bool:
    """Whether this version of PyTorch has an operator as it is called here."""
    found = getattr(_aten, name, None)
    return found is not None and fits(name, found.default._schema)


def forward(
    at: Kernel, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs
) -> tuple[Tensor, Tensor]:
    """attn (B, H, S_q, V), 0 in rows without a key, and lse (B, H, S_q), NaN of "public"."""
    attn, lse = _forward(at.name, q, k, v, call, at.bias)
    return attn if at.nothing is None else attn.masked_fill(at.nothing, 0.0), lse


def _forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    causal, scale = call.spec.window[1] == 0, call.spec.scale
    if kernel == "cpu":
        made = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
        return made[0], made[1]
    if kernel == "flash":
        return _flash(q, k, v, call)
    if kernel == "cudnn":
        made = _aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, True, 0.0, causal, scale=scale
        )
        return made[0], made[1].reshape(q.shape[:3])
    if kernel == "efficient":
        attn, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q, k, v, _expanded(bias, q, k), True, 0.0, causal, scale=scale
        )
        return attn, lse.narrow(-1, 0, q.shape[2]).clone()
    dtype = torch.promote_types(q.dtype, torch.float32)
    return _public(q, k, v, call, bias), q.new_full(q.shape[:3], torch.nan, dtype=dtype)


def backward(
    at: Kernel, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    call: AttentionArgs,
) -> Heads:  # fmt: skip
    """dq, dk, dv, from the results of `forward`."""
    kernel, bias, nothing = at
    if nothing is not None:  # (B, S, H, E) in memory, as without a mask: cuDNN's plans expect it
        do = do.transpose(1, 2).masked_fill(nothing.transpose(1, 2), 0.0).transpose(1, 2)
    causal, scale = call.spec.window[1] == 0, call.spec.scale
    if kernel == "public":
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            attn = _public(q, k, v, call, bias)
        dq, dk, dv = torch.autograd.grad(attn, (q, k, v), do)
        return dq, dk, dv
    if kernel == "cpu":
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
        return dq, dk, dv
    # CUDA's kernels ignore the strides of these two; the heads of a group are slices of both.
    lse, o = _dense(lse), _dense(o.transpose(1, 2)).transpose(1, 2)
    if kernel == "flash":
        return _flash_grads(do, q, k, v, o, lse, call)
    unused = _no_random_state(q)
    if kernel == "cudnn":
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            do, q, k, v, o, lse.unsqueeze(-1), unused, unused, bias, None, None, call.q_len,
            call.kv_len, 0.0, causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    padded = F.pad(lse, (0, -lse.shape[-1] % _LSE_ROWS), value=torch.inf)
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        do, q, k, v, _expanded(bias, q, k), o, padded, unused, unused, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _public(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs, bias: Tensor | None) -> Tensor:
    causal, shared = call.spec.window[1] == 0, q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, bias, 0.0, causal, scale=call.spec.scale, enable_gqa=shared
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> tuple[Tensor, Tensor]:
    """With a window, and over variable-length sequences too."""
    heads, bounds = [_tokens(x, call) for x in (q, k, v)], _bounds(call)
    causal, window = _window(call)
    attn, lse, *_ = _aten._flash_attention_forward(
        *heads, *bounds, call.q_len, call.kv_len, 0.0, causal, False, **window
    )
    if bounds[0] is None:
        return attn.transpose(1, 2), lse
    outside = _outside(bounds[0], call.q_len)  # rows that no kernel has written
    attn = attn.masked_fill(outside.view(-1, 1, 1), 0.0)
    return attn.transpose(0, 1).unsqueeze(0), lse.masked_fill(outside, torch.inf).unsqueeze(0)


def _flash_grads(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, call: AttentionArgs
) -> Heads:
    heads, bounds = [_tokens(x, call) for x in (do, q, k, v, o)], _bounds(call)
    causal, window = _window(call)
    unused = _no_random_state(q)
    grads = _aten._flash_attention_backward(
        *heads, lse if bounds[0] is None else lse.squeeze(0), *bounds, call.q_len, call.kv_len, 0.0,
        causal, unused, unused, **window,
    )  # fmt: skip
    if bounds[0] is None:
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv
    q_outside, k_outside = _outside(bounds[0], call.q_len), _outside(bounds[1], call.kv_len)
    dq, dk, dv = (
        grad.masked_fill(outside.view(-1, 1, 1), 0.0).transpose(0, 1).unsqueeze(0)
        for grad, outside in zip(grads, (q_outside, k_outside, k_outside), strict=True)
    )
    return dq, dk, dv


def _tokens(x: Tensor, call: AttentionArgs) -> Tensor:
    """Heads (B, H, S, E) as (B, S, H, E); of variable-length sequences (S, H, E)."""
    return x.squeeze(0).transpose(0, 1) if call.varlen else x.transpose(1, 2)


def _bounds(call: AttentionArgs) -> tuple[Any, Any]:
    """The bounds of variable-length sequences, within the tokens: a kernel reads between them."""
    if call.cu_q is None or call.cu_k is None:
        return None, None
    given = (call.cu_q, call.q_len), (call.cu_k, call.kv_len)
    q_bounds, k_bounds = (cu.clamp(0, tokens).to(torch.int32) for cu, tokens in given)
    return q_bounds, k_bounds


def _outside(bounds: Tensor, tokens: int) -> Tensor:
    """Which tokens are in no sequence: those before the first and after the last."""
    at = torch.arange(tokens, device=bounds.device)
    return (at < bounds.select(0, 0)) | (at >= bounds.select(0, -1))


def _window(call: AttentionArgs) -> tuple[bool, dict[str, Any]]:
    """`is_causal`, and the arguments by name; a causal window is no window besides."""
    causal = call.spec.window == (-1, 0)
    left, right = (-1, -1) if causal else call.spec.window
    return causal, {"scale": call.spec.scale, "window_size_left": left, "window_size_right": right}


def _no_random_state(q: Tensor) -> Tensor:
    """What stands for the state of a random generator, which only dropout would read."""
    return torch.empty(2, dtype=torch.uint64, device=q.device)


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    return None if bias is None else bias.expand(*q.shape[:3], k.shape[2])


def _dense(x: Tensor) -> Tensor:
    """x, contiguous. Not `x.contiguous()`, which fails for fake CUDA tensors without CUDA."""
    return x if x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)

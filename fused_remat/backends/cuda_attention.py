"""ATen's fused attention kernels on CUDA devices: flash, cuDNN, and the memory-efficient one.

Each call is over heads (B, H, S, E) with as many key heads as query heads. Without a mask PyTorch
picks the kernel, as it would for `scaled_dot_product_attention`; a mask is the efficient one's.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from fused_remat.backends.base import AttentionCall

_aten = torch.ops.aten
_KERNELS = {
    SDPBackend.FLASH_ATTENTION.value: "flash",
    SDPBackend.CUDNN_ATTENTION.value: "cudnn",
    SDPBackend.EFFICIENT_ATTENTION.value: "efficient",
}
# The efficient kernel holds lse, and wants masks, in rows of multiples of these.
_LSE_ROWS, _MASK_ROWS = 32, 16
# A mask value that scores lose digits beside.
_FAR = 128.0


def why_not(q: Tensor, call: AttentionCall) -> str | None:
    """Why none of the kernels can serve the call, or None if one can."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no fused kernel for {q.dtype}"
    multiple = 16 // q.element_size()
    if q.shape[-1] % multiple or q.shape[-1] > 256:
        return f"head dim {q.shape[-1]} is not a multiple of {multiple} up to 256"
    if call.masked and torch.version.hip is not None:
        return "a mask, on an AMD GPU"
    if not call.masked:
        return None if kernel(q, call) else "PyTorch would take its unfused kernel"
    if torch.are_deterministic_algorithms_enabled():
        return "a mask, and the kernel that takes one may add gradients in any order"
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return "a mask, and the fused kernel that takes one is switched off"
    return None


def kernel(q: Tensor, call: AttentionCall) -> str:
    """The kernel that serves a call over heads like `q`: flash, cudnn, efficient; "" for none.

    That of a training step, also in evaluation: some have a forward that their backward has not.
    """
    if call.masked:
        return "efficient"
    with torch.enable_grad():
        q = q.detach().requires_grad_()
        k = q if call.q_len == call.kv_len else q.new_empty((*q.shape[:2], call.kv_len, q.shape[3]))
        try:
            choice = torch._fused_sdp_choice(q, k, k, None, 0.0, call.right == 0, scale=call.scale)
        except RuntimeError:  # every kernel that could is switched off
            return ""
    return _KERNELS.get(choice, "")


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


def forward(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """attn (B, H, S_q, E) and lse (B, H, S_q); rows that see no key are 0."""
    name, causal, scale = kernel(q, call), call.right == 0, call.scale
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


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    call: AttentionCall,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, from what `forward` made of the same q, k, v and mask."""
    name, causal, scale = kernel(q, call), call.right == 0, call.scale
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

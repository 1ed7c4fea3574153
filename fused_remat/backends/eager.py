"""The ATen backend: every device and dtype, the default on CPU.

On CPUs without native bf16/fp16 products, low-precision products run in float32 on float32 copies
of the operands (faster there than ATen's, and rounded once): the copies are the size of a chunk and
of one weight, and live for one product.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fused_remat.backends import eager_attention
from fused_remat.backends.activations import ACTIVATIONS
from fused_remat.backends.base import AttentionCall

_CPU_TOKENS = 512
_DEVICE_TOKENS = 16384


@functools.cache
def _cpu_has_native(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _is_low(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16)


def widens(x: Tensor) -> bool:
    """Whether products over `x` are better computed in float32: low precision, not native."""
    return _is_low(x.dtype) and x.device.type == "cpu" and not _cpu_has_native(x.dtype)


class EagerBackend:
    """ATen ops only; see `backends.base.Backend` for the contract of each routine."""

    name = "eager"

    def chunk_tokens(self, x: Tensor) -> int:
        return _CPU_TOKENS if x.device.type == "cpu" else _DEVICE_TOKENS

    def norm_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if _is_low(x.dtype) and x.device.type == "cpu":  # else ATen's statistics are low precision
            weight = (
                torch.ones(x.shape[-1], dtype=torch.float32, device=x.device)
                if weight is None
                else weight.float()
            )
            bias = (
                torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
                if bias is None
                else bias.float()
            )
        y, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        return (y if out is None else out.copy_(y)), mean, rstd

    def norm_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        wants: tuple[bool, ...],
        add: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if _is_low(x.dtype) and x.device.type == "cpu":
            weight = (
                torch.ones(x.shape[-1], dtype=torch.float32, device=x.device)
                if weight is None
                else weight.float()
            )
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy, x, x.shape[-1:], mean, rstd, weight, weight, list(wants)
        )
        if wants[0] and add is not None:
            dx.add_(add)
        if _is_low(x.dtype):
            dweight = dweight.float() if wants[1] else None
            dbias = dbias.float() if wants[2] else None
        return dx if wants[0] else None, dweight, dbias

    def linear_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None = None,
        keep: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert weight is not None
        if widens(x):
            y = self._linear(x.float(), weight.float(), bias if bias is None else bias.float())
            if keep is not None:
                y.mul_(keep)
            if residual is not None:
                y.add_(residual)
            return y.to(x.dtype) if out is None else out.copy_(y)
        y = self._linear(x, weight, bias, out)
        if keep is not None:
            y.mul_(keep)
        if residual is not None:
            y.add_(residual)
        return y

    @staticmethod
    def _linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            return torch.nn.functional.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def linear_dx(self, dy: Tensor, weight: Tensor | None) -> Tensor:
        assert weight is not None
        if widens(dy):
            return torch.mm(dy.float(), weight.float()).to(dy.dtype)
        return torch.mm(dy, weight)

    def linear_dw(self, dy: Tensor, x: Tensor, into: Tensor | None, partial: bool) -> Tensor:
        if widens(x):
            dy, x = dy.float(), x.float()
        if into is not None and into.dtype == x.dtype:
            return into.addmm_(dy.t(), x)
        dw = torch.mm(dy.t(), x)
        if into is not None:
            return into.add_(dw)
        return dw.float() if partial and _is_low(dw.dtype) else dw

    def bias_grad(self, dy: Tensor) -> Tensor:
        return dy.sum(0, dtype=torch.float32) if _is_low(dy.dtype) else dy.sum(0)

    def act_fwd(self, x: Tensor, act: str, keep: Tensor | None) -> Tensor:
        y = ACTIVATIONS[act].fwd(x)
        return y if keep is None else y.mul_(keep)

    def act_bwd(self, dy: Tensor, x: Tensor, act: str, keep: Tensor | None, owned: bool) -> Tensor:
        if keep is not None:
            dy = dy.mul_(keep) if owned else self.dropout_bwd(dy, keep)
            owned = True
        return ACTIVATIONS[act].bwd(dy, x, dy if owned else None)

    def dropout_bwd(self, dy: Tensor, keep: Tensor) -> Tensor:
        return torch.mul(dy, keep).to(dy.dtype)

    def attention_fwd(self, qkv: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        return eager_attention.forward(qkv, call, widens(qkv))

    def attention_bwd(
        self,
        dattn: Tensor,
        qkv: Tensor,
        attn: Tensor,
        lse: Tensor,
        call: AttentionCall,
        wants_qkv: bool,
    ) -> Tensor | None:
        return eager_attention.backward(dattn, qkv, attn, lse, call, wants_qkv, widens(qkv))

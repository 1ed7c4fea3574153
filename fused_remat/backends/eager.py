"""The ATen backend: every device and dtype, the default on CPU.

On CPUs without native bf16/fp16 products, low-precision products run in float32 on float32 copies
of the operands (faster there than ATen's, and rounded once): the copies are the size of a chunk and
of one weight, and live for one product.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.backends import cross_entropy, eager_attention, packed_rows, rotary
from fused_remat.backends.activations import ACTIVATIONS
from fused_remat.backends.base import (
    AttentionCall,
    CrossEntropyCall,
    Loaded,
    LoadedHeads,
    PackedHeads,
    Packing,
    RotaryCall,
)
from fused_remat.backends.norms import NORMS
from fused_remat.backends.unfused import Unfused
from fused_remat.formats import Packed, Parts, pack
from fused_remat.random import Keep

# Larger pieces read the weights fewer times, and have larger transients.
_CPU_TOKENS = 512
_DEVICE_TOKENS = 16384


@functools.cache
def _cpu_has_native(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


_LOW = (torch.bfloat16, torch.float16)


def widens(x: Tensor) -> bool:
    """Whether products over `x` are better computed in float32: low precision, not native."""
    return x.dtype in _LOW and x.device.type == "cpu" and not _cpu_has_native(x.dtype)


class EagerBackend(Unfused):
    """ATen ops only; see `backends.base.Backend` for the contract of each routine."""

    name = "eager"
    mixes_norms = False

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def fusions(self, dtype: torch.dtype) -> frozenset[str]:
        return frozenset()

    def chunk_tokens(self, x: Tensor) -> int:
        return _CPU_TOKENS if x.device.type == "cpu" else _DEVICE_TOKENS

    def norm_fwd(
        self,
        kind: str,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = None,
        stats: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, ...]:
        made = NORMS[kind].fwd(x, weight, bias, eps, stats)
        return made if out is None else (out.copy_(made[0]), *made[1:])

    def norm_bwd(
        self,
        kind: str,
        dy: Tensor,
        x: Tensor,
        stats: tuple[Tensor, ...],
        weight: Tensor | None,
        wants: tuple[bool, ...],
        add: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dx, dweight, dbias = NORMS[kind].bwd(dy, x, stats, weight, wants)
        if dx is not None and add is not None:
            dx.add_(add)
        return dx, dweight, dbias

    def linear_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None = None,
        keep: Keep | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        assert weight is not None
        if x.dtype in _LOW and widens(x):
            y = self._linear(x.float(), weight.float(), bias if bias is None else bias.float())
            if keep is not None:
                y.mul_(keep.tensor())
            if residual is not None:
                y.add_(residual)
            return y.to(x.dtype) if out is None else out.copy_(y)
        y = self._linear(x, weight, bias, out)
        if keep is not None:
            y.mul_(keep.tensor())
        if residual is not None:
            y.add_(residual)
        return y

    @staticmethod
    def _linear(
        x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        if out is None:
            return F.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def linear_dx(self, dy: Tensor, weight: Tensor | None, into: Tensor | None = None) -> Tensor:
        assert weight is not None
        if dy.dtype in _LOW and widens(dy):
            dx = torch.mm(dy.float(), weight.float())
            return dx.to(dy.dtype) if into is None else into.add_(dx)
        if into is None:
            return torch.mm(dy, weight)
        return torch.addmm(into, dy, weight, out=into)  # not addmm_: FLOP counters miss it

    def add_product(self, y: Tensor, x: Tensor, weight: Tensor | None, scale: float) -> None:
        assert weight is not None
        if x.dtype == y.dtype and not widens(x):
            torch.addmm(y, x, weight.t(), alpha=scale, out=y)
            return
        wide = torch.promote_types(x.dtype, torch.float32)
        y.add_(torch.mm(x.to(wide), weight.t().to(wide)), alpha=scale)

    def linear_dw(
        self, dy: Tensor, x: Tensor, into: Tensor | None, partial: bool, exact: bool = False
    ) -> Tensor:
        if x.dtype in _LOW and (exact or widens(x)):
            dy, x = dy.float(), x.float()
        if into is not None and into.dtype == x.dtype:
            return torch.addmm(into, dy.t(), x, out=into)  # not addmm_: FLOP counters miss it
        dw = torch.mm(dy.t(), x)
        if into is not None:
            return into.add_(dw)
        return dw.float() if partial and dw.dtype in _LOW else dw

    def bias_grad(self, dy: Tensor) -> Tensor:
        return dy.sum(0, dtype=torch.float32) if dy.dtype in _LOW else dy.sum(0)

    def pack(self, x: Tensor, packing: Packing) -> Parts:
        return pack(x, packing.stored, packing.uniform)

    def unpack(self, x: Packed) -> Tensor:
        return x.tensor()

    def act_fwd(self, x: Loaded, act: str, keep: Keep | None) -> Tensor:
        y = packed_rows.act_fwd(x, act) if isinstance(x, Packed) else ACTIVATIONS[act].fwd(x)
        return y if keep is None else y.mul_(keep.tensor())

    def act_bwd(self, dy: Tensor, x: Loaded, act: str, keep: Keep | None, owned: bool) -> Tensor:
        if keep is not None:
            dy = dy.mul_(keep.tensor()) if owned else self.dropout_bwd(dy, keep)
            owned = True
        if isinstance(x, Packed):
            return packed_rows.act_bwd(dy, x, act, owned)
        return ACTIVATIONS[act].bwd(dy, x, dy if owned else None)

    def gated_fwd(self, gate: Loaded, up: Loaded, act: str, keep: Keep | None) -> Tensor:
        if isinstance(gate, Tensor) and isinstance(up, Tensor):
            y = ACTIVATIONS[act].fwd(gate).mul_(up)
        else:
            y = packed_rows.gated_fwd(gate, up, act)
        return y if keep is None else y.mul_(keep.tensor())

    def gated_bwd(
        self,
        dy: Tensor,
        gate: Loaded,
        up: Loaded | None,
        act: str,
        keep: Keep | None,
        owned: bool,
        wants_up: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        if keep is not None:
            dy = dy.mul_(keep.tensor()) if owned else self.dropout_bwd(dy, keep)
            owned = True
        if isinstance(gate, Packed) or isinstance(up, Packed):
            return packed_rows.gated_bwd(self, dy, gate, up, act, owned, wants_up)
        dup = ACTIVATIONS[act].fwd(gate).mul_(dy) if wants_up else None
        if up is None:
            return None, dup
        dy = dy.mul_(up) if owned else dy * up
        return ACTIVATIONS[act].bwd(dy, gate, dy), dup

    def add_fwd(
        self, x: Tensor, residual: Tensor, keep: Keep | None, out: Tensor | None = None
    ) -> Tensor:
        if keep is None:
            return torch.add(x, residual, out=out)
        y = torch.addcmul(residual.to(keep.dtype), x, keep.tensor())
        return y.to(residual.dtype) if out is None else out.copy_(y)

    def dropout_bwd(self, dy: Tensor, keep: Keep, dtype: torch.dtype | None = None) -> Tensor:
        return torch.mul(dy, keep.tensor()).to(dtype or dy.dtype)

    def rotary_fwd(self, x: Tensor, call: RotaryCall, out: Tensor | None = None) -> Tensor:
        return rotary.forward(x, call, out)

    def rotary_bwd(
        self, dy: Tensor, x: Tensor | None, call: RotaryCall, wants: tuple[bool, ...], owned: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return rotary.backward(dy, x, call, wants, owned)

    def attention_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return eager_attention.forward(q, k, v, call, widens(q), out)

    def attention_bwd(
        self,
        dattn: Tensor,
        q: LoadedHeads,
        k: LoadedHeads,
        v: LoadedHeads,
        attn: Tensor,
        lse: Tensor,
        call: AttentionCall,
        grads: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
            q, k, v = self._unpacked(q, k, v)
        eager_attention.backward(dattn, q, k, v, attn, lse, call, grads, widens(q))

    def _unpacked(self, *heads: LoadedHeads) -> tuple[Tensor, ...]:
        """Heads in memory; what lies in one packed matrix, in one."""
        matrices: dict[int, Tensor] = {}
        found = []
        for x in heads:
            if isinstance(x, PackedHeads):
                matrix = matrices.get(id(x.whole))
                if matrix is None:
                    matrix = matrices[id(x.whole)] = self.unpack(x.whole)
                x = x.of(matrix)
            found.append(x)
        return tuple(found)

    def cross_entropy_fwd(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: CrossEntropyCall,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return cross_entropy.forward(x, weight, bias, call, widens(x), out)

    def cross_entropy_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stats: tuple[Tensor, Tensor],
        call: CrossEntropyCall,
        wants: tuple[bool, ...],
        exact: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        given = dy, x, weight, bias, stats, call, wants, exact
        return cross_entropy.backward(*given, widens(x))

    def norm_route(self, kind: str, x: Tensor) -> str:
        return "ATen's native_layer_norm" if kind == "layer_norm" else "ATen, pointwise and mean"

    def pointwise_route(self, x: Loaded, act: str = "", *beside: Loaded) -> str:
        packed = f", from {x.stored} a few rows at a time" if isinstance(x, Packed) else ""
        return f"pointwise, eager{packed}"

    def packing_route(self, x: Loaded, stored: str) -> str:
        what = f"{stored} unpacked whole" if isinstance(x, Packed) else f"packed as {stored}"
        return f"{what}, eager, a few rows at a time"

    def rotary_route(self, x: Tensor, call: RotaryCall) -> str:
        return "pointwise, eager"

    def linear_route(self, x: Tensor, ends: bool = False) -> str:
        if not widens(x):
            return "ATen's addmm"
        return f"ATen's addmm on float32 copies: this CPU has no {str(x.dtype)[6:]} products"

    def cross_entropy_route(self, x: Tensor) -> str:
        return f"blocks of logits, {self.linear_route(x)}"

    def attention_route(self, q: LoadedHeads, v: LoadedHeads, call: AttentionCall) -> str:
        like_q, like_v = map(PackedHeads.stands_for, (q, v))
        route = eager_attention.route(like_q, like_v, call)
        in_memory = isinstance(q, Tensor) and isinstance(v, Tensor)
        return route if in_memory else f"{route}; heads unpacked first"

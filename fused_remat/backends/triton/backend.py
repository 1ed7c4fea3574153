"""The Triton backend: kernels where they save a pass or a product's end, ATen elsewhere.

Plain products are `torch.mm`; attention is ATen's fused kernel where the tables say so, else our
own. A result that a kernel fills is always a fresh contiguous matrix; operands are read by their
strides, and copied only if the elements of a row are not side by side (`launch.rows_in_place`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fused_remat.backends import eager_attention
from fused_remat.backends.base import (
    NORM_STATS,
    Affine,
    AttentionCall,
    CrossEntropyCall,
    Loaded,
    LoadedHeads,
    PackedHeads,
    Packing,
    RotaryCall,
)
from fused_remat.backends.eager import EagerBackend
from fused_remat.backends.triton import (
    attention,
    cross_entropy,
    gemm,
    int8,
    norms,
    pointwise,
    rotary,
    tables,
)
from fused_remat.backends.triton.launch import INTERPRETED, target_of
from fused_remat.formats import Packed, Parts
from fused_remat.random import Keep

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def _fusions(acts: tuple[str, ...]) -> frozenset[str]:
    pairs = {f"{name} {act}" for name in ("linear_act", "mlp_bwd") for act in acts}
    return frozenset({"linear_norm"} | pairs)


def _has_pair(act: str) -> bool:
    return act in pointwise.PAIRS


def _has_kernel(act: str, *loaded: Loaded | None) -> bool:
    """Whether a pointwise kernel computes `act` of activations as they are given."""
    return _has_pair(act) and int8.has_kernel(*loaded)


class TritonBackend(EagerBackend):
    """Triton kernels with ATen's products; see `backends.base.Backend` for each routine."""

    name = "triton"
    mixes_norms = True

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if dtype not in _DTYPES:
            return f"no kernels for {dtype}"
        if INTERPRETED:
            if device.type != "cpu":
                return f"Triton interprets (TRITON_INTERPRET=1), and the tensors are on {device}"
            if dtype == torch.bfloat16:
                return "Triton's interpreter multiplies the bits of bfloat16, not the numbers"
            return None
        if device.type != "cuda":
            return f"kernels run on CUDA devices, the tensors are on {device}"
        target = target_of(device)
        if target.kind == "cuda" and target.arch < 80:
            return f"kernels are for compute capability 8.0 and up, this is {target.arch / 10}"
        return None

    def fusions(self, dtype: torch.dtype) -> frozenset[str]:
        if torch.are_deterministic_algorithms_enabled():
            return frozenset()
        # float32 products are ATen's, except in the interpreter.
        products = dtype.itemsize == 2 or INTERPRETED
        return _fusions(tuple(pointwise.PAIRS) if products else ())

    # --- norms

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
        if not 0 < x.shape[1] <= norms.MAX_WIDTH:
            return super().norm_fwd(kind, x, weight, bias, eps, out, stats)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        made = self._new_stats(kind, x) if stats is None else stats
        norms.norm_fwd(
            x, None, None, weight, bias, eps, None, y, made, has_stats=stats is not None
        ).run()
        return (y, *made)

    @staticmethod
    def _new_stats(kind: str, x: Tensor) -> tuple[Tensor, ...]:
        shape = (x.shape[0], 1)
        return tuple(
            torch.empty(shape, dtype=torch.float32, device=x.device) for _ in NORM_STATS[kind]
        )

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
        if not 0 < x.shape[1] <= norms.MAX_WIDTH:
            return super().norm_bwd(kind, dy.to(x.dtype), x, stats, weight, wants, add)
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wants[0] else None
        dweight, dbias = (
            torch.empty(x.shape[1], dtype=torch.float32, device=x.device) if wanted else None
            for wanted in wants[1:]
        )
        for launch in norms.norm_bwd(
            dy, x, stats, weight, add, dx, dweight, dbias, target_of(x.device)
        ):
            launch.run()
        return dx, dweight, dbias

    # --- linear layers

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
        ends = residual is not None or keep is not None
        if ends and tables.ends_in_kernel(target_of(x.device)):
            y = x.new_empty((x.shape[0], weight.shape[0])) if out is None else out
            gemm.linear_fwd(
                x, weight, bias, residual, keep, None, None, y, target_of(x.device)
            ).run()
            return y
        z = self._linear(x, weight, bias, None if ends else out)
        if not ends:
            return z
        y = z if out is None else out
        pointwise.dropout_add_fwd(z, residual, keep, y).run()
        return y

    def linear_dw(
        self, dy: Tensor, x: Tensor, into: Tensor | None, partial: bool, exact: bool = False
    ) -> Tensor:
        low = x.dtype.itemsize == 2 and x.device.type == "cuda" and torch.version.hip is None
        if not (low and (partial or exact)):
            return super().linear_dw(dy, x, into, partial, exact)
        dw = torch.mm(dy.t(), x, out_dtype=torch.float32)  # not rounded before the sum is whole
        return dw if into is None else into.add_(dw)

    def linear_act_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_pre: bool,
        packing: Packing | None = None,
    ) -> tuple[Tensor | None, Tensor, Parts]:
        assert weight is not None
        y, target = x.new_empty((x.shape[0], weight.shape[0])), target_of(x.device)
        made = self._made("linear", y, wants_pre, packing)
        pre, packed = made
        gemm.linear_fwd(x, weight, bias, None, keep, act, pre, y, target, packed=packed).run()
        return pre if wants_pre else None, y, self._parts(made, packing)

    def gated_linear_act_fwd(
        self,
        x: Tensor,
        gate: Affine,
        up: Affine,
        act: str,
        keep: Keep | None,
        wants: tuple[bool, ...] = (False, False),
        packings: tuple[Packing | None, ...] = (None, None),
    ) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Parts, ...]]:
        assert gate[0] is not None and up[0] is not None
        y, target = x.new_empty((x.shape[0], up[0].shape[0])), target_of(x.device)
        asked = [*zip(wants, packings, strict=True)]
        made = [self._made("gated_mlp_fwd", y, *how) for how in asked]
        pres, packed = zip(*made, strict=True)
        gemm.gated_mlp_fwd(
            x, gate[0], gate[1], up[0], up[1], keep, act, y, target, pres=pres, packed=packed
        ).run()
        kept = tuple([pre if wanted else None for pre, wanted in zip(pres, wants, strict=True)])
        parts = [self._parts(*pair) for pair in zip(made, packings, strict=True)]
        return y, kept, tuple(parts)

    @staticmethod
    def _made(
        kernel: str, y: Tensor, wants_pre: bool, packing: Packing | None
    ) -> tuple[Tensor | None, int8.Codes | None]:
        """What a product that ends in y also fills: its result, or that packed.

        The result is filled, too, where it is to be packed and the product's end cannot.
        """
        packed = None
        fits = int8.has_kernel(packing) and gemm.packs(kernel, target_of(y.device), *y.shape)
        if packing is not None and fits:
            packed = packing, int8.new_parts(y, packing)
        whole = wants_pre or (packing is not None and packed is None)
        return torch.empty_like(y) if whole else None, packed

    def _parts(
        self, made: tuple[Tensor | None, int8.Codes | None], packing: Packing | None
    ) -> Parts:
        """What was packed; a pass of its own where the product's end did not."""
        pre, packed = made
        if packing is None:
            return ()
        if packed is not None:
            return packed[1]
        assert pre is not None
        return self.pack(pre, packing)

    def linear_norm_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor,
        keep: Keep | None,
        kind: str,
        norm: Affine,
        eps: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        assert weight is not None
        if not 0 < weight.shape[0] <= norms.FWD_WIDTH:
            return super().linear_norm_fwd(x, weight, bias, residual, keep, kind, norm, eps, out)
        product = self._linear(x, weight, bias)
        # In place of the product: each program reads a tile whole before it writes it.
        total = product
        if residual.dtype is not product.dtype:
            total = torch.empty(product.shape, dtype=residual.dtype, device=product.device)
        y = torch.empty_like(total) if out is None else out
        stats = self._new_stats(kind, total)
        norms.norm_fwd(product, residual, keep, *norm, eps, total, y, stats, has_stats=False).run()
        return (total, y, *stats)

    # --- storage formats

    def pack(self, x: Tensor, packing: Packing) -> Parts:
        if not int8.has_kernel(packing):
            return super().pack(x, packing)
        parts = int8.new_parts(x, packing)
        int8.pack_int8(x, packing, parts).run()
        return parts

    def unpack(self, x: Packed) -> Tensor:
        if not int8.has_kernel(x):
            return super().unpack(x)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        int8.unpack_int8(x, y).run()
        return y

    def packing_route(self, x: Loaded, stored: str) -> str:
        if stored not in int8.KERNELS:
            return f"{super().packing_route(x, stored)}: no kernel for that format"
        return f"kernel {'unpack' if isinstance(x, Packed) else 'pack'}_int8_fwd, {stored}"

    # --- activations

    def act_fwd(self, x: Loaded, act: str, keep: Keep | None) -> Tensor:
        if not _has_kernel(act, x):
            return super().act_fwd(x, act, keep)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        pointwise.act_fwd(x, act, keep, y).run()
        return y

    def act_bwd(self, dy: Tensor, x: Loaded, act: str, keep: Keep | None, owned: bool) -> Tensor:
        if not _has_kernel(act, x):
            return super().act_bwd(dy, x, act, keep, owned)
        dx = (
            dy
            if owned and dy.is_contiguous()
            else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        )
        pointwise.act_bwd(dy, x, act, keep, dx).run()
        return dx

    def gated_fwd(self, gate: Loaded, up: Loaded, act: str, keep: Keep | None) -> Tensor:
        if not _has_kernel(act, gate, up):
            return super().gated_fwd(gate, up, act, keep)
        y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        pointwise.gated_fwd(gate, up, act, keep, y).run()
        return y

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
        if not _has_kernel(act, gate, up):
            return super().gated_bwd(dy, gate, up, act, keep, owned, wants_up)
        shape, dtype, device = gate.shape, gate.dtype, gate.device
        dup = torch.empty(shape, dtype=dtype, device=device) if wants_up else None
        dgate = None
        if up is not None:
            in_place = owned and dy.is_contiguous()
            dgate = dy if in_place else torch.empty(shape, dtype=dtype, device=device)
        if dgate is not None or dup is not None:
            pointwise.gated_bwd(dy, gate, up, act, keep, dgate, dup).run()
        return dgate, dup

    def add_fwd(
        self, x: Tensor, residual: Tensor, keep: Keep | None, out: Tensor | None = None
    ) -> Tensor:
        y = torch.empty(x.shape, dtype=residual.dtype, device=x.device) if out is None else out
        pointwise.dropout_add_fwd(x, residual, keep, y).run()
        return y

    def dropout_bwd(self, dy: Tensor, keep: Keep, dtype: torch.dtype | None = None) -> Tensor:
        dx = torch.empty(dy.shape, dtype=dtype or dy.dtype, device=dy.device)
        pointwise.dropout_add_fwd(dy, None, keep, dx).run()
        return dx

    # --- attention

    @staticmethod
    def _own_attention(q: Tensor, v: Tensor, call: AttentionCall) -> str | None:
        """Why the kernels here serve the call; None if ATen does.

        Depends on nothing that differs between forward and backward, or between policies.
        """
        why = tables.why_own_attention(target_of(q.device), call)
        why = why or eager_attention.why_not_flash(q, v, call)
        return why if why is not None and attention.why_not(q, v, call) is None else None

    def attention_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self._own_attention(q, v, call) is None:
            return super().attention_fwd(q, k, v, call, out)
        if out is None:
            shape = (call.batch * call.q_len, call.nhead * v.shape[-1])
            out = torch.empty(shape, dtype=q.dtype, device=q.device)
        rows = (call.batch, call.nhead, call.q_len)
        lse = torch.empty(rows, dtype=torch.float32, device=q.device)
        for launch in attention.forward(q, k, v, call, out, lse, target_of(q.device)):
            launch.run()
        return out, lse

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
        like_q, like_v = map(PackedHeads.stands_for, (q, v))
        if self._own_attention(like_q, like_v, call) is None:
            super().attention_bwd(dattn, q, k, v, attn, lse, call, grads)
            return
        if not all(map(attention.reads, (q, k, v))):
            q, k, v = self._unpacked(q, k, v)
        launches = attention.backward(dattn, q, k, v, attn, lse, call, grads, target_of(q.device))
        for launch in launches:
            launch.run()

    # --- rotary position embedding

    def rotary_fwd(self, x: Tensor, call: RotaryCall, out: Tensor | None = None) -> Tensor:
        if not rotary.serves(x, call):
            return super().rotary_fwd(x, call, out)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        rotary.rotary_fwd(x, call, y, target_of(x.device)).run()
        return y

    def rotary_bwd(
        self, dy: Tensor, x: Tensor | None, call: RotaryCall, wants: tuple[bool, ...], owned: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if not rotary.serves(dy, call):
            return super().rotary_bwd(dy, x, call, wants, owned)
        dx, target = None, target_of(dy.device)
        if wants[0]:
            in_place = owned and dy.is_contiguous()
            dx = dy if in_place else torch.empty(dy.shape, dtype=dy.dtype, device=dy.device)
        if x is None:
            assert dx is not None
            rotary.rotary_fwd(dy, call, dx, target, back=True).run()
            return dx, None, None
        dq_weight, dk_weight = (
            torch.empty(weight.shape, dtype=torch.float32, device=dy.device) if wanted else None
            for weight, wanted in zip((call.q_weight, call.k_weight), wants[1:], strict=True)
            if weight is not None
        )
        for launch in rotary.rotary_norm_bwd(dy, x, call, dx, dq_weight, dk_weight, target):
            launch.run()
        return dx, dq_weight, dk_weight

    # --- the loss of a head

    def cross_entropy_fwd(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: CrossEntropyCall,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if cross_entropy.why_not(x, weight) is not None:
            return super().cross_entropy_fwd(x, weight, bias, call, out)
        return cross_entropy.forward(x, weight, bias, call, target_of(x.device), out)

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
        if cross_entropy.why_not(x, weight) is not None:
            return super().cross_entropy_bwd(*given)
        return cross_entropy.backward(*given, target_of(x.device))

    def cross_entropy_route(self, x: Tensor) -> str:
        reason = cross_entropy.why_not(x, x)
        if reason is not None:
            return f"{super().cross_entropy_route(x)}: {reason}"
        return (
            "kernel linear_cross_entropy_fwd; backward a kernel for each block, and ATen's products"
        )

    # --- the MLP's backward

    def mlp_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        up: Affine,
        out_weight: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_act: bool,
    ) -> tuple[Tensor | None, Tensor]:
        assert up[0] is not None and out_weight is not None
        target = target_of(x.device)
        dup = x.new_empty((x.shape[0], up[0].shape[0]))
        if tables.mlp_bwd_in_one(target):
            y = torch.empty_like(dup) if wants_act else None
            gemm.mlp_bwd(x, up[0], up[1], dy, out_weight, keep, act, y, dup, target).run()
            return y, dup
        pre = self._linear(x, up[0], up[1])
        y = pre if wants_act else None  # in its place
        gemm.linear_act_bwd(dy, out_weight, None, pre, keep, act, y, None, dup, target).run()
        return y, dup

    def gated_mlp_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        gate: Affine,
        up: Affine,
        out_weight: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_act: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        assert gate[0] is not None and up[0] is not None and out_weight is not None
        target = target_of(x.device)
        dup = x.new_empty((x.shape[0], up[0].shape[0]))
        if tables.mlp_bwd_in_one(target):
            dgate = torch.empty_like(dup)
            y = torch.empty_like(dup) if wants_act else None
            gemm.gated_mlp_bwd(
                x, gate[0], gate[1], up[0], up[1], dy, out_weight, keep, act, y, dgate, dup,
                target,
            ).run()  # fmt: skip
            return y, dgate, dup
        dgate, pre = self._linear(x, gate[0], gate[1]), self._linear(x, up[0], up[1])
        y = pre if wants_act else None  # in its place, and dgate in the gate's
        gemm.linear_act_bwd(dy, out_weight, dgate, pre, keep, act, y, dgate, dup, target).run()
        return y, dgate, dup

    # --- what `explain` says

    def norm_route(self, kind: str, x: Tensor) -> str:
        if not 0 < x.shape[1] <= norms.MAX_WIDTH:
            wide = f"rows of {x.shape[1]} are not between 1 and {norms.MAX_WIDTH} elements"
            return f"{super().norm_route(kind, x)}: {wide}"
        return "kernel norm_fwd" if x.shape[1] <= norms.FWD_WIDTH else "kernel norm_wide_fwd"

    def attention_route(self, q: LoadedHeads, v: LoadedHeads, call: AttentionCall) -> str:
        like_q, like_v = map(PackedHeads.stands_for, (q, v))
        why = self._own_attention(like_q, like_v, call)
        if why is not None:
            loads = attention.reads(q) and attention.reads(v)
            packed = ", heads unpacked as they are loaded" if loads else ", heads unpacked first"
            in_memory = isinstance(q, Tensor) and isinstance(v, Tensor)
            route = f"kernel attention_fwd; attention_dkdv_bwd and attention_dq_bwd: {why}"
            return route if in_memory else route + packed
        why_not = attention.why_not(like_q, like_v, call)
        aten = super().attention_route(q, v, call)
        return aten if why_not is None else f"{aten}; not the kernels here: {why_not}"

    def pointwise_route(self, x: Loaded, act: str = "", *beside: Loaded) -> str:
        if act and not _has_pair(act):
            return f"pointwise, ATen: {act} has no row in backends/triton/pointwise.PAIRS"
        if not isinstance(x, Packed):
            return "pointwise kernel"
        packed = [y.stored for y in (x, *beside) if isinstance(y, Packed)]
        formats = " and ".join(dict.fromkeys(packed))
        if not int8.has_kernel(x, *beside):
            return f"pointwise, ATen, from {formats}: no kernel for that format"
        return f"pointwise kernel, from {formats}"

    def rotary_route(self, x: Tensor, call: RotaryCall) -> str:
        if not rotary.serves(x, call):
            return f"pointwise, ATen: heads are not between 1 and {rotary.MAX_HEAD} elements wide"
        return "kernel rotary_fwd"

    def linear_route(self, x: Tensor, ends: bool = False) -> str:
        if not ends:
            return "ATen's addmm: a product without an end to fuse"
        if tables.ends_in_kernel(target_of(x.device)):
            return "kernel linear_fwd, dropout and residual in its end"
        return "ATen's addmm, then kernel dropout_add_fwd"

    def fused_route(self, fusion: str, x: Tensor, *stored: str) -> str:
        if fusion == "linear_act":
            late = [name for name in stored if name not in int8.KERNELS]
            then = f"; then packed by ATen: no kernel for {late[0]}" if late else ""
            return f"one kernel: product and activation{then}"
        if fusion == "linear_norm":
            if x.shape[1] > norms.FWD_WIDTH:
                return "ATen's addmm, then kernels dropout_add_fwd and norm_wide_fwd: a wide row"
            return "ATen's addmm, then kernel norm_fwd: dropout, residual and norm"
        if tables.mlp_bwd_in_one(target_of(x.device)):
            return "one kernel: both products of a tile, nothing rebuilt is written"
        return "ATen's addmm rebuilds, then one kernel: product and the activation's backward"

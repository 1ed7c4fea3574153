"""Routines of several steps, put together from a backend's single ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from fused_remat.formats import Parts
from fused_remat.random import Keep

if TYPE_CHECKING:
    from fused_remat.backends.base import Affine, Backend, Packing


class Unfused:
    """What a backend that has no kernel for several steps at once does instead: each in turn.

    See `backends.base.Backend` for the contract of each routine.
    """

    def linear_act_fwd(
        self: Backend,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_pre: bool,
        packing: Packing | None = None,
    ) -> tuple[Tensor | None, Tensor, Parts]:
        pre = self.linear_fwd(x, weight, bias)
        parts = () if packing is None else self.pack(pre, packing)
        return pre if wants_pre else None, self.act_fwd(pre, act, keep), parts

    def gated_linear_act_fwd(
        self: Backend,
        x: Tensor,
        gate: Affine,
        up: Affine,
        act: str,
        keep: Keep | None,
        wants: tuple[bool, ...] = (False, False),
        packings: tuple[Packing | None, ...] = (None, None),
    ) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Parts, ...]]:
        made = self.linear_fwd(x, *gate), self.linear_fwd(x, *up)
        pairs = list(zip(made, packings, strict=True))
        parts = tuple([() if how is None else self.pack(pre, how) for pre, how in pairs])
        pres = tuple([pre if want else None for pre, want in zip(made, wants, strict=True)])
        return self.gated_fwd(*made, act, keep), pres, parts

    def linear_norm_fwd(
        self: Backend,
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
        if residual.dtype is x.dtype:
            total = self.linear_fwd(x, weight, bias, residual, keep)
        else:
            total = self.add_fwd(self.linear_fwd(x, weight, bias), residual, keep)
        return (total, *self.norm_fwd(kind, total, *norm, eps, out=out))

    def mlp_bwd(
        self: Backend,
        dy: Tensor,
        x: Tensor,
        up: Affine,
        out_weight: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_act: bool,
    ) -> tuple[Tensor | None, Tensor]:
        pre = self.linear_fwd(x, *up)
        y = self.act_fwd(pre, act, keep) if wants_act else None
        dact = self.linear_dx(dy, out_weight)
        return y, self.act_bwd(dact, pre, act, keep, owned=True)

    def gated_mlp_bwd(
        self: Backend,
        dy: Tensor,
        x: Tensor,
        gate: Affine,
        up: Affine,
        out_weight: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_act: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        pre, value = self.linear_fwd(x, *gate), self.linear_fwd(x, *up)
        y = self.gated_fwd(pre, value, act, keep) if wants_act else None
        dact = self.linear_dx(dy, out_weight)
        dgate, dup = self.gated_bwd(dact, pre, value, act, keep, owned=True, wants_up=True)
        assert dgate is not None and dup is not None
        return y, dgate, dup

    def fused_route(self: Backend, fusion: str, x: Tensor, *stored: str) -> str:
        return "step by step"

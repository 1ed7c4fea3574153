"""Rotary position embedding as a step: of the query and key heads of a packed projection."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import Tensor

from fused_remat.blocks.frame import Frame
from fused_remat.blocks.nodes import Node
from fused_remat.spec import AttentionSpec
from fused_remat.steps.rotary import RotaryCall, rotary_bwd, rotary_fwd


@dataclass(frozen=True, kw_only=True)
class Rotary(Node):
    """name = x with its query and key heads normed (RMSNorm, if they have weights), then rotated.

    Backward of a rotation alone is the rotation back, and asks for nothing; that of the norm asks
    for x, from which it computes the statistics again.

    Attributes:
        x: the packed projection: query heads, key heads, value heads.
        spec: of the attention that reads them.
        cos, sin: names of the tables, both "" for no rotation.
        q_weight, k_weight: names of the norms' weights, both "" for no norm.
        in_place: written over x (`overwriting`).
    """

    x: str
    spec: AttentionSpec
    cos: str = ""
    sin: str = ""
    q_weight: str = ""
    k_weight: str = ""
    in_place: bool = False

    @property
    def says(self) -> tuple[str, str]:  # type: ignore[override]
        return "in place" if self.in_place else "", ""

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(n for n in (self.cos, self.sin, self.q_weight, self.k_weight) if n)

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.x,) if self.q_weight else ()

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return self.params

    def overwriting(self, spare: Collection[str]) -> Node:
        return replace(self, in_place=True) if self.x in spare else self

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        x = f[self.x]
        f.put(self.name, f.ops[rotary_fwd](x, self.call(f), x if self.in_place else out))

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        x = f[self.x] if self.q_weight else None
        marks = (self.x in wants, self.q_weight in wants, self.k_weight in wants)
        dx, dq_weight, dk_weight = f.ops[rotary_bwd](dy, x, self.call(f), marks, owned)
        if dx is not None:
            f.add_grad(self.x, dx, owned=True)
        if dq_weight is not None:
            f.add_param_grad(self.q_weight, dq_weight)
        if dk_weight is not None:
            f.add_param_grad(self.k_weight, dk_weight)

    def call(self, f: Frame) -> RotaryCall:
        """The tables and weights for the frame's tokens."""
        param = f.param
        tables = param(self.cos), param(self.sin), param(self.q_weight), param(self.k_weight)
        return RotaryCall(self.spec, *tables, f.first_row(self.x), f.run.prepared.lengths[self.x])

"""What is counted: steps of `bench kernels`, SwiGLU alone, and whose kernels take them.

Sizes are a share of a batch's on as many multiprocessors less (`SHARE`): a program has as many rows
as on the whole GPU, and counts of a row, a tile or an element are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bench.kernels.attention import ATTENTION
from bench.kernels.attention_problem import Attention
from bench.kernels.passes import NORM, ROPE, Norm, Rope
from bench.kernels.problem import Function, Op, Problem, Ways
from bench.kernels.products import LOSS, MLP, Loss, Mlp
from bench.measure.contest import Results, Rig, Way, Work
from fused_remat.triton.pointwise import activation_bwd_triton, activation_fwd_triton

#: One in so many multiprocessors, and tokens.
SHARE = 16


@dataclass(eq=False)
class Gated(Problem):
    """silu(gate) * up, (T, F) each: what joins the products of a gated MLP."""

    name: str = field(default="swiglu", init=False)
    tokens: int
    width: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("gate", "up"), (self.tokens, self.width))

    def reference(self, *inputs: Tensor) -> Tensor:
        gate, up = inputs
        return F.silu(gate) * up

    def work(self, direction: str) -> Work:
        """gate, up and y; or dy, gate, up and two gradients."""
        matrix = self.tokens * self.width * self.rig.dtype.itemsize
        return Work(bytes={"fwd": 3.0, "bwd": 5.0}[direction] * matrix)


GATED = Op("swiglu", lambda rig, size: [Gated(rig, size.tokens, size.model.d_ff)])


@GATED.provider("liger", module="liger_kernel", needs="cuda", in_place=True)
def liger_gated(p: Gated) -> Function:
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


@GATED.provider("fused_remat triton", needs="triton", ours=True)
def our_gated(p: Gated) -> Ways:
    """As a block calls them; the backward's dy is its own."""

    def forward(given: Sequence[Tensor]) -> Results:
        return {"y": activation_fwd_triton("silu", *given, None)}

    def backward(given: Sequence[Tensor]) -> Results:
        dgate, dup = activation_bwd_triton("silu", *given, None, True)
        return {"dgate": dgate, "dup": dup}

    def inputs(index: int) -> list[Tensor]:
        return list(p.sets[index].values())

    def with_dy(index: int) -> list[Tensor]:
        return [p.dys[index].clone(), *inputs(index)]

    return {"fwd": Way(forward, prepare=inputs), "bwd": Way(backward, prepare=with_dy)}


@dataclass(frozen=True)
class Case:
    """A problem of an op: its kind, its sizes, and tiny ones that show only whether it runs."""

    op: Op
    kind: type[Problem]
    sizes: tuple[Any, ...]
    tiny: tuple[Any, ...]

    def problem(self, rig: Rig) -> Problem:
        return self.kind(rig, *(self.tiny if rig.dry else self.sizes))


CASES = (
    Case(NORM, Norm, ("rms_norm", 512, 4096), ("rms_norm", 5, 48)),
    Case(NORM, Norm, ("layer_norm", 2048, 1024), ("layer_norm", 5, 48)),
    Case(GATED, Gated, (128, 14336), (5, 48)),
    Case(ROPE, Rope, ("rope", 1, 32, 8, 512, 128), ("rope", 1, 4, 2, 16, 16)),
    Case(LOSS, Loss, (256, 1024, 8192), (64, 32, 80)),
    Case(MLP, Mlp, (True, "silu", 1, 256, 512, 1536), (True, "silu", 1, 64, 32, 48)),
    Case(ATTENTION, Attention, ("causal", 1, 2, 2, 512, 128), ("causal", 1, 2, 2, 128, 16)),
)
#: By name, as the command line has it.
OPS = {case.op.name: case.op for case in CASES}
#: Those whose kernels are Triton's: ours, and others'.
WAYS = (
    "fused_remat triton", "fused_remat triton full", "fused_remat triton none",
    "fused_remat kernel", "liger", "liger fused", "flash-swiglu", "compile", "flex",
)  # fmt: skip

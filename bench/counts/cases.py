"""Steps that are counted, and who takes them: those of `bench kernels`, and SwiGLU alone.

A case is an op, a problem of it at the sizes of a part of a batch, and names of its providers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from bench.kernels.attention import ATTENTION
from bench.kernels.attention_problem import Attention
from bench.kernels.passes import NORM, ROPE, Norm, Rope
from bench.kernels.problem import Function, Op, Problem, Ways, compiled
from bench.kernels.products import LOSS, MLP, Loss, Mlp
from bench.measure.contest import Results, Rig, Way, Work
from fused_remat import ops
from fused_remat.triton.pointwise import activation_bwd_triton, activation_fwd_triton

OURS = "fused_remat"


# --- what joins the products of a gated MLP


@dataclass(eq=False)
class Gated(Problem):
    """silu(gate) * up, (T, F) each."""

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


@GATED.provider("liger", module="liger_kernel", in_place=True)
def liger_gated(p: Gated) -> Function:
    from liger_kernel.ops import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply


@GATED.provider(OURS, ours=True)
def our_gated(p: Gated) -> Ways:
    """As a block calls it: dy is its own."""

    def forward(index: int) -> Results:
        return {"y": activation_fwd_triton("silu", *p.sets[index].values(), None)}

    def backward(given: tuple[Tensor, ...]) -> Results:
        dgate, dup = activation_bwd_triton("silu", *given, None, True)
        return {"dgate": dgate, "dup": dup}

    def prepare(index: int) -> tuple[Tensor, ...]:
        return p.dys[index].clone(), *p.sets[index].values()

    return {"fwd": Way(forward), "bwd": Way(backward, prepare=prepare)}


# --- others, which `bench kernels` has not


@MLP.provider("flash-swiglu", module="flash_swiglu_mlp", needs="cuda", autotunes=True)
def flash_swiglu(p: Mlp) -> Function:
    """flash-swiglu-mlp's: gate, up and SiLU in one product, forward and backward."""
    from flash_swiglu_mlp.ops import flash_swiglu

    return flash_swiglu


@LOSS.provider(f"{OURS} as on a GPU", needs="triton", ours=True)
def our_loss(p: Loss) -> Function:
    """In blocks of as many logits as a GPU gets."""
    return lambda x, weight: ops.linear_cross_entropy(
        x, weight, p.target, chunk=1 << 26, backend="triton"
    ).to(x.dtype)


@ATTENTION.provider("flex as on a GPU", needs="cuda")
def flex(p: Attention) -> Function:
    """FlexAttention, compiled, with the statistics that a backward needs."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    attend, sees, length = compiled(flex_attention), p.sees(), p.seq_len
    seen = None if sees is None else create_block_mask(sees, None, None, length, length, "cpu")
    shared = p.nhead != p.kv_heads
    return lambda *heads: attend(*heads, block_mask=seen, enable_gqa=shared, return_lse=True)[0]


@dataclass(frozen=True)
class Case:
    """A step at a size."""

    op: Op
    make: Callable[[Rig], Problem]
    ways: tuple[str, ...]


def _case(op: Op, kind: Any, *sizes: Any, ways: tuple[str, ...]) -> Case:
    return Case(op, lambda rig: kind(rig, *sizes), ways)


_TRITON = f"{OURS} triton"
_PASS = (_TRITON, "liger", "compile")
_MLP = (f"{_TRITON} full", f"{_TRITON} none", "flash-swiglu", "liger", "liger fused", "compile")
_ATTENTION = (f"{OURS} kernel", "flex as on a GPU")

#: Of real widths; rows are as many as fit a minute.
CASES = (
    _case(NORM, Norm, "rms_norm", 2048, 4096, ways=_PASS),
    _case(NORM, Norm, "layer_norm", 8192, 1024, ways=_PASS),
    _case(GATED, Gated, 512, 14336, ways=(OURS, "liger", "compile")),
    _case(ROPE, Rope, "rope", 1, 32, 8, 1024, 128, ways=_PASS),
    _case(LOSS, Loss, 512, 512, 8192, ways=(f"{OURS} as on a GPU", "liger", "compile")),
    _case(MLP, Mlp, True, "silu", 1, 512, 512, 1408, ways=_MLP),
    _case(ATTENTION, Attention, "causal", 1, 4, 4, 512, 128, ways=_ATTENTION),
)
#: The same steps in sizes that show nothing but whether they run.
TINY = (
    _case(NORM, Norm, "rms_norm", 5, 48, ways=_PASS),
    _case(NORM, Norm, "layer_norm", 5, 48, ways=_PASS),
    _case(GATED, Gated, 5, 48, ways=(OURS, "liger", "compile")),
    _case(ROPE, Rope, "rope", 1, 4, 2, 16, 16, ways=_PASS),
    _case(LOSS, Loss, 64, 32, 80, ways=(f"{OURS} as on a GPU", "liger", "compile")),
    _case(MLP, Mlp, True, "silu", 1, 64, 32, 48, ways=_MLP),
    _case(ATTENTION, Attention, "causal", 1, 2, 2, 128, 16, ways=_ATTENTION),
)

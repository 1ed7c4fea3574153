"""LayerNorm and RMSNorm: y, and the gradients of x and of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem
from bench.kernels.shapes import Size
from bench.measure.contest import Rig, Work
from bench.measure.registry import Absent
from fused_remat import ops

EPS = 1e-5


@dataclass(eq=False)
class Norm(Problem):
    """`layer_norm` or `rms_norm` of x (T, D)."""

    tokens: int
    width: int

    mean: ClassVar[float] = 0.5

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = {"x": (self.tokens, self.width), "weight": (self.width,), "bias": (self.width,)}
        return shapes if self.name == "layer_norm" else {n: shapes[n] for n in ("x", "weight")}

    def reference(self, *inputs: Tensor) -> Tensor:
        x, *affine = inputs
        norm = F.layer_norm if self.name == "layer_norm" else F.rms_norm
        return norm(x, x.shape[-1:], *affine, eps=EPS)

    def work(self, direction: str) -> Work:
        """x and y; or x, dy and dx."""
        matrix = self.tokens * self.width * self.rig.dtype.itemsize
        return Work(bytes={"fwd": 2.0, "bwd": 3.0}[direction] * matrix)


def of_model(rig: Rig, size: Size) -> Iterator[Problem]:
    """The model's own norm."""
    yield Norm(rig, size.model.norm, size.tokens, size.model.d_model)


OP = Op("norm", of_model)
OP.add_stock()


@OP.provider("liger", module="liger_kernel", needs="cuda")
def liger(p: Norm) -> Function:
    """Liger-Kernel, RMSNorm not in place."""
    from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

    if p.name == "layer_norm":
        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


@OP.provider("quack", module="quack", needs="cuda", optional=True)
def quack(p: Norm) -> Function:
    """QuACK's RMSNorm; its LayerNorm wants float32 weights and no bias."""
    if p.name != "rms_norm":
        raise Absent("its LayerNorm is not nn.LayerNorm's: float32 weights")
    from quack import rmsnorm

    return lambda x, weight: rmsnorm(x, weight, eps=EPS)


def _ours(p: Norm, backend: str) -> Function:
    norm = ops.layer_norm if p.name == "layer_norm" else ops.rms_norm
    return lambda x, *affine: norm(x, *affine, eps=EPS, backend=backend)


OP.add_ours(_ours)

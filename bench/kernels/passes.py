"""Ops that memory bounds: norms, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from bench.kernels.problem import Function, Op, Problem
from bench.measure.contest import Work
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
        """Count x and y; or x, dy and dx."""
        matrix = self.tokens * self.width * self.rig.dtype.itemsize
        return Work(bytes={"fwd": 2.0, "bwd": 3.0}[direction] * matrix)


NORM = Op("norm", lambda rig, size: [Norm(rig, size.model.norm, size.tokens, size.model.d_model)])


@NORM.provider("liger", module="liger_kernel", needs="cuda")
def liger_norm(p: Norm) -> Function:
    from liger_kernel.ops import LigerLayerNormFunction, LigerRMSNormFunction

    if p.name == "layer_norm":
        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, EPS)
    return lambda x, weight: LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)


@NORM.ours()
def our_norm(p: Norm, backend: str) -> Function:
    norm = ops.layer_norm if p.name == "layer_norm" else ops.rms_norm
    return lambda x, *affine: norm(x, *affine, eps=EPS, backend=backend)

"""Norms over the width: the operations, the step, and a row each in `NORMS`.

    fwd(x, weight, bias, eps, stats) -> (y, *stats); `stats`, those of x, where they were kept
    bwd(dy, x, stats, weight, needs_grad) -> (dx, dweight, dbias), those marked, else None

Statistics are float32 (float64 for float64) whatever the dtype of x, and so is what is summed over
tokens for dweight and dbias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fused_remat.spec import NormSpec
from fused_remat.steps.linear import bias_grad
from fused_remat.steps.node import Input, Node, Param
from fused_remat.steps.operations import operation

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk

_LOW = (torch.bfloat16, torch.float16)
_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default


@dataclass(frozen=True)
class NormRow:
    """A norm over the last dimension and its gradients: a row of `NORMS`.

    Attributes:
        stats: names of the statistics that it keeps, a float per token each. Kernels know "mean"
            and "rstd", the factor.
        module: the class of modules that it stands for, built and read as `nn.LayerNorm` is.
        says: what its forward runs.
    """

    fwd: Callable[..., tuple[Tensor, ...]]
    bwd: Callable[..., tuple[Tensor | None, Tensor | None, Tensor | None]]
    stats: tuple[str, ...]
    module: type[nn.Module]
    says: str


def _wide(t: Tensor | None, fill: float, x: Tensor) -> Tensor:
    if t is None:
        return torch.full((x.shape[-1],), fill, dtype=torch.float32, device=x.device)
    return t.float()


def _widens(x: Tensor, *affine: Tensor | None) -> bool:
    """Whether ATen cannot norm x beside these: low precision and wider, not on CPU."""
    return any(t is not None and t.dtype is not x.dtype for t in affine)


def layer_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    stats: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """(x - mean) * rstd * weight + bias, mean, rstd; ATen's, which computes them again."""
    if x.dtype in _LOW:
        if x.device.type == "cpu":
            # Beside a low-precision affine, ATen's statistics are low precision too.
            weight, bias = _wide(weight, 1.0, x), _wide(bias, 0.0, x)
        elif _widens(x, weight, bias):
            y, *made = layer_norm_fwd(x.float(), weight, bias, eps)
            return (y.to(x.dtype), *made)
    result: tuple[Tensor, ...] = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return result


def layer_norm_bwd(
    dy: Tensor, x: Tensor, stats: tuple[Tensor, ...], weight: Tensor | None, needs_grad: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Ba, Kiros, Hinton 2016; ATen's own backward."""
    dtype = x.dtype
    if dtype in _LOW and (needs_grad[1] or needs_grad[2] or _widens(x, weight)):
        # ATen sums over tokens in the dtype of x on a CPU, and rounds to it on CUDA.
        dy, x = dy.float(), x.float()
        weight = _wide(weight, 1.0, x)
    elif dtype in _LOW and x.device.type == "cpu":
        weight = _wide(weight, 1.0, x)
    elif weight is None and needs_grad[2]:
        weight = x.new_ones(x.shape[-1:])  # ATen takes the layout of dbias from it
    dx, dweight, dbias = _LAYER_NORM_BACKWARD(
        dy, x, x.shape[-1:], *stats, weight, weight, list(needs_grad)
    )
    return (
        (dx if dx.dtype is dtype else dx.to(dtype)) if needs_grad[0] else None,
        dweight if needs_grad[1] else None,
        dbias if needs_grad[2] else None,
    )


def rms_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    stats: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """x * rstd * weight and rstd = (mean(x**2) + eps) ** -0.5; `bias`, if any, is added."""
    wide = x.float() if x.dtype in _LOW else x
    if stats is None:
        y = wide.square()
        rstd = y.mean(-1, keepdim=True).add_(eps).rsqrt_()
        torch.mul(wide, rstd, out=y)
    else:
        (rstd,) = stats
        y = wide * rstd
    if weight is not None:
        y.mul_(weight)
    if bias is not None:
        y.add_(bias)
    return y.to(x.dtype), rstd


def rms_norm_bwd(
    dy: Tensor, x: Tensor, stats: tuple[Tensor, ...], weight: Tensor | None, needs_grad: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dweight = sum(dy * x * rstd) over tokens, and with c = -rstd**3 * ((dy * x) @ weight) / D,
    dx = dy * weight * rstd + x * c; one matrix is made."""
    (rstd,) = stats
    wide, x_wide = dy.to(rstd.dtype), x.to(rstd.dtype)
    dbias = wide.sum(0) if needs_grad[2] else None
    if not (needs_grad[0] or needs_grad[1]):
        return None, None, dbias
    product = wide * x_wide
    scale = x_wide.new_ones(x.shape[1]) if weight is None else weight.to(rstd.dtype)
    c = torch.mv(product, scale)[:, None].div_(-x.shape[1])
    c.mul_(rstd).mul_(rstd).mul_(rstd)  # not by rstd**3, which leaves float32 long before c does
    # Not rstd.T @ product, which adds up one token after another and rounds more.
    dweight = product.mul_(rstd).sum(0) if needs_grad[1] else None
    if not needs_grad[0]:
        return None, dweight, dbias
    dx = torch.mul(wide, scale, out=product).mul_(rstd).addcmul_(x_wide, c)
    return dx.to(x.dtype), dweight, dbias


#: Norms by `NormSpec.kind`. A new norm is a new row, and for kernels one of `kernels.norms.KINDS`.
NORMS: dict[str, NormRow] = {
    "layer_norm": NormRow(
        layer_norm_fwd, layer_norm_bwd, ("mean", "rstd"), nn.LayerNorm, "ATen's native_layer_norm"
    ),
    "rms_norm": NormRow(
        rms_norm_fwd, rms_norm_bwd, ("rstd",), nn.RMSNorm, "ATen, pointwise and mean"
    ),
}


def shifted(weight: Tensor | None, offset: float) -> Tensor | None:
    """weight + offset, in at least float32 (16 bits near 1 hold fewer of a small weight)."""
    if weight is None or offset == 0.0:
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset


@operation(
    key=lambda spec, x, *_, **__: (spec.kind, x.dtype, x.device, x.shape[1]),
    says=lambda key, *_, **__: NORMS[key[0]].says,
)
def norm_fwd(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None = None,
    stats: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, ...]:
    """y (T, D) and the statistics of the norm, (T, 1) in float32 (float64 for float64).

    `out` may be of a lower dtype than x; weight and bias may be float32 whatever x is. `stats`,
    where given, are those of x, and may be taken instead of computed again.
    """
    if spec.offset:
        weight = shifted(weight, spec.offset)
    made = NORMS[spec.kind].fwd(x, weight, bias, spec.eps, stats)
    return made if out is None else (out.copy_(made[0]), *made[1:])


@operation(
    key=lambda spec, dy, x, *_, **__: (spec.kind, x.dtype, x.device, x.shape[1]),
    says=lambda key, *_, **__: NORMS[key[0]].says,
)
def norm_bwd(
    spec: NormSpec,
    dy: Tensor,
    x: Tensor,
    stats: tuple[Tensor, ...],
    weight: Tensor | None,
    needs_grad: tuple[bool, ...],
    add: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx + `add`, dweight, dbias: those that `needs_grad` marks, else None.

    dy may be of a lower dtype than x.
    """
    if spec.offset:
        weight = shifted(weight, spec.offset)
    if dy.dtype is not x.dtype:
        dy = dy.to(x.dtype)
    dx, dweight, dbias = NORMS[spec.kind].bwd(dy, x, stats, weight, needs_grad)
    if dx is not None and add is not None:
        dx.add_(add)
    return dx, dweight, dbias


@dataclass(frozen=True, kw_only=True)
class Norm(Node):
    """A norm over the width: (x - mean) * rstd * weight + bias, or x * rstd * weight.

    Under autocast its arithmetic is float32, rounded to `compute`, or to the dtype of x. `mixed`:
    whether that is so.
    """

    x: Input
    weight: Param
    bias: Param
    spec: NormSpec
    mixed: bool = False

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return tuple([f"{self.name}.{stat}" for stat in NORMS[self.spec.kind].stats])

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return dict.fromkeys(self.params, torch.float32) if self.mixed else {}

    @property
    def says(self) -> tuple[str, str]:
        return "" if self.compute is None else f"rounded to {str(self.compute)[6:]}", ""

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.x, *self.stats) if self.x in needs_grad or self.weight in needs_grad else ()

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.weight,) if self.needs(needs_grad) else ()

    def target(self, like: Tensor, out: Tensor | None) -> Tensor | None:
        """Where the norm of a tensor `like` goes: `out`, or None for a new one of its dtype."""
        if out is not None or self.compute is None or self.compute == like.dtype:
            return out
        return torch.empty(like.shape, dtype=self.compute, device=like.device)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        stats, x = None, chunk[self.x]
        if self.stats[0] in chunk:  # a rebuild, and they were kept
            stats = tuple([chunk[stat] for stat in self.stats])
        if self.compute is not None:
            out = self.target(x, out)
        affine = chunk.param(self.weight), chunk.param(self.bias)
        made = chunk.ops[norm_fwd](self.spec, x, *affine, out, stats)
        if stats is not None:
            chunk.put(self.name, made[0])
            return
        for name, value in zip(self.makes, made, strict=True):
            chunk.put(name, value)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        marks = (self.x in needs_grad, self.weight in needs_grad, self.bias in needs_grad)
        if not (marks[0] or marks[1]):
            chunk.add_param_grad(self.bias, chunk.ops[bias_grad](dy))
            return
        prior, _ = chunk.grads.pop(
            self.x, (None, False)
        )  # the residual's gradient, added in the same pass
        stats = tuple([chunk[stat] for stat in self.stats])
        dx, dweight, dbias = chunk.ops[norm_bwd](
            self.spec, dy, chunk[self.x], stats, chunk.param(self.weight), marks, add=prior
        )
        if dx is not None:
            chunk.add_grad(self.x, dx, owned=True)
        if dweight is not None:
            chunk.add_param_grad(self.weight, dweight)
        if dbias is not None:
            chunk.add_param_grad(self.bias, dbias)

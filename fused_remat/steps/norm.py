"""Norms over the width: the table of their kinds, two operations, and the step.

Statistics, and the sums over tokens for the weight's and the bias's gradients, are float32 (float64
for float64) whatever the dtype of x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fused_remat.spec import NormSpec
from fused_remat.steps.linear import LOW, bias_grad
from fused_remat.steps.node import Input, Node, Param
from fused_remat.steps.operations import operation

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk

_LAYER_NORM_BACKWARD = torch.ops.aten.native_layer_norm_backward.default
Stats = tuple[Tensor, ...]
#: dx, dweight, dbias; None for a gradient that is not needed.
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class NormRow:
    """A norm over the last dimension and its gradients: a row of `NORMS`."""

    # fwd(x, weight, bias, eps, stats) returns (y, *stats). The argument `stats` holds the
    # statistics of x where they were kept, else None.
    fwd: Callable[..., tuple[Tensor, ...]]
    # bwd(dy, x, stats, weight, needs_grad) returns (dx, dweight, dbias); one that
    # `needs_grad` does not mark is None
    bwd: Callable[..., Grads]
    # names of the statistics, one number per token each. Kernels know "mean" and "rstd".
    stats: tuple[str, ...]
    module: type[nn.Module]  # the `torch.nn` class, which is built and read like `nn.LayerNorm`
    description: str  # what forward runs, for `explain`


def _wide(t: Tensor | None, fill: float, x: Tensor) -> Tensor:
    if t is None:
        return torch.full((x.shape[-1],), fill, dtype=torch.float32, device=x.device)
    return t.float()


def _widens(x: Tensor, *affine: Tensor | None) -> bool:
    # A parameter of another dtype than x, which ATen's norm accepts on a CPU only.
    return any(t is not None and t.dtype is not x.dtype for t in affine)


def layer_norm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, stats: Stats | None = None
) -> tuple[Tensor, ...]:
    """Return (x - mean) * rstd * weight + bias, mean, rstd; ATen computes statistics always."""
    if x.dtype in LOW:
        if x.device.type == "cpu":
            # With a low-precision affine, ATen's statistics are low precision too.
            weight, bias = _wide(weight, 1.0, x), _wide(bias, 0.0, x)
        elif _widens(x, weight, bias):
            y, *made = layer_norm_fwd(x.float(), weight, bias, eps)
            return (y.to(x.dtype), *made)
    result: tuple[Tensor, ...] = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
    return result


def layer_norm_bwd(
    dy: Tensor, x: Tensor, stats: Stats, weight: Tensor | None, needs_grad: Any
) -> Grads:
    """Run ATen's own backward. Source: Ba, Kiros, Hinton 2016 (arXiv 1607.06450)."""
    dtype = x.dtype
    if dtype in LOW and (needs_grad[1] or needs_grad[2] or _widens(x, weight)):
        # ATen sums over tokens in the dtype of x on a CPU, and rounds to it on CUDA.
        dy, x = dy.float(), x.float()
        weight = _wide(weight, 1.0, x)
    elif dtype in LOW and x.device.type == "cpu":
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
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, stats: Stats | None = None
) -> tuple[Tensor, ...]:
    """Return x * rstd * weight + bias, and rstd = (mean(x**2) + eps) ** -0.5."""
    wide = x.float() if x.dtype in LOW else x
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
    dy: Tensor, x: Tensor, stats: Stats, weight: Tensor | None, needs_grad: Any
) -> Grads:
    """Return dx = dy * weight * rstd + x * c, dweight = sum(dy * x * rstd) over tokens, and dbias.

    Here c = -rstd**3 * ((dy * x) @ weight) / D. One matrix is allocated.
    """
    (rstd,) = stats
    wide, x_wide = dy.to(rstd.dtype), x.to(rstd.dtype)
    dbias = wide.sum(0) if needs_grad[2] else None
    if not (needs_grad[0] or needs_grad[1]):
        return None, None, dbias
    product = wide * x_wide
    scale = x_wide.new_ones(x.shape[1]) if weight is None else weight.to(rstd.dtype)
    c = torch.mv(product, scale)[:, None].div_(-x.shape[1])
    c.mul_(rstd).mul_(rstd).mul_(rstd)  # rstd**3 leaves float32's range long before c does
    # Not rstd.T @ product, which adds the tokens one by one and rounds more.
    dweight = product.mul_(rstd).sum(0) if needs_grad[1] else None
    if not needs_grad[0]:
        return None, dweight, dbias
    dx = torch.mul(wide, scale, out=product).mul_(rstd).addcmul_(x_wide, c)
    return dx.to(x.dtype), dweight, dbias


#: Norms by `NormSpec.kind`. A new norm is a new row; for kernels, also add a row to
#: `kernels.norms.KINDS`.
NORMS: dict[str, NormRow] = {
    "layer_norm": NormRow(
        layer_norm_fwd, layer_norm_bwd, ("mean", "rstd"), nn.LayerNorm, "ATen's native_layer_norm"
    ),
    "rms_norm": NormRow(
        rms_norm_fwd, rms_norm_bwd, ("rstd",), nn.RMSNorm, "ATen, pointwise and mean"
    ),
}


def shifted(weight: Tensor | None, offset: float) -> Tensor | None:
    """Return weight + offset in float32 (float64): near 1, 16 bits would lose small weights."""
    if weight is None or offset == 0.0:
        return weight
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset


@operation(
    key=lambda spec, x, *_, **__: (spec.kind, x.dtype, x.device, x.shape[1]),
    description=lambda key, *_, **__: NORMS[key[0]].description,
)
def norm_fwd(
    spec: NormSpec,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor | None = None,
    stats: Stats | None = None,
) -> tuple[Tensor, ...]:
    """Return the norm y (T, D) of x, and its statistics, (T, 1) in float32 (float64 for float64).

    `out` may have a lower dtype than x. The weight and the bias may be float32 whatever the dtype
    of x. `stats` are the statistics of x or None; an implementation may compute them again.
    """
    if spec.offset:
        weight = shifted(weight, spec.offset)
    made = NORMS[spec.kind].fwd(x, weight, bias, spec.eps, stats)
    return made if out is None else (out.copy_(made[0]), *made[1:])


@operation(
    key=lambda spec, dy, x, *_, **__: (spec.kind, x.dtype, x.device, x.shape[1]),
    description=lambda key, *_, **__: NORMS[key[0]].description,
)
def norm_bwd(
    spec: NormSpec,
    dy: Tensor,
    x: Tensor,
    stats: Stats,
    weight: Tensor | None,
    needs_grad: tuple[bool, ...],
    add: Tensor | None = None,
) -> Grads:
    """Return dx + `add`, dweight and dbias; one that `needs_grad` does not mark is None.

    dy may have a lower dtype than x.
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
    """A norm over the width: (x - mean) * rstd * weight + bias, or x * rstd * weight."""

    x: Input
    weight: Param
    bias: Param
    spec: NormSpec
    # whether the step runs under autocast: then it computes in float32, and rounds the result
    # to `compute`, or to the dtype of x if that is None
    mixed: bool = False

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return tuple([f"{self.name}.{stat}" for stat in NORMS[self.spec.kind].stats])

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        return dict.fromkeys(self.params, torch.float32) if self.mixed else {}

    @property
    def description(self) -> tuple[str, str]:
        return "" if self.compute is None else f"rounded to {str(self.compute)[6:]}", ""

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.x, *self.stats) if self.x in needs_grad or self.weight in needs_grad else ()

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.weight,) if self.needs(needs_grad) else ()

    def target(self, like: Tensor, out: Tensor | None) -> Tensor | None:
        """Return `out`, or an uninitialized result, or None where the dtype is that of `like`."""
        if out is not None or self.compute is None or self.compute == like.dtype:
            return out
        return torch.empty(like.shape, dtype=self.compute, device=like.device)

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        stats, x = None, chunk[self.x]
        if self.stats[0] in chunk:  # this is a rebuild, and the statistics were kept
            stats = tuple([chunk[stat] for stat in self.stats])
        if self.compute is not None:
            out = self.target(x, out)
        affine = chunk.param(self.weight), chunk.param(self.bias)
        made = chunk.ops[norm_fwd](self.spec, x, *affine, out, stats)
        for name, value in zip(self.makes, made, strict=True):  # statistics that were kept stay
            chunk.put(name, value)

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        marks = (self.x in needs_grad, self.weight in needs_grad, self.bias in needs_grad)
        if not (marks[0] or marks[1]):
            chunk.add_param_grad(self.bias, chunk.ops[bias_grad](dy))
            return
        # The residual's gradient, if there is one, is added by the operation.
        prior, _ = chunk.grads.pop(self.x, (None, False))
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


@dataclass(frozen=True, kw_only=True)
class HeadNorm(Norm):
    """A norm over the width of each head; its statistics are computed again, not kept."""

    heads: int

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return ()

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        x = chunk[self.x]
        into = None if out is None else self._by_head(out)
        affine = chunk.param(self.weight), chunk.param(self.bias)
        y, *_ = chunk.ops[norm_fwd](self.spec, self._by_head(x), *affine, into)
        chunk.put(self.name, y.view(x.shape))

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        x, affine = chunk[self.x], (chunk.param(self.weight), chunk.param(self.bias))
        marks = (self.x in needs_grad, self.weight in needs_grad, self.bias in needs_grad)
        by_head = self._by_head(x)
        _, *stats = chunk.ops[norm_fwd](self.spec, by_head, *affine)
        dx, *others = chunk.ops[norm_bwd](
            self.spec, self._by_head(dy), by_head, tuple(stats), affine[0], marks
        )
        if dx is not None:
            chunk.add_grad(self.x, dx.view(x.shape), owned=True)
        for name, grad in zip((self.weight, self.bias), others, strict=True):
            if grad is not None:
                chunk.add_param_grad(name, grad)

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        return (self.x,)

    def _by_head(self, x: Tensor) -> Tensor:
        return x.reshape(len(x) * self.heads, -1)

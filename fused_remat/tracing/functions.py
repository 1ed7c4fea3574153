"""Functions that a module computes as one operation.

Norms and activations are recognized by what they return, PEFT's DoRA by its modules.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fused_remat.layers.eligibility import Unsupported, parameters_of
from fused_remat.layers.expert_stacks import is_wrapper
from fused_remat.layers.modules import read_linear
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.dora import row_norms
from fused_remat.tracing.experts import KnownExperts, known_experts


class AdaptedLinear(NamedTuple):
    """A linear layer with DoRA."""

    names: tuple[str, ...]  # of weight, bias ("" for none), A, B and magnitudes
    scale: float
    p: float  # of dropout

    def run(self, x: Tensor, *params: Any) -> Tensor:
        """Compute the layer (`steps.dora`)."""
        weight, bias, a, b, magnitudes = params
        scale = magnitudes / row_norms(weight.detach(), a.detach(), b.detach(), self.scale)
        z = F.dropout(x, self.p)
        low = F.linear(F.linear(z.to(a.dtype), a), b) * self.scale
        y = F.linear(x, weight, bias)
        wide: Tensor = y + (scale - 1) * F.linear(z, weight) + scale * low
        return wide.to(y.dtype)


Known = NormSpec | AdaptedLinear | KnownExperts | str


def known_function(module: nn.Module, path: str, dtype: torch.dtype) -> Known | None:
    """Return the norm, adapted layer or name of an activation that a module computes, or None."""
    params = parameters_of(module, recurse=False)
    if hasattr(module, "_apply_gate") or is_wrapper(module):
        return known_experts(module)
    if hasattr(module, "lora_magnitude_vector"):
        return _adapted(module, path)
    own = [v for n, v in vars(module).items() if isinstance(v, Tensor) and n not in params]
    if type(module) in (nn.Dropout, nn.Identity, nn.Linear) or len(params) > 2 or own:
        return None
    if any(p.dim() != 1 for p in params.values()) or [*module.children(), *module.buffers()]:
        return None
    act = None
    if not params and not hasattr(module, "normalized_shape"):
        act = activation_of(module, torch.zeros(1, 1024, dtype=torch.float64))
    return act or _norm_of(module, params, dtype)


def _adapted(module: nn.Module, path: str) -> AdaptedLinear | None:
    try:
        weight, bias, updates = read_linear(module, path)
    except Unsupported:
        return None
    if len(updates) != 1 or updates[0][4] is None:
        return None
    (a, b, scale, p, magnitudes), names = updates[0], {id(None): ""}
    names |= {id(param): name for name, param in parameters_of(module).items()}
    own = [names.get(id(t)) for t in (weight, bias, a, b, magnitudes)]
    known = [name for name in own if name is not None]  # a transposed weight is none of them
    return AdaptedLinear(tuple(known), scale, p) if len(known) == len(own) else None


def activation_of(run: Callable[[Tensor], Tensor], like: Tensor) -> str | None:
    """Return the entry of `ACTIVATIONS` that a function of a matrix `like` computes, or None."""
    size, generator = like.numel(), torch.Generator().manual_seed(0)
    tiny, large = torch.logspace(-8.0, -1.0, 29), torch.logspace(1.0, 30.0, 30)
    some = torch.cat([torch.linspace(-9.0, 9.0, 1001), torch.randn(400, generator=generator)])
    limits = torch.tensor([math.inf, -math.inf, math.nan])
    x = torch.cat([tiny, -tiny, large, -large, some, some.new_zeros(1), limits]).to(like)
    count = -(-len(x) // size) * size
    x = x.repeat(-(-count // len(x)))[:count]

    def with_slope(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.view(like.shape).requires_grad_()
        with torch.enable_grad():
            y = run(x.clone())  # which it may change
        if y.shape != x.shape:
            raise ValueError
        (slope,) = torch.autograd.grad(y.sum(), x)
        return y.detach().reshape(-1), slope.reshape(-1)

    try:
        pairs = map(with_slope, x.split(size))
        y, slope = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    except Exception:  # an activation function would not raise
        return None
    loose = 1.0 if y.dtype == torch.float64 else 1e3  # digits of float32
    finite = x.isfinite()
    for name, known in ACTIVATIONS.items():
        if torch.allclose(known.fwd(x), y, 1e-9 * loose, 1e-9 * loose, equal_nan=True):
            dx = known.bwd(torch.ones_like(x), x, None)
            if torch.allclose(dx[finite], slope[finite], 1e-7 * loose, 1e-7 * loose):
                return name
    return None


def norm_function(spec: NormSpec) -> Callable[..., Tensor]:
    """Return a norm as a function of its input, weight and bias."""

    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if spec.kind == "layer_norm":
            y = F.layer_norm(wide, x.shape[-1:], None, None, spec.eps)
        else:
            y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
        if weight is not None:
            y = y * (weight.to(wide.dtype) + spec.offset)
        y = y if bias is None else y + bias
        return y.to(x.dtype)

    return run


def _norm_of(module: nn.Module, params: Mapping[str, Any], dtype: torch.dtype) -> NormSpec | None:
    shapes = {p.shape[0] for p in params.values()}
    width = shapes.pop() if shapes else getattr(module, "normalized_shape", (16,))[-1]
    if shapes:
        return None
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(dtype, torch.float32)
    x = torch.randn(3, 4, width, generator=generator, dtype=dtype)
    x[0, :, 0] = 1e4  # its result is as large as any can be
    signs = torch.randn(2, width, generator=generator, dtype=dtype)
    weights = (signs + 0.5 * signs.sign())[: len(params)]
    no_bias = weights * torch.tensor([[1.0], [0.0]])[: len(weights)].to(x)

    def tried(weights: Tensor, x: Tensor) -> Tensor | None:
        named = dict(zip(params, weights, strict=True))
        try:
            with torch.no_grad():
                y = functional_call(module, named, (x,))
        except Exception:  # a norm would not raise
            return None
        return y if isinstance(y, Tensor) and y.shape == x.shape else None

    tiny = x * 1e-16  # their variance is negligible against eps
    of_tiny = tried(no_bias, tiny)
    numbers = {v for v in vars(module).values() if isinstance(v, float) and 0.0 < v < 1e-2}
    if of_tiny is None:
        return None
    offsets = (0.0, 1.0) if params else (0.0,)
    for kind, offset in itertools.product(("layer_norm", "rms_norm"), offsets):
        centered = tiny - tiny.mean(-1, keepdim=True) if kind == "layer_norm" else tiny
        scale = weights[0] + offset if len(weights) else 1.0
        measured = float((centered * scale / of_tiny).square().median())
        if not 0.0 < measured < 1.0:
            continue
        known = (*numbers, 1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(dtype).eps)
        eps = next((n for n in known if math.isclose(n, measured, rel_tol=1e-4)), measured)
        spec = NormSpec(kind=kind, eps=eps, offset=offset)
        run = norm_function(spec)
        scales = ((1.0, 1.0), (1.0, 1e3), (1e-3, 1.0), (eps**0.5, 1.0), (1e5, 1.0))
        pairs = [(run(a * x, *(b * weights)), tried(b * weights, a * x)) for a, b in scales]
        if all(y is not None and (z - y).abs().max() <= 1e-5 * z.abs().max() for z, y in pairs):
            return spec
    return None

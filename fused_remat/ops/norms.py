"""Norms and the residual sum as functions."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat.graph.build import dropout_add_graph, norm_graph
from fused_remat.ops.inputs import check_alike, check_p, check_shape, run_tokens, seed_tensor
from fused_remat.policies import Policy
from fused_remat.spec import NormSpec


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    Shapes: x (..., D), weight and bias (D,) or None; returns (..., D) in x.dtype.
    Units: bytes kept = the input, and 8 a token (mean and rstd in float32; 16 for float64).
    Raises: ValueError for shapes that do not fit, RuntimeError for mixed dtypes or devices.
    Source: Ba, Kiros, Hinton 2016.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    tensor([[-1.,  1.]])
    """
    return _norm("layer_norm", x, weight, bias, eps, policy, backend)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
) -> Tensor:
    """x / sqrt(mean(x**2) + eps) * weight over the last dimension.

    Shapes: x (..., D), weight (D,) or None; returns (..., D) in x.dtype. `eps` None is the machine
        epsilon of the dtype computed in (float32 for 16 bits), as `torch.nn.functional.rms_norm`
        has it.
    Units: bytes kept = the input, and 4 a token (rstd in float32; 8 for float64).
    Raises: ValueError for shapes that do not fit, RuntimeError for mixed dtypes or devices.
    Source: Zhang, Sennrich 2019.

    >>> rms_norm(torch.tensor([[3.0, 3.0]]), eps=0.0)
    tensor([[1., 1.]])
    """
    check_alike(x, {})
    eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps
    return _norm("rms_norm", x, weight, None, eps, policy, backend)


def _norm(
    kind: str,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    policy: str | Policy,
    backend: str,
) -> Tensor:
    check_alike(x, {"weight": weight, "bias": bias})
    for name, t in (("weight", weight), ("bias", bias)):
        check_shape(name, t, tuple(x.shape[-1:]), "x", x)
    tensors = {"input": x, "norm.weight": weight, "norm.bias": bias}
    return run_tokens(norm_graph(NormSpec(kind=kind, eps=float(eps))), policy, backend, tensors)


def dropout_add(
    x: Tensor,
    residual: Tensor,
    p: float,
    *,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """residual + dropout(x), rounded once; the mask is never stored.

    Shapes: x and residual (..., D); returns the same, in x.dtype.
    Units: bytes kept = 8 (the seed), or nothing at p = 0.
    Raises: ValueError for different shapes or p outside [0, 1], RuntimeError for mixed dtypes.
    Source: Srivastava et al. 2014; the generator is defined in `fused_remat.random`.

    >>> dropout_add(torch.ones(4), torch.zeros(4), p=0.5, seed=0)
    tensor([0., 0., 0., 2.])
    """
    check_alike(x, {"residual": residual})
    if x.shape != residual.shape:
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, expected x's {tuple(x.shape)}"
        )
    tensors = {"input": x, "residual": residual, "seed": seed_tensor(seed, x.device)}
    return run_tokens(dropout_add_graph(check_p("p", p)), policy, backend, tensors)

"""The loss of a language model's head as a function: logits are never whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.autograd.shards import is_dtensor, local_shards
from fused_remat.execution.executor import autocast_on
from fused_remat.graph.build import linear_cross_entropy_graph
from fused_remat.ops.checks import check_alike, check_shape, run_tokens
from fused_remat.spec import ParallelSpec
from fused_remat.steps.cross_entropy import CrossEntropyCall, LinearCrossEntropy, check_targets

_REDUCTIONS = ("mean", "sum", "none")
#: What autocast converts.
_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = 0.0,
    reduction: str = "mean",
    shift: bool = False,
    chunk: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """cross_entropy(cap(hidden @ weight.T + bias), target) + z_loss · logsumexp².

    Logits are never whole. As `F.cross_entropy` of logits in float32, which is how Hugging Face
    computes it: the mean is over tokens that are not ignored, NaN where there is none; ignored ones
    are 0 in "none"; label smoothing spreads over the vocabulary. Hugging Face's
    `num_items_in_batch` is reduction="sum", divided by it.

    Shapes: hidden (..., D), weight (V, D), target (...), bias (V,); returns (), or (...) for
        "none", in float32, or float64 for float64, whatever else the dtype.
    target: int64, a row of weight for each token, or `ignore_index`. `shift`: of each token in
        place of the next one's, along the last dimension, as language models have it: the first is
        not predicted, and the last predicts nothing.
    softcap: cap(z) = softcap · tanh(z / softcap), as in Gemma 2; 0 for none.
    chunk: about how many logits to hold at a time; None for 2²⁰ on a CPU, 2²⁶ elsewhere.
    Autocast: hidden, weight and bias are rounded to its dtype, as `F.linear` would.
    Units: bytes kept = hidden, and 8 a token (maximum and log of the sum, float32; 16 for float64);
        FLOPs = 2·V·D a token forward, 6·V·D backward (less 2·V·D each if hidden or weight is
        frozen, which then has no buffer either).
    Raises: ValueError for shapes that do not fit, an unknown reduction, z_loss, softcap or chunk
        out of range; RuntimeError for mixed dtypes or devices, a target that is not int64 and
        label_smoothing outside [0, 1]; IndexError for a target that is no row (on a CPU; elsewhere
        the device asserts).
    Source: Wijmans et al. 2024 (cut cross-entropy); Szegedy et al. 2016 (label smoothing);
        Chowdhery et al. 2022 (z-loss).

    >>> hidden = torch.randn(2, 3, 8, requires_grad=True)
    >>> weight, labels = torch.randn(1000, 8), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss = linear_cross_entropy(hidden, weight, labels)
    >>> torch.allclose(loss, F.cross_entropy((hidden @ weight.T).view(6, -1), labels.view(-1)))
    True
    """
    _check_options(label_smoothing, z_loss, softcap, reduction, chunk)
    parallel = None
    if is_dtensor(weight):
        parallel, weight, bias = _own_columns(weight, bias)
    hidden, weight, bias = _operands(hidden, weight, bias, target)
    if parallel is not None:
        whole = CrossEntropyCall(target.reshape(-1), ignore_index, 0.0, 0.0, 0.0, 0)
        check_targets(whole, len(weight) * parallel.size)
    if shift:
        target = F.pad(target, (0, 1), value=ignore_index)[..., 1:]
    node = LinearCrossEntropy(
        name="output",
        x="input",
        weight="head.weight",
        bias="head.bias",
        target="target",
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        softcap=float(softcap),
        logits=chunk or 0,
        parallel=parallel,
    )
    tensors = {"input": hidden, "head.weight": weight, "head.bias": bias, "target": target}
    loss = run_tokens(linear_cross_entropy_graph(node), "full", backend, tensors).squeeze(-1)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def _own_columns(weight: Any, bias: Any) -> tuple[ParallelSpec, Tensor, Tensor | None]:
    """The rank's place among those that share a vocabulary, and its rows of weight and bias."""
    given = [weight] if bias is None else [weight, bias]
    for name, t in zip(("weight", "bias"), given, strict=False):
        if not is_dtensor(t) or len(t.placements) != 1 or not t.placements[0].is_shard(0):
            shown = f"{t.placements} on {t.device_mesh}" if is_dtensor(t) else "a plain Tensor"
            raise ValueError(
                f"a vocabulary divided among ranks has weight and bias as DTensors, (Shard(dim=0),)"
                f" on one dimension of a mesh; {name} is {shown}"
            )
    mesh = weight.device_mesh
    size, rank = mesh.size(), mesh.get_local_rank()
    if weight.shape[0] % size:
        raise ValueError(
            f"a vocabulary of {weight.shape[0]} cannot be divided evenly among {size} ranks: pad it"
        )
    group = mesh.get_group().group_name
    shards = local_shards(group, (False,) * len(given), given)
    place = ParallelSpec(group=group, size=size, rank=rank, sequence=False)
    return place, shards[0], shards[1] if len(given) > 1 else None


def _check_options(
    label_smoothing: float, z_loss: float, softcap: float, reduction: str, chunk: int | None
) -> None:
    if reduction not in _REDUCTIONS:
        valid = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(f"{reduction!r} is not a valid value for reduction; valid: {valid}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or positive and finite, got {value}")
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"chunk must be a positive number of logits or None, got {chunk!r}")


def _operands(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden, in the dtype that products take, weight and bias, once everything fits."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a Tensor, got {type(weight).__name__}")
    check_alike(hidden, {})
    low = torch.get_autocast_dtype(hidden.device.type) if autocast_on(hidden) else None
    if low is None or hidden.dtype not in _CASTABLE:
        check_alike(hidden, {"weight": weight, "bias": bias})
    else:
        _check_castable(hidden, {"weight": weight, "bias": bias}, low)
        hidden = hidden.to(low)  # weights are rounded block by block: no copy of the head is made
    if hidden.dim() < 1:
        raise ValueError("expected hidden of at least one dimension, got shape ()")
    check_shape("weight", weight, ("V", hidden.shape[-1]), "hidden", hidden)
    if weight.shape[0] < 1:
        raise ValueError(f"weight must have a row for each class, got shape {tuple(weight.shape)}")
    check_shape("bias", bias, (weight.shape[0],), "weight", weight)
    _check_target(target, hidden)
    return hidden, weight, bias


def _check_castable(hidden: Tensor, params: Mapping[str, Tensor | None], low: torch.dtype) -> None:
    """Raise unless autocast converts all of `params` to `low`, where `hidden` is."""
    for name, t in params.items():
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a Tensor or None, got {type(t).__name__}")
        if t.dtype not in _CASTABLE or t.device != hidden.device:
            raise RuntimeError(
                f"{name} is {t.dtype} on {t.device}, which autocast to {low} does not convert for "
                f"hidden on {hidden.device}"
            )


def _check_target(target: Tensor, hidden: Tensor) -> None:
    if not isinstance(target, Tensor):
        raise TypeError(f"target must be a Tensor, got {type(target).__name__}")
    if target.dtype != torch.int64 or target.device != hidden.device:
        raise RuntimeError(
            f"target must be class indices, {torch.int64} on {hidden.device}, got {target.dtype} "
            f"on {target.device}"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target has shape {tuple(target.shape)}, expected {tuple(hidden.shape[:-1])} to go "
            f"with hidden of shape {tuple(hidden.shape)}"
        )

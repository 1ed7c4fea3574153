"""The loss of a language model's head as a function, without a tensor of all logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.autograd.loss import LossWithGradients
from fused_remat.autograd.shards import local_shards
from fused_remat.execution.choose import choose, ops_for
from fused_remat.execution.executor import autocast_off, autocast_on
from fused_remat.execution.observe import LossRun
from fused_remat.graph.build import linear_cross_entropy_graph
from fused_remat.ops.checks import CASTABLE, check_alike, check_shape, check_tensor, run_tokens
from fused_remat.spec import ParallelSpec
from fused_remat.steps.collective import is_dtensor
from fused_remat.steps.cross_entropy import LinearCrossEntropy, check_targets, key_of
from fused_remat.steps.loss_grads import Grads, cross_entropy_grads, kept_bytes
from fused_remat.steps.token_losses import CrossEntropyTargets

#: Names of gradients that are kept, in reports.
_GRADS = ("input's gradient", "head.weight's gradient", "head.bias's gradient")


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
    logit_scale: float = 1.0,
    reduction: str = "mean",
    shift: bool = False,
    chunk: int | None = None,
    grad_in_forward: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Compute cross_entropy(logits, target) + z_loss · logsumexp² of a linear layer's logits.

    logits = cap(logit_scale · (hidden @ weight.T + bias)).

    Equals `F.cross_entropy` of logits in float32, as Hugging Face computes it: the mean is over
    tokens that are not ignored, NaN if there is none; ignored tokens are 0 in "none"; label
    smoothing is over the entire vocabulary. Hugging Face's `num_items_in_batch` is reduction="sum",
    divided by it. Blocks of logits are computed one at a time.

    Shapes: hidden (..., D), weight (V, D), target (...), bias (V,); returns (), or (...) for
        "none", in float64 for float64 and in float32 for all other dtypes.
    target: int64, a row of weight for each token, or `ignore_index`. `shift`: each token predicts
        the next one along the last dimension, as in language models: the first token is not
        predicted, and the last predicts nothing.
    softcap: cap(z) = softcap · tanh(z / softcap), as in Gemma 2; 0 for none.
    logit_scale: a factor of logits before the soft-cap, as in Cohere (Granite divides by it).
    chunk: at most about how many logits to hold at a time; None for 2²⁰ on a CPU, and elsewhere for
        512 MiB of them. On a GPU blocks are of so many tokens and columns that waves are full. With
        grad_in_forward and None, a block on a CPU has at least 256 tokens.
    grad_in_forward: compute the gradients with the loss, as three products of logits' size instead
        of four, and keep them, not hidden, until backward, which multiplies them by the loss's
        gradient (one more rounding unless that is a power of 2). Only for "mean" and "sum"; nothing
        changes without grad mode, and in compiled functions gradients are computed in backward.
        All columns of `chunk` logits are held at a time. See docs/kernels.md for when it is faster.
    Autocast: hidden, weight and bias are rounded to its dtype, as `F.linear` would.
    Units: bytes kept = hidden, and 8 a token (maximum and log of the sum, float32; 16 for float64);
        FLOPs = 2·V·D a token forward, 6·V·D backward (less 2·V·D each if hidden or weight is
        frozen, which then has no buffer either). With grad_in_forward: bytes kept = the gradients
        of hidden, weight and bias (float32 for float16), FLOPs = 6·V·D a token forward; in forward
        the weight's gradient is also summed in float32.
    Raises: ValueError for shapes that do not fit, an unknown reduction, grad_in_forward with
        "none", and z_loss, softcap, logit_scale or chunk out of range; RuntimeError for mixed
        dtypes or devices, a target that is not int64 and label_smoothing outside [0, 1];
        IndexError for a target out of range (on a CPU; elsewhere the device asserts).
    Source: Wijmans et al. 2024 (cut cross-entropy); Szegedy et al. 2016 (label smoothing);
        Chowdhery et al. 2022 (z-loss).

    >>> hidden = torch.randn(2, 3, 8, requires_grad=True)
    >>> weight, labels = torch.randn(1000, 8), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> loss = linear_cross_entropy(hidden, weight, labels)
    >>> torch.allclose(loss, F.cross_entropy((hidden @ weight.T).view(6, -1), labels.view(-1)))
    True
    """
    check_options(label_smoothing, z_loss, softcap, logit_scale, reduction, chunk)
    if grad_in_forward and reduction == "none":
        raise ValueError(
            'grad_in_forward=True with reduction="none": the gradients of a loss for each token '
            'depend on factors that only backward has; use "mean" or "sum"'
        )
    node, tensors = prepare(
        hidden,
        weight,
        target,
        bias,
        ignore_index=ignore_index,
        label_smoothing=float(label_smoothing),
        z_loss=float(z_loss),
        softcap=float(softcap),
        logits=chunk or 0,
        logit_scale=float(logit_scale),
    )
    if shift:
        target = F.pad(target, (0, 1), value=ignore_index)[..., 1:]
        tensors["target"] = target
    if grad_in_forward and _trains(*tensors.values()):
        return _with_gradients(node, tensors, reduction, backend)
    loss = run_tokens(linear_cross_entropy_graph(node), tensors, {}, "full", backend).squeeze(-1)
    if reduction == "none":
        return loss
    total = loss.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


def prepare(
    hidden: Tensor, weight: Any, target: Tensor, bias: Any, **options: Any
) -> tuple[LinearCrossEntropy, dict[str, Tensor | None]]:
    """Return the step with `options`, and its tensors, after all checks."""
    parallel = None
    if is_dtensor(weight):
        parallel, weight, bias = _own_columns(weight, bias)
    hidden = _checked(hidden, weight, bias, target)
    if parallel is not None:
        targets = CrossEntropyTargets(target.reshape(-1), options["ignore_index"], 0.0, 0.0, 0.0, 0)
        check_targets(targets, len(weight) * parallel.size)
    names = "input", "head.weight", "head.bias", "target"
    fields = dict(zip(("x", "weight", "bias", "target"), names, strict=True)) | options
    node = LinearCrossEntropy(name="output", parallel=parallel, **fields)
    return node, dict(zip(names, (hidden, weight, bias, target), strict=True))


def _trains(*tensors: Tensor | None) -> bool:
    """Return whether a gradient will be taken in eager mode, outside of torch.func transforms."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _with_gradients(
    node: LinearCrossEntropy, tensors: dict[str, Tensor | None], reduction: str, backend: str
) -> Tensor:
    """Return the loss, whose gradients are computed now."""
    hidden, weight, bias, target = tensors.values()
    assert hidden is not None and weight is not None and target is not None
    x, given = hidden.reshape(-1, hidden.shape[-1]), (weight, bias)
    needs_grad = tuple([t is not None and t.requires_grad for t in (x, *given)])
    call, ops = node.targets(target.reshape(-1), weight), ops_for(backend, x)

    def compute() -> tuple[Tensor, Grads]:
        with autocast_off(x):
            count = None if reduction == "sum" else (target != node.ignore_index).sum()
            wide = torch.promote_types(x.dtype, torch.float32)
            scale = None if count is None else count.clamp(min=1).to(wide).reciprocal()
            loss, grads = ops[cross_entropy_grads](x, *given, call, scale, needs_grad)
            total = loss.sum()
            return total if count is None else total / count, grads

    def describe(grads: Grads) -> LossRun:
        chosen = choose(cross_entropy_grads, ops.name, key_of(x, weight)).reason()
        kept = {n: t for n, t in zip(_GRADS, grads, strict=True) if t is not None}
        predicted = zip(_GRADS, kept_bytes(x, weight, bias, needs_grad), strict=True)
        return LossRun(ops.name, chosen, kept, {n: count for n, count in predicted if count})

    loss: Tensor = LossWithGradients.apply(compute, describe, x, *given)
    return loss


def _own_columns(weight: Any, bias: Any) -> tuple[ParallelSpec, Tensor, Tensor | None]:
    """Return the rank in a divided vocabulary, and its rows of weight and bias."""
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, t in given.items():
        if not is_dtensor(t) or len(t.placements) != 1 or not t.placements[0].is_shard(0):
            shown = f"{t.placements} on {t.device_mesh}" if is_dtensor(t) else "a plain Tensor"
            raise ValueError(
                "a vocabulary divided among ranks takes weight and bias as DTensors, "
                f"(Shard(dim=0),) on one dimension of a mesh; {name} is {shown}"
            )
    place, vocabulary = ParallelSpec.of(weight.device_mesh), weight.shape[0]
    if vocabulary % place.size:
        raise ValueError(
            f"a vocabulary of {vocabulary} cannot be divided evenly among {place.size} ranks: "
            "pad it"
        )
    shards = local_shards(place.group, (False,) * len(given), list(given.values()))
    return place, shards[0], None if bias is None else shards[1]


def check_options(
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
    reduction: str,
    chunk: int | None,
) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(
            f"{reduction!r} is not a valid value for reduction; valid: 'mean', 'sum', 'none'"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    for name, value in (("z_loss", z_loss), ("softcap", softcap)):
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be 0 or positive and finite, got {value}")
    if not 0.0 < logit_scale < math.inf:
        raise ValueError(f"logit_scale must be positive and finite, got {logit_scale}")
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"chunk must be a positive number of logits or None, got {chunk!r}")


def _checked(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """Return `hidden` in the dtype of products, after all checks."""
    check_alike({"hidden": hidden})
    dtypes: tuple[torch.dtype, ...] = (hidden.dtype,)
    why = ", as hidden"
    if autocast_on(hidden) and hidden.dtype in CASTABLE:
        low = torch.get_autocast_dtype(hidden.device.type)
        dtypes, why = CASTABLE, f", which autocast converts to {low}"
        hidden = hidden.to(low)  # weights are rounded block by block, without a copy of the head
    check_tensor("weight", weight, dtypes, hidden, why)
    if bias is not None:
        check_tensor("bias", bias, dtypes, hidden, why)
    check_shape("weight", weight, ("V", hidden.shape[-1]), {"hidden": hidden})
    if weight.shape[0] < 1:
        raise ValueError(f"weight needs one row per class, got shape {tuple(weight.shape)}")
    check_shape("bias", bias, weight.shape[:1], {"weight": weight})
    check_tensor("target", target, (torch.int64,), hidden, ": class indices")
    check_shape("target", target, hidden.shape[:-1], {"hidden": hidden})
    return hidden

"""Losses of tokens, and what else is returned of their distributions, from blocks of logits.

All follow from reductions of blocks of columns, which one pass over the logits makes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_remat.steps import collective

#: Each output and the reduction of blocks of logits z with maximum `top` that it needs: sum(exp(z
#: - top) * (z - top)), sum(exp(z - top)²), or the first column of the maximum.
REDUCTIONS = {
    "entropy": "weighted",
    "log_sum_sq_probs": "squares",  # log(sum(softmax²))
    "mean_logits": "",  # of the sum of logits
    "is_top1": "first",  # 1 if the target is the first column of the largest logit, else 0
}
_LEAST = -1e4  # exp of it is 0 in every dtype, and so is 0 times it


@dataclass(eq=False, slots=True)
class CrossEntropyTargets:
    """Targets and options of a cross-entropy over the logits of T tokens."""

    # (T,) int64, the column of each token's target; the loss is 0 where it is `ignore_index`
    target: Tensor
    ignore_index: int
    label_smoothing: float  # the share of each target that is spread over all columns
    z_loss: float  # the factor of logsumexp², which is added to each token's loss
    softcap: float  # logits become softcap * tanh(logits / softcap); 0 for none
    logits: int  # about how many logits to hold at a time; 0 for a number that suits the device
    # of the ranks among which the columns are divided; "" for none. A target is then a column
    # of this rank, or a negative number, not `ignore_index`, for another rank's.
    group: str = ""
    classes: int = 0  # the number of columns of all ranks; 0 for those of the weight
    logit_scale: float = 1.0  # the factor of x @ weight.T + bias, before the soft-cap
    # what is returned after each token's loss, names of `REDUCTIONS`
    outputs: tuple[str, ...] = ()


def reductions(
    outputs: Collection[str], like: Tensor, count: int, blocks: int
) -> dict[str, Tensor]:
    """Return uninitialized tensors (count, blocks) for the reductions of all blocks."""
    names = [REDUCTIONS[name] for name in outputs if REDUCTIONS[name]]
    return {name: like.new_empty((count, blocks)) for name in names}


def maximum(z: Tensor, first: int, parts: Mapping[str, Tensor]) -> Tensor:
    """Return the maximum of each row of z, whose columns begin at `first`."""
    if "first" not in parts:
        return torch.amax(z, 1, keepdim=True)
    top, at = torch.max(z, 1, keepdim=True)
    parts["first"].copy_(at + first)
    return top


def exponentials(shifted: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return exp(shifted) of shifted = z - top, which is overwritten."""
    if parts.keys() <= {"first"}:
        return shifted.exp_()
    exps = shifted.exp()
    if "squares" in parts:
        parts["squares"].copy_(torch.linalg.vector_norm(exps, dim=1, keepdim=True).square_())
    if "weighted" in parts:
        parts["weighted"].copy_(shifted.clamp_(min=_LEAST).mul_(exps).sum(1, keepdim=True))
    return exps


def _outputs(
    outputs: Collection[str],
    blocks: tuple[Tensor, Tensor, Mapping[str, Tensor]],
    stats: tuple[Tensor, Tensor],
    mean: Tensor,
    target: Tensor,
    group: str,
) -> list[Tensor]:
    """Return the outputs, (n, 1) each; `is_top1` and `log_sum_sq_probs` of one rank's columns only.

    `blocks` are the maximum, sum(exp(z - maximum)) and `reductions` of each block, (n, blocks);
    `stats` (maximum and log of the sum) and `mean` are those of all logits.
    """
    (tops, sums, parts), (high, log_sum) = blocks, stats
    found = {"mean_logits": mean}
    if "entropy" in outputs:
        above = tops - high
        mass = parts["weighted"].addcmul(sums, above).mul_(above.exp_()).sum(1, keepdim=True)
        mass = collective.total(mass, group, owned=True) if group else mass
        found["entropy"] = log_sum - mass / log_sum.exp()
    if "log_sum_sq_probs" in outputs:
        squares = (parts["squares"] * torch.exp(2 * (tops - high))).sum(1, keepdim=True)
        found["log_sum_sq_probs"] = squares.log_().sub_(log_sum, alpha=2)
    if "is_top1" in outputs:
        first = parts["first"].gather(1, tops.argmax(1, keepdim=True))
        found["is_top1"] = (first == target[:, None]).to(high.dtype)
    return [found[name] for name in outputs]


def softmax_grad(log_softmax: Tensor, mass: Tensor, entropy_slope: Tensor | None) -> Tensor:
    """Return softmax * (mass - entropy_slope * log_softmax), in place of `log_softmax`."""
    if entropy_slope is None:
        return log_softmax.exp_().mul_(mass)
    log_softmax.clamp_(min=_LEAST)
    factor = torch.addcmul(mass, log_softmax, entropy_slope, value=-1)
    return log_softmax.exp_().mul_(factor)


def losses(
    tops: Tensor,
    sums: Tensor,
    picked: Tensor,
    total: Tensor,
    vocab: int,
    call: CrossEntropyTargets,
    parts: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Return losses with outputs, and the statistics, (n, 1), from those of the blocks of columns.

    `tops` and `sums` (n, blocks) are max and sum(exp(logits - max)) of each block; `picked` is the
    target's logit, `total` the sum of all logits, (n, 1); `parts` are `reductions`.
    """
    high = tops.amax(1, keepdim=True)
    log_sum = (sums * torch.exp(tops - high)).sum(1, keepdim=True).log_()
    if call.group:
        high, log_sum, picked, total = _of_all_ranks(high, log_sum, picked, total, call.group)
    # Not lse - picked, which is all rounding where the target has nearly all of the mass.
    loss, mean = (high - picked).add_(log_sum), total / (call.classes or vocab)
    if call.label_smoothing:
        loss.lerp_((high - mean).add_(log_sum), call.label_smoothing)
    if call.z_loss:
        loss.add_((high + log_sum).square_(), alpha=call.z_loss)
    if not call.outputs:
        return loss, high, log_sum
    given = (tops, sums, parts or {}), (high, log_sum), mean, call.target, call.group
    made = _outputs(call.outputs, *given)
    entropy = [made[call.outputs.index("entropy")]] if "entropy" in call.outputs else []
    return torch.cat((loss, *made), 1), high, log_sum, *entropy


def _of_all_ranks(
    high: Tensor, log_sum: Tensor, picked: Tensor, total: Tensor, group: str
) -> tuple[Tensor, ...]:
    top = collective.total(high, group, largest=True)
    sums = torch.stack((torch.exp(log_sum + (high - top)), picked, total))
    exps, picked, total = collective.total(sums, group, owned=True).unbind()
    return top, exps.log(), picked, total


def slopes(
    dy: Tensor, stats: tuple[Tensor, ...], vocab: int, call: CrossEntropyTargets
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return factors of a logit's gradient: softmax * the 1st + the 2nd, and + the 3rd at a target.

    Softmax is also multiplied by -log(softmax) * the 4th, unless None. `dy` are the gradients of
    the losses and outputs. The soft-cap's slope is another factor.
    """
    dy, entropy = dy if call.logit_scale == 1.0 else dy * call.logit_scale, None
    if "entropy" in call.outputs:
        entropy = dy[:, 1 + call.outputs.index("entropy")][:, None]
        if is_read(call.target) and not bool(entropy.any()):
            entropy = None  # it was not differentiated
    dy = dy[:, :1]
    mass = dy if not call.z_loss else dy * (1 + 2 * call.z_loss * (stats[0] + stats[1]))
    if entropy is not None:  # d entropy = -softmax * (log(softmax) + entropy)
        mass = mass - entropy * stats[2]
    share = call.label_smoothing
    return mass, dy * (-share / (call.classes or vocab)), dy * (share - 1), entropy


def is_read(target: Tensor) -> bool:
    """Return whether values are read: without waiting for a device, and not of a fake tensor."""
    return target.device.type == "cpu" and type(target) is Tensor

"""Results under a random mask that nobody knows: whether it is one, and the same both ways."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.measure.contest import TOLERANCE, WrongResultError

#: Standard deviations that a sum of random numbers may be off: once in two million.
SIGMAS = 5.0
#: By which factor the noise of one mask may be more or less than that of another: a few hundred
#: rows, the largest of which count most, differ by two.
_NOISE = 3.0
#: Of the spread of dy·y over its sum: both sides are rounded to a hundredth of that at most; with
#: two different masks at p = 0.1 they differ by about a half.
_SAME = 0.1


def as_much_dropped(
    name: str, found: Tensor, plain: Tensor, dropped: Tensor, p: float, factor: float
) -> None:
    """A result that is linear in its mask is right on average, and as noisy as another mask's.

    plain: what is exact without dropout. dropped: the same under a mask of ours. On average means:
    its projection on `plain` is 1, but for the mean of many decisions, which rows (the last
    dimension) make apart, and for `factor` of what is allowed of the result itself. The spread of
    that mean is what is seen between rows, and at least that of rows which are dropped as a whole:
    a causal mask leaves one key to the first ones, and these are the largest.
    Raises: WrongResultError.
    """
    allowed, found = factor * TOLERANCE[found.dtype], found.double()
    mine, exact = (found * plain).sum(-1), plain.square().sum(-1)
    total = exact.sum()
    projection = mine.sum() / total
    seen, whole = mine - projection * exact, (p / (1.0 - p)) ** 0.5 * exact
    sigma = torch.maximum(seen.norm(), whole.norm()) / total
    if not (projection - 1.0).abs() <= SIGMAS * sigma + allowed:  # NaN too
        raise WrongResultError(
            f"{name} is {projection.item():.4f} of what it should be on average, "
            f"give or take {SIGMAS * sigma.item():.1g}"
        )
    noise = ((found - plain).norm() / (dropped - plain).norm()).item()
    if not 1.0 / _NOISE <= noise <= _NOISE:
        raise WrongResultError(f"dropout changes {name} {noise:.2g} times as much as it should")


def same_mask(y: Tensor, dy: Tensor, dv: Tensor, v: Tensor) -> None:
    """Attention's dv is that of the mask that made y: by feature and key head, dy·y = dv·v.

    For y is linear in v, whatever the mask. Raises: WrongResultError.
    """
    groups = y.shape[1] // v.shape[1]
    products = (dy.double() * y.double()).unflatten(1, (-1, groups))
    theirs = (dv.double() * v.double()).sum(2)
    difference = (products.sum((2, 3)) - theirs).norm()
    spread = products.square().sum((2, 3)).sqrt().norm()
    if not difference <= _SAME * spread:
        off = (difference / spread).item()
        raise WrongResultError(f"dv is of another mask than y: dy·y and dv·v are {off:.2g} apart")

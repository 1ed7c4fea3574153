"""Measuring side by side: rounds in which everyone runs once, in rotated order; percentiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch

WARMUP_ROUNDS = 2
FEWEST_ROUNDS = 5  # whatever the time limit says, if as many are asked for

T = TypeVar("T")


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The 20th, 50th and 80th percentile."""
    levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(levels).tolist()
    return dict(zip(("p20", "p50", "p80"), found, strict=True))


def ratios(
    times: Mapping[str, Sequence[float]], baselines: Iterable[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Percentiles of everyone's ratio, round by round, to each baseline that was timed."""
    return {
        name: {
            baseline: quantiles([a / b for a, b in zip(mine, times[baseline], strict=True)])
            for baseline in baselines
            if baseline in times
        }
        for name, mine in times.items()
    }


def rotated(names: Sequence[str], index: int) -> list[str]:
    """The order of round `index`: who goes first rotates; every other round runs backwards.

    Without the latter every name but the first would always follow the same other one, and find
    the caches as that one leaves them.
    """
    first = index // 2 % len(names)
    order = [*names[first:], *names[:first]]
    return order[::-1] if index % 2 else order


def interleave(
    steps: Mapping[str, Callable[[], T]], rounds: int, seconds: float
) -> dict[str, list[T]]:
    """What every step returned in every round; in a round each runs once, after warm-up rounds.

    Ends after `rounds` rounds; once `FEWEST_ROUNDS` are done, also after `seconds`.
    """
    names = list(steps)
    found: dict[str, list[T]] = {name: [] for name in names}
    if not names:
        return found
    for index in range(WARMUP_ROUNDS):
        for name in rotated(names, index):
            steps[name]()
    end = time.perf_counter() + seconds
    for index in range(rounds):
        for name in rotated(names, index):
            found[name].append(steps[name]())
        if index + 1 >= FEWEST_ROUNDS and time.perf_counter() >= end:
            break
    return found

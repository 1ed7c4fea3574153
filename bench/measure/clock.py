"""Times of one call on a device, and of several in turns; their percentiles."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from bench.measure.options import progress

T = TypeVar("T")

SAMPLE_SECONDS = 1e-3  # of calls that are timed at once: several short ones, or a long one
MOST_CALLS = 20
#: Cycles a second that a GPU does not exceed: how long to hold it while the host gets ahead.
_GPU_HERTZ = 2.0e9
_SPARE_HOST_SECONDS = 20e-6
WARMUP_ROUNDS = 2
FEWEST_ROUNDS = 5  # whatever the time limit, if as many are requested

#: A call is prepared, untimed, and then run on the result.
Call = Callable[[Any], Any]


class Clock:
    """Seconds of single calls on a device.

    On a GPU none of them finds its inputs in the cache: before each, a buffer of two L2 sizes is
    written. The calls of a sample are queued with events around each, and before each the device
    waits as long as the host takes to launch the call, so that launching does not show. The GPU's
    clocks are not changed. On a CPU caches are as the call before left them: the last
    one of somebody else's, then the same one's on another input set.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer: Tensor | None = None
        if device.type == "cuda":
            size = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)

    def flush(self) -> None:
        """Fill a GPU's L2 with what nobody reads."""
        if self._buffer is not None:
            self._buffer.fill_(1)

    def sampler(self, run: Call, prepare: Call, sets: int) -> Callable[[], float]:
        """Return a function that times `run(prepare(i))`, i in turn below `sets`, in seconds."""
        turns = itertools.cycle(range(sets))
        if self.device.type == "cuda":
            return self._gpu_sampler(run, prepare, sets)

        def once() -> float:
            given = prepare(next(turns))
            start = time.perf_counter()
            made = run(given)
            seconds = time.perf_counter() - start
            del made  # not on the clock: in training it is freed later
            return seconds

        count = _calls(once())
        return lambda: sum(once() for _ in range(count)) / count

    def _gpu_sampler(self, run: Call, prepare: Call, sets: int) -> Callable[[], float]:
        host = 0.0
        for index in range(sets):  # the first may compile; the last is as all will be
            given = prepare(index)
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            run(given)
            host = time.perf_counter() - start
            torch.cuda.synchronize(self.device)
        hold = int((1.5 * host + _SPARE_HOST_SECONDS) * _GPU_HERTZ)
        event = functools.partial(torch.cuda.Event, enable_timing=True)

        def sample(count: int) -> float:
            pairs = [(event(), event()) for _ in range(count)]
            for index, (start, end) in enumerate(pairs):
                given = prepare(index % sets)
                self.flush()
                torch.cuda._sleep(hold)
                start.record()
                run(given)
                end.record()
            torch.cuda.synchronize(self.device)
            return 1e-3 * sum(start.elapsed_time(end) for start, end in pairs) / count

        return functools.partial(sample, _calls(sample(sets)))


def _calls(seconds: float) -> int:
    """Return how many calls of this duration make a sample."""
    return max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / seconds)))


def quantiles(values: Sequence[float]) -> dict[str, float]:
    levels = torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)
    found = torch.tensor(values, dtype=torch.float64).quantile(levels).tolist()
    return dict(zip(("p20", "p50", "p80"), found, strict=True))


def ratios(
    times: Mapping[str, Sequence[float]], baselines: Iterable[str]
) -> dict[str, dict[str, dict[str, float]]]:
    """Return percentiles of each one's ratio, round by round, to each baseline that was timed."""
    there = [name for name in baselines if name in times]

    def relative(mine: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
        return quantiles([a / b for a, b in zip(mine, theirs, strict=True)])

    return {
        name: {other: relative(mine, times[other]) for other in there}
        for name, mine in times.items()
    }  # fmt: skip


def rotated(names: Sequence[str], index: int) -> list[str]:
    """Return the order of round `index`: the first one rotates; every other round is reversed.

    Without the latter every name but the first would always follow the same other one, and find
    the caches as that one leaves them.
    """
    first = index // 2 % max(1, len(names))
    order = [*names[first:], *names[:first]]
    return order[::-1] if index % 2 else order


def interleave(
    steps: Mapping[str, Callable[[], T]], rounds: int, seconds: float
) -> dict[str, list[T]]:
    """Run every step once a round, after warm-up rounds; return the results by name."""
    names = list(steps)
    found: dict[str, list[T]] = {name: [] for name in names}
    for index in range(WARMUP_ROUNDS):
        for name in rotated(names, index):
            steps[name]()
    end = time.perf_counter() + seconds
    for index in progress(range(rounds), rounds, "round"):
        for name in rotated(names, index):
            found[name].append(steps[name]())
        if index + 1 >= FEWEST_ROUNDS and time.perf_counter() >= end:
            break
    return found

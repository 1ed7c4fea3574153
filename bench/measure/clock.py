"""Timing one call on a device: CUDA events after a flush of the L2, or the host's clock."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SAMPLE_SECONDS = 1e-3  # of calls that are timed at once: several short ones, or a long one
MOST_CALLS = 20
#: Cycles a second that a GPU does not exceed: how long to hold it while the host gets ahead.
_GPU_HERTZ = 2.0e9
_SPARE_HOST_SECONDS = 20e-6

#: A call is prepared, untimed, and then run on what that gave.
Prepare = Callable[[int], Any]
Run = Callable[[Any], Any]


class Clock:
    """Seconds of single calls on a device.

    On a GPU none of them finds its inputs in the cache: before each, a buffer of twice the L2 is
    written. The calls of a sample are queued with events around each, and before each the device
    waits as long as the host takes to launch the call, so that launching does not show. The GPU's
    clocks are left as they are. On a CPU caches are as the call before left them, which in
    rotated turns is another one for everybody.
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

    def sampler(self, run: Run, prepare: Prepare, sets: int) -> Callable[[], float]:
        """A function that times `run(prepare(i))`, i in turn below `sets`: seconds of a call."""
        if self.device.type == "cuda":
            return self._gpu_sampler(run, prepare, sets)
        turn = 0

        def sample() -> float:
            nonlocal turn
            given = prepare(turn % sets)
            turn += 1
            start = time.perf_counter()
            made = run(given)
            seconds = time.perf_counter() - start
            del made  # not on the clock: in training it is freed later
            return seconds

        return sample

    def _gpu_sampler(self, run: Run, prepare: Prepare, sets: int) -> Callable[[], float]:
        host = 0.0
        for index in range(sets):  # the first may compile; the last is as all will be
            given = prepare(index)
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            run(given)
            host = time.perf_counter() - start
            torch.cuda.synchronize(self.device)
        hold = int((1.5 * host + _SPARE_HOST_SECONDS) * _GPU_HERTZ)
        once = self._between_events(run, prepare, sets, hold) / sets
        count = max(1, min(MOST_CALLS, round(SAMPLE_SECONDS / once)))
        return lambda: self._between_events(run, prepare, count, hold, sets) / count

    def _between_events(
        self, run: Run, prepare: Prepare, count: int, hold: int, sets: int | None = None
    ) -> float:
        event = functools.partial(torch.cuda.Event, enable_timing=True)
        pairs = [(event(), event()) for _ in range(count)]
        for index, (start, end) in enumerate(pairs):
            given = prepare(index % (sets or count))
            self.flush()
            torch.cuda._sleep(hold)
            start.record()
            run(given)
            end.record()
        torch.cuda.synchronize(self.device)
        return 1e-3 * sum(start.elapsed_time(end) for start, end in pairs)


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """`work`, which has run before, as a CUDA graph's replay: launches take the host no time.

    Raises: RuntimeError where it cannot be captured.
    """
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()  # what is set up for each stream, cuBLAS's workspace for one
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            work()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph.replay

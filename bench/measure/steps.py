"""A training step, forward and backward: how long it takes and what memory it needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench.measure.case import Forward, Subject
from bench.measure.clock import Clock, captured
from bench.measure.turns import quantiles, ratios
from fused_remat.report.allocations import AllocationTrace, SavedBytes, measure_allocations

_TIMED_SECONDS = 1e-2  # of a sample on a GPU, about
_MOST_STEPS = 10
_QUEUED = 3  # steps back to back, at least
#: Seconds by what was timed: "forward", "backward", "step", and "host", which is what the host
#: takes to launch a step.
Times = dict[str, float]


class Step:
    """Times a training step; nobody's operands are in a cache when it begins.

    On a GPU several steps are queued with events around forward and backward, and nothing waits in
    between; one step that is not timed keeps the device busy while the host gets ahead. The flush
    between steps is not timed.
    """

    def __init__(self, forward: Forward, subject: Subject, clock: Clock) -> None:
        self.forward, self.subject, self.clock = forward, subject, clock
        self.count = 1
        if clock.device.type == "cuda":
            self()
            self.count = max(1, min(_MOST_STEPS, round(_TIMED_SECONDS / self()["step"])))

    def __call__(self) -> Times:
        if self.clock.device.type == "cuda":
            return self._between_events()
        self._ready()
        self.clock.flush()
        start = time.perf_counter()
        y = self.forward(self.subject.x)
        between = time.perf_counter()
        y.backward(self.subject.dy)
        end = time.perf_counter()
        times = {"forward": between - start, "backward": end - between, "step": end - start}
        return times | {"host": end - start}

    def _ready(self) -> None:
        if self.subject.fresh:
            self.subject.clear()

    def _between_events(self) -> Times:
        self._queue([])
        queued: list[list[torch.cuda.Event]] = []
        host = 0.0
        for _ in range(self.count):
            self.clock.flush()
            queued.append([])
            before = time.perf_counter()
            self._queue(queued[-1])
            host += time.perf_counter() - before
        torch.cuda.synchronize(self.clock.device)
        parts = [1e-3 * sum(s[i].elapsed_time(s[i + 1]) for s in queued) / self.count
                 for i in range(len(queued[0]) - 1)]  # fmt: skip
        apart = dict(zip(("forward", "backward"), parts, strict=True)) if len(parts) == 2 else {}
        return apart | {"step": sum(parts), "host": host / self.count}

    def _queue(self, events: list[torch.cuda.Event]) -> None:
        """Launch a step, and an event before, in the middle and after."""
        self._ready()
        _record(events)
        y = self.forward(self.subject.x)
        _record(events)
        y.backward(self.subject.dy)
        _record(events)


class QueuedStep(Step):
    """The same of steps back to back, as in training: caches are as the step before left them.

    On a GPU there is no event within them, and one that is not timed still runs when they are
    launched. Where launching takes longer than the steps themselves, that shows.
    """

    def __init__(self, forward: Forward, subject: Subject, clock: Clock) -> None:
        super().__init__(forward, subject, clock)
        self.count = max(_QUEUED, self.count)

    def _between_events(self) -> Times:
        ends: list[torch.cuda.Event] = []
        self._run()
        _record(ends)
        before = time.perf_counter()
        for _ in range(self.count):
            self._run()
        host = time.perf_counter() - before
        _record(ends)
        torch.cuda.synchronize(self.clock.device)
        step = 1e-3 * ends[0].elapsed_time(ends[1])
        return {"step": step / self.count, "host": host / self.count}

    def _run(self) -> None:
        self.forward(self.subject.x).backward(self.subject.dy)


class ReplayedStep(Step):
    """The same of a step captured as a CUDA graph, as a whole: the host's share does not show."""

    def __init__(self, forward: Forward, subject: Subject, clock: Clock) -> None:
        if clock.device.type == "cuda":
            work = lambda: forward(subject.x).backward(subject.dy)  # noqa: E731
            self._replay = captured(work)
        super().__init__(forward, subject, clock)

    def _queue(self, events: list[torch.cuda.Event]) -> None:
        _record(events)
        self._replay()
        _record(events)


def _record(events: list[torch.cuda.Event]) -> None:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    events.append(event)


def summary(
    times: Mapping[str, Sequence[Times]], baselines: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Percentiles of every way's times, and of its step's ratio to each baseline's, by round."""
    beside = ratios({name: [t["step"] for t in mine] for name, mine in times.items()}, baselines)
    return {
        name: {f"{part}_seconds": quantiles([t[part] for t in mine]) for part in mine[0]}
        | {"step_ratio": beside[name]}
        for name, mine in times.items()
    }


def kept_bytes(run: Callable[[], Any], subject: Subject, by: str = "autograd") -> int:
    """Bytes kept for backward by a forward, without parameters, buffers and the caller's masks.

    Args:
        run: gives what has the autograd graph.
        by: "autograd", whose hooks see what it saves, the input included where it is; or the
            "allocator", which sees what lies elsewhere too, and the input only if `run` copies it.
    """
    if by == "allocator":
        return measure_allocations(lambda: run().grad_fn, subject.device).net
    own = *subject.module.parameters(), *subject.module.buffers(), *subject.masks
    with SavedBytes(own) as saved:
        run()
    return saved.total


def peaks(
    run: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device
) -> dict[str, int]:
    """Peaks of a step above what is there before; backward's is above what forward left."""
    with AllocationTrace(device) as trace:
        y = run()
        trace.mark("backward")
        backward(y)
        del y
    first, second = trace.spans
    return {
        "forward_peak_bytes": first.peak,
        "backward_peak_bytes": second.peak - second.start,
        "step_peak_bytes": max(first.peak, second.peak),
    }

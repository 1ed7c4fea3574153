"""Bytes that torch allocates on a device while something runs, fused or not."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile, record_function

from fused_remat.report.saved import SavedBytes as SavedBytes


class Allocations(NamedTuple):
    """Bytes allocated while a function ran, above what was allocated before."""

    peak: int  # the largest amount at any moment
    net: int  # what was still allocated at the end, including the function's result


def measure_allocations(fn: Callable[[], Any], device: torch.device | str = "cpu") -> Allocations:
    """Run `fn()` and measure what it allocates on `device`, as `AllocationTrace` does.

    Raises: NotImplementedError if the device is neither the CPU nor a CUDA device.

    >>> measure_allocations(lambda: torch.zeros(256) + torch.zeros(256))
    Allocations(peak=3072, net=1024)
    """
    with AllocationTrace(device) as trace:
        result = fn()
    del result
    (span,) = trace.spans
    return Allocations(span.peak, span.end)


class Span(NamedTuple):
    """Allocation between two marks, in bytes above what was allocated when the trace began."""

    label: Any  # of the mark at the span's beginning; None for the first span
    start: int
    peak: int  # the most at any moment
    end: int


#: The variable from which torch's profiler reads, when it first starts, how much it logs to stderr.
_LOG_LEVEL = "KINETO_LOG_LEVEL"
#: Held during a trace: a process has one torch profiler and one peak counter per device.
_TRACING = threading.RLock()


class AllocationTrace:
    """Context manager that measures what torch allocates on a device, in spans between marks.

    On the CPU it reads the profiler's memory events; on a CUDA device it reads the allocator's
    statistics and resets the peak. Traces in other threads wait.

    Args:
        device: the CPU or a CUDA device.
        collect: whether to free cyclic garbage at the start. If not, garbage collection is off
            during the trace.

    Attributes:
        spans: after the trace, one span before the first mark and one for each mark.

    Raises: NotImplementedError for any other device.

    >>> with AllocationTrace() as trace:
    ...     x = torch.zeros(256)
    ...     trace.mark("second")
    ...     y = x + torch.zeros(256)
    >>> trace.spans[1]
    Span(label='second', start=1024, peak=3072, end=2048)
    """

    _MARK = "fused_remat.report.allocations::mark"

    def __init__(self, device: torch.device | str = "cpu", collect: bool = True) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"allocations are measured on cpu and cuda, not on {self.device}"
            )
        self.spans: list[Span] = []
        self._collect = collect
        self._labels: list[Any] = [None]

    def mark(self, label: Any) -> None:
        """End the current span and begin one with this label."""
        if self.device.type == "cuda":
            self._end_cuda_span()
        else:
            with record_function(self._MARK):
                pass
        self._labels.append(label)

    def __enter__(self) -> AllocationTrace:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_TRACING)
            if self._collect:
                gc.collect()
            elif gc.isenabled():
                gc.disable()
                stack.callback(gc.enable)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self._before, self._start = torch.cuda.memory_allocated(self.device), 0
                torch.cuda.reset_peak_memory_stats(self.device)
            else:
                self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
                with contextlib.ExitStack() as silent:  # it logs its first start and stop
                    if _LOG_LEVEL not in os.environ:
                        os.environ[_LOG_LEVEL] = "99"
                        silent.callback(os.environ.pop, _LOG_LEVEL)
                    self._profile.__enter__()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        with self._held:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self._end_cuda_span()
                return
            self._profile.__exit__(*error)
            if error[0] is None:
                self._read_profile()
            del self._profile

    def _end_cuda_span(self) -> None:
        end = torch.cuda.memory_allocated(self.device) - self._before
        peak = torch.cuda.max_memory_allocated(self.device) - self._before
        self.spans.append(Span(self._labels[-1], self._start, peak, end))
        self._start = end
        torch.cuda.reset_peak_memory_stats(self.device)

    def _read_profile(self) -> None:
        results: Any = self._profile.profiler
        events: list[tuple[int, int | None]] = []  # (time, change in bytes, or None for a mark)
        for event in results.kineto_results.events():
            if event.name() == self._MARK:
                events.append((event.start_ns(), None))
            elif event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
                events.append((event.start_ns(), event.nbytes()))
        labels = iter(self._labels)
        start = level = peak = 0
        for _, nbytes in sorted(events, key=lambda event: event[0]):
            if nbytes is None:
                self.spans.append(Span(next(labels), start, peak, level))
                start = peak = level
            else:
                level += nbytes
                peak = max(peak, level)
        self.spans.append(Span(next(labels), start, peak, level))

"""Bytes that autograd saves, bytes that torch allocates, and the prediction of what a block keeps.

The measurements work on any model, so a fused layer and a stock layer can be compared.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import DeviceType, ProfilerActivity, profile, record_function

from fused_remat.autograd.offload import moved_names
from fused_remat.graph.graph import Graph
from fused_remat.graph.precision import mixed_precision
from fused_remat.graph.schedule import kept_bytes
from fused_remat.policies import Policy, kept_names, offload_of


class SavedBytes:
    """Context manager that counts the bytes autograd saves for backward, each storage once.

    Args:
        exclude: tensors whose storages do not count, such as parameters and the caller's masks.

    >>> x = torch.randn(8, 4, requires_grad=True)
    >>> with SavedBytes() as saved:
    ...     y = (x * x).exp()
    >>> saved.total  # x, and the result of exp
    256
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._exclude = {t.untyped_storage().data_ptr() for t in exclude}
        self._storages: dict[int, Tensor] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t)

    def _pack(self, t: Tensor) -> Tensor:
        pointer = t.untyped_storage().data_ptr()
        if pointer not in self._exclude:
            self._storages.setdefault(pointer, t.detach())
        return t.detach()  # an output that its own hook returned would never be freed

    @property
    def total(self) -> int:
        """Bytes saved so far."""
        return sum(t.untyped_storage().nbytes() for t in self._storages.values())

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


@dataclass(frozen=True)
class Allocations:
    """Bytes allocated while a function ran, above what was allocated before.

    Attributes:
        peak: the largest amount at any moment.
        net: what was still allocated at the end, including the function's result.
    """

    peak: int
    net: int


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


@dataclass(frozen=True)
class Span:
    """Allocation between two marks, in bytes above what was allocated when the trace began.

    Attributes:
        label: label of the mark at the span's beginning; None for the first span.
        start, peak, end: bytes at the beginning, the most at any moment, and bytes at the end.
    """

    label: Any
    start: int
    peak: int
    end: int


#: From which torch's profiler reads, when it first starts, how much it logs to stderr.
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
            stack.enter_context(_no_garbage_between(self._collect))
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self._before, self._start = torch.cuda.memory_allocated(self.device), 0
                torch.cuda.reset_peak_memory_stats(self.device)
            else:
                self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
                with _silent_profiler():
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
        events: list[
            tuple[int, int | None]
        ] = []  # (time, bytes allocated or freed), with None for a mark
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


@contextlib.contextmanager
def _silent_profiler() -> Iterator[None]:
    """Keep torch's profiler, if it starts for the first time, from logging starts and stops."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


@contextlib.contextmanager
def _no_garbage_between(collect: bool) -> Iterator[None]:
    """Cyclic garbage from before is freed first, or kept until the end: never freed in between."""
    if collect:
        gc.collect()
        yield
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def predict_kept_bytes(
    graph: Graph,
    policy: str | Policy,
    shapes: Mapping[str, tuple[int, ...]],
    needs_grad: Iterable[str],
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
    compute: torch.dtype | None = None,
    input_dtypes: Mapping[str, torch.dtype] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, int]:
    """Bytes that one call of a block keeps for backward, by name, computed from its graph alone.

    Args:
        graph, policy: the block and its policy.
        shapes: the shape of "input" (its last dimension is the width), of every other input
            (whole) and of every parameter.
        needs_grad: "input" and the parameters that need a gradient, by name.
        dtype: dtype of the input; under autocast, of the residual stream.
        compute: dtype in which autocast computes products; None without autocast.
        input_dtypes: dtypes of other inputs ("memory") that differ from `dtype`.
        device: where the block runs. Offloaded activations leave a CUDA device and do not count;
            on the CPU nothing moves, so they count.

    >>> from fused_remat.graph.build import block_graph
    >>> from fused_remat.layer_specs import nn_layer_spec
    >>> shapes = {"input": (8,), "qkv.weight": (24, 8), "proj.weight": (8, 8),
    ...           "fc1.weight": (32, 8), "fc2.weight": (8, 32)}
    >>> graph = block_graph(nn_layer_spec(True, 2, 4, "gelu"))
    >>> predict_kept_bytes(graph, "full", shapes, ["input", "fc1.weight"],
    ...                    batch=1, seq_len=10, dtype=torch.float32)["input"]
    320
    """
    save = kept_names(policy, graph)
    shapes = {**shapes, "input": (batch, seq_len, shapes["input"][-1])}
    if compute is not None:
        graph = mixed_precision(graph, compute)
    others = {name: given.itemsize for name, given in (input_dtypes or {}).items()}
    segment = None if isinstance(policy, str) else policy.segment
    names = save if segment is None else frozenset()  # a segment keeps its first input alone
    kept = dict(kept_bytes(graph, names, frozenset(needs_grad), shapes, dtype.itemsize, others))
    if segment == "inner":
        kept.pop(graph.inputs[0], None)
    for name in moved_names(offload_of(policy), tuple(kept), torch.device(device)):
        del kept[name]
    return kept

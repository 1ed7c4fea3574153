"""What a model keeps for backward and what a step takes at its peak: measured, and predicted.

Measured on any model, so that the same number can be had of a stock layer.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from fused_remat.autograd.offload import moved_names
from fused_remat.graph.graph import Graph
from fused_remat.graph.precision import mixed_precision
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import kept_bytes
from fused_remat.policies import Policy, kept_names, offload_of


class SavedBytes:
    """Context manager: bytes that autograd saves for backward, each storage counted once.

    Args:
        exclude: tensors whose storages do not count: parameters, and the caller's own masks.

    >>> x = torch.randn(8, 4, requires_grad=True)
    >>> with SavedBytes() as saved:
    ...     y = (x * x).exp()
    >>> saved.total  # x, and exp's result
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
        return t.detach()  # a saved output that its own hook returns is never freed

    @property
    def total(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self._storages.values())

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)


@dataclass(frozen=True)
class Allocations:
    """Bytes allocated while a function ran, above what was allocated before.

    Attributes:
        peak: the largest amount at any moment.
        net: what was still allocated at the end, the function's result included.
    """

    peak: int
    net: int


@dataclass(frozen=True)
class Span:
    """Allocation from one mark to the next, in bytes above those of the trace's beginning.

    Attributes:
        label: of the mark at its beginning; None for the trace's own.
        start, peak, end: at the mark, at most, and at the next mark.
    """

    label: Any
    start: int
    peak: int
    end: int


#: Held while a trace runs: torch has one profiler, and one peak, in a process.
_TRACING = threading.RLock()


class AllocationTrace:
    """Context manager: what torch's allocator for a device hands out, in spans between marks.

    Args:
        device: the CPU (read from the profiler's memory events) or a CUDA device (from the
            allocator's statistics, whose peak is reset). Traces in other threads wait.
        collect: free cyclic garbage first. Else nothing does until the end.

    Attributes:
        spans: after the end, one for each mark, and one before them.

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
        self._collect, self._collects = collect, False
        self.spans: list[Span] = []
        self._label: Any = None
        self._labels: list[Any] = []
        if self.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(
                f"allocations are measured on cpu and cuda, not {self.device}"
            )

    def mark(self, label: Any) -> None:
        """End a span here and begin the next."""
        if self.device.type == "cpu":
            self._labels.append(label)
            with record_function(self._MARK):
                pass
        else:
            self._end_span()
            self._label = label

    def __enter__(self) -> AllocationTrace:
        _TRACING.acquire()
        try:
            self._begin()
        except BaseException:
            self._release()
            raise
        return self

    def _begin(self) -> None:
        # Cyclic garbage of before must not be freed, and counted, in between.
        if self._collect:
            gc.collect()
        else:
            self._collects = gc.isenabled()
            gc.disable()
        if self.device.type == "cpu":
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()
        else:
            torch.cuda.synchronize(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            self._start = 0
            torch.cuda.reset_peak_memory_stats(self.device)

    def _release(self) -> None:
        if self._collects:
            gc.enable()
        _TRACING.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
                self._end_span()
                return
            self._profile.__exit__(kind, error, trace)
            if kind is None:
                self._read_profile()
            del self._profile
        finally:
            self._release()

    def _end_span(self) -> None:
        end = torch.cuda.memory_allocated(self.device) - self._before
        peak = torch.cuda.max_memory_allocated(self.device) - self._before
        self.spans.append(Span(self._label, self._start, peak, end))
        self._start = end
        torch.cuda.reset_peak_memory_stats(self.device)

    def _read_profile(self) -> None:
        results: Any = self._profile.profiler
        events = [
            (event.start_ns(), event.nbytes() if event.name() == "[memory]" else None)
            for event in results.kineto_results.events()
            if event.name() == self._MARK
            or (event.name() == "[memory]" and event.device_type() == torch.profiler.DeviceType.CPU)
        ]
        labels = iter(self._labels)
        start = level = peak = 0
        for _, nbytes in sorted(events, key=lambda event: event[0]):
            if nbytes is None:
                self.spans.append(Span(self._label, start, peak, level))
                self._label, start, peak = next(labels), level, level
            else:
                level += nbytes
                peak = max(peak, level)
        self.spans.append(Span(self._label, start, peak, level))


def measure_allocations(fn: Callable[[], Any], device: torch.device | str = "cpu") -> Allocations:
    """Run `fn()` and count what torch's allocator for `device` hands out and takes back.

    On CPU from the profiler's memory events; on CUDA from the allocator's statistics. The result
    of `fn` is alive when `net` is read.

    Raises: NotImplementedError for a device that is neither CPU nor CUDA.

    >>> measure_allocations(lambda: torch.zeros(256) + torch.zeros(256))
    Allocations(peak=3072, net=1024)
    """
    with AllocationTrace(device) as trace:
        result = fn()
    del result
    (span,) = trace.spans
    return Allocations(span.peak, span.end)


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
    """Bytes that one call of a block keeps, by name, worked out from the graph alone.

    Args:
        graph, policy: the block and what it keeps.
        shapes: the shape of "input" (its width last), of other inputs (whole) and of every param.
        wants: "input" and the params whose gradients are wanted.
        dtype: of the input; under autocast, of the residual stream.
        compute: what autocast computes products in; None without autocast.
        input_dtypes: of other inputs ("memory") that are not in `dtype`.
        device: where the block runs. What the policy offloads is not kept on a CUDA device; on a
            CPU, whose memory it would stay in, nothing moves and all of it counts.

    >>> from fused_remat.graph.build import block_graph
    >>> from fused_remat.spec import nn_layer_spec
    >>> shapes = {"input": (8,), "qkv.weight": (24, 8), "proj.weight": (8, 8),
    ...           "fc1.weight": (32, 8), "fc2.weight": (8, 32)}
    >>> graph = block_graph(nn_layer_spec(True, 2, 4, "gelu"))
    >>> predict_kept_bytes(graph, "full", shapes, ["input", "fc1.weight"],
    ...                    batch=1, seq_len=10, dtype=torch.float32)["input"]
    320
    """
    graph_names = kept_names(policy, graph)
    itemsize = dtype.itemsize
    shapes = {**shapes, "input": (batch, seq_len, shapes["input"][-1])}
    graph = in_formats(graph if compute is None else mixed_precision(graph, compute), graph_names)
    others = {name: given.itemsize for name, given in (input_dtypes or {}).items()}
    place = None if isinstance(policy, str) else policy.segment
    names = graph_names if place is None else frozenset()
    kept = dict(kept_bytes(graph, names, frozenset(needs_grad), shapes, itemsize, others))
    if place == "inner":
        kept.pop(graph.inputs[0], None)
    for name in moved_names(offload_of(policy), tuple(kept), torch.device(device)):
        del kept[name]
    return kept

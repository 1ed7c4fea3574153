"""What a model keeps for backward and what a step takes at its peak: measured, and predicted.

Measured on any model, so that the same number can be had of a stock layer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fused_remat.blocks.program import Graph, kept_bytes
from fused_remat.policies import Policy, kept_names


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
        return t

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


def measure_allocations(fn: Callable[[], Any], device: torch.device | str = "cpu") -> Allocations:
    """Run `fn()` and count what torch's allocator for `device` hands out and takes back.

    On CPU from the profiler's memory events; on CUDA from the allocator's statistics. The result
    of `fn` is alive when `net` is read.

    Raises: NotImplementedError for a device that is neither CPU nor CUDA.

    >>> measure_allocations(lambda: torch.zeros(256) + torch.zeros(256))
    Allocations(peak=3072, net=1024)
    """
    device = torch.device(device)
    gc.collect()  # cyclic garbage of before must not be freed, and counted, in between
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = fn()
        torch.cuda.synchronize(device)
        net = torch.cuda.memory_allocated(device) - before
        peak = torch.cuda.max_memory_allocated(device) - before
        del result
        return Allocations(peak, net)
    if device.type != "cpu":
        raise NotImplementedError(f"allocations are measured on cpu and cuda, not {device}")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = fn()
    events = [
        (e.start_ns(), e.nbytes())
        for e in recorded.profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    del result
    level = peak = 0
    for _, nbytes in sorted(events, key=lambda event: event[0]):
        level += nbytes
        peak = max(peak, level)
    return Allocations(peak, level)


def predict_kept_bytes(
    graph: Graph,
    policy: str | Policy,
    shapes: Mapping[str, tuple[int, ...]],
    wants: Iterable[str],
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Bytes that one call of a block keeps, by name, worked out from the graph alone.

    Args:
        graph, policy: the block and what it keeps.
        shapes: the shape of "input" (its width last) and of every param.
        wants: "input" and the params whose gradients are wanted.

    >>> from fused_remat.blocks.encoder import EncoderConfig, encoder_graph
    >>> config = EncoderConfig(True, nhead=2, head_dim=4, activation="gelu", eps1=1e-5, eps2=1e-5)
    >>> shapes = {"input": (8,), "qkv.weight": (24, 8), "proj.weight": (8, 8),
    ...           "fc1.weight": (32, 8), "fc2.weight": (8, 32)}
    >>> predict_kept_bytes(encoder_graph(config), "full", shapes, ["input", "fc1.weight"],
    ...                    batch=1, seq_len=10, dtype=torch.float32)["input"]
    320
    """
    graph_names = kept_names(policy, graph.kind, graph.names)
    itemsize = torch.empty((), dtype=dtype).element_size()
    return dict(kept_bytes(graph, graph_names, frozenset(wants), shapes, batch * seq_len, itemsize))

"""Where a layer's step spends its time on a GPU, by kind of kernel.

The profiler slows the host: gaps between kernels are what the same steps take without it, back to
back, less what they keep the device busy with it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.layers import WIDTHS, encoder, long_encoder
from bench.measure.case import Forward, Subject
from bench.measure.contest import Entry, Rig
from bench.measure.steps import QueuedStep
from bench.measure.steps import measure as measure_ways
from bench.subjects.layers import WAYS as LAYER_WAYS
from bench.subjects.layers import Case
from fused_remat.policies import EXACT_PRESETS

WAYS = ("eager", "compile", "checkpoint", *EXACT_PRESETS)
#: Steps that are profiled, after one that is not.
STEPS = 5
#: In the order of the tables; what no row below names is "other".
KINDS = (
    "products", "attention", "norms", "pointwise", "reductions", "copies and fills", "other",
)  # fmt: skip
#: Module of our kernels -> what its kernels are for; others are known by what their names have in
#: common.
OURS = {
    "attention": "attention",
    "attention_bwd": "attention",
    "attention_masks": "attention",
    "cross_entropy": "products",
    "dropout": "pointwise",
    "experts": "products",
    "experts_bwd": "products",
    "linear": "products",
    "mlp": "products",
    "norms": "norms",
    "pointwise": "pointwise",
    "rotary": "pointwise",
}
#: Kind -> what is found in names of others' kernels; the first that fits is theirs: FlashAttention
#: is made with CUTLASS, cuBLAS has reductions, and copies are elementwise kernels of ATen's.
THEIRS = {
    kind: re.compile(pattern)
    for kind, pattern in {
        "copies and fills": r"^Mem(cpy|set)\b|copy_kernel|CopyFunctor|FillFunctor"
        r"|CatArrayBatchedCopy",
        "attention": r"flash|Flash|fmha|sdpa|cudnn::fusion|dot_do_o|convert_dq",
        "norms": r"layer_?norm|LayerNorm|rms_?norm|RMSNorm|GammaBeta|RowwiseMoments"
        r"|ComputeGradientFusedParams",
        "products": r"nvjet|gemm|gemv|cutlass|cublas|splitK|xmma|dot_kernel|Cijk_",
        "reductions": r"reduce_kernel|reduce_1Block|triton_(red|per)_",
        "pointwise": r"elementwise|dropout|triton_poi_",
    }.items()
}


@functools.cache
def ours() -> dict[str, str]:
    found = {}
    for module, kind in OURS.items():
        known = vars(importlib.import_module(f"fused_remat.kernels.{module}"))
        found |= {name: kind for name in known if name.endswith("_kernel")}
    return found


@functools.cache
def kind_of(name: str) -> str:
    """Return the kind of a kernel, a copy or a fill, by its name."""
    own = re.fullmatch(r"(?:[\w.]+\.)?(\w+_kernel)(?:_\d\w*)?", name)
    if own is not None and own[1] in ours():
        return ours()[own[1]]
    return next((kind for kind, pattern in THEIRS.items() if pattern.search(name)), "other")


@dataclass(frozen=True)
class Event:
    """A kernel, a copy or a fill on the device; microseconds from some moment."""

    name: str
    start: float
    end: float


def recorded(work: Callable[[], Any], device: torch.device) -> list[Event]:
    """Return the events on the device; on a CPU the operators that call no other.

    Raises: RuntimeError if torch's profiler cannot look at this device.
    """
    cuda = device.type == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    where = DeviceType.CUDA if cuda else DeviceType.CPU
    with profile(activities=[activity]) as found:
        work()
        if cuda:
            torch.cuda.synchronize(device)
    events = [
        Event(event.name, event.time_range.start, event.time_range.end)
        for event in found.events() or ()
        if event.device_type == where and not _is_note(event)
    ]
    if not events:
        raise RuntimeError("torch.profiler saw nothing run: is CUPTI there, and allowed?")
    return events


def _is_note(event: Any) -> bool:
    """Return whether an event is a marked range, a wait, or an operator that calls others."""
    marked = getattr(event, "is_user_annotation", False) or event.name.startswith("ProfilerStep")
    waits = event.name.endswith((" Sync", " Synchronize", "Wait Event"))
    return bool(marked or waits or event.cpu_children)


def busy(events: Sequence[Event]) -> float:
    """Return the microseconds in which at least one of them ran."""
    total, until = 0.0, -float("inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def tally(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Return a step's time by kind of kernel, the mean of so many."""
    by_kind = dict.fromkeys(KINDS, 0.0)
    for event in events:
        by_kind[kind_of(event.name)] += (event.end - event.start) / steps
    numbers = {"busy_us": busy(events) / steps, "launches": len(events) / steps}
    return {**numbers, "kinds_us": by_kind}


def profiled(forward: Forward, subject: Subject, steps: int) -> dict[str, Any]:
    """Return the `tally` of so many steps of a way, after one that is not recorded."""
    x, dy = subject.x, subject.dy
    forward(x).backward(dy)

    def work() -> None:
        for _ in range(steps):
            forward(x).backward(dy)

    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)
    return tally(recorded(work, subject.device), steps)


# --- what is measured


def measure(case: Case, rig: Rig, ways: Sequence[str] = WAYS) -> dict[str, Any]:
    """Return a row: every way checked, timed back to back in turns, and then profiled.

    Each way has `tally` as well. In a dry run ours are those of the eager backend.
    """
    subject = case.subject(rig.device)
    if rig.dry:
        subject.compiler = "aot_eager_decomp_partition"
    row = measure_ways(subject, LAYER_WAYS, ways, rig, QueuedStep, others=("none",))
    right = {name: way for name, way in row["ways"].items() if "step_seconds" in way}
    for index, (name, way) in enumerate(right.items()):
        forward = LAYER_WAYS[name].build(subject)
        if index == 0:
            profiled(forward, subject, 1)  # the profiler's own beginning
        way |= profiled(forward, subject, 1 if rig.dry else STEPS)
    return {"profiled": dataclasses.asdict(case), **row}


def profile_entries(rig: Rig) -> Iterator[Entry]:
    layers = [encoder(rig, "pre", width) for width in ((32,) if rig.dry else WIDTHS)]
    for layer in [*layers, *([] if rig.dry else [long_encoder(rig)])]:
        case = {"name": "pre-norm", "width": layer.d_model, "seq_len": layer.seq_len}
        yield case, lambda rig, layer=layer: measure(layer, rig)

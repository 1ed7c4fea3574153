"""Where a layer's step spends its time on a GPU, by kind of kernel, beside the least it takes.

A few steps in a row run under torch's profiler, which says when each kernel, copy and fill began
and ended on the device. It slows the host: gaps between kernels are what the same steps take
without it, back to back, less what they keep the device busy with it.

The least is counted from the layer's graph. Each step of it takes its FLOPs at the rate of a large
product, or its bytes at that of a large copy, whichever is longer, both as the same run measures
them. Steps count alone, and a pass over memory twice forward's bytes in backward: what a kernel
reads once or fuses into another's pass can take less than is said here of "norms" and "pointwise".
No attention kernel comes near the rate of a large product.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.gpu.layers import WIDTHS, as_contest, encoder, long_encoder
from bench.measure.case import Forward, Subject
from bench.measure.contest import UNITS, Entry, Rig, Work
from bench.measure.steps import QueuedStep
from bench.measure.steps import measure as measure_ways
from bench.subjects.layer_ways import WAYS as LAYER_WAYS
from bench.subjects.layers import Case
from fused_remat.execution.observe import OBSERVERS, BlockRun
from fused_remat.graph.schedule import schedule
from fused_remat.planner.calibration import Example, Sizer, steps_of
from fused_remat.policies import EXACT_PRESETS, kept_names
from fused_remat.steps.norm import Norm

WAYS = ("eager", "compile", "checkpoint", *EXACT_PRESETS)
#: Steps that are profiled, after one that is not.
STEPS = 5
#: Kernels that a row names, of those that take longest, and letters of their names.
NAMED, LETTERS = 12, 160
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
    "linear": "products",
    "mlp": "products",
    "norms": "norms",
    "packing": "pointwise",
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
#: Of kernels that compute attention's output, once for each forward.
FORWARD = re.compile(
    r"flash_fwd(?!.*combine)|FlashAttnFwd(?!.*[Cc]ombine)|fprop|fmha_cutlassF|^attention_fwd_kernel"
)


@functools.cache
def ours() -> dict[str, str]:
    found = {}
    for module, kind in OURS.items():
        known = vars(importlib.import_module(f"fused_remat.kernels.{module}"))
        found |= {name: kind for name in known if name.endswith("_kernel")}
    return found


def kind_of(name: str) -> str:
    """What a kernel, a copy or a fill of that name is for."""
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
    """What ran on the device; on a CPU the operators that call no other.

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
    """A range that somebody marked, a wait, or an operator that calls others."""
    marked = getattr(event, "is_user_annotation", False) or event.name.startswith("ProfilerStep")
    waits = event.name.endswith((" Sync", " Synchronize", "Wait Event"))
    return bool(marked or waits or event.cpu_children)


def busy(events: Sequence[Event]) -> float:
    """Microseconds in which at least one of them ran."""
    total, until = 0.0, -float("inf")
    for event in sorted(events, key=lambda event: event.start):
        total += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return total


def tally(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Of a step, the mean of so many: what a way's row says of its kernels.

    "busy_us", "launches" (kernels, copies and fills), "kinds_us" by kind, "attention_forwards", and
    "kernels": name, kind, "us" and "count" of those that take longest.
    """
    counts = Counter(event.name for event in events)
    us = dict.fromkeys(counts, 0.0)
    for event in events:
        us[event.name] += event.end - event.start
    by_kind = dict.fromkeys(KINDS, 0.0)
    for name, time in us.items():
        by_kind[kind_of(name)] += time / steps
    named = [
        {"name": name[:LETTERS], "kind": kind_of(name), "us": us[name] / steps,
         "count": counts[name] / steps}
        for name in sorted(us, key=lambda name: -us[name])[:NAMED]
    ]  # fmt: skip
    forwards = sum(count for name, count in counts.items() if FORWARD.search(name))
    return {
        "busy_us": busy(events) / steps,
        "launches": len(events) / steps,
        "kinds_us": by_kind,
        "attention_forwards": forwards / steps,
        "kernels": named,
    }


def profiled(forward: Forward, subject: Subject, steps: int) -> dict[str, Any]:
    """`tally` of so many steps of a way, after one that is not recorded."""
    x, dy = subject.x, subject.dy
    forward(x).backward(dy)

    def work() -> None:
        for _ in range(steps):
            forward(x).backward(dy)

    if subject.device.type == "cuda":
        torch.cuda.synchronize(subject.device)
    return tally(recorded(work, subject.device), steps)


# --- the least


@dataclass(frozen=True, kw_only=True)
class Part(Work):
    """The work of a step of a layer's forward or backward."""

    kind: str  # "products", "attention", "norms" or "pointwise"
    backward: bool
    rebuilt: bool  # backward computes again what forward has


def example_of(subject: Subject) -> Example:
    """The block's call in a forward of our layer on the subject's module."""
    found: list[BlockRun] = []
    OBSERVERS.append(found.append)
    try:
        subject.fused(subject.module, "full", subject.backend)(subject.x)
    finally:
        OBSERVERS.remove(found.append)
    (call,) = found
    tensors = tuple(None if t is None else t.detach() for t in call.tensors)
    return Example(call.call, tensors, call.functions)


def parts(example: Example, save: Iterable[str]) -> Iterator[Part]:
    """Every step of both passes of the layer that keeps `save`."""
    call = example.keeping(save)
    plan = schedule(call.graph, call.save, call.needs_grad, tiled=False)
    sizer = Sizer(call, example.shapes, example.input.dtype)
    for which in ("forward", "backward"):
        for step in steps_of(plan, which):
            node = step.node
            assert node is not None
            flops, moved = sizer.work(step)
            if node.per_sequence:
                kind = "attention"
            elif flops:
                kind = "products"
            else:
                kind = "norms" if isinstance(node, Norm) else "pointwise"
            backward = which == "backward"
            rebuilt = backward and step.kind == "compute"
            yield Part(flops, moved, kind=kind, backward=backward, rebuilt=rebuilt)


def parts_of(way: str, example: Example) -> list[Part]:
    """The steps of a way: a preset, "eager", "compile", or "checkpoint" (non-reentrant).

    The stock layer rebuilds nothing, compiled or not. Checkpointing replays forward up to its last
    product, whose input is the last thing that backward asks for in a pre-norm layer.
    """
    graph = example.call.graph
    if way in EXACT_PRESETS:
        return list(parts(example, kept_names(way, graph)))
    own = [part for part in parts(example, kept_names("none", graph)) if not part.rebuilt]
    if way in ("eager", "compile"):
        return own
    forward = [part for part in own if not part.backward]
    last = max(i for i, part in enumerate(forward) if part.kind == "products")
    return own + forward[:last]


def least(way: str, example: Example, ceilings: Mapping[str, float]) -> dict[str, float]:
    """Microseconds of a way's step by kind of work; {} where a ceiling is not known."""
    if set(UNITS) - set(ceilings):
        return {}
    found: dict[str, float] = {}
    for part in parts_of(way, example):
        found[part.kind] = found.get(part.kind, 0.0) + 1e6 * (part.floor(ceilings) or 0.0)
    return found


# --- what is measured


def measure(case: Case, rig: Rig) -> dict[str, Any]:
    """A row: every way checked, timed back to back in turns, and then profiled.

    Of each way besides `tally`: "us" of a step and "host_us" of its launch without the profiler,
    "gaps_us", and "least_us" by kind, as `least` has it. In a dry run our ways are those of
    the eager backend.
    """
    subject = case.subject(rig.device)
    if rig.dry:
        subject.compiler = "aot_eager_decomp_partition"
    given = subject, LAYER_WAYS, WAYS, rig, QueuedStep
    row = as_contest(measure_ways(*given, beside=("none",)))
    ways = row["ways"]
    right = [name for name, found in ways.items() if "us" in found]
    example = example_of(subject)
    for index, name in enumerate(right):
        forward = LAYER_WAYS[name].build(subject)
        if index == 0:
            profiled(forward, subject, 1)  # the profiler's own beginning
        ways[name] |= profiled(forward, subject, 1 if rig.dry else STEPS)
        ways[name] |= {
            "gaps_us": ways[name]["us"]["p50"] - ways[name]["busy_us"],
            "least_us": least(name, example, rig.ceilings),
        }
    return {"profiled": dataclasses.asdict(case), **row}


def profile_entries(rig: Rig) -> Iterator[Entry]:
    layers = [encoder(rig, "pre", width) for width in ((32,) if rig.dry else WIDTHS)]
    for layer in [*layers, *([] if rig.dry else [long_encoder(rig)])]:
        case = {"name": "pre-norm", "width": layer.d_model, "seq_len": layer.seq_len}
        yield case, lambda rig, layer=layer: measure(layer, rig)

"""Seconds of the steps of a block: timed on the device, or computed from FLOPs and bytes."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.execution import executor
from fused_remat.execution.observe import TRACERS
from fused_remat.execution.prepare import BlockConfig, Execution, Functions
from fused_remat.graph.graph import sizes
from fused_remat.graph.schedule import Step, schedule
from fused_remat.steps.chunk import Chunk

_ROUNDS = 3  # of which the median counts

_CALIBRATIONS: dict[tuple[object, ...], Calibration] = {}


def calibrate(device: torch.device | str = "cpu", again: bool = False) -> Calibration:
    """Measure what a device does in a second; the result is cached for the life of the process.

    Measured at once: a large copy and the smallest operation. Measured on request: a large product
    of each dtype, for `plan(..., costs="analytic")`, and the steps of the layers' graphs at the
    shapes of a call, for `costs="measured"`. The cache has one entry for each number of threads,
    precision of float32 products and deterministic mode. Pass the result as `costs` to use the
    same measurements again. Run nothing else meanwhile.

    Args:
        device: "cpu" or a CUDA device.
        again: whether to measure again instead of using the cache.
    Raises: NotImplementedError for any other device.

    >>> calibrate("cpu") is calibrate("cpu")
    True
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"steps are timed on cpu and cuda, not on {device}")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (device, torch.get_num_threads(), torch.get_float32_matmul_precision(),
           torch.are_deterministic_algorithms_enabled())  # fmt: skip
    if again or key not in _CALIBRATIONS:
        large = torch.empty(1 << (28 if device.type == "cuda" else 24), device=device)
        into, small = torch.empty_like(large), torch.ones(1, device=device)
        seconds = min(seconds_of(lambda: into.copy_(large), device))
        overhead = min(seconds_of(lambda: [small + small for _ in range(100)], device)) / 100
        _CALIBRATIONS[key] = Calibration(device, 2.0 * large.nbytes / seconds, overhead)
    return _CALIBRATIONS[key]


class Seconds(NamedTuple):
    """Time of one forward and one backward of a call."""

    forward: float
    backward: float


@dataclass
class Calibration:
    """Measured rates of a device, and the times of steps on it; made by `calibrate`.

    Attributes:
        device: the device.
        bandwidth: bytes read and written per second in a large copy.
        overhead: seconds of the smallest operation.
        flops: FLOP/s of a large product, by dtype, for the dtypes measured so far.
        link: bytes per second from a CUDA device to pinned host memory, and back; None until
            `host_link` measures them.
    """

    device: torch.device
    bandwidth: float
    overhead: float
    flops: dict[torch.dtype, float] = field(default_factory=dict)
    link: tuple[float, float] | None = None
    _steps: dict[Any, dict[tuple[str, str], float]] = field(default_factory=dict, repr=False)

    def measured(self, example: Example, save: Iterable[str] = ()) -> Seconds:
        """Return the time of a call, from steps timed now or in an earlier equal call."""
        known = self._steps.setdefault(example.key, {})
        plan = example.prepare(save).plan
        labels = [[(w, str(s)) for s in plan.steps(w)] for w in Seconds._fields]
        if not known.keys() >= {*labels[0], *labels[1]}:
            known |= _timed(example, save) | known
        return Seconds(*(sum(known.get(label, 0.0) for label in of) for of in labels))

    def analytic(self, example: Example, save: Iterable[str] = ()) -> Seconds:
        """Return the time of a call: of each step the longer of FLOPs and bytes over the rates."""
        rate = self.rate(example.call.graph.compute or example.input.dtype)
        totals = dict.fromkeys(Seconds._fields, 0.0)
        for which, _, flops, nbytes in work_of(example, save):
            totals[which] += max(flops / rate, nbytes / self.bandwidth) + self.overhead
        return Seconds(**totals)

    def host_link(self) -> tuple[float, float]:
        """Return `link`, measured at the first request with copies of pinned memory."""
        if self.link is None:
            here = torch.empty(1 << 28, dtype=torch.uint8, device=self.device)
            host = torch.empty(here.shape, dtype=torch.uint8, pin_memory=True)
            out = min(seconds_of(lambda: host.copy_(here, non_blocking=True), self.device))
            back = min(seconds_of(lambda: here.copy_(host, non_blocking=True), self.device))
            self.link = here.nbytes / out, here.nbytes / back
        return self.link

    def rate(self, dtype: torch.dtype) -> float:
        """Return the FLOP/s of a large product in `dtype`, measured at the first request."""
        if dtype not in self.flops:
            n = 4096 if self.device.type == "cuda" else 1024
            x, w = (torch.randn(n, n, device=self.device).to(dtype) for _ in range(2))
            self.flops[dtype] = 2.0 * n**3 / min(seconds_of(lambda: x @ w, self.device))
        return self.flops[dtype]


@dataclass(frozen=True, eq=False)
class Example:
    """One call of a block with its tensors, which can be run again by itself without autograd."""

    call: BlockConfig
    tensors: tuple[Tensor | None, ...]
    functions: Functions

    def keeping(self, save: Iterable[str]) -> BlockConfig:
        """Return the call with a policy that keeps the names `save`."""
        return dataclasses.replace(self.call, save=frozenset(save))

    def prepare(self, save: Iterable[str]) -> Execution:
        return self.keeping(save).prepare(self.tensors)

    @property
    def input(self) -> Tensor:
        x = self.tensors[0]
        assert x is not None
        return x

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of inputs and parameters by name."""
        return self.call.named_shapes([None if t is None else t.shape for t in self.tensors])

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies equal calls, which take equal memory and time."""
        given = tuple(None if t is None else (t.shape, t.dtype, t.stride()) for t in self.tensors)
        # A traced layer has functions of its own, of programs that equal layers share. Those that
        # make a tensor again are no steps. Keys outlive the model, which a function may hold.
        functions = [
            (name, name in self.call.graph.params or weakref.ref(getattr(run, "program", run)))
            for name, run in sorted(self.functions.items(), key=lambda named: named[0])
        ]
        return self.call, given, tuple(functions)

    def run(self, save: Iterable[str], between: Callable[[], None] = lambda: None) -> None:
        """Run forward, then `between`, then backward from a random gradient."""
        execution = self.prepare(save)
        with torch.no_grad():
            out, kept = executor.forward(execution, self.tensors, self.functions)
            dy = torch.randn_like(out)
            again = [t if r else None for t, r in zip(self.tensors, execution.rereads, strict=True)]
            saved = out if execution.plan.keeps_output else None
            del out
            between()
            executor.backward(execution, again, kept, saved, dy, self.functions)


def work_of(example: Example, save: Iterable[str]) -> Iterator[tuple[str, Step, float, float]]:
    """Yield pass, step, FLOPs and bytes for every step of a call that keeps `save`."""
    call, shapes, dtype = example.keeping(save), example.shapes, example.input.dtype
    graph = call.graph
    plan = schedule(graph, call.save, call.needs_grad, tiled=False)
    compute = graph.compute or dtype
    widths, lengths, dtypes = graph.widths(shapes), graph.lengths(shapes), graph.dtypes(dtype)
    batch = sizes(shapes[graph.inputs[0]])[0]
    for which, step in ((w, s) for w in Seconds._fields for s in plan.steps(w)):
        node = step.node
        assert node is not None
        length = lengths[node.name]
        flops = float(batch * length * node.flops(widths, shapes, length))
        reads = [n for n in node.reads if n not in node.masks]  # dropout masks are drawn, not read
        names = [n for n in (*reads, node.name) if n in dtypes]
        rows = sum(batch * lengths[n] * widths[n] * dtypes[n].itemsize for n in names)
        weights = sum(torch.Size(shapes[p]).numel() for p in node.params if p in shapes)
        moved = float(rows + weights * compute.itemsize)
        if step.kind == "backward":
            # One product for each gradient; attention has five in backward for two in forward.
            needed = set(step.needs_grad)
            groups = (node.inputs, node.params)
            products = float(sum(not needed.isdisjoint(names) for names in groups))
            flops, moved = flops * (2.5 if node.per_sequence else products), 2.0 * moved
        yield which, step, flops, moved


class _Clock:
    """Marks of the steps' beginnings: on a CUDA device, events that are read at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._marks: list[tuple[tuple[str, str] | None, Any]] = []
        self.which = "forward"

    def __call__(self, step: Step, chunk: Chunk) -> None:
        self._mark((self.which, str(step)))

    def between(self) -> None:
        self._mark(None)
        self.which = "backward"

    def _mark(self, label: tuple[str, str] | None) -> None:
        now: Any = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        if self._cuda:
            now.record(torch.cuda.current_stream(self._device))
        self._marks.append((label, now))

    def seconds(self) -> dict[tuple[str, str], float]:
        self._mark(None)
        if self._cuda:
            torch.cuda.synchronize(self._device)
        totals: dict[tuple[str, str], float] = defaultdict(float)
        for (label, begin), (_, end) in itertools.pairwise(self._marks):
            if label is not None:
                totals[label] += begin.elapsed_time(end) * 1e-3 if self._cuda else end - begin
        return dict(totals)


def _timed(example: Example, save: Iterable[str]) -> dict[tuple[str, str], float]:
    """Return the seconds of every step, summed over groups and tiles: the median of rounds."""
    rounds = []
    for _ in range(_ROUNDS + 1):  # the first round warms up
        clock = _Clock(example.input.device)
        TRACERS.append(clock)
        try:
            example.run(save, clock.between)
            rounds.append(clock.seconds())
        finally:
            TRACERS.remove(clock)
    labels = rounds[0]
    return {label: statistics.median(r[label] for r in rounds[1:]) for label in labels}


def seconds_of(run: Callable[[], Any], device: torch.device, rounds: int = 5) -> list[float]:
    """Return the seconds of each of a few runs, after a warm-up."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    seconds = []
    for _ in range(rounds + 1):
        wait(device)
        begin = time.perf_counter()
        run()
        wait(device)
        seconds.append(time.perf_counter() - begin)
    return seconds[1:]

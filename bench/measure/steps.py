"""Training steps, forward and backward: each way admitted and weighed, then all timed in turns."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo

from bench.measure.case import DTYPES, Case, Forward, Subject, graph_of
from bench.measure.checks import Checks, no_fallback
from bench.measure.clock import Clock, quantiles, ratios
from bench.measure.contest import Rig
from bench.measure.machine import environment
from bench.measure.registry import Provider, Registry, described, refusal
from bench.tables import ResultsFile, Row
from fused_remat.report.allocations import AllocationTrace, SavedBytes, measure_allocations

_TIMED_SECONDS = 1e-2  # of a sample on a GPU, about
_MOST_STEPS = 10
#: Seconds by what was timed: "forward", "backward", "step", and "host", which is what the host
#: takes to launch a step.
Times = dict[str, float]
#: What is found of a forward, to be added to its row.
Find = Callable[[Forward], dict[str, Any]]


class Step:
    """Times a training step, after another one of the same way that is not timed.

    So on a CPU caches and the heap are as a step of training finds them, not as another way left
    them. On a GPU several steps are queued with events around forward and backward, nothing waits
    in between, and the step before keeps the device busy while the host gets ahead. Nobody's
    operands are in a cache when a step begins: the flush between steps is not timed.
    """

    cold = True

    def __init__(self, forward: Forward, subject: Subject, clock: Clock) -> None:
        self.forward, self.subject, self.clock = forward, subject, clock
        self.count = 1
        if clock.device.type == "cuda":
            self()
            self.count = max(1, min(_MOST_STEPS, round(_TIMED_SECONDS / self()["step"])))

    def __call__(self) -> Times:
        if self.clock.device.type == "cuda":
            return self._between_events()
        # Of one thread, which other processes may keep waiting, its own time.
        now = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        for _ in range(2):
            self._ready()
            start = now()
            y = self.forward(self.subject.x)
            between = now()
            y.backward(self.subject.dy)
            end = now()
            del y
        times = {"forward": between - start, "backward": end - between, "step": end - start}
        return times | {"host": end - start}

    def _ready(self) -> None:
        if self.subject.fresh:
            self.subject.clear()

    def _between_events(self) -> Times:
        self._launch()
        queued, host = [], 0.0
        for _ in range(self.count):
            if self.cold:
                self.clock.flush()
            before = time.perf_counter()
            queued.append(self._launch())
            host += time.perf_counter() - before
        torch.cuda.synchronize(self.clock.device)
        parts = [
            1e-3 * sum(events[i].elapsed_time(events[i + 1]) for events in queued) / self.count
            for i in range(len(queued[0]) - 1)
        ]
        apart = dict(zip(("forward", "backward"), parts, strict=True))
        return apart | {"step": sum(parts), "host": host / self.count}

    def _launch(self) -> list[torch.cuda.Event]:
        """Launch a step; return events before it, in the middle and after it."""
        self._ready()
        before = _event()
        y = self.forward(self.subject.x)
        between = _event()
        y.backward(self.subject.dy)
        return [before, between, _event()]


class QueuedStep(Step):
    """The same of steps back to back, as in training: caches are as the step before left them."""

    cold = False


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def kept_bytes(run: Callable[[], Any], subject: Subject, by: str = "autograd") -> int:
    """Return bytes that a forward keeps, without parameters, buffers and the caller's masks.

    Args:
        run: gives what has the autograd graph.
        by: "autograd", whose hooks see what it saves, the input included where it is; or the
            "allocator", which sees what lies elsewhere too, and the input only if `run` copies it.
    """
    if by == "allocator":
        return measure_allocations(lambda: graph_of(run()), subject.device).net
    own = *subject.module.parameters(), *subject.module.buffers(), *subject.masks
    with SavedBytes(own) as saved:
        run()
    return saved.total


def peaks(
    run: Callable[[], Any], backward: Callable[[Any], Any], device: torch.device
) -> dict[str, int]:
    """Return a step's peaks above the bytes at its start; backward's above those at its own."""
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


def memory(forward: Forward, subject: Subject, kept_by: str = "autograd") -> dict[str, Any]:
    """Return the bytes that a way keeps between forward and backward, and its step's peaks."""
    x, dy = subject.x, subject.dy
    held = kept_bytes(lambda: forward(x.clone()), subject, "allocator")
    kept = held if kept_by == "allocator" else kept_bytes(lambda: forward(x), subject)
    return {
        "kept_bytes": kept,
        "kept_by": kept_by,
        "kept_bytes_per_token": kept / x[..., 0].numel(),
        "held_bytes": held,
    } | peaks(lambda: forward(x), lambda y: y.backward(dy), subject.device)


class Steps:
    """What is found of each way of a step, first one by one, then side by side."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.rows: dict[str, dict[str, Any]] = {}
        self.forwards: dict[str, Forward] = {}
        self._known: dict[str, dict[str, Any]] = {}
        self.rounds = 0

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *error: Any) -> None:
        torch._dynamo.reset()

    def admit(self, name: str, build: Callable[[], Forward], *finds: Find, **known: Any) -> None:
        """Build a way, and add the results of `finds`, checks first, to what is `known` of it."""
        known = self._known.setdefault(name, known)
        row = self.rows.get(name, known)
        try:
            with no_fallback():
                self.forwards[name] = build()
            for find in finds:
                row = row | find(self.forwards[name])
            self.rows[name] = row
        except Exception as error:  # one broken way must not cost the results of the others
            self._refuse(name, error)

    def admit_way(self, way: Provider[Any], checks: Checks, *finds: Find) -> None:
        """Admit a way of a registry, whose traits describe its check."""
        subject, traits = checks.subject, way.traits
        kind = {name: traits[name] for name in ("draws", "compiled")}

        def check(forward: Forward) -> dict[str, Any]:
            return {"check": checks.check(forward, **kind)}

        self.admit(way.name, lambda: way.make(subject.device, subject), check, *finds)

    def _refuse(self, name: str, error: Exception) -> None:
        self.forwards.pop(name, None)
        self.rows[name] = self._known[name] | refusal(error)

    def time(self, timer: Callable[..., Step], subject: Subject, baselines: Sequence[str]) -> None:
        """Time all that are right in turns: percentiles, and of the step's ratio by round."""
        steps = {}
        for name, forward in list(self.forwards.items()):
            try:
                steps[name] = timer(forward, subject, self.rig.clock)
            except Exception as error:  # as above
                self._refuse(name, error)
        times = self.rig.in_turns(steps)
        self.rounds = max(map(len, times.values()), default=0)
        seconds = {name: [t["step"] for t in mine] for name, mine in times.items()}
        relative = ratios(seconds, baselines)
        for name, mine in times.items():
            for part in mine[0]:
                self.rows[name][f"{part}_seconds"] = quantiles([t[part] for t in mine])
            self.rows[name]["step_ratio"] = relative[name]


def measure(
    subject: Subject,
    ways: Registry[Any],
    names: Sequence[str],
    rig: Rig,
    timer: type[Step] = Step,
    others: Sequence[str] = (),
) -> dict[str, Any]:
    """Return {"rounds": int, "ways": {name: row}} of a layer's step in these ways.

    A way's row is {"absent": why it cannot run here}, or {"error": what is wrong with its results},
    of which nothing was measured, or {"check", the results of `memory`, percentiles of
    "forward_seconds", "backward_seconds", "step_seconds" and "host_seconds", and "step_ratio" to
    each baseline that was measured and to `others`}. Memory is not measured in a dry run, nor
    of steps back to back.
    """
    with Steps(rig) as steps:
        checks = Checks(subject)
        for name in names:
            weigh = functools.partial(memory, subject=subject, kept_by=ways[name].traits["kept_by"])
            finds = [weigh] if timer is Step and not rig.dry else []
            steps.admit_way(ways[name], checks, *finds)
        del checks  # whose results in float64 are gone before anything is timed
        steps.time(timer, subject, (*ways.baselines, *others))
    return {"rounds": steps.rounds, "ways": steps.rows}


def run(
    args: argparse.Namespace,
    file: str,
    measure: Callable[[Case, Rig], Row],
    title: Callable[[Row], str],
    table: Callable[[Row], str] = lambda row: "",
    **config: Any,
) -> tuple[ResultsFile, list[Row | None]]:
    """Return the file in `args.out`, and each case's row, None where measuring failed."""
    config |= {name: getattr(args, name) for name in ("ways", "rounds", "seconds")}
    results = ResultsFile(args.out / file, environment(args.device), config)
    rows: list[Row | None] = []
    for index, case in enumerate(args.cases, start=1):
        start, named = time.perf_counter(), {"case": dataclasses.asdict(case)}
        print(f"\n[{index}/{len(args.cases)}] {title(named)}", end=" ", flush=True)
        row = None if args.fresh else results.find(named["case"], args.ways)
        how = "in the file already"
        if row is None:
            much = {"seconds": args.seconds, "rounds": args.rounds}
            rig = Rig(torch.device(args.device), DTYPES[case.dtype], **much)
            try:
                row = named | measure(case, rig)
                results.put(row)
                how = f"{time.perf_counter() - start:.0f} s"
            except Exception as error:  # a case too large must not cost the others' results
                how = f"FAIL: {described(error)}"
        rows.append(row)
        print(f"({how}, {row['rounds']} rounds)\n{table(row)}" if row else f"({how})", flush=True)
    return results, rows

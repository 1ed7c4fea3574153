"""Several ways to compute one thing on a GPU: each checked against float64, then timed in turns."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from bench.timing import interleave, quantiles
from fused_remat import random
from fused_remat.backends.eager import EagerBackend
from fused_remat.backends.triton.launch import Launch, Target
from fused_remat.random import Keep

#: What is exact when computed in float64.
EXACT = EagerBackend()
P = 0.1  # of every dropout here
#: Input sets of a contest: together they outgrow the cache, and calls take turns on them.
SETS = 2
#: Relative L2 error allowed, by the dtype of a result. A rounding to bfloat16 is off by 1.6e-3 in
#: the mean square; a result takes at most six, its own included, of independent values: 3.9e-3.
#: float16 has three bits more. float32 sums in another order than float64, and tf32 would show.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5, torch.float64: 1e-9}
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
ROUNDS = 24
_REPLAY_SECONDS = 1e-3  # what is timed at once: many launches, or a few long ones

Results = Mapping[str, Tensor]


@dataclass
class Rig:
    """What is measured on, in which dtype, and what was found of it.

    Attributes:
        dry: tiny sizes, one round, the host's clock: the whole path, but no measurement.
        target: of the kernels.
        ceilings: unit ("GB/s", "TFLOP/s") -> the measured most of it.
        seconds: timed seconds of a contest at most, about.
        ends: `time.perf_counter()` at which everything should have ended.
    """

    device: torch.device
    dtype: torch.dtype
    dry: bool
    target: Target
    ends: float
    seconds: float = 1.0
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.perf_counter()

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.dry else full

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        """Fresh random numbers."""
        x = torch.empty(shape, device=self.device, dtype=torch.float32)
        return x.normal_(shift, scale).to(self.dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """NaN, to be written."""
        return torch.full(shape, torch.nan, device=self.device, dtype=dtype or self.dtype)

    def keep(self, rows: int, width: int) -> Keep:
        """A dropout site."""
        key = random.site_keys(torch.tensor(7, device=self.device))[random.MLP]
        return Keep(key, 0, rows, width, P, torch.float32)


def multiplier(keep: Keep) -> Tensor:
    """A site's multiplier in float64."""
    key, dtype = keep.site_key, torch.float64
    return random.keep_scale(key, keep.row0, keep.rows, keep.width, keep.p, dtype)


def from_mask(mask: Tensor) -> Tensor:
    """The multiplier of `torch.native_dropout`'s mask, in float64."""
    return mask.double() / (1.0 - P)


@dataclass(frozen=True)
class Way:
    """One way to compute it.

    Attributes:
        run: computes on an input set; what it returns is checked by name.
        truth: what its results should be, where that depends on them (its own dropout mask).
        optional: it may not serve here, which is no failure; its results have to be right.
        replayed: timed as a CUDA graph's replay, where it can be captured.
    """

    run: Callable[[int], Results]
    truth: Callable[[Results], Results] | None = None
    optional: bool = False
    replayed: bool = True


@dataclass(frozen=True)
class Contest:
    """Ways to compute the same, and how much work that is.

    Attributes:
        truth: the results on the first input set, in float64; a way may return fewer.
        work: bytes (unit "GB/s") or floating-point operations ("TFLOP/s") of a call.
        baselines: ways that all are compared with.
        factor: how many times `TOLERANCE` a result may be off.
    """

    ways: Mapping[str, Way]
    truth: Callable[[], Results]
    work: float
    unit: str
    baselines: tuple[str, ...]
    factor: float = 1.0


class WrongResultError(Exception):
    """A result that is not right."""


def check(found: Results, truth: Results, factor: float = 1.0) -> dict[str, Any]:
    """The result with the largest relative L2 error for its dtype. Raises: WrongResultError."""
    worst: dict[str, Any] = {"error": -1.0, "allowed": 1.0}
    assert found, "a way without results cannot be checked"
    for name, value in found.items():
        allowed, exact = factor * TOLERANCE[value.dtype], truth[name].reshape(value.shape)
        error = ((value.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()
        if not error <= allowed:  # NaN too: what was not written
            raise WrongResultError(f"relative error of {name} is {error:.2g}, allowed {allowed:g}")
        if error / allowed > worst["error"] / worst["allowed"]:
            worst = {"result": name, "error": error, "allowed": allowed}
    return worst


def described(error: Exception) -> str:
    """An exception in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}"


def admit(contest: Contest) -> dict[str, dict[str, Any]]:
    """The beginning of each way's row: how it was found right, its error, or why it is absent."""
    rows: dict[str, dict[str, Any]] = {}
    truth = contest.truth()
    for name, way in contest.ways.items():
        try:
            results = way.run(0)
            exact = truth if way.truth is None else way.truth(results)
            own = {k: v for k, v in results.items() if k in exact}
            rows[name] = {"check": check(own, exact, contest.factor)}
        except Exception as error:  # one broken way must not cost the others' results
            absent = way.optional and not isinstance(error, WrongResultError)
            rows[name] = {"absent" if absent else "error": described(error)}
    return rows


def measure(contest: Contest, rig: Rig) -> dict[str, Any]:
    """A row: every way checked, and those that are right timed."""
    rows = admit(contest)
    right = {name: contest.ways[name] for name, row in rows.items() if "check" in row}
    steps = {name: stepper(way.run, rig, way.replayed) for name, way in right.items()}
    times = in_turns(steps, rig)
    for name, found in summary(times, contest.baselines).items():
        rate = contest.work / UNITS[contest.unit] / (1e-6 * found["us"]["p50"])
        rows[name] |= found | {contest.unit: rate}
        if contest.unit in rig.ceilings:
            rows[name]["of_ceiling"] = rate / rig.ceilings[contest.unit]
    rounds = max(map(len, times.values()), default=0)
    return {"rounds": rounds, "work": contest.work, "unit": contest.unit, "ways": rows}


def in_turns(
    steps: Mapping[str, Callable[[], float]], rig: Rig, longer: float = 1.0
) -> dict[str, list[float]]:
    """Seconds of every step in every round; `longer`: times the rig's seconds."""
    if rig.dry:
        return {name: [step()] for name, step in steps.items()}
    return interleave(steps, ROUNDS, longer * rig.seconds)


def summary(
    times: Mapping[str, list[float]], baselines: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Microseconds, and the ratio to each baseline by round: percentiles."""
    found: dict[str, dict[str, Any]] = {}
    for name, mine in times.items():
        ratios = {
            baseline: quantiles([a / b for a, b in zip(mine, times[baseline], strict=True)])
            for baseline in baselines
            if baseline in times
        }
        found[name] = {"us": quantiles([1e6 * t for t in mine]), "ratio": ratios}
    return found


def stepper(run: Callable[[int], Any], rig: Rig, replayed: bool = True) -> Callable[[], float]:
    """A function that times some calls of `run` and returns the seconds of one."""
    if rig.device.type != "cuda":
        return lambda: _on_host(run)
    few = _calls(run, SETS)
    once = between_events(few, few) / SETS
    count = SETS * max(1, min(20, round(_REPLAY_SECONDS / once / SETS)))
    work = _calls(run, count)
    try:
        work = captured(work) if replayed else work
    except RuntimeError:  # what cannot be captured is launched call by call
        torch.cuda.synchronize()
    return lambda: between_events(work, work) / count


def _calls(run: Callable[[int], Any], count: int) -> Callable[[], None]:
    def work() -> None:
        for i in range(count):
            run(i % SETS)

    return work


def _on_host(run: Callable[[int], Any]) -> float:
    start = time.perf_counter()
    run(0)
    return time.perf_counter() - start


def between_events(before: Callable[[], Any], work: Callable[[], Any]) -> float:
    """Seconds of `work` on the device, which `before` keeps busy while the host gets ahead."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    start.record()
    work()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


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


def compile_together(launches: Iterable[Launch]) -> None:
    """Compile them on all cores, where this Triton can; an error shows where one is launched."""
    mode = getattr(triton, "AsyncCompileMode", None)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        if mode is not None:
            stack.enter_context(mode(pool, ignore_errors=True))
        for launch in launches:
            launch.kernel.warmup(
                *launch.args, grid=launch.grid, **launch.constants,
                num_warps=launch.num_warps, num_stages=launch.num_stages,
            )  # fmt: skip

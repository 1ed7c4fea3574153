"""Contests: several ways to compute a result, checked against float64, timed in turns."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.measure.clock import Clock, T, interleave, quantiles, ratios
from bench.measure.registry import WrongResultError, refusal
from fused_remat.triton.launch import Target

P = 0.1  # of every dropout here
#: Input sets of a contest, which calls take turns on.
SETS = 2
#: Relative L2 error allowed, by the dtype of a result. A rounding to bfloat16 is off by 1.6e-3 in
#: the mean square; a result takes at most six, its own included, of independent values: 3.9e-3.
#: float16 has three bits more. float32 sums in another order than float64, and tf32 would show.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5, torch.float64: 1e-9}
UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
ROUNDS = 24
#: How far off the baseline itself may be, in `TOLERANCE`s, for others to be judged by it.
_GROSS = 10.0

Results = Mapping[str, Tensor]


@dataclass
class Rig:
    """What is measured on, in which dtype, and what was found of it."""

    device: torch.device
    dtype: torch.dtype
    dry: bool = False  # tiny sizes, one round: the full path, but no measurement
    target: Target | None = None  # of the kernels; None where there are none to launch
    ends: float = float("inf")  # `time.perf_counter()` at which everything should have ended
    seconds: float = 1.0  # of a contest, timed, at most, about
    rounds: int = ROUNDS  # of a contest, at most
    ceilings: dict[str, float] = field(default_factory=dict)  # by unit: the most of it
    out: Path | None = None  # folder of results

    @property
    def left(self) -> float:
        return self.ends - time.perf_counter()

    @functools.cached_property
    def clock(self) -> Clock:
        return Clock(self.device)

    def longer(self, times: float) -> Rig:
        """Return a rig with so many times the seconds."""
        return dataclasses.replace(self, seconds=times * self.seconds)

    def in_turns(self, steps: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
        if self.dry:
            return {name: [step()] for name, step in steps.items()}
        return interleave(steps, self.rounds, self.seconds)

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.dry else full

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        x = torch.empty(shape, device=self.device, dtype=torch.float32)
        return x.normal_(shift, scale).to(self.dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full(shape, torch.nan, device=self.device, dtype=dtype or self.dtype)


@dataclass(frozen=True)
class Work:
    """What a call has to do at least: each operation once, each input read, each output written."""

    flops: float = 0.0  # floating-point operations of the products
    bytes: float = 0.0  # to and from memory

    @property
    def amounts(self) -> dict[str, float]:
        """By unit, of what is counted."""
        counted = {"TFLOP/s": self.flops / UNITS["TFLOP/s"], "GB/s": self.bytes / UNITS["GB/s"]}
        return {unit: amount for unit, amount in counted.items() if amount}

    def rates(self, seconds: float) -> dict[str, float]:
        return {unit: amount / seconds for unit, amount in self.amounts.items()}

    def floor(self, ceilings: Mapping[str, float]) -> float | None:
        """Return the least possible seconds at the ceilings; None where one is not known."""
        amounts = self.amounts
        if not amounts.keys() <= ceilings.keys():
            return None
        return max((amount / ceilings[unit] for unit, amount in amounts.items()), default=0.0)


@dataclass(frozen=True)
class Way:
    """One way to compute it.

    `prepare` makes ready, untimed, for a call on an input set: the forward before a backward; by
    default it gives the set's index. `run` computes on what it gave; results are checked by name.
    """

    run: Callable[[Any], Results]
    optional: bool = False  # it may not apply here, but its results have to be right
    prepare: Callable[[int], Any] = lambda index: index


@dataclass(frozen=True)
class Contest:
    """Ways to compute the same, and how much work that is."""

    ways: Mapping[str, Way]
    truth: Callable[[], Results]  # on the first input set, in float64; a way may return fewer
    work: Work  # of a call
    baselines: tuple[str, ...]  # ways that all are compared with
    factor: float = 1.0  # how many times `TOLERANCE` a result may be off
    refused: Mapping[str, dict[str, str]] = field(default_factory=dict)  # rows of the others


#: A case, and what measures it, or builds the contest that is to be measured.
Entry = tuple[dict[str, Any], Callable[[Rig], "dict[str, Any] | Contest"]]


def errors(found: Results, truth: Results) -> dict[str, float]:
    """Return relative L2 errors by name; NaN of what is not finite or was not written."""
    assert found, "a way without results cannot be checked"
    off = {}
    for name, value in found.items():
        exact = truth[name].reshape(value.shape)
        off[name] = ((value.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()
    return off


def check(
    found: Results, truth: Results, factor: float = 1.0, theirs: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Check results; return the one with the largest error relative to its limit.

    Allowed is `factor` times `TOLERANCE`, or 1.5 times the error of the baseline in the same dtype
    (`theirs`, by name), whichever is more.

    Raises: WrongResultError.
    """
    allowed = {
        name: max(factor * TOLERANCE[t.dtype], 1.5 * (theirs or {}).get(name, 0.0))
        for name, t in found.items()
    }
    return within(found, truth, allowed)


def within(found: Results, truth: Results, allowed: Mapping[str, float]) -> dict[str, Any]:
    """Return the result whose error comes nearest to its limit.

    Raises: WrongResultError for the one that is beyond by most.
    """
    off = errors(found, truth)
    wrong = [name for name in off if not off[name] <= allowed[name]]  # NaN: was not written
    worst = max(wrong or off, key=lambda name: off[name] / allowed[name])
    if wrong:
        raise WrongResultError(
            f"relative error of {worst} is {off[worst]:.2g}, allowed {allowed[worst]:.2g}"
        )
    return {"worst": worst, "error": off[worst], "allowed": allowed[worst]}


def admit(contest: Contest) -> dict[str, dict[str, Any]]:
    """Return the beginning of each way's row: its check, its error, or why it is absent.

    The first baseline is judged first, by a wider margin, and the others by its errors.
    """
    truth = contest.truth()
    theirs: dict[str, float] = {}
    found: dict[str, dict[str, Any]] = {}
    first = [name for name in contest.baselines if name in contest.ways][:1]
    for name in dict.fromkeys([*first, *contest.ways]):
        way = contest.ways[name]
        try:
            results = {k: t.detach() for k, t in way.run(way.prepare(0)).items()}
            own = {k: v for k, v in results.items() if k in truth}
            factor = contest.factor * (_GROSS if name in first else 1.0)
            found[name] = {"check": check(own, truth, factor, theirs)}
            theirs = theirs or (errors(own, truth) if name in first else {})
        except Exception as error:  # one broken way must not cost the others' results
            found[name] = refusal(error, way.optional)
    return {name: found[name] for name in contest.ways} | dict(contest.refused)


def measure(contest: Contest, rig: Rig) -> dict[str, Any]:
    """Return a row: every way checked, and those that are right timed."""
    rows = admit(contest)
    right = {name: contest.ways[name] for name, row in rows.items() if "check" in row}
    times = rig.in_turns(
        {name: rig.clock.sampler(way.run, way.prepare, SETS) for name, way in right.items()}
    )
    work, floor = contest.work, contest.work.floor(rig.ceilings)
    relative = ratios(times, contest.baselines)
    for name, mine in times.items():
        us = quantiles([1e6 * seconds for seconds in mine])
        rows[name] |= {"us": us, "ratio": relative[name], **work.rates(1e-6 * us["p50"])}
        if floor is not None:
            rows[name]["of_ceiling"] = 1e6 * floor / us["p50"]
    return {
        "rounds": max(map(len, times.values()), default=0),
        "work": dataclasses.asdict(work),
        "floor_us": None if floor is None else 1e6 * floor,
        "ways": rows,
    }


# --- what the machine can do at most: a large copy, a large product of random numbers


def _copy(rig: Rig) -> tuple[Callable[[int], Any], Work]:
    """Return a copy of far more bytes than any cache holds."""
    count = rig.size(1 << 30 if rig.device.type == "cuda" else 1 << 26, 1 << 10)
    x, y = rig.normal(count), rig.poisoned(count)
    return lambda index: y.copy_(x), Work(bytes=2.0 * x.nbytes)


def _product(rig: Rig) -> tuple[Callable[[int], Any], Work]:
    n = rig.size(8192 if rig.device.type == "cuda" else 2048, 64)
    x, w = rig.normal(n, n), rig.normal(n, n)
    return lambda index: torch.mm(x, w), Work(flops=2.0 * n**3)


#: Unit -> what is run to find the most of it, by name.
CEILINGS = {"GB/s": ("copy", _copy), "TFLOP/s": ("product", _product)}


def ceiling(rig: Rig, unit: str) -> dict[str, Any]:
    """Return a row, and set the rig's ceiling: the fastest fifth of the rounds."""
    run, work = CEILINGS[unit][1](rig)
    run(0)
    sampler = rig.clock.sampler(run, lambda index: index, SETS)
    us = quantiles([1e6 * seconds for seconds in rig.longer(3.0).in_turns({"": sampler})[""]])
    rig.ceilings[unit] = work.rates(1e-6 * us["p20"])[unit]
    way = {"us": us, "ratio": {}, unit: rig.ceilings[unit]}
    return {"unit": unit, "work": dataclasses.asdict(work), "ways": {"torch": way}}

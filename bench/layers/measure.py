"""A case in every way: checked, and where the results are right, memory and time measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo

from bench.layers.checks import Checks, no_fallback
from bench.layers.memory import memory
from bench.layers.steps import Step, summary
from bench.layers.subjects import DTYPES, Case, Forward, Subject
from bench.layers.ways import DEFAULT, WAYS, select
from bench.measure.contest import Rig, WrongResultError, described, in_turns
from bench.measure.progress import Progress
from bench.measure.registry import Absent

Timer = Callable[..., Step]


@dataclass(frozen=True)
class Options:
    """How a case is measured.

    Attributes:
        device: "cpu" or "cuda".
        ways: names or groups of `bench.layers.ways`; the baseline is always among them.
        rounds: timed rounds at most. seconds: timed seconds, about.
    """

    device: str = "cpu"
    ways: Sequence[str] = DEFAULT
    rounds: int = 36
    seconds: float = 60.0

    def rig(self, dtype: torch.dtype) -> Rig:
        """What the case is measured on."""
        device = torch.device(self.device)
        return Rig(device, dtype, False, None, math.inf, self.seconds, self.rounds)


def measure(
    case: Case, options: Options = Options(), progress: Progress | None = None
) -> dict[str, Any]:
    """A row of the results file.

    {"case": the case as a dict, "rounds": int, "ways": {name: found}}, where found is one of

    - {"unavailable": why it cannot run here};
    - {"failure": what is wrong with its results}: nothing was measured;
    - {"check", "kept_bytes", "kept_by", "kept_bytes_per_token", "held_bytes",
      "forward_peak_bytes", "backward_peak_bytes", "step_peak_bytes", as `memory` has them, and
      percentiles (by "p20", "p50", "p80"): "forward_seconds", "backward_seconds", "step_seconds",
      "host_seconds", and "step_ratio" to each baseline ("eager", "checkpoint") that was measured}.

    Args:
        progress: gets `steps_of(options)` units.

    Raises: ValueError for an unknown way.
    """
    names = select(options.ways, options.device)
    rig = options.rig(DTYPES[case.dtype])
    row = measure_subject(case.subject(rig.device), names, rig, progress=progress)
    return {"case": dataclasses.asdict(case), **row}


def steps_of(options: Options) -> int:
    """Units of progress of a case: every way is checked, then timed."""
    return 2 * len(select(options.ways, options.device))


def measure_subject(
    subject: Subject,
    names: Sequence[str],
    rig: Rig,
    timer: Timer = Step,
    progress: Progress | None = None,
    beside: Sequence[str] = (),
) -> dict[str, Any]:
    """`measure`'s row without the case: of these ways, each of which `timer` times.

    `beside`: ways that all are compared with besides the baselines.

    Memory is not measured in a dry run, nor of steps that a graph replays.
    """
    try:
        return _measure(subject, names, rig, timer, progress, (*WAYS.baselines, *beside))
    finally:
        if any(_is_compiled(name) for name in names):
            torch._dynamo.reset()  # lets go of this case's tensors


def _measure(
    subject: Subject,
    names: Sequence[str],
    rig: Rig,
    timer: Timer,
    progress: Progress | None,
    baselines: Sequence[str],
) -> dict[str, Any]:
    checks = Checks(subject)
    ways: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name in names:
        if progress is not None:
            progress.at(name)
        ways[name], forward = admit(name, subject, checks)
        if forward is not None:
            try:
                if timer is Step and not rig.dry:
                    ways[name] |= memory(forward, subject, WAYS[name].traits["kept_by"])
                steps[name] = timer(forward, subject, rig.clock)
            except Exception as error:  # as above
                ways[name] = {"failure": described(error)}
        if progress is not None:
            progress.done()
    del checks
    if progress is not None:
        progress.at("all in turns")
    times = in_turns(steps, rig)
    for name, times_found in summary(times, baselines).items():
        ways[name] |= times_found
    if progress is not None:
        progress.done(len(names))
    return {"rounds": max(map(len, times.values()), default=0), "ways": ways}


def admit(name: str, subject: Subject, checks: Checks) -> tuple[dict[str, Any], Forward | None]:
    """The beginning of a way's row, and the way itself if its results are right."""
    way = WAYS[name]
    why_not = way.why_not(subject.device)
    if why_not is not None:
        return {"unavailable": why_not}, None
    try:
        with no_fallback():
            forward = way.build(subject)
        told = way.traits["draws"], _is_compiled(name), way.traits.get("lossy", False)
        return {"check": checks.check(forward, *told)}, forward
    except Absent as absent:
        return {"unavailable": str(absent)}, None
    except WrongResultError as error:
        return {"failure": str(error)}, None
    except Exception as error:  # one broken way must not cost the results of the others
        return {"failure": described(error)}, None


def _is_compiled(name: str) -> bool:
    traits = WAYS[name].traits
    return bool(traits.get("compiled", traits["group"] == "compiled"))

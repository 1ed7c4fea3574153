"""A case in every way: checked, and where results are right, memory, time and batch measured."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.measure.admission import Absent, described
from bench.measure.case import DTYPES
from bench.measure.contest import Rig
from bench.measure.progress import Progress
from bench.measure.step_contest import Steps
from bench.measure.steps import Step
from bench.measure.turns import quantiles, rotated
from bench.model import losses
from bench.model.checks import Checks, checked_subject, same_loss
from bench.model.memory import largest_batch, memory, peak_of
from bench.subjects.forwards import Forward
from bench.subjects.model_ways import BASELINE, DEFAULT, WAYS
from bench.subjects.models import Case, Subject, build

#: At the largest batch, where a step takes longest; those of the search have warmed it up.
_ROUNDS_THERE = 3


@dataclass(frozen=True)
class Options:
    """How a case is measured.

    Attributes:
        ways: names or groups of `model_ways.WAYS`; the baseline is always among them.
        memory: bytes within which the largest batch is searched for; None: it is not.
        most: the largest batch that is tried.
        losses: steps that are trained to compare losses; 0: none.
        backend, compiler: as of `Subject`.
    """

    ways: Sequence[str] = DEFAULT
    memory: int | None = None
    most: int = 4096
    losses: int = 0
    backend: str = "auto"
    compiler: str = "inductor"

    @property
    def names(self) -> list[str]:
        """The ways by name. Raises: ValueError for an unknown one."""
        return WAYS.select(self.ways)

    @property
    def units(self) -> int:
        """Of progress of a case: every way is checked, weighed, timed, then enlarged."""
        return (3 + (self.memory is not None)) * len(self.names)


def measure(
    case: Case, options: Options, rig: Rig, progress: Progress | None = None
) -> dict[str, Any]:
    """A row of the results file, but for the case.

    {"fixed_bytes", "rounds", "ways": {name: found}} and, if asked for, "memory_cap" and "losses"
    (`losses.compare`). What is found of a way is one of

    - {"unavailable": why it cannot run here};
    - {"failure": what is wrong with its results}: nothing was measured;
    - {"check", what `memory` says, percentiles (by "p20", "p50", "p80") "forward_seconds",
      "backward_seconds", "step_seconds", "host_seconds", "step_ratio" to each baseline, and of the
      search "largest_batch", "peaks" by batch that was tried, "step_seconds_there" and
      "tokens_per_second" of forward and backward}.

    Memory is not measured in a dry run.

    Raises: ValueError for an unknown way; Absent where no model can be made.
    """
    names, steps = options.names, Steps(rig, progress)
    _load(case)
    try:
        return _measure(case, names, options, steps)
    finally:
        if any(WAYS[name].traits["compiled"] for name in names):
            torch._dynamo.reset()  # lets go of this case's tensors


def _load(case: Case) -> None:
    """What making such a model imports, out of the garbage collector's way.

    Every memory measurement collects garbage, and would walk all of transformers each time.
    """
    tiny = dataclasses.replace(case, layers=1, seq_len=1, tiny=True)
    build(tiny.published, 1, DTYPES[case.dtype], "meta", case.lora)
    gc.collect()
    gc.freeze()


def _measure(case: Case, names: Sequence[str], options: Options, steps: Steps) -> dict[str, Any]:
    routes = {"backend": options.backend, "compiler": options.compiler}
    device = steps.rig.device
    _check(names, dataclasses.replace(checked_subject(case, device), **routes), steps)
    subject = dataclasses.replace(case.subject(device), **routes)
    _weigh(subject, steps)
    steps.time(Step, subject, WAYS.baselines)
    row = {"fixed_bytes": subject.fixed_bytes(), "rounds": steps.rounds, "ways": steps.rows}
    if options.memory is not None:
        row["memory_cap"] = options.memory
        _enlarge(subject, options, steps)
    if options.losses:
        steps.progress.at("losses")
        del subject
        steps.forwards.clear()
        try:
            row["losses"] = losses.compare(case, _trained(steps.rows), options.losses, device)
        except Exception as error:  # must not cost what was measured
            row["losses_failure"] = described(error)
    return row


def _trained(ways: dict[str, dict[str, Any]]) -> list[str]:
    """The first right way of ours, and the first with a fused loss: presets differ in memory."""
    of = {name: WAYS[name].traits["group"] for name, found in ways.items() if "check" in found}
    firsts = (next((name for name in of if of[name] == group), None) for group in ("ours", "loss"))
    return [name for name in firsts if name is not None]


def _check(names: Sequence[str], small: Subject, steps: Steps) -> None:
    """The beginning of every way's row; no forward of the small model is left."""
    checks = Checks(small)
    for name in names:
        steps.admit(
            name,
            lambda way=WAYS[name]: way.make(small.device, small),
            lambda forward: {"check": checks.check(forward)},
        )
    steps.forwards.clear()


def _weigh(subject: Subject, steps: Steps) -> None:
    """The right ways of the whole model, with their memory in the rows; the loss is compared again.

    With dropout it depends on whose draws they are.
    """
    dropout = any(v for k, v in subject.published.values.items() if "dropout" in k)
    rows, dtype = steps.rows, DTYPES[subject.case.dtype]

    def weigh(forward: Forward, name: str) -> dict[str, Any]:
        try:
            found = memory(forward, subject, not WAYS[name].traits["compiled"])
        except torch.OutOfMemoryError as error:
            raise Absent("out of memory at this batch") from error
        if not dropout and BASELINE in steps.forwards and name != BASELINE:
            loss = same_loss(found["loss"], rows[BASELINE]["loss"], dtype)
            found["check"] = rows[name]["check"] | {"loss": loss}
        return found

    for name in [name for name, row in rows.items() if "check" in row]:
        finds = [] if steps.rig.dry else [lambda forward, name=name: weigh(forward, name)]
        steps.admit(name, lambda way=WAYS[name]: way.build(subject), *finds)


def _enlarge(subject: Subject, options: Options, steps: Steps) -> None:
    """Every way's largest batch, and then all of them in turns, each at its own."""
    there: dict[str, Step] = {}

    def enlarge(forward: Forward, name: str) -> dict[str, Any]:
        cap = options.memory or 0
        batch, tried = largest_batch(peak_of(forward, subject), cap, options.most)
        if batch:
            large = dataclasses.replace(subject, x=subject.inputs(batch))
            there[name] = Step(forward, large, steps.rig.clock)
        return {"largest_batch": batch, "peaks": tried}

    for name, forward in list(steps.forwards.items()):
        if not WAYS[name].traits["compiled"]:
            found = [lambda forward, name=name: enlarge(forward, name)]
            steps.admit(name, lambda forward=forward: forward, *found)
    times: dict[str, list[float]] = {name: [] for name in there}
    for index in range(1 if steps.rig.dry else _ROUNDS_THERE):
        for name in rotated(list(there), index) if there else ():
            times[name].append(there[name]()["step"])
    for name, found_times in times.items():
        seconds = quantiles(found_times)
        tokens = steps.rows[name]["largest_batch"] * subject.case.seq_len
        steps.rows[name] |= {
            "step_seconds_there": seconds,
            "tokens_per_second": tokens / seconds["p50"],
        }

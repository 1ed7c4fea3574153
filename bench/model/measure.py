"""A case in every way: checked, and where results are right, memory, time and batch measured."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo

from bench.layers.checks import no_fallback
from bench.layers.steps import Step, summary
from bench.layers.subjects import DTYPES
from bench.measure.contest import Rig, WrongResultError, described, in_turns
from bench.measure.progress import Progress
from bench.measure.registry import Absent
from bench.measure.turns import quantiles, rotated
from bench.model import losses
from bench.model.checks import Checks, checked_subject, same_loss
from bench.model.configs import MODELS
from bench.model.forwards import Forward
from bench.model.memory import largest_batch, memory, peak_of
from bench.model.subjects import Case, Sample, Subject, build
from bench.model.ways import BASELINE, DEFAULT, WAYS, select

#: At the largest batch, where a step takes longest; those of the search have warmed it up.
_ROUNDS_THERE = 3


@dataclass(frozen=True)
class Options:
    """How a case is measured.

    Attributes:
        ways: names or groups of `bench.model.ways`; the baseline is always among them.
        rounds: timed rounds at most. seconds: timed seconds, about.
        memory: bytes within which the largest batch is searched for; None: it is not.
        most: the largest batch that is tried.
        losses: steps that are trained to compare losses; 0: none.
        backend, compiler: as of `Subject`.
    """

    device: str = "cpu"
    ways: Sequence[str] = DEFAULT
    rounds: int = 12
    seconds: float = 120.0
    memory: int | None = None
    most: int = 4096
    losses: int = 0
    backend: str = "auto"
    compiler: str = "inductor"

    def rig(self, dtype: torch.dtype) -> Rig:
        """What the case is measured on."""
        device = torch.device(self.device)
        return Rig(device, dtype, False, None, math.inf, self.seconds, self.rounds)


def measure(
    case: Case,
    options: Options = Options(),
    progress: Progress | None = None,
    rig: Rig | None = None,
) -> dict[str, Any]:
    """A row of the results file.

    {"case": the case as a dict, "fixed_bytes", "tokens", "rounds", "ways": {name: found}} and, if
    asked for, "memory_cap" and "losses" (`losses.compare`). What is found of a way is one of

    - {"unavailable": why it cannot run here};
    - {"failure": what is wrong with its results}: nothing was measured;
    - {"check", what `memory` says, percentiles (by "p20", "p50", "p80") "forward_seconds",
      "backward_seconds", "step_seconds", "host_seconds", "step_ratio" to each baseline, and of the
      search "largest_batch", "peaks" by batch that was tried, "step_seconds_there" and
      "tokens_per_second" of forward and backward}.

    Memory is not measured in a dry run.

    Raises: ValueError for an unknown way; Absent where no model can be made.
    """
    names = select(options.ways)
    _load(case)
    rig = rig or options.rig(DTYPES[case.dtype])
    try:
        return _measure(case, names, options, rig, progress or Progress(0, "steps"))
    finally:
        if any(not WAYS[name].traits["resized"] for name in names):
            torch._dynamo.reset()  # lets go of this case's tensors


def _load(case: Case) -> None:
    """What making such a model imports, out of the garbage collector's way.

    Every memory measurement collects garbage, and would walk all of transformers each time.
    """
    tiny = dataclasses.replace(case, layers=1, seq_len=1, tiny=True)
    build(tiny.published, 1, DTYPES[case.dtype], "meta", case.lora)
    gc.collect()
    gc.freeze()


def steps_of(options: Options) -> int:
    """Units of progress of a case: every way is checked, then timed, then enlarged."""
    return (2 + (options.memory is not None)) * len(select(options.ways))


def _measure(
    case: Case, names: Sequence[str], options: Options, rig: Rig, progress: Progress
) -> dict[str, Any]:
    routes = {"backend": options.backend, "compiler": options.compiler}
    small = dataclasses.replace(checked_subject(case, rig.device), **routes)
    ways = _checked(names, small, progress)
    del small
    subject = dataclasses.replace(case.subject(rig.device), **routes)
    row = {"case": dataclasses.asdict(case), "fixed_bytes": subject.fixed_bytes()}
    forwards = _weighed(ways, subject, rig)
    progress.at("all in turns")
    steps = {n: Step(f, subject, rig.clock) for n, f in forwards.items()}  # type: ignore[arg-type]
    times = in_turns(steps, rig)
    for name, found in summary(times, WAYS.baselines).items():
        ways[name] |= found
    progress.done(len(names))
    row |= {"rounds": max(map(len, times.values()), default=0), "ways": ways}
    if options.memory is not None:
        row["memory_cap"] = options.memory
        _enlarge(ways, forwards, subject, options, rig, progress)
    if options.losses:
        progress.at("losses")
        del subject, forwards, steps
        try:
            row["losses"] = losses.compare(case, _trained(ways), options.losses, rig.device)
        except Exception as error:  # must not cost what was measured
            row["losses_failure"] = described(error)
    return row


def _trained(ways: dict[str, dict[str, Any]]) -> list[str]:
    """The first right way of ours, and the first with a fused loss: presets differ in memory."""
    of = {name: WAYS[name].traits["group"] for name, found in ways.items() if "check" in found}
    firsts = (next((name for name in of if of[name] == group), None) for group in ("ours", "loss"))
    return [name for name in firsts if name is not None]


def _checked(names: Sequence[str], small: Subject, progress: Progress) -> dict[str, dict[str, Any]]:
    """The beginning of every way's row."""
    checks = Checks(small)
    rows = {}
    for name in names:
        progress.at(name)
        rows[name] = _admit(name, small, checks)
        progress.done()
    return rows


def _admit(name: str, small: Subject, checks: Checks) -> dict[str, Any]:
    why_not = WAYS[name].why_not(small.device)
    if why_not is not None:
        return {"unavailable": why_not}
    try:
        return {"check": checks.check(WAYS[name].build(small))}
    except Absent as absent:
        return {"unavailable": str(absent)}
    except WrongResultError as error:
        return {"failure": str(error)}
    except Exception as error:  # one broken way must not cost the results of the others
        return {"failure": described(error)}


def _weighed(ways: dict[str, dict[str, Any]], subject: Subject, rig: Rig) -> dict[str, Forward]:
    """The right ways of the whole model, with their memory in the rows; the loss is compared again.

    With dropout it depends on whose draws they are.
    """
    dropout = any(v for k, v in subject.published.values.items() if "dropout" in k)
    forwards: dict[str, Forward] = {}
    for name in [name for name, row in ways.items() if "check" in row]:
        try:
            with no_fallback():
                forward = WAYS[name].build(subject)
                split = WAYS[name].traits["resized"]
                found = {} if rig.dry else memory(forward, subject, split)
            if found and not dropout and BASELINE in forwards:
                ways[name]["check"]["loss"] = same_loss(
                    found["loss"], ways[BASELINE]["loss"], DTYPES[subject.case.dtype]
                )
            ways[name] |= found
            forwards[name] = forward
        except torch.OutOfMemoryError:
            ways[name] = {"unavailable": "out of memory at this batch"}
        except Exception as error:  # as above
            ways[name] = {"failure": described(error)}
    return forwards


def _enlarge(
    ways: dict[str, dict[str, Any]],
    forwards: dict[str, Forward],
    subject: Subject,
    options: Options,
    rig: Rig,
    progress: Progress,
) -> None:
    """Every way's largest batch, and then all of them in turns, each at its own."""
    assert options.memory is not None
    steps: dict[str, Step] = {}
    for name, forward in forwards.items():
        progress.at(f"{name}: the largest batch")
        if WAYS[name].traits["resized"]:
            try:
                step = _largest(ways[name], forward, subject, options, rig)
                steps |= {} if step is None else {name: step}
            except Exception as error:  # one broken way must not cost the results of the others
                ways[name] = {"failure": described(error)}
        progress.done()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(1 if rig.dry else _ROUNDS_THERE):
        for name in rotated(list(steps), index) if steps else ():
            times[name].append(steps[name]()["step"])
    for name, found_times in times.items():
        seconds = quantiles(found_times)
        tokens = ways[name]["largest_batch"] * subject.tokens
        ways[name] |= {
            "step_seconds_there": seconds, "tokens_per_second": tokens / seconds["p50"],
        }  # fmt: skip
    progress.done(len(ways) - len(forwards))


def _largest(
    row: dict[str, Any], forward: Forward, subject: Subject, options: Options, rig: Rig
) -> Step | None:
    """A way's step at its largest batch, which goes into its row; None where none fits."""
    assert options.memory is not None
    batch, tried = largest_batch(peak_of(forward, subject), options.memory, options.most)
    row |= {"largest_batch": batch, "peaks": tried}
    if not batch:
        return None
    there = dataclasses.replace(subject, sample=Sample(subject.sample.model, subject.inputs(batch)))
    return Step(forward, there, rig.clock)  # type: ignore[arg-type]


def usual_tokens(model: str, asked: int) -> int:
    """Tokens of a sequence: as asked, as far as the model takes it; an image has its own."""
    return MODELS[model].image_tokens or min(asked, MODELS[model].longest)

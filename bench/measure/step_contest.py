"""Every way of a training step admitted and weighed, then all timed in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.measure.admission import refusal
from bench.measure.case import Forward, Subject
from bench.measure.checks import Checks, no_fallback
from bench.measure.contest import Rig, in_turns
from bench.measure.progress import Progress
from bench.measure.registry import Provider, Registry
from bench.measure.steps import Step, kept_bytes, peaks, summary


class Steps:
    """What is found of each way of a step, first one by one, then side by side.

    Attributes:
        rows: name -> what is found: {"unavailable": why it cannot run here}, {"failure": what is
            wrong}, or what `admit` was asked to find and `time` adds.
        forwards: those that are right.
    """

    def __init__(self, rig: Rig, progress: Progress | None = None) -> None:
        self.rig, self.progress = rig, progress or Progress(0, "steps")
        self.rows: dict[str, dict[str, Any]] = {}
        self.forwards: dict[str, Forward] = {}
        self._said: dict[str, dict[str, Any]] = {}
        self.rounds = 0

    def admit(
        self,
        name: str,
        build: Callable[[], Forward],
        *finds: Callable[[Forward], dict[str, Any]],
        **said: Any,
    ) -> None:
        """Build a way, and add to what is `said` of it what each of `finds` finds: checks first."""
        self.progress.at(name)
        said = self._said.setdefault(name, said)
        row = self.rows.get(name, said)
        try:
            with no_fallback():
                self.forwards[name] = build()
            for find in finds:
                row = row | find(self.forwards[name])
        except Exception as error:  # one broken way must not cost the results of the others
            self.forwards.pop(name, None)
            row = said | _refused(error)
        self.rows[name] = row
        self.progress.done()

    def admit_way(
        self,
        way: Provider[Any],
        subject: Subject,
        checks: Checks,
        *finds: Callable[[Forward], dict[str, Any]],
        **said: Any,
    ) -> None:
        """The same of a way of a registry, whose traits say how it is checked."""
        traits = way.traits

        def check(forward: Forward) -> dict[str, Any]:
            told = traits["draws"], traits["compiled"], traits["lossy"]
            return {"check": checks.check(forward, *told)}

        self.admit(way.name, lambda: way.make(subject.device, subject), check, *finds, **said)

    def time(
        self,
        timer: Callable[..., Step],
        subject: Subject,
        baselines: Sequence[str],
        parts: Sequence[str] | None = None,
    ) -> None:
        """Time all that are right in turns; of what `summary` says, add all or some `parts`."""
        steps = {}
        for name, forward in self.forwards.items():
            try:
                steps[name] = timer(forward, subject, self.rig.clock)
            except Exception as error:  # as above: what cannot be captured as a graph, say
                self.rows[name] = self._said[name] | _refused(error)
        self.progress.at("all in turns")
        times = in_turns(steps, self.rig)
        self.rounds = max(map(len, times.values()), default=0)
        for name, found in summary(times, baselines).items():
            self.rows[name] |= {part: found[part] for part in parts or found}
        self.progress.done(len(self.rows))


def _refused(error: Exception) -> dict[str, str]:
    """`refusal` as rows of steps have it."""
    ((key, why),) = refusal(error).items()
    word = {"absent": "unavailable", "error": "failure"}[key]
    return {word: why.removeprefix("WrongResultError: ")}


def memory(forward: Forward, subject: Subject, kept_by: str = "autograd") -> dict[str, Any]:
    """What a way keeps between forward and backward, and what its step takes at the peak.

    "kept_bytes" is what is kept for backward, by autograd's account or the allocator's, as
    "kept_by" says; "held_bytes" is always the allocator's, a copy of the input that nobody else
    holds included, and of the output only what backward needs.
    """
    x, dy = subject.x, subject.dy
    held = kept_bytes(lambda: forward(x.clone()), subject, "allocator")
    kept = held if kept_by == "allocator" else kept_bytes(lambda: forward(x), subject)
    return {
        "kept_bytes": kept,
        "kept_by": kept_by,
        "kept_bytes_per_token": kept / x[..., 0].numel(),
        "held_bytes": held,
    } | peaks(lambda: forward(x), lambda y: y.backward(dy), subject.device)


def measure(
    subject: Subject,
    ways: Registry[Any],
    names: Sequence[str],
    rig: Rig,
    timer: Callable[..., Step] = Step,
    progress: Progress | None = None,
    beside: Sequence[str] = (),
) -> dict[str, Any]:
    """{"rounds": int, "ways": {name: found}} of a layer's step in these ways, timed by `timer`.

    What is found of a way is one of

    - {"unavailable": why it cannot run here};
    - {"failure": what is wrong with its results}: nothing was measured;
    - {"check", "kept_bytes", "kept_by", "kept_bytes_per_token", "held_bytes",
      "forward_peak_bytes", "backward_peak_bytes", "step_peak_bytes", as `memory` has them, and
      percentiles (by "p20", "p50", "p80"): "forward_seconds", "backward_seconds", "step_seconds",
      "host_seconds", and "step_ratio" to each baseline that was measured}.

    Memory is not measured in a dry run, nor of steps that a graph replays.

    Args:
        progress: gets two units for each way.
        beside: ways that all are compared with besides the baselines.
    """
    steps = Steps(rig, progress)
    try:
        _admit_all(steps, subject, ways, names, weigh=timer is Step and not rig.dry)
        steps.time(timer, subject, (*ways.baselines, *beside))
    finally:
        if any(ways[name].traits["compiled"] for name in names):
            torch._dynamo.reset()  # lets go of this subject's tensors
    return {"rounds": steps.rounds, "ways": steps.rows}


def _admit_all(
    steps: Steps, subject: Subject, ways: Registry[Any], names: Sequence[str], weigh: bool
) -> None:
    checks = Checks(subject)  # whose results in float64 are gone before anything is timed
    for name in names:
        kept_by = ways[name].traits["kept_by"]
        weighs = [lambda forward, by=kept_by: memory(forward, subject, by)] if weigh else []
        steps.admit_way(ways[name], subject, checks, *weighs)

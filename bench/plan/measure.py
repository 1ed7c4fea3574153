"""A case in every way: checked, and where the results are right, memory and time measured.

First the peers' peaks; then our plans within each of them; then all in turns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo

from bench.layers.checks import Checks, no_fallback
from bench.layers.steps import Step, summary
from bench.layers.subjects import DTYPES, Forward, Subject
from bench.measure.contest import Rig, WrongResultError, described, in_turns
from bench.measure.progress import Progress
from bench.measure.registry import Absent
from bench.plan.ours import Entry, Planner, forward_of
from bench.plan.subjects import Case, TokenSample
from bench.plan.ways import BASELINE, PEERS
from fused_remat.report.allocations import AllocationTrace, SavedBytes, measure_allocations


@dataclass(frozen=True)
class Options:
    """How a case is measured.

    Attributes:
        device: "cpu" or "cuda".
        compiled: whether `torch.compile` is among the peers.
        rounds: timed rounds at most. seconds: timed seconds, about.
    """

    device: str = "cpu"
    compiled: bool = True
    rounds: int = 12
    seconds: float = 150.0

    @property
    def peers(self) -> list[str]:
        """In the order of the tables."""
        return [n for n in PEERS if self.compiled or not PEERS[n].traits.get("compiled")]


#: Of what `summary` says of a way, what its row has.
TIMES = ("step_seconds", "host_seconds", "step_ratio")


class FreshStep(Step):
    """A step at whose beginning no gradients are there, as after `zero_grad()`."""

    def __call__(self) -> dict[str, float]:
        _sample(self).clear()
        return super().__call__()

    def _queue(self, events: list[torch.cuda.Event]) -> None:
        _sample(self).clear()
        super()._queue(events)


def _sample(step: Step) -> TokenSample:
    assert isinstance(step.sample, TokenSample)
    return step.sample


def memory(forward: Forward, subject: Subject, resting: int, kept_by: str) -> dict[str, Any]:
    """Bytes: kept from forward to backward, and the most in a step with what rests.

    At its beginning no gradients are there. Kept are inputs too, as the planner counts.
    """
    sample, device = subject.sample, subject.device
    assert isinstance(sample, TokenSample)
    sample.clear()
    if kept_by == "autograd":
        with SavedBytes([*sample.layer.parameters(), *sample.layer.buffers()]) as saved:
            sample.loss(forward(sample.x))
        kept = saved.total
        del saved  # it holds what it counted
    else:
        kept = measure_allocations(lambda: sample.loss(forward(sample.x)).grad_fn, device).net
    with AllocationTrace(device) as trace:
        sample.loss(forward(sample.x)).backward()
    peak = resting + max(span.peak for span in trace.spans)
    sample.zero()
    return {"peak_bytes": peak, "kept_bytes": kept, "kept_by": kept_by}


class _Contest:
    """What was found of each way so far."""

    def __init__(self, subject: Subject, planner: Planner, progress: Progress | None) -> None:
        self.subject, self.planner, self.progress = subject, planner, progress
        self.checks = Checks(subject)
        self.ways: dict[str, dict[str, Any]] = {}
        self.forwards: dict[str, Forward] = {}

    def admit(
        self,
        name: str,
        build: Callable[[], Forward],
        draws: str,
        kept_by: str = "autograd",
        compiled: bool = False,
        **said: Any,
    ) -> None:
        """Check a way, and measure its memory."""
        if self.progress is not None:
            self.progress.at(name)
        resting = self.planner.plan.chain.rests
        try:
            with no_fallback():
                forward = build()
            check = self.checks.check(forward, draws, compiled)
            found = {"check": check} | memory(forward, self.subject, resting, kept_by)
            self.forwards[name] = forward
        except Absent as absent:
            found = {"unavailable": str(absent)}
        except WrongResultError as error:
            found = {"failure": str(error)}
        except Exception as error:  # one broken way must not cost the results of the others
            found = {"failure": described(error)}
        self.ways[name] = said | found
        if self.progress is not None:
            self.progress.done()

    def peer(self, name: str) -> None:
        way = PEERS[name]
        traits = way.traits
        self.admit(
            name, lambda: way.build(self.subject), traits["draws"], traits["kept_by"],
            bool(traits.get("compiled")), family=traits["family"],
        )  # fmt: skip

    def ours(self, entry: Entry) -> None:
        said = {
            "family": "ours" if entry.plan.method == "optimal" else "ours, by a rule",
            "method": entry.plan.method,
            "asked": entry.asked,
            "segments": len(entry.plan.choice.segments),
            "predicted": self.planner.predicted(entry.plan),
        }
        self.admit(entry.name, lambda: forward_of(self.subject, entry), "ours", **said)


def measure(
    case: Case,
    options: Options = Options(),
    progress: Progress | None = None,
    rig: Rig | None = None,
) -> dict[str, Any]:
    """A row of the results file.

    {"case", "rounds", "resting": bytes by what they are, "frontier": predicted points, "plans":
    what was asked of the planner, "steps": seconds of a layer's steps by both costs, "ways": {name:
    found}}, where found is {"unavailable": why} or {"failure": what is wrong}, or has "check",
    "peak_bytes", "kept_bytes", percentiles of "step_seconds", "host_seconds" (what the host takes
    to launch a step) and "step_ratio" to each peer, and if it is ours, "predicted". All have their
    "family".

    Args:
        progress: gets a unit for each way that is checked; their number is not known before.
        rig: what it is measured on, in place of what the options say.
    """
    if rig is None:
        device, dtype = torch.device(options.device), DTYPES[case.dtype]
        rig = Rig(device, dtype, False, None, math.inf, options.seconds, options.rounds)
    try:
        return {"case": dataclasses.asdict(case), **_measure(case, options.peers, rig, progress)}
    finally:
        if options.compiled:
            torch._dynamo.reset()  # lets go of this case's tensors


def _measure(
    case: Case, peers: Sequence[str], rig: Rig, progress: Progress | None
) -> dict[str, Any]:
    subject = case.subject(rig.device)
    planner = Planner(subject)
    contest = _Contest(subject, planner, progress)
    for name in peers:
        contest.peer(name)
    budgets = {n: w["peak_bytes"] for n, w in contest.ways.items() if "peak_bytes" in w}
    entries, asked = planner.at(budgets)
    for entry in entries:
        contest.ours(entry)
    del contest.checks
    if progress is not None:
        progress.at("all in turns")
    steps = {n: FreshStep(f, subject, rig.clock) for n, f in contest.forwards.items()}
    times = in_turns(steps, rig)
    for name, found in summary(times, [name for name in peers if name in times]).items():
        contest.ways[name] |= {key: found[key] for key in TIMES}
    chain = planner.plan.chain
    return {
        "rounds": max(map(len, times.values()), default=0),
        "baseline": BASELINE,
        "resting": dict(chain.resting),
        "base_seconds": chain.seconds,
        "frontier": [dataclasses.asdict(point) for point in planner.plan.frontier],
        "plans": asked,
        "steps": planner.steps(),
        "ways": contest.ways,
    }

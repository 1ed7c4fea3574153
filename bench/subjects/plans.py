"""Our plans: which are asked for, and what each predicts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from bench.measure.case import Subject
from bench.subjects.stacks import Stack, fused
from fused_remat import Policy
from fused_remat.planner import BudgetError, Plan, plan
from fused_remat.planner import chain as chains
from fused_remat.planner.chain import Chain, Choice

T = TypeVar("T")

#: Ours by other rules than the best there is.
RULES = ("uniform", "sqrt", "greedy")
#: Of each of them, how many choices are run; all are predicted.
MOST_OF_A_RULE = 2
#: Points of the frontier that are run, besides those at the peers' peaks.
SWEEP = 3


def loss(subject: Subject, y: Tensor) -> Tensor:
    """Of a stack's output; the gradient of the output is dy."""
    return (y * subject.dy).sum()


@dataclass
class Entry:
    """A choice to be run."""

    plan: Plan
    name: str | None = None  # its method, and which of it from the least peak on
    asked: list[tuple[str, int]] = field(default_factory=list)  # whose budgets, and bytes


class Planner:
    """Plans of a subject from one measurement, and their costs as FLOPs and bytes have them."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        subject.clear()
        stack = fused(subject.module, "full", subject.backend)
        given = {"loss": functools.partial(loss, subject)}
        self.plan = plan(stack, subject.x, **given)
        saves = {o.save: None for call in self.plan.chain.calls for o in call.options}
        options = [Policy(save) for save in saves]
        analytic = plan(stack, subject.x, costs="analytic", options=options, **given)
        # The same step: what differs is what the choices cost in it.
        seconds = self.plan.chain.seconds
        self.analytic: Chain = dataclasses.replace(analytic.chain, seconds=seconds)
        subject.zero()

    def steps(self) -> list[tuple[str, str, float, float]]:
        """(pass, step, measured, analytic) seconds of every step of a layer that has both."""
        costs = self.plan.steps
        return [(c.which, c.step, c.measured, c.analytic) for c in costs if c.measured is not None]

    def predicted(self, found: Plan) -> dict[str, float]:
        calls = zip(found.chain.calls, self.analytic.calls, found.choice.options, strict=True)
        same = [  # the choice among the options of the other costs
            next(i for i, o in enumerate(theirs.options) if o.save == mine.options[chosen].save)
            for mine, theirs, chosen in calls
        ]
        choice = Choice(tuple(same), found.choice.segments)
        return {
            "peak_bytes": found.peak_bytes,
            "kept_bytes": found.kept_bytes,
            "seconds": found.seconds,
            "analytic_seconds": chains.seconds(self.analytic, choice),
        }

    def said_of(self, entry: Entry) -> dict[str, Any]:
        return {
            "family": "ours" if entry.plan.method == "optimal" else "ours, by a rule",
            "method": entry.plan.method,
            "asked": entry.asked,
            "segments": len(entry.plan.choice.segments),
            "predicted": self.predicted(entry.plan),
        }

    def at(self, budgets: Mapping[str, int]) -> tuple[list[Entry], list[dict[str, Any]]]:
        """The choices to be run, each once, and everything that was asked for.

        The best within each budget and along the frontier; of the simpler rules, a few.
        """
        points = _spread(self.plan.frontier, SWEEP)
        wanted = [(of, nbytes, "optimal") for of, nbytes in budgets.items()]
        wanted += [("sweep", point.peak_bytes, "optimal") for point in points]
        wanted += [(of, nbytes, rule) for rule in RULES for of, nbytes in budgets.items()]
        entries: dict[tuple[str, Choice], Entry] = {}
        asked: list[tuple[dict[str, Any], Entry | None]] = []
        for of, nbytes, method in wanted:
            row: dict[str, Any] = {"method": method, "of": of, "budget_bytes": nbytes}
            try:
                found = self.plan.within(nbytes, method)
            except BudgetError as error:
                asked.append((row | {"least_bytes": error.least}, None))
                continue
            entry = entries.setdefault((method, found.choice), Entry(found))
            entry.asked.append((of, nbytes))
            asked.append((row | {"predicted": self.predicted(found)}, entry))
        chosen = list(_chosen(list(entries.values())))
        return chosen, [row | ({"way": entry.name} if entry else {}) for row, entry in asked]


def _spread(items: Sequence[T], count: int) -> Sequence[T]:
    """So many of them at most, the first and the last included, evenly between."""
    last = len(items) - 1
    return items if last < count else [items[round(i * last / (count - 1))] for i in range(count)]


def _chosen(entries: list[Entry]) -> Iterator[Entry]:
    """All of the best, and of each rule some from its least peak to its largest; named."""
    for method in ("optimal", *RULES):
        mine = [e for e in entries if e.plan.method == method]
        mine.sort(key=lambda e: e.plan.peak_bytes)
        some = mine if method == "optimal" else _spread(mine, MOST_OF_A_RULE)
        for index, entry in enumerate(some, start=1):
            entry.name = f"{method}_{index}" if len(some) > 1 else method
            yield entry


def forward_of(subject: Subject, entry: Entry) -> Stack:
    """The model as a plan has it, on the subject's parameters."""
    return entry.plan.apply(fused(subject.module, "full", subject.backend))

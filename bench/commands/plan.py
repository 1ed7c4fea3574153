"""Plans against what else there is to fit a model into memory, at equal peaks.

    python -m bench plan
    python -m bench plan --d-model 512 --seconds 300
    python -m bench plan --layers 4 --dropout 0.1 --no-compile

Of a stack of encoder layers: eager, `torch.utils.checkpoint` around every layer, some, or segments,
selective checkpointing, `torch.compile` with memory budgets; and our plans within the measured peak
of each of them, and along the frontier. A step is forward and backward; no gradients are there at
its beginning. Peaks include parameters and gradients. Every way is checked before it is timed.
Written to the folder: plan-DEVICE.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from bench.commands.layers import heads
from bench.measure.case import Forward, Subject
from bench.measure.checks import Checks
from bench.measure.contest import Rig
from bench.measure.options import Parser, positive
from bench.measure.results import Row
from bench.measure.steps import Step, Steps, kept_bytes, peaks, run
from bench.pages import plans as page
from bench.subjects.layers import NORMS
from bench.subjects.stacks import BASELINE, PEERS, Case, Stack, fused
from fused_remat.planner import BudgetError, Plan, plan
from fused_remat.planner.chain import Choice

T = TypeVar("T")

#: By device: layers, batch, tokens of a sequence, width, heads.
SIZES = {"cpu": (8, 4, 256, 256, 4), "cuda": (12, 4, 2048, 1024, 8)}
#: Ours by other rules than the best there is.
RULES = ("uniform", "sqrt", "greedy")
#: Of each of them, how many choices are run; all are predicted.
MOST_OF_A_RULE = 2
#: Points of the frontier that are run, besides those at the peers' peaks.
SWEEP = 3
TABLES = {
    "All ways:": page.table,
    "Plans within each peer's peak:": page.rival_table,
    "Predictions compared with measurements:": page.error_table,
}


# --- our plans: which are asked for, and what each predicts


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
    """Plans of a subject from one measurement, and their predictions."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        subject.clear()
        stack = fused(subject.module, "full", subject.backend)
        self.plan = plan(stack, subject.x, loss=functools.partial(loss, subject))
        subject.zero()

    def predicted(self, found: Plan) -> dict[str, float]:
        """Return what a plan predicts."""
        return {
            "peak_bytes": found.peak_bytes,
            "kept_bytes": found.kept_bytes,
            "seconds": found.seconds,
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


# --- what is measured


def peers(compiled: bool) -> list[str]:
    return [name for name in PEERS if compiled or not PEERS[name].traits["compiled"]]


def memory(forward: Forward, subject: Subject, resting: int, kept_by: str) -> Row:
    """Bytes: kept from forward to backward, and the most in a step with what rests.

    At its beginning no gradients are there. Kept are inputs too, as the planner counts.
    """

    def run() -> Tensor:
        return loss(subject, forward(subject.x))

    subject.clear()
    kept = kept_bytes(run, subject, kept_by)
    step = peaks(run, lambda found: found.backward(), subject.device)["step_peak_bytes"]
    subject.zero()
    return {"peak_bytes": resting + step, "kept_bytes": kept, "kept_by": kept_by}


def measure(case: Case, names: Sequence[str], rig: Rig) -> Row:
    """A row of the results file, but for the case: first these peers, then our plans within the
    peak of each of them, then all in turns. All have their "family", ours what was "predicted".
    """
    subject = case.subject(rig.device)
    planner = Planner(subject)
    chain = planner.plan.chain
    with Steps(rig) as steps:
        asked = _admit_all(steps, planner, names)
        steps.time(Step, subject, [name for name in names if name in steps.forwards])
    return {
        "rounds": steps.rounds,
        "baseline": BASELINE,
        "resting": dict(chain.resting),
        "base_seconds": chain.seconds,
        "frontier": [dataclasses.asdict(point) for point in planner.plan.frontier],
        "plans": asked,
        "ways": steps.rows,
    }


def _admit_all(steps: Steps, planner: Planner, names: Sequence[str]) -> list[Row]:
    """Check and weigh the peers and our plans; what was asked of the planner."""
    subject = planner.subject
    checks = Checks(subject)  # whose results in float64 are gone before anything is timed
    weigh = functools.partial(memory, subject=subject, resting=planner.plan.chain.rests)
    for way in map(PEERS.__getitem__, names):
        weighed = functools.partial(weigh, kept_by=way.traits["kept_by"])
        steps.admit_way(way, checks, weighed, family=way.traits["family"])
    budgets = {n: w["peak_bytes"] for n, w in steps.rows.items() if "peak_bytes" in w}
    entries, asked = planner.at(budgets)
    for entry in entries:
        steps.admit(
            entry.name,
            lambda entry=entry: forward_of(subject, entry),
            lambda forward: {"check": checks.check(forward, "ours")},
            functools.partial(weigh, kept_by="autograd"),
            **planner.said_of(entry),
        )
    return asked


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "plan", __doc__, "device dtype rounds seconds threads out fresh", rounds=12, seconds=150.0
    )
    add = parser.add
    add("--layers", type=positive, help="(8; on cuda 12)")
    add("--batch", type=positive, help="sequences (4)")
    add("--seq", type=positive, help="tokens of each (256; on cuda 2048)")
    add("--d-model", type=positive, help="(256; on cuda 1024)")
    add("--nhead", type=positive, help="(heads 64 wide; on cuda 128)")
    add("--post-norm", action="store_true")
    add("--causal", action="store_true", help="with a causal mask")
    add("--dropout", type=float, default=0.0)
    add("--no-compile", action="store_true", help="without torch.compile, which takes long")
    args = parser.parse(arguments)
    args.ways = peers(compiled=not args.no_compile)
    layers, batch, seq, width, nhead = SIZES[args.device]
    wide = args.d_model or width
    norm = {first: name for name, first in NORMS.items()}[not args.post_norm]
    with parser.usage_errors():
        case = Case(
            args.layers or layers, args.dtype, norm, args.dropout, args.batch or batch,
            args.seq or seq, wide, args.nhead or heads(wide, width // nhead), args.causal,
        )  # fmt: skip
    args.cases = [case]
    return args


def main(arguments: Sequence[str]) -> int:
    """Measure and print the tables.

    Returns 1 if a result of ours was wrong: of others', FAIL in the table says it.
    """
    args = parse(arguments)

    def one(case: Case, rig: Rig) -> Row:
        return measure(case, args.ways, rig)

    results, (row,) = run(args, f"plan-{args.device}.json", one, page.title)
    if row is None:
        return 1
    for heading, make in TABLES.items():
        print(f"\n{heading}\n\n{make(row)}")
    print(f"\n{results.path}")
    return int(wrong(row))


def wrong(row: Row) -> bool:
    ways = row["ways"].items()
    return any("failure" in way for name, way in ways if name == BASELINE or page.is_ours(way))

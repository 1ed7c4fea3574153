"""Plans compared with other methods that fit a model into memory, at equal peaks.

    python -m bench plan
    python -m bench plan --d-model 512 --seconds 300
    python -m bench plan --layers 4 --dropout 0.1 --no-compile

A stack of encoder layers runs eagerly, under `torch.utils.checkpoint` around every layer, some
layers or segments, under selective checkpointing, and under `torch.compile` with memory budgets;
and by plans within the measured peak of each of them. A step is forward and backward, without
gradients at its beginning. Peaks include parameters and gradients. Every way is checked before it
is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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

#: By device: layers, batch, tokens of a sequence, width, heads.
SIZES = {"cpu": (8, 4, 256, 256, 4), "cuda": (12, 4, 2048, 1024, 8)}
TABLES = {
    "All ways:": page.table,
    "Plans within each peer's peak:": page.rival_table,
    "Predictions compared with measurements:": page.error_table,
}


def loss(subject: Subject, y: Tensor) -> Tensor:
    """Return the loss of a stack's output; the gradient of the output is dy."""
    return (y * subject.dy).sum()


@dataclass
class Entry:
    """A plan to be run, and the budgets that it is the best for."""

    plan: Plan
    name: str
    budgets: list[tuple[str, int]] = field(default_factory=list)  # peer, bytes

    @property
    def row(self) -> Row:
        """The beginning of the plan's row."""
        found = self.plan
        predicted = {"peak_bytes": found.peak_bytes, "kept_bytes": found.kept_bytes,
                     "seconds": found.seconds}  # fmt: skip
        return {"family": "ours", "budgets": self.budgets, "predicted": predicted,
                "segments": len(found.choice.segments)}  # fmt: skip


def measured_plan(subject: Subject) -> Plan:
    """Return the plan of a subject's stack, from one measurement."""
    subject.clear()
    stack = fused(subject.module, "full", subject.backend)
    found = plan(stack, subject.x, loss=functools.partial(loss, subject))
    subject.zero()
    return found


def within(base: Plan, budgets: Mapping[str, int]) -> tuple[list[Entry], list[Row]]:
    """Return the best plan within each budget, each plan once, and a row per budget."""
    entries: dict[Choice, Entry] = {}
    rows = []
    for peer, nbytes in budgets.items():
        row: Row = {"method": "optimal", "of": peer, "budget_bytes": nbytes}
        try:
            found = base.within(nbytes)
        except BudgetError as error:
            rows.append(row | {"least_bytes": error.least})
            continue
        name = f"optimal_{len(entries) + 1}"
        entry = entries.setdefault(found.choice, Entry(found, name))
        entry.budgets.append((peer, nbytes))
        rows.append(row | {"way": entry.name})
    return list(entries.values()), rows


def forward_of(subject: Subject, entry: Entry) -> Stack:
    """Return the model by a plan, on the subject's parameters."""
    return entry.plan.apply(fused(subject.module, "full", subject.backend))


def peers(compiled: bool) -> list[str]:
    """Return the names of the peers, with or without those of `torch.compile`."""
    return [name for name in PEERS if compiled or not PEERS[name].traits["compiled"]]


def memory(forward: Forward, subject: Subject, resting: int, kept_by: str) -> Row:
    """Return bytes kept from forward to backward, inputs included, and the peak of a step."""

    def output() -> Tensor:
        return loss(subject, forward(subject.x))

    subject.clear()
    kept = kept_bytes(output, subject, kept_by)
    step = peaks(output, lambda y: y.backward(), subject.device)["step_peak_bytes"]
    subject.zero()
    return {"peak_bytes": resting + step, "kept_bytes": kept, "kept_by": kept_by}


def measure(case: Case, names: Sequence[str], rig: Rig) -> Row:
    """Return a row of the results file, without the case: peers, then plans, then all in turns."""
    subject = case.subject(rig.device)
    base = measured_plan(subject)
    with Steps(rig) as steps:
        checks = Checks(subject)  # its results in float64 are freed before anything is timed
        weigh = functools.partial(memory, subject=subject, resting=base.chain.rests)
        for way in map(PEERS.__getitem__, names):
            weighed = functools.partial(weigh, kept_by=way.traits["kept_by"])
            steps.admit_way(way, checks, weighed, family=way.traits["family"])
        budgets = {n: w["peak_bytes"] for n, w in steps.rows.items() if "peak_bytes" in w}
        entries, plans = within(base, budgets)
        for entry in entries:
            steps.admit(
                entry.name,
                functools.partial(forward_of, subject, entry),
                lambda forward: {"check": checks.check(forward, "ours")},
                functools.partial(weigh, kept_by="autograd"),
                **entry.row,
            )
        steps.time(Step, subject, [name for name in names if name in steps.forwards])
    return {
        "rounds": steps.rounds,
        "baseline": BASELINE,
        "resting": dict(base.chain.resting),
        "frontier": [dataclasses.asdict(point) for point in base.frontier],
        "plans": plans,
        "ways": steps.rows,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `cases` is one stack."""
    options = "device dtype rounds seconds threads fresh"
    parser = Parser("plan", __doc__, options, rounds=12, seconds=150.0)
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
    """Measure and print the tables; 1 if a plan's result, or eager's, was wrong."""
    args = parse(arguments)

    def one(case: Case, rig: Rig) -> Row:
        return measure(case, args.ways, rig)

    results, (row,) = run(args, f"plan-{args.device}.json", one, page.title)
    if row is None:
        return 1
    for heading, table in TABLES.items():
        print(f"\n{heading}\n\n{table(row)}")
    print(f"\n{results.path}")
    ways = row["ways"].items()
    return int(any("failure" in way for name, way in ways if name == BASELINE or page.is_ours(way)))

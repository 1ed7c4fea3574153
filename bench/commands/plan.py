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
import functools
from collections.abc import Mapping, Sequence

from torch import Tensor

from bench.commands.layers import heads
from bench.measure.case import Forward, Subject
from bench.measure.checks import Checks
from bench.measure.contest import Rig
from bench.measure.options import Parser, positive
from bench.measure.steps import Step, Steps, kept_bytes, peaks, run
from bench.pages import plans as page
from bench.subjects.stacks import BASELINE, PEERS, Case, Stack, fused
from bench.tables import Row
from fused_remat.planner import BudgetError, Plan, plan
from fused_remat.planner.chain import Choice

#: By device: layers, batch, tokens of a sequence, width, heads.
SIZES = {"cpu": (8, 4, 256, 256, 4), "cuda": (12, 4, 2048, 1024, 8)}
TABLES = {
    "All ways:": page.table,
    "Plans within each peer's peak:": page.rival_table,
    "Predictions compared with measurements:": page.error_table,
}


def within(base: Plan, budgets: Mapping[str, int]) -> tuple[dict[str, Plan], list[Row]]:
    """Return the best plan within each budget, each plan once, and a row per budget."""
    plans: dict[str, Plan] = {}
    names: dict[Choice, str] = {}
    rows = []
    for peer, nbytes in budgets.items():
        row: Row = {"method": "optimal", "of": peer, "budget_bytes": nbytes}
        try:
            best = base.within(nbytes)
        except BudgetError as error:
            rows.append(row | {"least_bytes": error.least})
            continue
        name = names.setdefault(best.choice, f"optimal_{len(names) + 1}")
        plans[name] = best
        rows.append(row | {"way": name})
    return plans, rows


def forward_of(subject: Subject, applied: Plan) -> Stack:
    """Return the model by a plan, on the subject's parameters."""
    return applied.apply(fused(subject.module, "full", subject.backend))


def peers(compiled: bool) -> list[str]:
    """Return the names of the peers, with or without those of `torch.compile`."""
    return [name for name in PEERS if compiled or not PEERS[name].traits["compiled"]]


def measure(case: Case, rig: Rig, names: Sequence[str]) -> Row:
    """Return a row of the results file, without the case: peers, then plans, then all in turns."""
    subject = case.subject(rig.device)

    def loss(y: Tensor) -> Tensor:
        return (y * subject.dy).sum()

    subject.clear()
    base = plan(fused(subject.module, "full", subject.backend), subject.x, loss=loss)
    subject.zero()

    def weigh(forward: Forward, kept_by: str = "autograd") -> Row:
        """Return bytes kept from forward to backward, inputs included, and the peak of a step."""

        def output() -> Tensor:
            return loss(forward(subject.x))

        subject.clear()
        kept = kept_bytes(output, subject, kept_by)
        step = peaks(output, lambda y: y.backward(), subject.device)["step_peak_bytes"]
        subject.zero()
        return {"peak_bytes": base.chain.rests + step, "kept_bytes": kept, "kept_by": kept_by}

    with Steps(rig) as steps:
        checks = Checks(subject)  # its results in float64 are freed before anything is timed
        for way in map(PEERS.__getitem__, names):
            weighed = functools.partial(weigh, kept_by=way.traits["kept_by"])
            steps.admit_way(way, checks, weighed)
        budgets = {n: w["peak_bytes"] for n, w in steps.rows.items() if "peak_bytes" in w}
        plans, rows = within(base, budgets)
        for name, found in plans.items():
            steps.admit(
                name,
                functools.partial(forward_of, subject, found),
                lambda forward: {"check": checks.check(forward, "ours")},
                weigh,
                predicted={k: getattr(found, k) for k in ("peak_bytes", "kept_bytes", "seconds")},
            )
        steps.time(Step, subject, [name for name in names if name in steps.forwards])
    return {"rounds": steps.rounds, "plans": rows, "ways": steps.rows}


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
    names = ("layers", "batch", "seq", "d_model")
    parser.by_device(**dict(zip(names, zip(*SIZES.values(), strict=True), strict=False)))
    args = parser.parse(arguments)
    args.ways = peers(compiled=not args.no_compile)
    *_, width, nhead = SIZES[args.device]
    with parser.usage_errors():
        args.cases = [Case(
            args.layers, args.dtype, "post" if args.post_norm else "pre", args.dropout, args.batch,
            args.seq, args.d_model, args.nhead or heads(args.d_model, width // nhead), args.causal,
        )]  # fmt: skip
    return args


def main(arguments: Sequence[str]) -> int:
    """Measure and print the tables; 1 if a plan's result, or eager's, was wrong."""
    args = parse(arguments)
    file = f"plan-{args.device}.json"
    results, (row,) = run(args, file, functools.partial(measure, names=args.ways), page.title)
    if row is None:
        return 1
    for heading, table in TABLES.items():
        print(f"\n{heading}\n\n{table(row)}")
    print(f"\n{results.path}")
    ways = row["ways"].items()
    return int(any("error" in way for name, way in ways if name == BASELINE or "predicted" in way))

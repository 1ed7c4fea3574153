"""Plans against what else there is to fit a model into memory, at equal peaks.

    python -m bench plan
    python -m bench plan --d-model 512 --seconds 300
    python -m bench plan --layers 4 --dropout 0.1 --no-compile

Of a stack of encoder layers: eager, `torch.utils.checkpoint` around every layer, some, or segments,
selective checkpointing, `torch.compile` with memory budgets; and our plans within the measured peak
of each of them, and along the frontier. A step is forward and backward; no gradients are there at
its beginning. Peaks include parameters and gradients. Every way is checked before it is timed.
Written to the folder: plan-DEVICE.json, .png and .svg.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence

from torch import Tensor

from bench.commands.layers import heads
from bench.figures.plans import picture
from bench.measure.case import Forward, Subject
from bench.measure.checks import Checks
from bench.measure.contest import Rig
from bench.measure.options import Parser, positive
from bench.measure.results import Progress, Row
from bench.measure.steps import Step, Steps, kept_bytes, peaks, run
from bench.pages import plans as page
from bench.subjects.layers import NORMS
from bench.subjects.plans import Planner, forward_of, loss
from bench.subjects.stacks import BASELINE, PEERS, Case

#: By device: layers, batch, tokens of a sequence, width, heads.
SIZES = {"cpu": (8, 4, 256, 256, 4), "cuda": (12, 4, 2048, 1024, 8)}
_OURS = 14  # ways, about: their number is known once the peers have been measured
TABLES = {
    "All ways:": page.table,
    "Ours within each peer's peak:": page.rival_table,
    "Predictions against what was measured of all plans that were run:": page.error_table,
    "A layer's steps:": page.step_table,
}


def peers(compiled: bool) -> list[str]:
    """In the order of the tables, with or without `torch.compile`."""
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


def measure(case: Case, names: Sequence[str], rig: Rig, progress: Progress | None = None) -> Row:
    """A row of the results file, but for the case: first these peers, then our plans within the
    peak of each of them, then all in turns.

    {"rounds", "resting": bytes by what they are, "frontier": predicted points, "plans": what was
    asked of the planner, "steps": seconds of a layer's steps by both costs, "ways": {name: found}},
    where found is {"unavailable": why} or {"failure": what is wrong}, or has "check", "peak_bytes",
    "kept_bytes", percentiles of "step_seconds", "host_seconds" (what the host takes to launch a
    step) and "step_ratio" to each peer, and if it is ours, "predicted". All have their "family".

    Args:
        progress: gets two units for each way, whose number is not known before.
    """
    subject = case.subject(rig.device)
    planner = Planner(subject)
    chain = planner.plan.chain
    with Steps(rig, progress) as steps:
        asked = _admit_all(steps, planner, names)
        steps.time(Step, subject, [name for name in names if name in steps.forwards])
    return {
        "rounds": steps.rounds,
        "baseline": BASELINE,
        "resting": dict(chain.resting),
        "base_seconds": chain.seconds,
        "frontier": [dataclasses.asdict(point) for point in planner.plan.frontier],
        "plans": asked,
        "steps": planner.steps(),
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
    """Measure, draw, and print the tables.

    Returns 1 if a result of ours was wrong: of others', FAIL in the table says it.
    """
    args = parse(arguments)

    def one(case: Case, rig: Rig, progress: Progress) -> Row:
        return measure(case, args.ways, rig, progress)

    units = 2 * (len(args.ways) + _OURS)
    results, (row,) = run(args, f"plan-{args.device}.json", one, units, page.title)
    if row is None:
        return 1
    for heading, make in TABLES.items():
        print(f"\n{heading}\n\n{make(row)}")
    try:
        made = picture(results.path, results.rows)
        made.write()
    except (ValueError, ImportError) as error:
        print(f"python -m bench plan: {error}", file=sys.stderr)
        return 2
    print("", results.path, *made.files, sep="\n")
    return int(wrong(row))


def wrong(row: Row) -> bool:
    """Whether a result of ours, or of what all are compared with, was not right."""
    ways = row["ways"].items()
    return any("failure" in way for name, way in ways if name == BASELINE or page.is_ours(way))

"""Plans against what else there is to fit a model into memory, at equal peaks.

    python -m bench plan
    python -m bench plan --d-model 512 --seconds 300
    python -m bench plan --layers 4 --dropout 0.1 --no-compile
    python -m bench plan --from bench/results/plan-cpu.json

Of a stack of encoder layers: eager, `torch.utils.checkpoint` around every layer, some, or segments,
selective checkpointing, `torch.compile` with memory budgets; and our plans within the measured peak
of each of them, and along the frontier. A step is forward and backward; no gradients are there at
its beginning. Peaks include parameters and gradients. Every way is checked before it is timed.
Written to the folder: plan-DEVICE.json, .png and .svg. `--from` draws a file again.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.commands.layers import heads
from bench.figures.plans import picture
from bench.measure.case import DTYPES, Forward, Subject
from bench.measure.checks import Checks
from bench.measure.contest import Rig
from bench.measure.machine import environment
from bench.measure.options import Parser, positive
from bench.measure.progress import Progress
from bench.measure.results import ResultsFile, rows_of
from bench.measure.step_contest import Steps
from bench.measure.steps import Step, kept_bytes, peaks
from bench.pages.plans import (
    error_table,
    is_ours,
    read,
    rival_table,
    step_table,
    table,
    title,
)
from bench.subjects.layers import NORMS
from bench.subjects.plans import Planner, forward_of, loss
from bench.subjects.stack_ways import BASELINE, PEERS
from bench.subjects.stacks import Case

#: By device: layers, batch, tokens of a sequence, width, heads.
SIZES = {"cpu": (8, 4, 256, 256, 4), "cuda": (12, 4, 2048, 1024, 8)}
_OURS = 14  # ways, about: their number is known once the peers have been measured
#: Of what is said of a way's times, what its row has.
TIMES = ("step_seconds", "host_seconds", "step_ratio")
TABLES = {
    "All ways:": table,
    "Ours within each peer's peak:": rival_table,
    "Predictions against what was measured of all plans that were run:": error_table,
    "A layer's steps:": step_table,
}


def peers(compiled: bool) -> list[str]:
    """In the order of the tables, with or without `torch.compile`."""
    return [name for name in PEERS if compiled or not PEERS[name].traits["compiled"]]


def memory(forward: Forward, subject: Subject, resting: int, kept_by: str) -> dict[str, Any]:
    """Bytes: kept from forward to backward, and the most in a step with what rests.

    At its beginning no gradients are there. Kept are inputs too, as the planner counts.
    """

    def run() -> torch.Tensor:
        return loss(subject, forward(subject.x))

    subject.clear()
    kept = kept_bytes(run, subject, kept_by)
    step = peaks(run, lambda found: found.backward(), subject.device)["step_peak_bytes"]
    subject.zero()
    return {"peak_bytes": resting + step, "kept_bytes": kept, "kept_by": kept_by}


def measure(
    case: Case, names: Sequence[str], rig: Rig, progress: Progress | None = None
) -> dict[str, Any]:
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
    planner, steps = Planner(subject), Steps(rig, progress)
    try:
        asked = _admit_all(steps, planner, names)
        timed = [name for name in names if name in steps.forwards]
        steps.time(Step, subject, timed, TIMES)
    finally:
        if any(PEERS[name].traits["compiled"] for name in names):
            torch._dynamo.reset()  # lets go of this case's tensors
    chain = planner.plan.chain
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


def _admit_all(steps: Steps, planner: Planner, names: Sequence[str]) -> list[dict[str, Any]]:
    """Check and weigh the peers and our plans; what was asked of the planner."""
    subject, rests = planner.subject, planner.plan.chain.rests
    checks = Checks(subject)  # whose results in float64 are gone before anything is timed
    for way in map(PEERS.__getitem__, names):
        weigh = lambda forward, by=way.traits["kept_by"]: memory(forward, subject, rests, by)  # noqa: E731
        steps.admit_way(way, subject, checks, weigh, family=way.traits["family"])
    budgets = {n: w["peak_bytes"] for n, w in steps.rows.items() if "peak_bytes" in w}
    entries, asked = planner.at(budgets)
    for entry in entries:
        steps.admit(
            entry.name,
            lambda entry=entry: forward_of(subject, entry),
            lambda forward: {"check": checks.check(forward, "ours")},
            lambda forward: memory(forward, subject, rests, "autograd"),
            **planner.said_of(entry),
        )
    return asked


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, with the case that it asks for."""
    parser = Parser(
        "plan", __doc__, "device dtype rounds seconds threads out fresh", rounds=12, seconds=150.0
    )
    add = parser.add
    add("--from", dest="given", type=Path, metavar="FILE", help="draw this file again, beside it")
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
    layers, batch, seq, width, nhead = SIZES[args.device]
    wide = args.d_model or width
    try:
        args.case = Case(
            args.layers or layers, args.dtype,
            next(name for name, first in NORMS.items() if first != args.post_norm), args.dropout,
            args.batch or batch, args.seq or seq, wide,
            args.nhead or heads(wide, width // nhead), args.causal,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    return args


def measured(args: argparse.Namespace, path: Path) -> dict[str, Any] | None:
    """The case's row, from the file or measured; None if it cannot be."""
    compiled = not args.no_compile
    config = {"compiled": compiled, "rounds": args.rounds, "seconds": args.seconds}
    results, names = ResultsFile(path, environment(args.device), config), peers(compiled)
    much = {"seconds": args.seconds, "rounds": args.rounds}
    rig = Rig(torch.device(args.device), DTYPES[args.dtype], **much)

    def one(case: Case, progress: Progress) -> dict[str, Any]:
        return measure(case, names, rig, progress)

    units = 2 * (len(names) + _OURS)
    ((_, row, how, progress),) = rows_of([args.case], names, results, one, args.fresh, units)
    progress.line(how)
    return row


def main(arguments: Sequence[str]) -> int:
    """Measure or read, draw, and print the tables.

    Returns 1 if a result of ours was wrong: of others', FAIL in the table says it.
    """
    args = parse(arguments)
    path = args.given or args.out / f"plan-{args.device}.json"
    try:
        if args.given is None and measured(args, path) is None:
            return 1
        data = read(path)
        wanted = dataclasses.asdict(args.case)
        rows = [r for r in data["results"] if args.given or r["case"] == wanted]
        for row in rows:
            print(f"\n{title(row)}, {row['rounds']} rounds")
            for heading, make in TABLES.items():
                print(f"\n{heading}\n\n{make(row)}")
        made = picture(path, data["results"])
        made.write()
    except (ValueError, ImportError) as error:
        print(f"python -m bench plan: {error}", file=sys.stderr)
        return 2
    print("", path, *made.files, sep="\n")
    return int(any(map(wrong, rows)))


def wrong(row: dict[str, Any]) -> bool:
    """Whether a result of ours, or of what all are compared with, was not right."""
    ways = row["ways"].items()
    return any("failure" in way for name, way in ways if name == BASELINE or is_ours(way))

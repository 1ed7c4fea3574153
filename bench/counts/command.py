"""What kernels move and issue, beside their peers', without a GPU.

    python -m bench counts --op norm swiglu --arch 90

Kernels are compiled as for a GPU, and their PTX is executed on this CPU (`tests/ptx`): ours,
Liger-Kernel's, flash-swiglu-mlp's, and those that Inductor writes for CUDA. Of each: bytes, as
32-byte sectors, instructions of warps, bank conflicts, multiply-adds of matrix instructions; of
what is left to ATen the bytes of inputs and results, and the multiply-adds. Nothing is counted of
wrong results. What a GPU would tune by time takes the configuration of the fewest sectors and
instructions (Inductor's), or the largest tile that fits (Triton's).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench.counts.cases import CASES, OPS, SHARE, WAYS, Case
from bench.counts.peers import peers
from bench.counts.tally import Tally
from bench.kernels.problem import DIRECTIONS, Ways, ways_of
from bench.measure.contest import Contest, Rig, admit
from bench.measure.machine import environment
from bench.measure.options import Parser
from bench.measure.registry import refusal
from bench.measure.results import ResultsFile, Row
from bench.pages import counts as report
from bench.tables import current
from fused_remat.triton.launch import target_of
from tests.ptx.driver import Driver, installed

ARCHES = (80, 90)
#: How many times `TOLERANCE` results may be off: some are rounded between kernels once more.
FACTOR = 1.25
_CPU = torch.device("cpu")


def rows_of(
    case: Case, rig: Rig, driver: Driver, results: ResultsFile, fresh: bool
) -> Iterator[Row]:
    """The rows of a case's directions, from the file if they are there."""
    problem, op = case.problem(rig), case.op
    names = [name for name in WAYS if name in op]
    told = {"arch": driver.arch, "op": op.name, "name": problem.name, "sizes": problem.sizes}
    known = [
        None if fresh else results.find(told | {"direction": direction}, names)
        for direction in DIRECTIONS
    ]
    if all(known):
        yield from filter(None, known)
        return
    torch.manual_seed(0)
    tally, built, refused = Tally(driver), dict[str, Ways](), Row()
    for name in names:
        try:  # the driver stands for the device that it may need
            built[name] = ways_of(dataclasses.replace(op[name], needs=None), problem)
        except Exception as error:  # one broken provider must not cost the others' counts
            refused[name] = refusal(error, bool(op[name].traits.get("optional")))
    for direction in DIRECTIONS:
        ways = {name: tally.of(name, made[direction]) for name, made in built.items()}
        truth, work = functools.partial(problem.truth, direction), problem.work(direction)
        found: dict[str, Any] = admit(Contest(ways, truth, work, (), FACTOR * problem.factor))
        for name in [name for name, way in found.items() if "check" in way]:
            counted = tally.rows[name]
            absent = {"absent": "its kernels are ATen's here"}
            found[name] = found[name] | counted if counted["launches"] else absent
        row = {"case": told | {"direction": direction}, "work": dataclasses.asdict(work)}
        row["ways"] = {name: found.get(name, refused.get(name)) for name in names}
        results.put(row)
        yield row


def run(args: argparse.Namespace, results: ResultsFile) -> list[Row]:
    rows = []
    for arch in args.arch:
        with installed(arch, count=True) as driver, peers(driver, SHARE):
            rig = Rig(_CPU, torch.bfloat16, args.dry_run, target_of(_CPU))
            for case in CASES:
                if case.op.name in args.op:
                    for row in rows_of(case, rig, driver, results, args.fresh):
                        rows.append(row)
                        print(report.block(row), flush=True)
    return rows


def main(arguments: Sequence[str]) -> int:
    """Count, print, and write `counts.json`; 1 if a result was wrong."""
    parser = Parser("counts", __doc__, "out fresh dry-run")
    parser.several("op", default=list(OPS), choices=OPS)
    parser.several("arch", type=int, default=list(ARCHES), choices=ARCHES)
    args = parser.parse(arguments)
    config = {"dtype": "bfloat16", "dry_run": args.dry_run}
    results = ResultsFile(args.out / "counts.json", environment("cpu"), config)
    start = time.perf_counter()
    rows = run(args, results)
    print("", report.summary(current(results.data)), sep="\n")
    print(f"\n{time.perf_counter() - start:.0f} s; {results.path}")
    wrong = report.failures(rows)
    print(*wrong, sep="\n", file=sys.stderr) if wrong else None
    return 1 if wrong else 0

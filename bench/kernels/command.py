"""Kernels against their peers, forward and backward, at the sizes of real models.

    python -m bench kernels --op norm mlp --device cuda
    python -m bench kernels --device cpu --models gpt2 smollm-135m --tokens 512

Each provider's results are checked against float64 before it is timed; all take turns on the same
fresh random inputs. Of each: percentiles, the ratio to the baseline round by round, what it reaches
in GB/s and TFLOP/s, and its share of the ceilings that the same run measures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from bench.kernels.ops import OPS
from bench.kernels.problem import DIRECTIONS, Problem, at_tokens, contests, tiny
from bench.measure.case import DTYPES, dtype_name
from bench.measure.contest import CEILINGS, ROUNDS, Rig, ceiling, measure
from bench.measure.machine import environment
from bench.measure.options import Parser, positive, progress
from bench.measure.registry import described
from bench.pages import kernels as report
from bench.tables import ResultsFile, Row, current, errors_of
from fused_remat.triton.launch import INTERPRETED, target_of

#: Tokens of a model's batch, about.
TOKENS = {"cpu": 1024, "cuda": 16384}


def problems(rig: Rig, args: argparse.Namespace) -> Iterator[tuple[Row, Problem]]:
    """Yield all problems, op by op, each with the case of its rows."""
    for op in args.op:
        seen, known = set(), OPS[op].models
        for name in (name for name in args.models if name in known):
            model = tiny(known[name]) if args.dry_run else known[name]
            size = at_tokens(model, args.tokens)
            where = {"model": name, "batch": size.batch, "seq_len": size.seq_len}
            for problem in OPS[op].of_model(rig, size):
                key = (problem.name, *problem.sizes.items())
                if key not in seen:
                    seen.add(key)
                    how = {"dtype": dtype_name(rig.dtype), "sizes": problem.sizes}
                    yield {"op": op, "name": problem.name} | where | how, problem


def find_ceilings(rig: Rig, results: ResultsFile, fresh: bool) -> None:
    """Measure them, or take them from the file where the same run measured them before."""
    for unit, (name, _) in CEILINGS.items():
        case = {"op": "ceilings", "name": name}
        row = None if fresh else results.find(case, ())
        if row is None:
            row = {"case": case} | ceiling(rig, unit)
            results.put(row)
        rig.ceilings[unit] = row["ways"]["torch"][unit]


def rows_of(
    case: Row, problem: Problem, args: argparse.Namespace, results: ResultsFile
) -> Iterator[Row]:
    """Yield the rows of a problem's directions, from the file if it has these providers."""
    op = OPS[case["op"]]
    names = [n for n in op if args.providers is None or n in (*args.providers, *op.baselines)]
    cases = {direction: case | {"direction": direction} for direction in DIRECTIONS}
    known = [None if args.fresh else results.find(c, names) for c in cases.values()]
    if all(known):
        yield from filter(None, known)
        return
    torch.manual_seed(0)
    for direction, contest in contests(op, problem, names):
        row = {"case": cases[direction]}
        try:
            row |= measure(contest, problem.rig)
        except Exception as error:  # one size too large must not cost the others' results
            row["error"] = described(error)
        results.put(row)
        yield row


def run(args: argparse.Namespace, rig: Rig, results: ResultsFile) -> list[Row]:
    rows = []
    find_ceilings(rig, results, args.fresh)
    print(f"ceilings of this machine: {report.amounts(rig.ceilings)}")
    every = list(problems(rig, args))
    for case, problem in progress(every, len(every), "problem"):
        for row in rows_of(case, problem, args, results):
            rows.append(row)
            print(report.block(row), flush=True)
    return rows


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    shared = "device dtype rounds seconds threads fresh dry-run"
    parser = Parser("kernels", __doc__, shared, rounds=ROUNDS, seconds=1.0)
    parser.several("op", default=list(OPS), choices=OPS)
    models = list(dict.fromkeys(name for op in OPS.values() for name in op.models))
    parser.add("--models", nargs="*", default=models, choices=models)
    parser.add("--tokens", type=positive, help="of a model's batch, about (1024; on cuda 16384)")
    every = list(dict.fromkeys(name for op in OPS.values() for name in op))
    parser.several("providers", choices=every, metavar="NAME", help=f"of {every} (all)")
    args = parser.parse(arguments)
    args.tokens = args.tokens or (32 if args.dry_run else TOKENS[args.device])
    args.op = [name for name in OPS if name in args.op]
    return args


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write `kernels-<device>.json`; 1 if a result was wrong."""
    args = parse(arguments)
    device = torch.device(args.device)
    target = target_of(device) if device.type == "cuda" or INTERPRETED else None
    much = {"seconds": args.seconds, "rounds": args.rounds}
    rig = Rig(device, DTYPES[args.dtype], args.dry_run, target, **much)
    names = ("dtype", "rounds", "seconds", "dry_run")
    config = {name: getattr(args, name) for name in names}
    path = args.out / f"kernels-{device.type}.json"
    results = ResultsFile(path, environment(device), config)
    start = time.perf_counter()
    rows = run(args, rig, results)
    took, known = time.perf_counter() - start, sum("machine" in row for row in rows)
    print("", report.summary(report.entries(current(results.data))), sep="\n")
    print(f"\n{took:.0f} s, {known} of {len(rows)} known before; {path}")
    wrong = errors_of(rows, report.title)
    print(*wrong, sep="\n", file=sys.stderr) if wrong else None
    return 1 if wrong else 0

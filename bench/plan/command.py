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
import time
from pathlib import Path
from typing import Any

import torch

from bench.figures import plans as figure
from bench.layers.command import DEVICE, DTYPE
from bench.layers.subjects import DTYPES, NORMS
from bench.measure.contest import described
from bench.measure.machine import ROOT, environment
from bench.measure.progress import Progress
from bench.measure.results import ResultsFile
from bench.pages.plans import (
    error_table,
    is_ours,
    read,
    rival_table,
    rule_table,
    step_table,
    table,
    title,
)
from bench.plan.measure import Options, measure
from bench.plan.subjects import Case
from bench.plan.ways import BASELINE

#: By device: layers, batch, tokens of a sequence, width, heads.
SIZES = {"cpu": (8, 4, 256, 256, 4), "cuda": (12, 4, 2048, 1024, 8)}
_OURS = 14  # ways, about: their number is known once the peers have been measured


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default=DEVICE, choices=tuple(SIZES), help=f"(default here: {DEVICE})")
    add("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results")
    add("--from", dest="given", type=Path, metavar="FILE", help="draw this file again, beside it")
    add("--layers", type=int, help="(8; on cuda 12)")
    add("--batch", type=int, help="sequences (4)")
    add("--seq", type=int, help="tokens of each (256; on cuda 2048)")
    add("--d-model", type=int, help="(256; on cuda 1024)")
    add("--nhead", type=int, help="(heads 64 wide; on cuda 128)")
    add("--post-norm", action="store_true")
    add("--causal", action="store_true", help="with a causal mask")
    add("--dropout", type=float, default=0.0)
    add("--dtype", choices=DTYPES, help="(default: float32; on cuda bfloat16)")
    add("--no-compile", action="store_true", help="without torch.compile, which takes long")
    add("--rounds", type=int, default=Options.rounds, help=f"timed at most ({Options.rounds})")
    add("--seconds", type=float, default=Options.seconds,
        help=f"timed, about ({Options.seconds:g}); five rounds in any case")  # fmt: skip
    add("--threads", type=int, help="torch's threads on CPU")
    add("--fresh", action="store_true", help="measure again what is in the file already")
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, with the case that it asks for."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if not args.given and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    layers, batch, seq, width, heads = SIZES[args.device]
    wide = args.d_model or width
    head_width = width // heads
    try:
        if args.nhead is None and wide > head_width and wide % head_width:
            raise ValueError(f"d_model {wide} is no multiple of {head_width}: give --nhead")
        args.case = Case(
            args.layers or layers, args.dtype or DTYPE[args.device],
            next(name for name, first in NORMS.items() if first != args.post_norm), args.dropout,
            args.batch or batch, args.seq or seq, wide,
            args.nhead or max(1, wide // head_width), args.causal,
        )  # fmt: skip
    except ValueError as error:
        parser.error(str(error))
    return args


def measured(args: argparse.Namespace, path: Path) -> dict[str, Any] | None:
    """The case's row, from the file or measured; None if it cannot be."""
    options = Options(args.device, not args.no_compile, args.rounds, args.seconds)
    config = {"compiled": options.compiled, "rounds": args.rounds, "seconds": args.seconds}
    results = ResultsFile(path, environment(args.device), config)
    row = None if args.fresh else results.find(dataclasses.asdict(args.case), options.peers)
    if row is not None:
        print(f"in the file already, {row['rounds']} rounds")
        return row
    start = time.perf_counter()
    with Progress(len(options.peers) + _OURS, "ways") as progress:
        try:
            row = measure(args.case, options, progress)
        except Exception as error:
            progress.line(f"FAIL: {described(error)}")
            return None
    results.put(row)
    print(f"{time.perf_counter() - start:.0f} s, {row['rounds']} rounds")
    return row


def show(row: dict[str, Any]) -> None:
    """Print the tables of a row."""
    print(f"\n{title(row)}, {row['rounds']} rounds")
    for heading, make in TABLES.items():
        print(f"\n{heading}\n\n{make(row)}")


TABLES = {
    "All ways:": table,
    "Ours within each peer's peak:": rival_table,
    "Simpler rules within the same, as predicted:": rule_table,
    "Predictions against what was measured of all plans that were run:": error_table,
    "A layer's steps:": step_table,
}


def main(arguments: list[str]) -> int:
    """Measure or read, draw, and print the tables.

    Returns 1 if a result of ours was wrong: of others', FAIL in the table says it.
    """
    args = parse(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    path = args.given or args.out / f"plan-{args.device}.json"
    try:
        if args.given is None and measured(args, path) is None:
            return 1
        data = read(path)
        wanted = dataclasses.asdict(args.case)
        rows = [r for r in data["results"] if args.given or r["case"] == wanted]
        for row in rows:
            show(row)
        pictures = figure.draw(data, path.parent, path.stem)
    except (ValueError, ImportError) as error:
        print(f"python -m bench plan: {error}", file=sys.stderr)
        return 2
    print("", path, *pictures, sep="\n")
    return int(any(map(wrong, rows)))


def wrong(row: dict[str, Any]) -> bool:
    """Whether a result of ours, or of what all are compared with, was not right."""
    ways = row["ways"].items()
    return any("failure" in way for name, way in ways if name == BASELINE or is_ours(way))

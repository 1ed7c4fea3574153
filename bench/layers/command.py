"""Time and memory of a training step of one encoder layer, in every way, side by side.

    python -m bench layers --device cpu --out bench/results
    python -m bench layers --dropout 0 --d-model 512 1024 --seq-len 512 2048 --ways stock full lean

A step is forward and backward; gradients are added into `.grad`s that exist, the input wants one.
Every way is checked before it is timed: a wrong one prints FAIL instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.layers.measure import Options, measure, steps_of
from bench.layers.subjects import ACTIVATIONS, DTYPES, NORMS, Case
from bench.layers.ways import BASELINE, DEFAULT, GROUPS, WAYS, select
from bench.measure.contest import described
from bench.measure.machine import ROOT, environment, version
from bench.measure.progress import Progress
from bench.measure.results import ResultsFile
from bench.pages.layers import case_table, target_table, title

Sizes = tuple[int, int, int, int]

#: By device: (B, S, D, H), and dtypes. A CPU without bfloat16 products takes minutes a step of it.
SIZES: dict[str, tuple[Sizes, ...]] = {
    "cpu": ((4, 512, 512, 8), (2, 512, 1024, 16)),
    "cuda": ((8, 2048, 1024, 8), (8, 2048, 2048, 16), (4, 2048, 4096, 32)),
}
DTYPE = {"cpu": "float32", "cuda": "bfloat16"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DROPOUTS = (0.0, 0.1)


def grid(args: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for, each once.

    An axis that is given takes the place of that of `--sizes`; without `--nhead`, heads stay as
    wide as they are there.
    """
    every: dict[Sizes, None] = {}
    for batch, seq_len, width, nhead in args.sizes:
        axes = (args.batch or [batch], args.seq_len or [seq_len], args.d_model or [width])
        for b, s, d in itertools.product(*axes):
            for h in args.nhead or [_heads(d, width // nhead)]:
                every[b, s, d, h] = None
    rest = itertools.product(args.dtype, args.norm, args.dropout)
    return [
        Case(dtype, norm, dropout, *sizes, args.activation, args.causal)
        for sizes, (dtype, norm, dropout) in itertools.product(every, rest)
    ]


def _heads(d_model: int, head_width: int) -> int:
    if d_model > head_width and d_model % head_width:
        raise ValueError(
            f"d_model {d_model} is no multiple of the width of a head, {head_width}: give --nhead"
        )
    return max(1, d_model // head_width)


def sizes(text: str) -> Sizes:
    """(B, S, D, H) of "4x512x512x8". Raises: ArgumentTypeError, whose text the user sees."""
    found = [int(part) for part in text.split("x") if part.isdecimal()]
    if len(found) != text.count("x") + 1 or len(found) != 4:
        raise argparse.ArgumentTypeError(f"expected BxSxDxH, got {text!r}")
    batch, seq_len, d_model, nhead = found
    if min(found) < 1 or d_model % nhead:
        raise argparse.ArgumentTypeError(f"{text}: all positive, D a multiple of H")
    return batch, seq_len, d_model, nhead


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"ways: {', '.join(WAYS)}\ngroups of them: {', '.join(GROUPS)}",
    )
    add = parser.add_argument
    add("--device", default=DEVICE, choices=tuple(SIZES), help=f"(default here: {DEVICE})")
    add("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results file")
    add("--dtype", nargs="+", choices=DTYPES, help="(default: float32; on cuda bfloat16)")
    add("--norm", nargs="+", default=list(NORMS), choices=NORMS)
    add("--dropout", nargs="+", type=float, default=list(DROPOUTS))
    add("--sizes", nargs="+", type=sizes, metavar="BxSxDxH")
    for axis in ("batch", "seq-len", "d-model", "nhead"):
        add(f"--{axis}", nargs="+", type=int, help="in place of that of --sizes")
    add_measuring(parser, rounds=36, seconds=60.0, ways=DEFAULT)
    return parser


def add_measuring(
    parser: argparse.ArgumentParser, rounds: int, seconds: float, ways: Sequence[str]
) -> None:
    """Options of whatever measures layers; the defaults are for a case."""
    add = parser.add_argument
    add("--activation", default="gelu", choices=ACTIVATIONS)
    add("--causal", action="store_true", help="with a causal mask")
    shown = ", ".join(ways)
    add("--ways", nargs="+", default=list(ways), metavar="WAY", help=f"names, groups ({shown})")
    add("--rounds", type=int, default=rounds, help=f"timed of a case at most ({rounds})")
    add("--seconds", type=float, default=seconds, help=f"timed of a case, about ({seconds:g})")
    add("--threads", type=int, help="torch's threads on CPU")
    add("--fresh", action="store_true", help="measure again what is in the file already")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; the ways come in the order of the table, the baseline always with them."""
    parser = _parser()
    args = parser.parse_args(arguments)
    args.sizes = args.sizes or list(SIZES[args.device])
    args.dtype = args.dtype or [DTYPE[args.device]]
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        args.ways = select(args.ways, args.device)
        args.cases = grid(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def row_of(
    case: Case, options: Options, results: ResultsFile, progress: Progress, fresh: bool
) -> tuple[dict[str, Any] | None, str]:
    """The case's row, from the file or measured, and which; None and why if it cannot be."""
    row = None if fresh else results.find(dataclasses.asdict(case), options.ways)
    if row is not None:
        progress.done(steps_of(options))
        return row, f"in the file already, {row['rounds']} rounds"
    start = time.perf_counter()
    try:
        row = measure(case, options, progress)
    except Exception as error:  # a case too large, say, must not cost the others' results
        return None, f"FAIL: {described(error)}"
    results.put(row)
    return row, f"{time.perf_counter() - start:.0f} s, {row['rounds']} rounds"


def run(args: argparse.Namespace, results: ResultsFile) -> bool:
    """Measure and print the cases that the file does not have; whether what is ours was right."""
    options = Options(args.device, args.ways, args.rounds, args.seconds)
    right = True
    with Progress(len(args.cases) * steps_of(options), "steps") as progress:
        for index, case in enumerate(args.cases):
            row, how = row_of(case, options, results, progress, args.fresh)
            what = title(row or {"case": dataclasses.asdict(case)})
            progress.line(f"\n[{index + 1}/{len(args.cases)}] {what}")
            progress.line(f"({how})" if row is None else f"{case_table(row)}\n({how})")
            right &= row is not None and not answered_for(row)
    return right


def answered_for(row: dict[str, Any]) -> list[str]:
    """Whose wrong results are an error of this project: ours, and what all are compared with."""
    wrong = [name for name, found in row["ways"].items() if "failure" in found]
    return [n for n in wrong if n == BASELINE or WAYS[n].traits["group"] == "ours"]


def main(arguments: list[str]) -> int:
    """Measure the grid, print a table per case and the targets of CPUs.

    Returns 1 if a result of ours was wrong: of PyTorch's own, FAIL in the table says it.
    """
    args = parse(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    config = {
        "ways": args.ways,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "dim_feedforward": "4 D",
        "torch_remat": version("torch-remat"),
    }
    path = args.out / f"layers-{args.device}.json"
    results = ResultsFile(path, environment(args.device), config)
    right = run(args, results)
    targets = f"\n{target_table(results.data)}\n" if args.device == "cpu" else ""
    print(f"{targets}\n{path}")
    return 0 if right else 1

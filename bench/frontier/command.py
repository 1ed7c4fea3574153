"""Memory against time: every way to train a layer, at a sweep of shapes, as a Pareto picture.

    python -m bench frontier --device cpu
    python -m bench frontier --norm post --dropout 0.1 --seq-len 512 2048 --d-model 512
    python -m bench frontier --from bench/results/layers-cpu.json --out DIR

Measured as `bench layers` does, at a fixed number of tokens: over S at the middle width, and over D
at the middle length. Written to the folder: frontier.json, .md, .png and .svg. A run is taken up
where it ended; shapes that are not asked for leave the folder. `--from` draws what result files
hold, and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import torch

from bench.frontier import files
from bench.frontier.points import collected, is_ours, title
from bench.frontier.report import changes, panel_table, sentences
from bench.layers.command import DEVICE, add_measuring, row_of, sizes
from bench.layers.measure import Options, steps_of
from bench.layers.subjects import DTYPES, NORMS, Case
from bench.layers.ways import BASELINE, GROUPS, WAYS, select
from bench.measure.machine import ROOT, environment, version
from bench.measure.progress import Progress
from bench.measure.results import ResultsFile
from bench.tables import read

#: Device -> tokens of a step, lengths, widths.
SHAPES = {
    "cpu": (2048, (128, 512, 2048), (256, 512, 1024)),
    "cuda": (16384, (512, 2048, 16384), (1024, 2048, 4096)),
}
HEAD_DIM = {"cpu": 64, "cuda": 128}


def sweep(
    tokens: int, seq_lens: list[int], d_models: list[int], head_dim: int
) -> list[tuple[int, int, int, int]]:
    """(B, S, D, H): over S at the middle D, then over D at the middle S.

    >>> sweep(1024, [256, 1024], [64, 128], 32)
    [(4, 256, 128, 4), (1, 1024, 128, 4), (1, 1024, 64, 2)]

    Raises: ValueError where the tokens are no whole sequences, or a width no whole heads.
    """
    for seq_len in seq_lens:
        if not 1 <= seq_len <= tokens or tokens % seq_len:
            raise ValueError(f"{tokens} tokens are no whole sequences of {seq_len}")
    for d_model in d_models:
        if d_model < 1 or d_model % head_dim:
            raise ValueError(f"a width of {d_model} is no whole heads of {head_dim}")
    middle_s, middle_d = seq_lens[len(seq_lens) // 2], d_models[len(d_models) // 2]
    pairs = [*((s, middle_d) for s in seq_lens), *((middle_s, d) for d in d_models)]
    return [(tokens // s, s, d, d // head_dim) for s, d in dict.fromkeys(pairs)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"ways: {', '.join(WAYS)}\ngroups of them: {', '.join(GROUPS)}",
    )
    add = parser.add_argument
    add("--device", default=DEVICE, choices=tuple(SHAPES), help=f"(default here: {DEVICE})")
    add("--out", type=Path, help="folder (default: bench/results/frontier-DEVICE)")
    add("--from", dest="given", nargs="+", type=Path, metavar="FILE", help="draw these results")
    add("--dtype", nargs="+", choices=DTYPES, help="(default: float32; on cuda bfloat16)")
    add("--norm", nargs="+", default=["pre"], choices=NORMS)
    add("--dropout", nargs="+", type=float, default=[0.0])
    add("--tokens", type=int, help="of a step (default: 2048; on cuda 16384)")
    add("--seq-len", nargs="+", type=int, metavar="S")
    add("--d-model", nargs="+", type=int, metavar="D")
    add("--head-dim", type=int, help="(default: 64; on cuda 128)")
    add("--sizes", nargs="+", type=sizes, metavar="BxSxDxH", help="these, not the sweep")
    add_measuring(parser, rounds=24, seconds=120.0, ways=GROUPS)
    return parser


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line, with the cases that it asks for."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.given and args.out is None:
        parser.error("--from needs --out, the folder to write to")
    if not args.given and args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    args.out = args.out or ROOT / "bench" / "results" / f"frontier-{args.device}"
    dtypes = args.dtype or ["float32" if args.device == "cpu" else "bfloat16"]
    try:
        args.ways = select(args.ways, args.device)
        shapes = args.sizes or sweep(*_axes(args))
        args.cases = [
            Case(*rest, *shape, args.activation, args.causal)
            for *rest, shape in itertools.product(dtypes, args.norm, args.dropout, shapes)
        ]
    except ValueError as error:
        parser.error(str(error))
    return args


def _axes(args: argparse.Namespace) -> tuple[int, list[int], list[int], int]:
    tokens, seq_lens, d_models = SHAPES[args.device]
    return (
        args.tokens or tokens, args.seq_len or list(seq_lens), args.d_model or list(d_models),
        args.head_dim or HEAD_DIM[args.device],
    )  # fmt: skip


def measured(args: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The data of a run, and whether every shape has its row, eager's results being right.

    Every shape that the file does not have is measured; what is there of other shapes leaves it.
    """
    config = {
        "ways": args.ways,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "torch_remat": version("torch-remat"),
    }
    results = ResultsFile(args.out / files.DATA, environment(args.device), config)
    options = Options(args.device, args.ways, args.rounds, args.seconds)
    complete = True
    with Progress(len(args.cases) * steps_of(options), "steps") as progress:
        for case in args.cases:
            row, how = row_of(case, options, results, progress, args.fresh)
            progress.line(f"{title(dataclasses.asdict(case))}: {how}")
            complete &= row is not None and "failure" not in row["ways"][BASELINE]
    wanted = [dataclasses.asdict(case) for case in args.cases]
    results.rows = [row for row in results.rows if row["case"] in wanted]
    return results.data, complete


def main(arguments: list[str]) -> int:
    """Measure or read, write the four files and print the tables.

    Returns 1 if a result of ours was wrong, or a shape could not be measured: of the others, the
    tables say it.
    """
    args = parse(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        found, complete = (given(args), True) if args.given else measured(args)
        derived = files.write(args.out, found)
    except (ValueError, ImportError) as error:
        print(f"python -m bench frontier: {error}", file=sys.stderr)
        return 2
    tables = map(panel_table, derived["panels"])
    print("", *tables, changes(derived), sentences(derived), sep="\n\n")
    print("", *(args.out / name for name in (files.DATA, files.PAGE, *files.PICTURES)), sep="\n")
    wrong = {way for panel in derived["panels"] for way in panel["wrong"]}
    return int(not complete or any(map(is_ours, wrong)))


def given(args: argparse.Namespace) -> dict[str, Any]:
    """What the files of `--from` hold, by their paths from the folder."""
    return collected({os.path.relpath(path, args.out): read(path) for path in args.given})

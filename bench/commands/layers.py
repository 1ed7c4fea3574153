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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from bench.measure.case import DTYPES
from bench.measure.contest import Rig
from bench.measure.machine import environment, version
from bench.measure.options import Parser
from bench.measure.progress import Progress
from bench.measure.registry import Registry
from bench.measure.results import ResultsFile, rows_of
from bench.measure.step_contest import measure
from bench.pages.layers import case_table, target_table, title
from bench.subjects.layer_ways import BASELINE, DEFAULT, WAYS, select
from bench.subjects.layers import ACTIVATIONS, NORMS, Case

Sizes = tuple[int, int, int, int]

#: By device: (B, S, D, H), and dtypes. A CPU without bfloat16 products takes minutes a step of it.
SIZES: dict[str, tuple[Sizes, ...]] = {
    "cpu": ((4, 512, 512, 8), (2, 512, 1024, 16)),
    "cuda": ((8, 2048, 1024, 8), (8, 2048, 2048, 16), (4, 2048, 4096, 32)),
}


def grid(args: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for, each once.

    An axis that is given takes the place of that of `--sizes`; without `--nhead`, heads stay as
    wide as they are there.
    """
    every: dict[Sizes, None] = {}
    for batch, seq_len, width, nhead in args.sizes:
        axes = (args.batch or [batch], args.seq_len or [seq_len], args.d_model or [width])
        for b, s, d in itertools.product(*axes):
            for h in args.nhead or [heads(d, width // nhead)]:
                every[b, s, d, h] = None
    return cases(args, every)


def cases(args: argparse.Namespace, sizes: Iterable[Sizes]) -> list[Case]:
    """Every size in every dtype, norm and dropout that was asked for."""
    grid = itertools.product(sizes, args.dtype, args.norm, args.dropout)
    return [Case(*kind, *size, args.activation, args.causal) for size, *kind in grid]


def heads(d_model: int, head_width: int) -> int:
    """As wide as asked for. Raises: ValueError where that is no whole number of them."""
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


def parser_of(
    name: str,
    about: str | None,
    norms: Sequence[str],
    dropouts: Sequence[float],
    ways: Sequence[str],
    **defaults: Any,
) -> Parser:
    """Options of whatever measures layers; the defaults are for a case."""
    parser = Parser(name, about, "device rounds seconds threads out fresh", **defaults)
    parser.several("dtype")
    parser.several("norm", default=list(norms), choices=NORMS)
    parser.several("dropout", type=float, default=list(dropouts))
    parser.several("sizes", type=sizes, metavar="BxSxDxH")
    parser.several("seq-len", type=int, metavar="S", help="in place of that of --sizes")
    parser.several("d-model", type=int, metavar="D", help="in place of that of --sizes")
    parser.add("--activation", default="gelu", choices=ACTIVATIONS)
    parser.add("--causal", action="store_true", help="with a causal mask")
    parser.add_ways(WAYS, ways)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line; the ways come in the order of the table, the baseline always with them."""
    parser = parser_of("layers", __doc__, NORMS, (0.0, 0.1), DEFAULT, rounds=36, seconds=60.0)
    for axis in ("batch", "nhead"):
        parser.several(axis, type=int, help="in place of that of --sizes")
    args = parser.parse(arguments)
    args.sizes = args.sizes or list(SIZES[args.device])
    try:
        args.ways = select(args.ways, args.device)
        args.cases = grid(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def measured(
    args: argparse.Namespace, results: ResultsFile
) -> Iterator[tuple[Case, dict[str, Any] | None, str, Progress]]:
    """Each case, its row, how it came, and where to say so."""

    def one(case: Case, progress: Progress) -> dict[str, Any]:
        much = {"seconds": args.seconds, "rounds": args.rounds}
        rig = Rig(torch.device(args.device), DTYPES[case.dtype], **much)
        return measure(case.subject(rig.device), WAYS, args.ways, rig, progress=progress)

    return rows_of(args.cases, args.ways, results, one, args.fresh, 2 * len(args.ways))


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """How a run measures, as its file has it."""
    return {
        "ways": args.ways,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "torch_remat": version("torch-remat"),
    }


def wrong_of_ours(row: dict[str, Any], ways: Registry[Any], groups: Sequence[str]) -> list[str]:
    """Whose wrong results are an error of this project: ours, and what all are compared with."""
    wrong = [name for name, found in row["ways"].items() if "failure" in found]
    return [n for n in wrong if n == BASELINE or ways[n].traits["group"] in groups]


def main(arguments: Sequence[str]) -> int:
    """Measure the grid, print a table per case and the targets of CPUs.

    Returns 1 if a result of ours was wrong: of PyTorch's own, FAIL in the table says it.
    """
    args = parse(arguments)
    config = config_of(args) | {"dim_feedforward": "4 D"}
    path = args.out / f"layers-{args.device}.json"
    results = ResultsFile(path, environment(args.device), config)
    right = True
    for index, (case, row, how, progress) in enumerate(measured(args, results), start=1):
        what = title(row or {"case": dataclasses.asdict(case)})
        progress.line(f"\n[{index}/{len(args.cases)}] {what}")
        progress.line(f"({how})" if row is None else f"{case_table(row)}\n({how})")
        right &= row is not None and not wrong_of_ours(row, WAYS, ("ours",))
    targets = f"\n{target_table(results.data)}\n" if args.device == "cpu" else ""
    print(f"{targets}\n{path}")
    return 0 if right else 1

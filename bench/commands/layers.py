"""Time and memory of a training step of one encoder layer, by method.

    python -m bench layers --device cpu --publish
    python -m bench layers --dropout 0 --d-model 512 1024 --seq-len 512 2048 --ways stock full lean

A step is forward and backward; gradients are added into existing `.grad`s, the input's as well.
Every way is checked before it is timed: a wrong one prints FAIL instead.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.measure.machine import version
from bench.measure.options import Parser, positive
from bench.measure.registry import Registry
from bench.measure.steps import measure, run
from bench.pages.layers import case_table, title
from bench.subjects.layers import ACTIVATIONS, BASELINE, DEFAULT, NORMS, WAYS, Case
from bench.tables import ResultsFile, Row

Sizes = tuple[int, int, int, int]

#: By device: (B, S, D, H), and dtypes. A CPU without bfloat16 products takes minutes a step of it.
SIZES: dict[str, tuple[Sizes, ...]] = {
    "cpu": ((4, 512, 512, 8), (4, 512, 1024, 16), (8, 512, 512, 8)),
    "cuda": ((8, 2048, 1024, 8), (8, 2048, 2048, 16), (4, 2048, 4096, 32)),
}


def grid(args: argparse.Namespace) -> list[Sizes]:
    """Return the sizes that the command line requests, each once.

    A requested axis replaces that of `SIZES`; without `--nhead`, heads keep the width that they
    have in `SIZES`.
    """
    every: dict[Sizes, None] = {}
    for batch, seq_len, width, nhead in SIZES[args.device]:
        axes = (args.batch or [batch], args.seq_len or [seq_len], args.d_model or [width])
        for b, s, d in itertools.product(*axes):
            for h in args.nhead or [heads(d, width // nhead)]:
                every[b, s, d, h] = None
    return list(every)


def cases(args: argparse.Namespace, sizes: Iterable[Sizes]) -> list[Case]:
    grid = itertools.product(sizes, args.dtype, args.norm, args.dropout)
    return [Case(*kind, *size, args.activation, args.causal) for size, *kind in grid]


def heads(d_model: int, head_width: int) -> int:
    """Return the number of heads. Raises: ValueError unless their width divides d_model."""
    if d_model > head_width and d_model % head_width:
        raise ValueError(
            f"d_model {d_model} is no multiple of the width of a head, {head_width}: give --nhead"
        )
    return max(1, d_model // head_width)


def parser_of(
    name: str,
    about: str | None,
    norms: Sequence[str],
    dropouts: Sequence[float],
    ways: Sequence[str],
    **defaults: Any,
) -> Parser:
    """Return the parser of commands that measure layers."""
    parser = Parser(name, about, "device rounds seconds threads fresh", **defaults)
    parser.several("dtype")
    parser.several("norm", default=list(norms), choices=NORMS)
    parser.several("dropout", type=float, default=list(dropouts))
    parser.several("seq-len", type=positive, metavar="S")
    parser.several("d-model", type=positive, metavar="D")
    parser.add("--activation", default="gelu", choices=ACTIVATIONS)
    parser.add("--causal", action="store_true", help="with a causal mask")
    parser.add_ways(WAYS, ways)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("layers", __doc__, NORMS, (0.0, 0.1), DEFAULT, rounds=36, seconds=60.0)
    for axis in ("batch", "nhead"):
        parser.several(axis, type=positive)
    args = parser.parse(arguments)
    with parser.usage_errors():
        args.ways = WAYS.select(args.ways)
        args.cases = cases(args, grid(args))
    return args


def measured(
    args: argparse.Namespace, file: str, ways: Registry[Any], *shown: Callable[[Row], str]
) -> tuple[ResultsFile, list[Row | None]]:
    """Run the cases in ways of a registry; a row's title and table are `shown`."""
    one = lambda case, rig: measure(case.subject(rig.device), ways, args.ways, rig)  # noqa: E731
    return run(args, file, one, *shown, torch_remat=version("torch-remat"))


def wrong_of_ours(row: Row | None, ways: Registry[Any], *groups: str) -> list[str]:
    """Return the ways whose wrong results are this project's error: ours and the baseline."""
    if row is None:
        return ["all"]
    wrong = [name for name, found in row["ways"].items() if "error" in found]
    return [n for n in wrong if n == BASELINE or ways[n].traits["group"] in groups]


def main(arguments: Sequence[str]) -> int:
    """Measure the grid, print a table per case."""
    args = parse(arguments)
    results, rows = measured(args, f"layers-{args.device}.json", WAYS, title, case_table)
    print(f"\n{results.path}")
    return int(any(wrong_of_ours(row, WAYS, "ours") for row in rows))

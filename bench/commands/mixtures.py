"""Time and memory of a training step of a decoder layer with experts, by method.

    python -m bench mixtures --device cpu --threads 1
    python -m bench mixtures --model qwen3-30b-a3b --part 2 --ways stock full fast

Layers of published models, with widths and heads divided by `--part`; weights are random. A step is
forward and backward; gradients are added into existing ones. Every way's output and gradients are
checked in float64 before it is measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from bench.commands.layers import measured, wrong_of_ours
from bench.measure.options import Parser, positive
from bench.pages.mixtures import case_table, title
from bench.subjects.mixtures import DEFAULT, MIXTURES, WAYS, Case


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `cases` are each model, part, length and dtype."""
    parser = Parser("mixtures", __doc__, "device rounds seconds threads fresh",
                    rounds=12, seconds=60.0)  # fmt: skip
    parser.several("dtype")
    parser.several("model", choices=MIXTURES, default=list(MIXTURES), help="(all)")
    parser.several("part", type=positive, help="divides widths and heads (4; on cuda 1)")
    parser.several("seq-len", type=positive, metavar="S", help="(2048; on cuda 4096)")
    parser.add("--batch", type=positive, default=1)
    parser.by_device(part=([4], [1]), seq_len=([2048], [4096]))
    parser.add_ways(WAYS, DEFAULT)
    args = parser.parse(arguments)
    with parser.usage_errors():
        args.ways = WAYS.select(args.ways)
        grid = itertools.product(args.model, args.part, args.seq_len, args.dtype)
        args.cases = [Case(name, part, args.batch, s, dtype) for name, part, s, dtype in grid]
    return args


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table per case; 1 if a result of ours was wrong."""
    args = parse(arguments)
    results, rows = measured(args, f"mixtures-{args.device}.json", WAYS, title, case_table)
    print(f"\n{results.path}")
    return int(any(wrong_of_ours(row, WAYS, "ours") for row in rows))

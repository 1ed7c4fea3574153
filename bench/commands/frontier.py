"""Memory against time: training methods for a layer, at a sweep of shapes, as a Pareto picture.

    python -m bench frontier --device cpu
    python -m bench frontier --norm post --dropout 0.1 --seq-len 512 2048 --d-model 512

Measured as `bench layers` does, at a fixed number of tokens: over S at the middle width, and over D
at the middle length. Written to the folder: frontier.json and .png, of all shapes that were
measured there on this machine and commit. A run is taken up where it ended.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import figures
from bench.commands.layers import cases, heads, measured, parser_of
from bench.measure.options import positive
from bench.pages.frontier import DATA, RULES, brief, is_ours, panel_table, panels, title
from bench.subjects.layers import BASELINE, WAYS


def sweep(
    tokens: int, seq_lens: list[int], d_models: list[int], head_dim: int
) -> list[tuple[int, int, int, int]]:
    """Return (B, S, D, H): over S at the middle D, then over D at the middle S.

    >>> sweep(1024, [256, 1024], [64, 128], 32)
    [(4, 256, 128, 4), (1, 1024, 128, 4), (1, 1024, 64, 2)]

    Raises: ValueError where the tokens are no whole sequences, or a width no whole heads.
    """
    middle_s, middle_d = seq_lens[len(seq_lens) // 2], d_models[len(d_models) // 2]
    pairs = dict.fromkeys([*((s, middle_d) for s in seq_lens), *((middle_s, d) for d in d_models)])
    if broken := [s for s in seq_lens if tokens % s]:
        raise ValueError(f"{tokens} tokens are no whole sequences of {broken[0]}")
    return [(tokens // s, s, d, heads(d, head_dim)) for s, d in pairs]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(
        "frontier", __doc__, ["pre"], [0.0], WAYS.groups, folder="frontier-{device}",
        rounds=24, seconds=120.0,
    )  # fmt: skip
    parser.add("--tokens", type=positive, help="of a step (default: 2048; on cuda 16384)")
    parser.add("--head-dim", type=positive, help="(default: 64; on cuda 128)")
    parser.by_device(
        tokens=(2048, 16384), seq_len=([128, 512, 2048], [512, 2048, 16384]),
        d_model=([256, 512, 1024], [1024, 2048, 4096]), head_dim=(64, 128),
    )  # fmt: skip
    args = parser.parse(arguments)
    axes = args.tokens, args.seq_len, args.d_model, args.head_dim
    with parser.usage_errors():
        args.ways = WAYS.select(args.ways)
        args.cases = cases(args, sweep(*axes))
    return args


def main(arguments: Sequence[str]) -> int:
    """Measure every shape that the file has not, write the files and print the tables."""
    args = parse(arguments)
    results, rows = measured(args, DATA, WAYS, lambda row: title(row["case"]))
    drawn = panels(results.data)
    print("", *map(panel_table, drawn), RULES, brief(drawn), sep="\n\n")
    try:
        made = figures.frontier(args.out, drawn)
        made.draw(made)
    except (ValueError, ImportError) as error:
        print(f"python -m bench frontier: {error}", file=sys.stderr)
        return 2
    print("", args.out / DATA, *made.files, sep="\n")
    complete = all(row and "error" not in row["ways"][BASELINE] for row in rows)
    return int(not complete or any(is_ours(way) for panel in drawn for way in panel.wrong))

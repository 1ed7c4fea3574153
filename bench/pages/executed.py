"""What was executed of the compiled kernels: tables of docs/tables/executed.md.

The file is written by the tests (`tests/executed.py`).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable

from bench.tables import RESULTS, Cell, Row, markdown, number

EXECUTED = RESULTS / "executed" / "executed.tsv"
#: Whose counts are shown.
_SHOWN = ("sm_80 bfloat16", "sm_90 bfloat16")
Rows = dict[str, list[Row]]


def _read() -> list[Row]:
    with EXECUTED.open() as file:
        return list(csv.DictReader(file, delimiter="\t"))


def _by(rows: Iterable[Row], column: str) -> Rows:
    found: Rows = defaultdict(list)
    for row in rows:
        found[row[column]].append(row)
    return found


def targets() -> str:
    """For every architecture and dtype: the audit's default cases, and those executed right."""
    cells: list[list[Cell]] = []
    for target, rows in sorted(_by(_read(), "target").items()):
        wrong = {row["case"] for row in rows if row["right"] != "1"}
        right = [
            {row["case"] for row in rows if row["default"] == default} - wrong for default in "10"
        ]
        cells.append(
            [target, rows[0]["defaults"], *(str(len(cases)) for cases in (*right, wrong)),
             number(len(rows))]
        )  # fmt: skip
    head = ("target", "default cases", "right", "others right", "wrong", "launches")
    return markdown(head, cells)


def kernels() -> str:
    """Of each kernel, all cases of a target together."""
    parts = []
    for target, rows in _by(_read(), "target").items():
        if target in _SHOWN:
            of_sizes = [row for row in rows if row["sizes"] == "ragged"]
            cells = [_counts(name, of) for name, of in sorted(_by(of_sizes, "kernel").items())]
            head = (
                target, "launches", "opcodes", "warp instructions", "multiply-adds", "least",
                "KiB loaded", "least", "KiB stored", "least", "shared passes", "least",
            )  # fmt: skip
            parts.append(markdown(head, cells))
    return "\n\n".join(parts)


def _products(rows: list[Row]) -> list[Cell]:
    """Multiply-adds of matrix instructions, and those needed, of launches where they are known."""
    known = [row for row in rows if row["least multiply-adds"] != "0"]
    if not known:
        return ["–", "–"]
    columns = "multiply-adds", "least multiply-adds"
    return [number(sum(int(row[column]) for row in known)) for column in columns]


def _counts(name: str, rows: list[Row]) -> list[Cell]:
    def total(column: str, scale: float = 1.0) -> Cell:
        return number(sum(int(row[column]) for row in rows) * scale)

    def beside(what: str, least: str, scale: float = 1.0) -> list[Cell]:
        return [total(what, scale), total(least, scale)]

    return [
        f"`{name.removesuffix('_kernel')}`", str(len(rows)),
        number(max(int(row["opcodes"]) for row in rows)),
        total("warp instructions"), *_products(rows),
        *beside("load sectors", "touched load sectors", 1 / 32),
        *beside("store sectors", "touched store sectors", 1 / 32),
        *beside("shared passes", "shared passes least"),
    ]  # fmt: skip

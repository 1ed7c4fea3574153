"""What was executed of the compiled kernels: tables of docs/tables/executed.md.

The file is written by the tests (`tests/executed.py`).
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable

from bench.tables import RESULTS, Cell, Row, markdown, number

EXECUTED = RESULTS / "executed" / "executed.tsv"
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

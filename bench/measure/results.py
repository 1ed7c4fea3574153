"""The results file: a row for each measured case, with where and how it was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class ResultsFile:
    """A JSON file with the machine and the config of the last run, and a row per measured case."""

    def __init__(self, path: Path, machine: Row, config: Row) -> None:
        self.path, self.machine, self.config = path, machine, config
        self.rows: list[Row] = json.loads(path.read_text())["results"] if path.exists() else []

    @property
    def data(self) -> Row:
        return {"machine": self.machine, "config": self.config, "results": self.rows}

    @property
    def own(self) -> list[Row]:
        """Rows of this machine, commit, code and config, whatever the ways."""

        def of(where: Row, how: Row) -> tuple[Row, Row]:
            return {**where, "date": None}, {**how, "ways": None}

        here = of(self.machine, self.config)
        return [row for row in self.rows if of(row["machine"], row["config"]) == here]

    def find(self, case: Row, ways: Iterable[str]) -> Row | None:
        """Return the case's row if these ways were measured; one that failed is tried again."""
        alike = (row for row in self.own if row["case"] == case and "ways" in row)
        return next((row for row in alike if set(ways) <= set(row["ways"])), None)

    def put(self, row: Row) -> None:
        """Add the row of a case, in place of the one that is there, and write the file."""
        new = row | {"machine": self.machine, "config": self.config}
        there = [old["case"] for old in self.rows]
        at = there.index(row["case"]) if row["case"] in there else len(there)
        self.rows[at : at + 1] = [new]
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
        unfinished.replace(self.path)

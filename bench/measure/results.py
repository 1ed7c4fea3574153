"""The results file: a row for each measured case, with where and how it was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.measure.machine import ROOT


def folder_of(dry_run: bool) -> Path:
    """Where results go by default; a dry run's are kept from those that pages are made of."""
    return ROOT / "build" / "dry-run" if dry_run else ROOT / "bench" / "results"


class ResultsFile:
    """A JSON file with the machine and the config of the last run, and a row per measured case.

    A row holds its `case`, the `machine` it was measured on, its `config`, and `ways`. It is
    written after every case, so that a run that was cut short is taken up where it ended.
    """

    def __init__(self, path: Path, machine: dict[str, Any], config: dict[str, Any]) -> None:
        self.path, self.machine, self.config = path, machine, config
        self.rows: list[dict[str, Any]] = []
        if path.exists():
            self.rows = json.loads(path.read_text())["results"]

    @property
    def data(self) -> dict[str, Any]:
        """What the file holds."""
        return {"machine": self.machine, "config": self.config, "results": self.rows}

    def find(self, case: dict[str, Any], ways: Iterable[str]) -> dict[str, Any] | None:
        """The case's row, if these ways were measured on this machine, commit, code and config."""
        for row in self.rows:
            if "ways" not in row:  # it failed as a whole, and is tried again
                continue
            same = row["case"] == case and set(ways) <= set(row["ways"])
            same = same and {**row["machine"], "date": None} == {**self.machine, "date": None}
            if same and {**row["config"], "ways": None} == {**self.config, "ways": None}:
                return row
        return None

    def put(self, row: dict[str, Any]) -> None:
        """Add the row of a case, in place of the one that is there, and write the file."""
        new = row | {"machine": self.machine, "config": self.config}
        for index, old in enumerate(self.rows):
            if old["case"] == row["case"]:
                self.rows[index] = new
                break
        else:
            self.rows.append(new)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
        unfinished.replace(self.path)

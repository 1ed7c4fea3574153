"""The results file: a row for each measured case, with where and how it was measured."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.measure.machine import ROOT

PATIENCE = 10.0  # seconds without a bar
Row = dict[str, Any]


def folder_of(dry_run: bool) -> Path:
    """Where results go by default; a dry run's are kept from those that pages are made of."""
    return ROOT / "build" / "dry-run" if dry_run else ROOT / "bench" / "results"


class ResultsFile:
    """A JSON file with the machine and the config of the last run, and a row per measured case.

    A row holds its `case`, the `machine` it was measured on, its `config`, and `ways`. It is
    written after every case, so that a run that was cut short is taken up where it ended.
    """

    def __init__(self, path: Path, machine: Row, config: Row) -> None:
        self.path, self.machine, self.config = path, machine, config
        self.rows: list[Row] = json.loads(path.read_text())["results"] if path.exists() else []

    @property
    def data(self) -> Row:
        return {"machine": self.machine, "config": self.config, "results": self.rows}

    def find(self, case: Row, ways: Iterable[str]) -> Row | None:
        """The case's row, if these ways were measured on this machine, commit, code and config."""

        def fits(row: Row) -> bool:
            if row["case"] != case or "ways" not in row:  # it failed as a whole, and is tried again
                return False
            here = {**row["machine"], "date": None} == {**self.machine, "date": None}
            alike = {**row["config"], "ways": None} == {**self.config, "ways": None}
            return here and alike and set(ways) <= set(row["ways"])

        return next(filter(fits, self.rows), None)

    def put(self, row: Row) -> None:
        """Add the row of a case, in place of the one that is there, and write the file."""
        new = row | {"machine": self.machine, "config": self.config}
        there = [old["case"] for old in self.rows]
        at = there.index(row["case"]) if row["case"] in there else len(there)
        self.rows[at : at + 1] = [new]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
        unfinished.replace(self.path)


class Progress:
    """How much of `total` is done, and the lines of what was found.

    The bar is tqdm's, on a terminal, for what takes long; without either, only the lines are
    printed.
    """

    def __init__(self, total: int, unit: str) -> None:
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(
            total=total, unit=f" {unit}", delay=PATIENCE, disable=None, dynamic_ncols=True,
            smoothing=0.1, leave=False,
        )  # fmt: skip

    def line(self, text: str) -> None:
        if self._bar is None or self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def at(self, what: str) -> None:
        """Say what is being measured now: until the next is done the bar is not drawn again."""
        if self._bar is not None:
            shown = not self._bar.disable and time.time() >= self._bar.start_t + PATIENCE
            self._bar.set_description(what, refresh=shown)

    def done(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.close()

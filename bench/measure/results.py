"""The results file: a row for each measured case, with where and how it was measured."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.measure.admission import described
from bench.measure.case import Case
from bench.measure.machine import ROOT
from bench.measure.progress import Progress


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


def rows_of(
    cases: Sequence[Case],
    ways: Sequence[str],
    results: ResultsFile,
    measure: Callable[[Case, Progress], dict[str, Any]],
    fresh: bool,
    units: int,
) -> Iterator[tuple[Case, dict[str, Any] | None, str, Progress]]:
    """Every case's row, from the file or measured, and which; None and why if it cannot be.

    Args:
        ways: what a row of the file has to have, or it is measured again; `fresh`: all are.
        measure: gives the progress so many `units`.
    """
    with Progress(len(cases) * units, "steps") as progress:
        for case in cases:
            row = None if fresh else results.find(dataclasses.asdict(case), ways)
            if row is not None:
                progress.done(units)
                yield case, row, f"in the file already, {row['rounds']} rounds", progress
                continue
            start = time.perf_counter()
            try:
                row = {"case": dataclasses.asdict(case)} | measure(case, progress)
            except Exception as error:  # a case too large, say, must not cost the others' results
                yield case, None, f"FAIL: {described(error)}", progress
                continue
            results.put(row)
            seconds = time.perf_counter() - start
            yield case, row, f"{seconds:.0f} s, {row['rounds']} rounds", progress

"""Tests on a GPU: a pytest plugin that writes each outcome at once, and sections of tests.

    python -m pytest -m gpu -p bench.gpu.outcomes --outcomes bench/results/gpu

Writes tests.json in that folder, for docs/tables/composition.md: names and outcomes, no messages.
Tests whose outcome at this commit is there are not run again; a failure of the device ends the run.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.commands.gpu import SECTIONS
from bench.measure.machine import ROOT, machine
from bench.pages.composition import OUTCOMES
from bench.tables import RESULTS, Row, files, load

#: Folders of tests that run kernels.
FOLDERS = ("gpu", "kernels", "backend")
#: Outcomes of a case in which a process ended: it runs again once, after all others.
UNFINISHED = "unfinished", "unfinished again"
#: In the message of a failure after which nothing on the device works.
BROKEN_DEVICE = "CUDA error"


def _function(case: str) -> str:
    return case.split("[")[0]


class Outcomes:
    """The outcomes of a run, in a file: by case, and by test, which passes if no case fails."""

    def __init__(self, folder: Path, names: Sequence[str], where: Row) -> None:
        self.path, self.names, self.where = folder / OUTCOMES, names, where
        before = load(self.path) if self.path.exists() else {}
        same = all(
            before.get("machine", {}).get(k) == where[k] for k in ("gpu", "commit", "source")
        )
        self.cases: dict[str, str] = before.get("cases", {}) if same else {}
        self.session: Any = None

    def write(self) -> None:
        """Write the file; a reader sees the one before or this one."""
        tests: dict[str, str] = {}
        for case, outcome in sorted(self.cases.items()):
            name = _function(case)
            if outcome in ("failed", UNFINISHED[1]):
                tests[name] = "failed"
            elif outcome == "passed":
                tests.setdefault(name, outcome)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        found = {"machine": self.where, "tests": tests, "cases": self.cases}
        new.write_text(json.dumps(found, indent=1) + "\n")
        new.replace(self.path)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remember the session, which a broken device ends."""
        self.session = session

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        """Leave out what is known or not named; a case in which a process ended comes last."""
        order = {name: index for index, name in enumerate(self.names)}
        chosen = [
            item
            for item in items
            if (not order or _function(item.nodeid) in order)
            and self.cases.get(item.nodeid, UNFINISHED[0]) == UNFINISHED[0]
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        chosen.sort(key=lambda i: (i.nodeid in self.cases, order.get(_function(i.nodeid), 0)))
        items[:] = chosen

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record that a case runs."""
        self.cases[nodeid] = UNFINISHED[nodeid in self.cases]
        self.write()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a case when it is over, or fails."""
        if report.failed or report.skipped:
            self.cases[report.nodeid] = report.outcome
        elif report.when == "teardown" and self.cases[report.nodeid] in UNFINISHED:
            self.cases[report.nodeid] = "passed"
        if report.failed or report.when == "teardown":
            self.write()
        if report.failed and BROKEN_DEVICE in str(report.longrepr):
            self.session.shouldstop = "the device is broken"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the folder of the outcomes, and the tests to run."""
    parser.addoption("--outcomes", type=Path, help="write the outcomes to tests.json in here")
    parser.addoption("--named", nargs="*", default=(), help="only these tests, in this order")


def pytest_configure(config: pytest.Config) -> None:
    """Record in the main process, not in pytest-xdist's workers, which run some of the tests."""
    folder = config.getoption("--outcomes")
    if folder and not hasattr(config, "workerinput"):
        import torch

        where = machine("cuda" if torch.cuda.is_available() else "cpu")
        names = config.getoption("--named")
        config.pluginmanager.register(Outcomes(folder.absolute(), names, where))


# --- sections of a session


def functions() -> list[str]:
    """Return all test functions of `FOLDERS`, by the name of their outcomes."""
    found = []
    for path in sorted(
        path for name in FOLDERS for path in (ROOT / "tests" / name).glob("test_*.py")
    ):
        for line in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(line, ast.FunctionDef) and line.name.startswith("test_"):
                found.append(f"{path.relative_to(ROOT).as_posix()}::{line.name}")
    return found


def lacking(gpu: str | None, root: Path = RESULTS) -> list[str]:
    """Return the functions that did not pass when last run on a GPU; those that failed first."""
    last: dict[str, str] = {}
    every = [
        data for path in files(OUTCOMES, root) if (data := load(path))["machine"]["gpu"] == gpu
    ]
    for data in sorted(every, key=lambda data: data["machine"]["date"]):
        last |= data["tests"]
    names = [name for name in functions() if last.get(name) != "passed"]
    return sorted(names, key=lambda name: name not in last)


def run(
    rig: Any, paths: Sequence[str], seconds: float, names: Sequence[str] = (), marks: str = "gpu"
) -> Row:
    """Run tests for so long; of what they print, OUT/tests.txt has all.

    Returns {"found": counts}, with an "error" if any failed, or {"skipped": why} if time was over.
    """
    ends, path = time.perf_counter() + min(seconds, rig.left), rig.out / OUTCOMES
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "bench.gpu.outcomes",
               "--outcomes", str(rig.out), "-m", marks, *paths, "--named", *names]  # fmt: skip

    def known() -> list[str]:
        return list(load(path)["cases"].values()) if path.exists() else []

    status, before = -1, ["nothing"]
    # A broken device or a crash ends a process: the next one continues.
    while (status < 0 or status == pytest.ExitCode.INTERRUPTED) and before != known():
        before = known()
        with (rig.out / "tests.txt").open("a") as printed:
            try:
                status = subprocess.run(
                    command, cwd=ROOT, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False,
                    stdout=printed, stderr=subprocess.STDOUT,
                    timeout=max(1.0, ends - time.perf_counter()),
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return {"skipped": "time was over; the next call continues"}
    row: Row = {"found": {outcome: known().count(outcome) for outcome in sorted(set(known()))}}
    wrong = {"failed", UNFINISHED[1]} & set(row["found"])
    return row | ({"error": "tests failed: see tests.json"} if wrong else {})


def _entry(rig: Any, section: str, names: Sequence[str] = ()) -> Any:
    paths = [f"tests/{name}" for name in (FOLDERS[:1] if rig.dry else FOLDERS)]
    names = ("nobody",) if rig.dry else names  # in the interpreter they take minutes
    seconds = 60.0 * SECTIONS[section].minutes
    return {"name": section}, functools.partial(run, paths=paths, seconds=seconds, names=names)


def lacking_entries(rig: Any) -> Iterator[Any]:
    """Yield the tests that failed or were not run on this GPU."""
    yield _entry(rig, "tests", lacking(None if rig.dry else machine(rig.device)["gpu"]))


def all_entries(rig: Any) -> Iterator[Any]:
    """Yield the other tests."""
    yield _entry(rig, "all tests")

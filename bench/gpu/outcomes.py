"""A pytest plugin: which tests passed on this GPU, for docs/tables/composition.md.

    python -m pytest -m gpu -p bench.gpu.outcomes

Writes bench/results/gpu/tests.json: names and outcomes, no messages. Without a GPU it writes
nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.measure.machine import machine
from bench.pages.composition import OUTCOMES

_found: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record a test, which passes if none of its parameters fails; skipped ones do not count."""
    name = report.nodeid.split("[")[0]
    if report.failed:
        _found[name] = "failed"
    elif report.when == "call" and report.passed:
        _found.setdefault(name, "passed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write in the main process, not in pytest-xdist's workers, which ran some of the tests."""
    if torch.cuda.is_available() and not hasattr(session.config, "workerinput"):
        write(OUTCOMES)


def write(path: Path) -> None:
    """Write outcomes and the machine; earlier outcomes at this commit stay."""
    path.parent.mkdir(parents=True, exist_ok=True)
    where = machine("cuda" if torch.cuda.is_available() else "cpu")
    before = json.loads(path.read_text()) if path.exists() else {}
    same = all(before.get("machine", {}).get(k) == where[k] for k in ("gpu", "commit", "source"))
    kept = before.get("tests", {}) if same else {}
    found = {"machine": where, "tests": dict(sorted({**kept, **_found}.items()))}
    path.write_text(json.dumps(found, indent=1) + "\n")

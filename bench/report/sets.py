"""The sets of results in bench/results: this CPU's files, and a folder for each run on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.measure.machine import ROOT

RESULTS = ROOT / "bench" / "results"


def read(path: Path) -> dict[str, Any] | None:
    """A results file; None where it is not there yet."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def machine_line(machine: dict[str, Any]) -> str:
    """Where, with what and of which code something was measured."""
    where = [machine["cpu"], f"{machine['threads']} thread{'s' * (machine['threads'] > 1)}"]
    if machine.get("gpu"):
        driver = f"driver {machine['driver']}" if machine.get("driver") else None
        where = [machine["gpu"], *filter(None, [driver])]
    elif not machine.get("native_bfloat16", True):
        where.append("without bfloat16 products of its own")
    versions = {"torch": machine["torch"], **machine.get("versions", {})}
    where += [f"{name} {version}" for name, version in versions.items() if version]
    commit = (machine.get("commit") or "unknown")[:7]
    changed = " with uncommitted changes" if machine.get("dirty") else ""
    return f"Measured on {', '.join(where)}, commit {commit}{changed}."


def gpu_sets(root: Path = RESULTS) -> dict[Path, list[dict[str, Any]]]:
    """Folder -> the results files in it that were measured on a GPU, the newest set first."""
    found: dict[Path, list[dict[str, Any]]] = {}
    for path in sorted(root.glob("*/*.json"), reverse=True):
        data = read(path)
        if isinstance(data, dict) and isinstance(data.get("results"), list):
            machine = data.get("machine", {})
            if machine.get("gpu") and not data.get("config", {}).get("dry_run"):
                found.setdefault(path.parent, []).append(data)
    return found

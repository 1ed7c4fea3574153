"""The targets of GPUs, met or not, of every set that was measured on one, and where steps spend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.gpu import report, targets
from bench.layers.report import current
from bench.report.sets import gpu_sets, machine_line

UNMEASURED = "not yet run on hardware"


def section() -> str:
    """Of every set of `bench gpu`; without one, the targets."""
    return "\n\n".join(_sets()) or targets.table((), UNMEASURED)


def _sets() -> Iterator[str]:
    for folder, files in gpu_sets().items():
        for data in files:
            rows = [row for row in current(data) if "section" in row["case"]]
            if rows:
                where = f"{data['machine']['gpu']} (`bench/results/{folder.name}`)"
                parts = [f"#### {where}", machine_line(data["machine"]), targets.table(rows)]
                yield "\n\n".join([*parts, *_profiles(rows)])


def _profiles(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Every profiled case, folded."""
    found = [report.profile_table(row) for row in rows if "profiled" in row and "ways" in row]
    if found:
        tables = "\n\n".join(found)
        yield (
            "<details>\n<summary>Where a step spends its time</summary>\n\n"
            f"```\n{tables}\n```\n\n</details>"
        )

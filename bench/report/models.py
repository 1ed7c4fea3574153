"""Whole models: every measured case, and the targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.model.report import case_table, has_losses, losses_table, rows_of, target_table, title
from bench.report.sets import RESULTS, gpu_sets, machine_line, read

MODELS = RESULTS / "model-cpu.json"
UNMEASURED = "Not measured yet: `python -m bench model --article --device cpu`."


def section() -> str:
    """Every CPU's, then every set of a GPU's."""
    paths = [MODELS, *sorted(RESULTS.glob(f"*/{MODELS.name}"), reverse=True)]
    parts = [_set(data) for data in map(read, paths) if data is not None] or [UNMEASURED]
    for folder, files in gpu_sets().items():
        for data in filter(rows_of, files):
            where = f"{data['machine']['gpu']} (`bench/results/{folder.name}`)"
            parts.append(f"### Models on {where}\n\n{_set(data)}")
    return "\n\n".join(parts)


def _set(data: dict[str, Any]) -> str:
    targets = [] if data["machine"].get("gpu") else [target_table(data)]
    return "\n\n".join([machine_line(data["machine"]), *targets, *_cases(data)])


def _cases(data: dict[str, Any]) -> Iterator[str]:
    for row in rows_of(data):
        parts = [f"<details>\n<summary>{title(row)}</summary>", case_table(row)]
        if has_losses(row):
            parts.append(losses_table(row))
        yield "\n\n".join([*parts, "</details>"])

"""Plans: beside their peers at equal peaks, and what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.frontier.figure import drawn_of
from bench.plan import figure
from bench.plan import report as plans
from bench.report.sets import RESULTS, machine_line, read

UNMEASURED = "Not measured yet: `python -m bench plan --device cpu`."


def files(root: Path = RESULTS) -> list[Path]:
    """Every results file of plans: this CPU's first, then those of folders, the newest first."""
    return [*sorted(root.glob("plan-*.json")), *sorted(root.glob("*/plan-*.json"), reverse=True)]


def pictures(path: Path) -> list[Path]:
    """A results file's pictures, beside it."""
    return [path.with_suffix(suffix) for suffix in (".png", ".svg")]


def stale(root: Path = RESULTS) -> list[Path]:
    """Pictures that are not of their file's data, or not there yet."""
    return [
        picture
        for path in files(root)
        for picture in pictures(path)
        if drawn_of(picture) != figure.drawn_from(plans.read(path))
    ]


def rewrite(root: Path = RESULTS) -> None:
    """Draw those anew. Raises: ImportError without matplotlib."""
    for path in {picture.with_suffix(".json") for picture in stale(root)}:
        figure.draw(plans.read(path), path.parent, path.stem)


def section(root: Path = RESULTS) -> str:
    """Of every file: the picture, and the tables of every case."""
    return "\n\n".join(map(_set, files(root))) or UNMEASURED


def readme(root: Path = RESULTS) -> str:
    """Of the first file: the picture, and how its cases come out in a line each."""
    path = next(iter(files(root)), None)
    if path is None:
        return UNMEASURED
    data = read(path)
    assert data is not None
    lines = [f"- {plans.summary(row)}" for row in data["results"]]
    machine = machine_line(data["results"][0]["machine"])
    picture = _picture(path).replace("../bench", "bench")
    return "\n\n".join([picture, "\n".join(lines), machine])


def _set(path: Path) -> str:
    data = read(path)
    assert data is not None
    machine = data["machine"]
    where = f"bench/results/{_folder(path)}{path.name}"
    parts = [f"### {machine.get('gpu') or machine['cpu']} (`{where}`)", _picture(path)]
    return "\n\n".join([*parts, *(text for row in data["results"] for text in _case(row))])


def _picture(path: Path) -> str:
    text = "Step time against the measured peak; predicted against measured peak"
    return f"![{text}](../bench/results/{_folder(path)}{pictures(path)[0].name})"


def _folder(path: Path) -> str:
    """Of a file in the results, with a slash; nothing for one that is in no folder of its own."""
    return "" if path.parent.name == RESULTS.name else f"{path.parent.name}/"


def _case(row: dict[str, Any]) -> Iterator[str]:
    yield f"**{plans.title(row)}**, {row['rounds']} rounds. {machine_line(row['machine'])}"
    yield "Each peer, and our optimal plan whose budget is the peer's measured peak:"
    yield plans.rival_table(row)
    yield "Predictions against what was measured, of all our plans that were run:"
    yield plans.error_table(row)
    yield "Simpler rules within the same budgets: predicted time, relative to the optimal plan's:"
    yield plans.rule_table(row)
    yield _folded("Every way", plans.table(row))
    yield _folded("A layer's steps: measured, and analytic", plans.step_table(row))


def _folded(summary: str, table: str) -> str:
    return f"<details>\n<summary>{summary}</summary>\n\n{table}\n\n</details>"

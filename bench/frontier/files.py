"""The frontier's four files in a folder, and whether they are those of its data."""

from __future__ import annotations

import json
from pathlib import Path

from bench.figures import frontier as figure
from bench.figures.drawing import digest, drawn_of
from bench.frontier.pareto import derive
from bench.frontier.points import COLLECTED, collected, panels
from bench.frontier.report import report
from bench.tables import Row, read

DATA, PAGE = "frontier.json", "frontier.md"
PICTURES = ("frontier.png", "frontier.svg")
DERIVED = "frontier"  # the data's key for what follows from its rows


def write(folder: Path, data: Row) -> Row:
    """Write the rows with what follows from them, the page and the pictures; returns the second.

    Raises: ValueError without a step beside eager's, ImportError without matplotlib (the pictures
        come last: the data and the page are there then).
    """
    derived = derive(panels(data))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DATA).write_text(json.dumps({**data, DERIVED: derived}, indent=1) + "\n")
    (folder / PAGE).write_text(report(derived))
    figure.draw(derived, folder)
    return derived


def source(folder: Path) -> Row:
    """The rows of a folder's frontier: its own, or those of the files beside it that it is of."""
    data = read(folder / DATA)
    given = [folder / name for name in data.get(COLLECTED, ())]
    if given and all(path.exists() for path in given):
        return collected({name: read(folder / name) for name in data[COLLECTED]})
    return {key: value for key, value in data.items() if key != DERIVED}


def stale(folder: Path) -> list[Path]:
    """Files that are not, or not any more, what `write` would make of the folder's data."""
    data = source(folder)
    derived = derive(panels(data))
    page = folder / PAGE
    old = [] if read(folder / DATA) == {**data, DERIVED: derived} else [folder / DATA]
    old += [] if page.exists() and page.read_text() == report(derived) else [page]
    pictures = [folder / name for name in PICTURES]
    return old + [path for path in pictures if drawn_of(path) != digest(derived)]

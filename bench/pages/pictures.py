"""All pictures that are drawn of results and of graphs: which are stale, and drawing them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.figures import frontier, overview, plans
from bench.figures.drawing import Picture
from bench.frontier import sets
from bench.pages import drawings
from bench.pages.overview import means
from bench.tables import RESULTS, files, load


def every(root: Path = RESULTS) -> Iterator[Picture]:
    """The pictures beside results in a folder; with all results, the README's and drawings too."""
    for folder, panels in sets(root).items():
        yield frontier.picture(folder, panels)
    for path in files("plan-*.json", root):
        yield plans.picture(path, load(path)["results"])
    if root == RESULTS:
        yield from overview.pictures(means())
        yield drawings.picture()


def stale(root: Path = RESULTS) -> list[Path]:
    """Files that are not of their data, or not there yet."""
    return [path for picture in every(root) for path in picture.stale()]


def rewrite(root: Path = RESULTS) -> None:
    """Draw those anew. Raises: ImportError without matplotlib."""
    for picture in every(root):
        if picture.stale():
            picture.write()

"""Pictures beside results files: whether they are of their file's data, and drawing them anew."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.figures import losses as losses_figure
from bench.figures import plans as plans_figure
from bench.figures.drawing import drawn_of
from bench.pages import losses, plans
from bench.tables import RESULTS

#: Of a page's results files, the module that draws them.
FIGURES = ((plans, plans_figure), (losses, losses_figure))


def _stale(root: Path) -> Iterator[tuple[Path, Any, Any]]:
    """Pictures that are not of their file's data, or not there yet; the data, and who draws it."""
    for page, figure in FIGURES:
        for path in page.files(root):
            data = page.read(path)
            for picture in (path.with_suffix(".png"), path.with_suffix(".svg")):
                if drawn_of(picture) != figure.drawn_from(data):
                    yield picture, data, figure


def stale(root: Path = RESULTS) -> list[Path]:
    """Pictures that are not of their file's data, or not there yet."""
    return [picture for picture, _, _ in _stale(root)]


def rewrite(root: Path = RESULTS) -> None:
    """Draw those anew. Raises: ImportError without matplotlib."""
    for picture, data, figure in _stale(root):
        figure.draw(data, picture.parent, picture.stem)

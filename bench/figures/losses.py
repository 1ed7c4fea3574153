"""Losses of exact and of 8-bit kept activations as a picture: a row of panels for each model."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.figures.drawing import STYLES, bare, digest, drawing, legend, machines, save
from bench.pages.losses import Rows, finals, models, spread, title

_ALIKE = {"eager": "stock", "native": "ours", "fast8": "checkpointing"}
COLOURS = {way: STYLES[family][0] for way, family in _ALIKE.items()}
_SHOWN = {
    "eager": "eager (stock layers)",
    "native": 'native (policy "none")',
    "fast8": 'policy "fast8"',
}
WINDOW = 25  # steps whose mean is drawn
_EVERY = 4  # one of so many means is drawn

Curve = list[tuple[int, float]]


def smooth(losses: list[float], window: int = WINDOW) -> list[float]:
    """The mean of each run of `window` losses, or of all where there are fewer.

    >>> smooth([1.0, 2.0, 3.0, 5.0], window=2)
    [1.5, 2.5, 4.0]
    """
    window = min(window, len(losses))
    sums = [0.0, *accumulate(losses)]
    return [(b - a) / window for a, b in zip(sums[:-window], sums[window:], strict=True)]


def draw(data: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg: losses, the same above eager's mean, and those at the end.

    Raises: ImportError without matplotlib.
    """
    found = models(data)
    with drawing("losses", 12.5, 0.9 + 3.6 * len(found)) as figure:
        grid = figure.subplots(len(found), 3, width_ratios=(5, 5, 2.4), squeeze=False)
        for (left, middle, right), rows in zip(grid, found.values(), strict=True):
            _losses(left, rows)
            _differences(middle, rows)
            _ends(right, rows)
        machines(figure, data["results"])
        legend(figure, grid[0][0], columns=3)
        return save(figure, folder, name, drawn_from(data))


def drawn_from(data: dict[str, Any]) -> str:
    """The digest of what is drawn."""
    return digest({"rows": data["results"]})


def _curve(losses: list[float]) -> Curve:
    """Smoothed losses, each at its window's last step."""
    found = smooth(losses)
    first = len(losses) - len(found) + 1
    return list(enumerate(found, start=first))[::_EVERY]


def _lines(axes: Any, rows: Rows, below: list[float]) -> None:
    """Every run's curve, above `below`, step by step."""
    for way, colour in COLOURS.items():
        for row in rows:
            losses = [loss - b for loss, b in zip(row["ways"][way]["losses"], below, strict=True)]
            label = _SHOWN[way] if row is rows[0] else None
            axes.plot(*zip(*_curve(losses), strict=True), color=colour, linewidth=0.9, alpha=0.8,
                      label=label)  # fmt: skip
    axes.set_xlabel("step")
    bare(axes)


def _losses(axes: Any, rows: Rows) -> None:
    steps = rows[0]["case"]["steps"]
    _lines(axes, rows, [0.0] * steps)
    name, _, sizes = title(rows).partition(": ")
    axes.set_title(f"{name}\n{sizes}", fontsize=8.5, loc="left")
    axes.set_ylabel(f"training loss, nats per byte\n(mean of {WINDOW} steps)")


def _differences(axes: Any, rows: Rows) -> None:
    eager = [row["ways"]["eager"]["losses"] for row in rows]
    _lines(axes, rows, [fmean(losses) for losses in zip(*eager, strict=True)])
    axes.axhline(0.0, color="0.6", linewidth=0.8, linestyle="--", zorder=1)
    axes.set_title("three lines of a seed have the same batches", fontsize=8.5, loc="left")
    axes.set_ylabel("training loss − mean over eager's seeds")


def _ends(axes: Any, rows: Rows) -> None:
    """Each seed's validation losses, joined; their mean and spread."""
    for row in rows:
        ends = [row["ways"][way]["validation_loss"] for way in COLOURS]
        axes.plot(range(len(ends)), ends, color="0.75", linewidth=0.8, marker="o", markersize=3)
    for x, (way, colour) in enumerate(COLOURS.items()):
        values = finals(rows, way, "validation")
        axes.errorbar(x, fmean(values), spread(values), color=colour, marker="D", markersize=5,
                      capsize=4, zorder=3)  # fmt: skip
    axes.set_xticks(range(len(COLOURS)), list(COLOURS))
    axes.set_xlim(-0.5, len(COLOURS) - 0.5)
    axes.set_title("at the end: mean ± sd", fontsize=8.5, loc="left")
    axes.set_ylabel("validation loss, nats per byte")
    bare(axes)

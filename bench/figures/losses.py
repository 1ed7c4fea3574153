"""Losses of exact and of 8-bit kept activations as a picture: a row of panels for each model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.figures.drawing import STYLES, Picture, beside, drawing, finish, surround
from bench.pages.losses import Rows, finals, models, spread, title

#: Way -> whose colour it has, and what it is called.
WAYS = {
    "eager": ("stock", "eager (stock layers)"),
    "native": ("ours", 'native (policy "none")'),
    "fast8": ("checkpointing", 'policy "fast8"'),
}
WINDOW = 25  # steps whose mean is drawn
_EVERY = 4  # one of so many means is drawn


def picture(path: Path, rows: Rows) -> Picture:
    """Beside a results file: losses, the same above eager's mean, and those at the end."""
    return Picture(beside(path), rows, _draw)


def _draw(rows: Rows, files: Sequence[Path]) -> None:
    found = models(rows)
    with drawing("losses", rows, files, 12.5, 0.9 + 3.6 * len(found)) as figure:
        grid = figure.subplots(len(found), 3, width_ratios=(5, 5, 2.4), squeeze=False)
        for (left, middle, right), mine in zip(grid, found.values(), strict=True):
            eager = np.mean([row["ways"]["eager"]["losses"] for row in mine], axis=0)
            _lines(left, mine, 0 * eager)
            finish(left, title(mine).replace(": ", "\n").replace("; ", "\n"), "step",
                   f"training loss, nats per byte\n(mean of {WINDOW} steps)")  # fmt: skip
            _lines(middle, mine, eager)
            finish(middle, "three lines of a seed have the same batches", "step",
                   "training loss − mean over eager's seeds", 0.0)  # fmt: skip
            _ends(right, mine)
        surround(figure, [row["machine"] for row in rows], columns=3)


def smooth(losses: Any) -> Any:
    """The mean of each run of `WINDOW` losses, or of all where there are fewer."""
    window = min(WINDOW, len(losses))
    return np.convolve(losses, np.ones(window) / window, "valid")


def _lines(axes: Any, rows: Rows, below: Any) -> None:
    """Every run's smoothed losses above `below`, each mean at its window's last step."""
    for way, (family, name) in WAYS.items():
        for row in rows:
            ys = smooth(np.array(row["ways"][way]["losses"]) - below)
            steps = np.arange(len(ys)) + len(below) - len(ys) + 1
            axes.plot(steps[::_EVERY], ys[::_EVERY], color=STYLES[family][0], linewidth=0.9,
                      alpha=0.8, label=name)  # fmt: skip


def _ends(axes: Any, rows: Rows) -> None:
    """Each seed's validation losses, joined; their mean and spread."""
    for row in rows:
        ends = [row["ways"][way]["validation_loss"] for way in WAYS]
        axes.plot(range(len(ends)), ends, color="0.75", linewidth=0.8, marker="o", markersize=3)
    for x, (way, (family, _)) in enumerate(WAYS.items()):
        values = finals(rows, way, "validation")
        axes.errorbar(x, fmean(values), spread(values), color=STYLES[family][0], marker="D",
                      markersize=5, capsize=4, zorder=3)  # fmt: skip
    axes.set_xticks(range(len(WAYS)), list(WAYS))
    axes.set_xlim(-0.5, len(WAYS) - 0.5)
    finish(axes, "at the end: mean ± sd", y="validation loss, nats per byte")

"""The frontier as a picture: a panel per shape, a point per way."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.figures import drawing
from bench.figures.drawing import STYLES, Picture
from bench.figures.labels import Label
from bench.frontier import BASELINE, DATA, MEMORY_POINTS, Panel, family, title
from bench.tables import fraction, measured_on

COLUMNS = 2
_WIDTH, _HEIGHT = 5.0, 4.1  # of a panel, inches
_LOGARITHMIC = 4.0  # times are on a logarithmic axis where they span more than this


def short(way: str) -> str:
    """The label of a way: what its family does not say already.

    >>> short("lean_compiled"), short("compile_budget_0.5"), short("checkpoint_reentrant")
    ('lean', 'budget 0.5', 'checkpoint reentrant')
    """
    if family(way).startswith("ours"):
        return way.split("_")[0]
    return way.removeprefix("compile_").replace("_", " ")


def picture(folder: Path, panels: Sequence[Panel]) -> Picture:
    """Of a folder's panels. Raises: ValueError without any."""
    if not panels:
        raise ValueError("no step of a layer was measured beside eager's")
    rows = [asdict(panel) for panel in panels]
    return Picture(drawing.beside(folder / DATA), rows, functools.partial(_draw, panels))


def _draw(panels: Sequence[Panel], drawn: Any, files: Sequence[Path]) -> None:
    rows, columns = -(-len(panels) // COLUMNS), min(COLUMNS, len(panels))
    size = max(6.5, columns * _WIDTH), 0.9 + rows * _HEIGHT
    with drawing.drawing("frontier", drawn, files, *size) as figure:
        grid = figure.subplots(rows, columns, squeeze=False).flat
        several = len({measured_on(panel.machine) for panel in panels}) > 1
        labels = [_panel(next(grid), panel, several) for panel in panels]
        for axes in grid:
            axes.set_axis_off()
        drawing.surround(figure, [panel.machine for panel in panels], columns=4)
        drawing.label(figure, labels)


def _panel(axes: Any, panel: Panel, several: bool) -> tuple[Any, list[Label]]:
    """Draw a shape's points; the axes, and what is to be labelled."""
    ys = [point.p50 for point in panel.points]
    low, high, room = min(ys), max(ys), 0.12 * (max(ys) - min(ys)) + 0.02
    axes.set_ylim(low - room, high + room)
    if high > _LOGARITHMIC * low:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.set_ylim(low / 1.3, high * 1.3)
    in_bytes(axes, [point.kept for point in panel.points])
    axes.grid(axis="x", color="0.92")
    # A step down at every way that is faster than all that keep less.
    best, (right, top) = panel.frontier(), (axes.get_xlim()[1], axes.get_ylim()[1])
    corners = [(best[0].kept, top)]
    for x, y in [*((point.kept, point.p50) for point in best), (right, best[-1].p50)]:
        corners += [(x, corners[-1][1]), (x, y)]
    axes.plot(*zip(*corners, strict=True), color="0.82", linewidth=4.0, zorder=1.5,
              solid_joinstyle="miter", label="frontier")  # fmt: skip
    named = [(family(point.way), point) for point in panel.points]
    for name, style in STYLES.items():
        mine = [point for of, point in named if of == name]
        at = sorted((p.kept, *(p.time[level] for level in ("p50", "p20", "p80"))) for p in mine)
        if at:
            shown = f"stock ({BASELINE})" if name == "stock" else name
            drawing.points(axes, at, style, 0.9, shown)
    size, _, rest = title(panel.case).partition(", B = ")
    where = f"\n{measured_on(panel.machine)}" * several
    drawing.finish(axes, f"{size}\nB = {rest}{where}", "bytes kept for backward, relative to eager",
                   "step time relative to eager", 1.0)  # fmt: skip
    return axes, [Label(p.kept, p.p50, short(p.way), STYLES[of][0]) for of, p in named]


def in_bytes(axes: Any, xs: Sequence[float]) -> None:
    """Relative to eager's, by powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(xs) / 1.35, max(xs) * 1.6)
    ticks = [m for m in (1 / 64, 1 / 32, *MEMORY_POINTS, 2.0) if min(xs) / 1.3 < m < max(xs) * 1.5]
    axes.set_xticks(ticks, map(fraction, ticks))
    axes.set_xticks([], minor=True)

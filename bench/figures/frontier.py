"""The frontier as a picture, of `pareto.derive`'s data: a panel per shape, a point per way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.figures.drawing import STYLES, Label, bare, digest, drawing, label, points, save
from bench.frontier.pareto import MEMORY_POINTS
from bench.frontier.points import BASELINE
from bench.tables import measured_on

COLUMNS = 2
_WIDTH, _HEIGHT = 5.0, 4.1  # of a panel, inches
_LOGARITHMIC = 4.0  # times are on a logarithmic axis where they span more than this


def short(way: str, family: str) -> str:
    """The label of a way: what its family does not say already.

    >>> short("lean_compiled", "ours, compiled"), short("compile_budget_0.5", "compile")
    ('lean', 'budget 0.5')
    >>> short("checkpoint_reentrant", "checkpointing")
    'checkpoint reentrant'
    """
    if family.startswith("ours"):
        return way.split("_")[0]
    return way.removeprefix("compile_").replace("_", " ")


def draw(derived: dict[str, Any], folder: Path, name: str = "frontier") -> list[Path]:
    """Write `name`.png and `name`.svg. Raises: ImportError without matplotlib."""
    panels = derived["panels"]
    rows, columns = -(-len(panels) // COLUMNS), min(COLUMNS, len(panels))
    with drawing("frontier", max(6.5, columns * _WIDTH), 0.9 + rows * _HEIGHT) as figure:
        grid = figure.subplots(rows, columns, squeeze=False)
        drawn = [_panel(axes, p) for axes, p in zip(grid.flat, panels, strict=False)]
        _machines(figure, grid.flat, panels)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_axis_off()
        _legend(figure, panels)
        label(figure, drawn)
        return save(figure, folder, name, digest(derived))


def _machines(figure: Any, grid: Iterable[Any], panels: list[dict[str, Any]]) -> None:
    """What was measured on: below all panels, or where they differ, above each."""
    texts = [measured_on(panel["machine"]) for panel in panels]
    if len(set(texts)) == 1:
        figure.supxlabel(texts[0], fontsize=7.5, color="0.4")
        return
    for axes, text in zip(grid, texts, strict=False):
        axes.set_title(text, fontsize=6.5, loc="right", color="0.4")


def _panel(axes: Any, panel: dict[str, Any]) -> tuple[Any, list[Label]]:
    """Draw a shape's points; what is to be labelled: x, y, text, colour."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    ways = panel["points"]
    xs = [way["kept"] for way in ways]
    ys = [way["time"]["p50"] for way in ways]
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(xs) / 1.35, max(xs) * 1.6)
    if max(ys) > _LOGARITHMIC * min(ys):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_ylim(min(ys) / 1.3, max(ys) * 1.3)
    else:
        room = 0.12 * (max(ys) - min(ys)) + 0.02
        axes.set_ylim(min(ys) - room, max(ys) + room)
    ticks = [m for m in (1 / 64, 1 / 32, *MEMORY_POINTS, 2.0) if min(xs) / 1.3 < m < max(xs) * 1.5]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: fraction(x)))
    axes.grid(axis="x", color="0.92")
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--", zorder=1)
    _frontier_line(axes, ways)
    for family, style in STYLES.items():
        mine = [way for way in ways if way["family"] == family]
        at = sorted((w["kept"], *(w["time"][p] for p in ("p50", "p20", "p80"))) for w in mine)
        if at:
            points(axes, at, style, linewidth=0.9)
    bare(axes)
    axes.set_xlabel("bytes kept for backward, relative to eager")
    axes.set_ylabel("step time relative to eager")
    size, _, rest = panel["title"].partition(", B = ")
    axes.set_title(f"{size}\nB = {rest}", fontsize=8.5, loc="left")
    texts = [short(way["way"], way["family"]) for way in ways]
    colours = [STYLES[way["family"]][0] for way in ways]
    return axes, list(zip(xs, ys, texts, colours, strict=True))


def _frontier_line(axes: Any, ways: list[dict[str, Any]]) -> None:
    """A step down at every way that is faster than all that keep less."""
    best = sorted((p["kept"], p["time"]["p50"]) for p in ways if p["on_frontier"])
    (_, top), (right, _) = axes.get_ylim(), axes.get_xlim()[::-1]
    corners = [(best[0][0], top)]
    for x, y in [*best, (right, best[-1][1])]:
        corners += [(x, corners[-1][1]), (x, y)]
    axes.plot(*zip(*corners, strict=True), color="0.82", linewidth=4.0, zorder=1.5,
              solid_joinstyle="miter")  # fmt: skip


def _legend(figure: Any, panels: list[dict[str, Any]]) -> None:
    from matplotlib.lines import Line2D

    seen = {p["family"] for panel in panels for p in panel["points"]}
    handles = [
        Line2D([], [], color=colour, marker=marker, linestyle="-" if joined else "none",
               label=f"stock ({BASELINE})" if family == "stock" else family)
        for family, (colour, marker, joined) in STYLES.items() if family in seen
    ]  # fmt: skip
    handles.append(Line2D([], [], color="0.82", linewidth=4.0, label="frontier"))
    columns = min(len(handles), 4)
    figure.legend(handles=handles, loc="outside upper left", ncols=columns, frameon=False)


def fraction(x: float) -> str:
    """A power of two as people say it.

    >>> fraction(1.0), fraction(0.0625), fraction(2.0)
    ('1', '1/16', '2')
    """
    return f"{x:.0f}" if x >= 1 else f"1/{1 / x:.0f}"

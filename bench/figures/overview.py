"""The README's picture: every way's mean over the shapes, with dropout and without.

It is written once for light pages and once for dark ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures.drawing import Picture, drawing, label
from bench.figures.frontier import in_bytes, short
from bench.figures.labels import Label
from bench.tables import RESULTS, Row

PICTURES = {theme: RESULTS / f"overview-{theme}.svg" for theme in ("light", "dark")}
#: Theme -> text, faint lines, and the colour of each family.
THEMES: dict[str, dict[str, str]] = {
    "light": {
        "text": "#1f2328", "faint": "#d8dee4", "ours": "#0969da", "checkpointing": "#c2410c",
        "compile": "#8250df", "stock": "#1f2328",
    },
    "dark": {
        "text": "#e6edf3", "faint": "#3d444d", "ours": "#58a6ff", "checkpointing": "#f0883e",
        "compile": "#bc8cff", "stock": "#e6edf3",
    },
}  # fmt: skip
#: Way -> its label, where the name's end does not say it.
LABELS = {"compile_budget_0": "compile, budget 0", "torch_remat": "torch-remat"}
_COMPILED = "ours, compiled"


def pictures(panels: Mapping[str, list[Row]]) -> list[Picture]:
    """Of each panel's title and points, in both themes."""
    return [
        Picture((path,), panels, functools.partial(_draw, THEMES[theme]))
        for theme, path in PICTURES.items()
    ]


def _draw(colours: Mapping[str, str], panels: Mapping[str, list[Row]], files: Any) -> None:
    text, faint = colours["text"], colours["faint"]
    parts = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    settings = {
        "font.size": 10.0, **dict.fromkeys(parts, text), "axes.edgecolor": faint,
        "savefig.transparent": True, "figure.facecolor": "none", "axes.facecolor": "none",
    }  # fmt: skip
    with drawing("overview", panels, files, 11.0, 4.9, **settings) as figure:
        grid = figure.subplots(1, len(panels))
        figure.supxlabel("memory kept for backward, relative to eager", fontsize=10)
        grid[0].set_ylabel("step time, relative to eager")
        labels = []
        for axes, (title, means) in zip(grid, panels.items(), strict=True):
            axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
            labels.append((axes, _panel(axes, means, colours)))
        label(figure, labels, veil="none")


def _panel(axes: Any, means: Sequence[Row], colours: Mapping[str, str]) -> list[Label]:
    """Draw the points; what is to be labelled."""
    from matplotlib.ticker import MultipleLocator

    in_bytes(axes, [point["kept"] for point in means])
    axes.yaxis.set_major_locator(MultipleLocator(0.1))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:.1f}×")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3, color=colours["faint"])
    axes.axhline(1.0, color=colours["faint"], linewidth=1.0, zorder=0)
    best: list[Row] = []  # those that are faster than all that keep no more
    for point in means:
        if not best or point["time"] < best[-1]["time"]:
            best.append(point)
    axes.plot([p["kept"] for p in best], [p["time"] for p in best], color=colours["text"],
              linewidth=7, alpha=0.13, solid_capstyle="round", zorder=1)  # fmt: skip
    note = {"transform": axes.transAxes, "fontsize": 8.5, "alpha": 0.6}
    axes.text(0, 0.02, "  lower left is better", **note)
    if any(point["family"] == _COMPILED for point in means):
        axes.text(1, 0.97, "hollow: the preset above or below it, compiled", ha="right", **note)
    labels = []
    for point in means:
        way, at = point["way"], (point["kept"], point["time"])
        is_ours, is_compiled = point["family"] == "ours", point["family"] == _COMPILED
        colour = colours[point["family"].removesuffix(", compiled")]
        axes.plot(*at, marker="o", color=colour, markersize=8 if is_ours else 5.5,
                  markerfacecolor="none" if is_compiled else colour, zorder=3)  # fmt: skip
        if not is_compiled:
            look = (10.0, "bold") if is_ours else (8.5, "normal")
            labels.append(Label(*at, LABELS.get(way) or short(way), colour, *look))
    return labels

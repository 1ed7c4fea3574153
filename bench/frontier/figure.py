"""The frontier as a picture, of `pareto.derive`'s data: a panel per shape, a point per way.

The same data gives the same SVG, and either file says by the data's digest what it is drawn of.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.frontier.labels import place
from bench.frontier.pareto import MEMORY_POINTS, digest
from bench.frontier.points import BASELINE

# Okabe and Ito's palette, told apart by the colour-blind too; markers tell the same once more.
#: Family -> colour, marker, whether its ways are joined by a line.
STYLES: dict[str, tuple[str, str, bool]] = {
    "stock": ("#222222", "*", False),
    "checkpointing": ("#D55E00", "s", False),
    "compile": ("#CC79A7", "D", True),
    "ours": ("#0072B2", "o", True),
    "ours, lossy": ("#F0E442", "X", False),
    "ours, eager backend": ("#56B4E9", "v", True),
    "ours, triton": ("#009E73", "^", True),
    "ours, compiled": ("#E69F00", "P", True),
}
COLUMNS = 2
_WIDTH, _HEIGHT = 5.0, 4.1  # of a panel, inches
_LOGARITHMIC = 4.0  # times are on a logarithmic axis where they span more than this
_MARK = "frontier data sha256:"


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
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError as error:
        raise ImportError(
            'the frontier\'s picture needs matplotlib: pip install "fused-remat[bench]"'
        ) from error
    panels = derived["panels"]
    rows, columns = -(-len(panels) // COLUMNS), min(COLUMNS, len(panels))
    with matplotlib.rc_context({"svg.hashsalt": "frontier", "font.size": 9.0}):
        size = (max(6.5, columns * _WIDTH), 0.9 + rows * _HEIGHT)
        figure = Figure(figsize=size, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        grid = figure.subplots(rows, columns, squeeze=False)
        drawn = [_panel(axes, p) for axes, p in zip(grid.flat, panels, strict=False)]
        _machines(figure, grid.flat, panels)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_axis_off()
        _legend(figure, panels)
        canvas.draw()  # settles the layout: where labels fit depends on it
        figure.set_layout_engine("none")
        for axes, points in drawn:
            place(axes, points, canvas.get_renderer())
        return save(figure, folder, name, digest(derived))


def _machines(figure: Any, grid: Iterable[Any], panels: list[dict[str, Any]]) -> None:
    """What was measured on: below all panels, or where they differ, above each."""
    texts = [measured_on(panel["machine"]) for panel in panels]
    if len(set(texts)) == 1:
        figure.supxlabel(texts[0], fontsize=7.5, color="0.4")
        return
    for axes, text in zip(grid, texts, strict=False):
        axes.set_title(text, fontsize=6.5, loc="right", color="0.4")


def measured_on(machine: dict[str, Any]) -> str:
    """A machine in a few words.

    >>> measured_on({"cpu": "a CPU", "threads": 2, "torch": "2.13.0", "commit": "0123456789"})
    'a CPU, 2 threads, torch 2.13.0, commit 0123456'
    """
    where = machine.get("gpu") or machine.get("cpu")
    threads = None if machine.get("gpu") else machine.get("threads")
    commit = machine.get("commit")
    parts = [
        where, threads and f"{threads} thread{'s' * (threads > 1)}",
        machine.get("torch") and f"torch {machine['torch']}", commit and f"commit {commit[:7]}",
    ]  # fmt: skip
    return ", ".join(filter(None, parts))


def save(figure: Any, folder: Path, name: str, drawn: str) -> list[Path]:
    """Write `name`.png and `name`.svg, which say by a digest what they are drawn of."""
    mark = _MARK + drawn
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    figure.savefig(png, dpi=150, metadata={"Software": None, "Description": mark})
    figure.savefig(svg, metadata={"Date": None, "Creator": None, "Description": mark})
    return [png, svg]


def _panel(axes: Any, panel: dict[str, Any]) -> tuple[Any, list[tuple[float, float, str, str]]]:
    """Draw a shape's points; what is to be labelled: x, y, text, colour."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    points = panel["points"]
    xs = [p["kept"] for p in points]
    ys = [p["time"]["p50"] for p in points]
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
    _frontier_line(axes, points)
    _families(axes, points)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bytes kept for backward, relative to eager")
    axes.set_ylabel("step time relative to eager")
    size, _, rest = panel["title"].partition(", B = ")
    axes.set_title(f"{size}\nB = {rest}", fontsize=8.5, loc="left")
    texts = [short(p["way"], p["family"]) for p in points]
    colours = [STYLES[p["family"]][0] for p in points]
    return axes, list(zip(xs, ys, texts, colours, strict=True))


def _frontier_line(axes: Any, points: list[dict[str, Any]]) -> None:
    """A step down at every way that is faster than all that keep less."""
    best = sorted((p["kept"], p["time"]["p50"]) for p in points if p["on_frontier"])
    (_, top), (right, _) = axes.get_ylim(), axes.get_xlim()[::-1]
    corners = [(best[0][0], top)]
    for x, y in [*best, (right, best[-1][1])]:
        corners += [(x, corners[-1][1]), (x, y)]
    axes.plot(*zip(*corners, strict=True), color="0.82", linewidth=4.0, zorder=1.5,
              solid_joinstyle="miter")  # fmt: skip


def _families(axes: Any, points: list[dict[str, Any]]) -> None:
    for family, (colour, marker, joined) in STYLES.items():
        mine = [p for p in points if p["family"] == family]
        at = sorted((p["kept"], p["time"]["p50"], p["time"]["p20"], p["time"]["p80"]) for p in mine)
        if not at:
            continue
        xs, ys, lows, highs = zip(*at, strict=True)
        axes.vlines(xs, lows, highs, color=colour, linewidth=1.0, alpha=0.35, zorder=2)
        axes.plot(xs, ys, color=colour, marker=marker, markersize=9 if marker == "*" else 5.5,
                  linewidth=0.9, linestyle="-" if joined else "none", zorder=3,
                  markeredgecolor="white", markeredgewidth=0.5)  # fmt: skip


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


def drawn_of(path: Path) -> str | None:
    """The digest of the data that a picture was drawn of; None where it does not say."""
    if not path.exists():
        return None
    content = path.read_bytes()
    text = _png_text(content) if path.suffix == ".png" else content.decode()
    found = re.search(_MARK + "([0-9a-f]{64})", text)
    return found.group(1) if found else None


def _png_text(content: bytes) -> str:
    """A PNG's text chunks: each chunk is its length, its kind, that many bytes, and a checksum."""
    found, at = [], 8
    while at + 8 <= len(content):
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        if kind in (b"tEXt", b"iTXt"):
            found.append(content[at + 8 : at + 8 + length].decode("utf-8", "replace"))
        at += 12 + length
    return "\n".join(found)

"""Figures of result files, by matplotlib: the README's overview, and the frontier of each folder.

The same data gives the same SVG, and each file holds the digest of the data that it shows.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.pages.frontier import BASELINE, DATA, MEMORY_POINTS, SLACK, Panel, family, title
from bench.tables import RESULTS, Row, fraction, measured_on

#: Family -> color, marker, whether its points are joined. Okabe and Ito's palette.
STYLES: dict[str, tuple[str, str, bool]] = {
    "stock": ("#222222", "*", False),
    "checkpointing": ("#D55E00", "s", False),
    "compile": ("#CC79A7", "D", True),
    "ours": ("#0072B2", "o", True),
    "ours, compiled": ("#E69F00", "P", True),
}
#: Theme -> text, faint lines, and the color of each family.
THEMES: dict[str, dict[str, str]] = {
    "light": {"text": "#1f2328", "faint": "#d8dee4", "ours": "#0969da", "checkpointing": "#c2410c",
              "compile": "#8250df", "stock": "#1f2328"},
    "dark": {"text": "#e6edf3", "faint": "#3d444d", "ours": "#58a6ff", "checkpointing": "#f0883e",
             "compile": "#bc8cff", "stock": "#e6edf3"},
}  # fmt: skip
OVERVIEW = {theme: RESULTS / f"overview-{theme}.svg" for theme in THEMES}
COLUMNS = 2


@dataclass(frozen=True)
class Picture:
    """Files of a figure, the rows that they show, and a function that draws and writes them.

    It raises ImportError without matplotlib.
    """

    files: tuple[Path, ...]
    rows: Any
    draw: Callable[[Picture], None]

    def stale(self) -> list[Path]:
        """Return the files that are missing or show other rows."""
        mark = _digest(self.rows).encode()
        return [path for path in self.files if not path.exists() or mark not in path.read_bytes()]


def _digest(rows: Any) -> str:
    text = json.dumps({"rows": rows}, sort_keys=True)
    return f"data sha256:{hashlib.sha256(text.encode()).hexdigest()}"


@contextlib.contextmanager
def drawing(picture: Picture, width: float, height: float, **settings: Any) -> Iterator[Any]:
    """Yield an empty figure of so many inches, which is written at the end.

    Raises: ImportError without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "fused-remat[bench]"') from error
    with matplotlib.rc_context({"svg.hashsalt": "frontier", "font.size": 9.0, **settings}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        for path in picture.files:
            silent = ("Software",) if path.suffix == ".png" else ("Date", "Creator")
            metadata = {**dict.fromkeys(silent), "Description": _digest(picture.rows)}
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata=metadata)


def short(way: str) -> str:
    """Return the label of a way, without the name of its family."""
    if family(way).startswith("ours"):
        return way.split("_")[0]
    return way.removeprefix("compile_").replace("_", " ")


def _label(axes: Any, points: Iterable[tuple[float, float, str, str]], **text: Any) -> None:
    """Write labels (x, y, text, color) to the right of points, moved up where they overlap."""
    taken: list[tuple[float, float]] = []
    for x, y, label, color in sorted(points, key=lambda point: (point[1], point[0])):
        at = axes.transData.transform((x, y))
        dy = 0.0
        while any(abs(at[0] - u) < 95 and abs(at[1] + dy - v) < 13 for u, v in taken):
            dy += 3.0
        taken.append((at[0], at[1] + dy))
        axes.annotate(label, (x, y), (6, 72 / axes.figure.dpi * dy), color=color, va="center",
                      textcoords="offset points", **text)  # fmt: skip


def _relative_bytes(axes: Any, xs: Sequence[float]) -> None:
    """Scale the axis of bytes relative to eager's by powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_xlim(min(xs) / 1.35, max(xs) * 2.2)
    ticks = [m for m in (1 / 64, 1 / 32, *MEMORY_POINTS, 2.0) if min(xs) / 1.3 < m < max(xs) * 2]
    axes.set_xticks(ticks, map(fraction, ticks))
    axes.set_xticks([], minor=True)
    axes.spines[["top", "right"]].set_visible(False)


def overview(panels: Mapping[str, list[Row]]) -> list[Picture]:
    """Return the README's figures: the mean of every way, for light and for dark pages."""
    return [Picture((path,), panels, functools.partial(_draw_overview, theme))
            for theme, path in OVERVIEW.items()]  # fmt: skip


def _draw_overview(theme: str, picture: Picture) -> None:
    colors = THEMES[theme]
    parts = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    settings = dict.fromkeys(parts, colors["text"]) | {
        "font.size": 10.0, "axes.edgecolor": colors["faint"], "savefig.transparent": True,
        "figure.facecolor": "none", "axes.facecolor": "none",
    }  # fmt: skip
    rows = -(-len(picture.rows) // 3)
    with drawing(picture, 12.5, 4.9 * rows, **settings) as figure:
        from matplotlib.ticker import MultipleLocator

        grid = list(figure.subplots(rows, -(-len(picture.rows) // rows), squeeze=False).flat)
        note = "memory kept for backward, relative to eager; lower left is better"
        if any(p["family"] == "ours, compiled" for means in picture.rows.values() for p in means):
            note += "; hollow: a compiled preset"
        figure.supxlabel(note, fontsize=10)
        grid[0].set_ylabel("step time, relative to eager")
        for axes, (name, means) in zip(grid, picture.rows.items(), strict=True):
            axes.set_title(name, loc="left", fontsize=12, fontweight="bold")
            _relative_bytes(axes, [point["kept"] for point in means])
            axes.set_xlim(right=3.2)
            axes.yaxis.set_major_locator(MultipleLocator(0.1))
            axes.yaxis.set_major_formatter(lambda y, _: f"{y:.1f}×")
            axes.axhline(1.0, color=colors["faint"], linewidth=1.0, zorder=0)
            best = [  # those that are faster than all that keep no more
                a for a in means
                if all(a["time"] <= b["time"] or b["kept"] > a["kept"] * (1 + SLACK) for b in means)
            ]  # fmt: skip
            axes.plot([p["kept"] for p in best], [p["time"] for p in best], color=colors["text"],
                      linewidth=7, alpha=0.13, solid_capstyle="round", zorder=1)  # fmt: skip
            for point in means:
                ours = point["family"] == "ours"
                name, _, compiled = point["family"].partition(", ")
                face = {"markerfacecolor": "none"} if compiled else {}
                axes.plot(point["kept"], point["time"], marker="o", markersize=8 if ours else 5.5,
                          color=colors[name], zorder=3, **face)  # fmt: skip
                if ours:  # nothing is below the front
                    axes.annotate(short(point["way"]), (point["kept"], point["time"]),
                                  (-3, -13 if point in best else 8), ha="center", fontsize=9,
                                  textcoords="offset points", color=colors[name])  # fmt: skip
            axes.margins(y=0.08)
        figure.canvas.draw()
        for axes, means in zip(grid, picture.rows.values(), strict=True):
            _label(axes, [(p["kept"], p["time"], short(p["way"]), colors[p["family"]])
                          for p in means if p["family"] in set(colors) - {"ours"}],
                   fontsize=8.5)  # fmt: skip


def frontier(folder: Path, panels: Sequence[Panel]) -> Picture:
    """Return a folder's figure, a panel per shape. Raises: ValueError without any."""
    if not panels:
        raise ValueError("no step of a layer was measured next to eager's")
    files = ((folder / DATA).with_suffix(".png"),)
    return Picture(files, [asdict(p) for p in panels], functools.partial(_draw_frontier, panels))


def _draw_frontier(panels: Sequence[Panel], picture: Picture) -> None:
    rows, columns = -(-len(panels) // COLUMNS), min(COLUMNS, len(panels))
    with drawing(picture, max(6.5, columns * 5.0), 0.9 + rows * 4.1) as figure:
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        handles: dict[str, Any] = {}
        for axes in figure.axes:
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(handles.values(), handles.keys(), loc="outside upper left", ncols=4)
        machines = dict.fromkeys(measured_on(panel.machine) for panel in panels)
        figure.supxlabel("; ".join(machines), fontsize=7.5, color="0.4")
        figure.canvas.draw()
        for axes, panel in zip(grid, panels, strict=False):
            _label(axes, [(p.kept, p.p50, short(p.way), STYLES[family(p.way)][0])
                          for p in panel.points], fontsize=7)  # fmt: skip


def _draw_panel(axes: Any, panel: Panel) -> None:
    _relative_bytes(axes, [point.kept for point in panel.points])
    best = panel.frontier()
    axes.step([p.kept for p in best], [p.p50 for p in best], where="post", color="0.82",
              linewidth=4.0, zorder=1.5, label="frontier")  # fmt: skip
    for name, (color, marker, joined) in STYLES.items():
        mine = sorted((p for p in panel.points if family(p.way) == name), key=lambda p: p.kept)
        if mine:
            xs, ys = [p.kept for p in mine], [p.p50 for p in mine]
            spread = [p.time["p20"] for p in mine], [p.time["p80"] for p in mine]
            axes.vlines(xs, *spread, color=color, linewidth=1.0, alpha=0.35)
            axes.plot(xs, ys, color=color, marker=marker, markersize=6, linewidth=0.9,
                      linestyle="-" if joined else "none", zorder=3,
                      label=f"stock ({BASELINE})" if name == "stock" else name)  # fmt: skip
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--", zorder=1)
    sizes, _, rest = title(panel.case).partition(", B = ")
    axes.set_title(f"{sizes}\nB = {rest}", fontsize=8.5, loc="left")
    axes.set_xlabel("bytes kept for backward, relative to eager")
    axes.set_ylabel("step time relative to eager")


def presets(file: Path, names: Sequence[str], entries: Sequence[Row]) -> Picture:
    """Return the figure of docs/how-it-works.md: activations that presets keep and rebuild."""
    return Picture((file,), {"names": list(names), "entries": list(entries)}, _draw_presets)


def _draw_presets(picture: Picture) -> None:
    names, entries = picture.rows["names"], picture.rows["entries"]
    with drawing(picture, 10.5, 0.6 + 0.4 * len(entries)) as figure:
        axes = figure.subplots()
        for y, entry in enumerate(entries):
            for kind, style in (
                ("kept", {"color": "#0969da"}),
                ("rebuilt", {"markerfacecolor": "none", "markeredgecolor": "#c2410c"}),
            ):
                at = [names.index(name) for name in entry[kind]]
                label = {"kept": "kept", "rebuilt": "rebuilt in backward, once"}[kind]
                axes.plot(at, [y] * len(at), "o", markersize=10, markeredgewidth=2, **style,
                          label=label if y == 0 else None)  # fmt: skip
            axes.text(len(names) + 0.2, y, entry["size"], va="center")
            axes.text(len(names) + 2.2, y, entry["work"], va="center")
        for x, head in ((len(names) + 0.2, "bytes per token"), (len(names) + 2.2, "rebuilds")):
            axes.text(x, -0.75, head, va="center", fontweight="bold")
        axes.set_xticks(range(len(names)), names)
        axes.set_yticks(range(len(entries)), [f'"{entry["preset"]}"' for entry in entries])
        axes.set(xlim=(-0.6, len(names) + 4.5), ylim=(len(entries) - 0.4, -1.1))
        axes.tick_params(length=0, labeltop=True, labelbottom=False)
        axes.spines[:].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(0, 0), ncols=2, frameon=False)

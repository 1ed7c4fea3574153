"""What the pictures share: styles, points with their spread, and by which data a file was drawn.

The same data gives the same SVG, and each file says by the data's digest what it is drawn of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures.labels import Label, place
from bench.tables import Row, measured_on

#: Colour, marker, whether points are joined by a line.
Style = tuple[str, str, bool]
# Okabe and Ito's palette, told apart by the colour-blind too; markers tell the same once more.
STYLES: dict[str, Style] = {
    "stock": ("#222222", "*", False),
    "checkpointing": ("#D55E00", "s", False),
    "compile": ("#CC79A7", "D", True),
    "ours": ("#0072B2", "o", True),
    "ours, eager backend": ("#56B4E9", "v", True),
    "ours, triton": ("#009E73", "^", True),
    "ours, compiled": ("#E69F00", "P", True),
}


@dataclass(frozen=True)
class Picture:
    """Files of a picture, the rows that they show, and what draws rows to files."""

    files: tuple[Path, ...]
    rows: Any
    draw: Callable[[Any, Sequence[Path]], None]

    def stale(self) -> list[Path]:
        """Files that are not of these rows, or not there yet."""
        mark = marked(self.rows).encode()
        return [path for path in self.files if not path.exists() or mark not in path.read_bytes()]

    def write(self) -> None:
        """Raises: ImportError without matplotlib."""
        self.draw(self.rows, self.files)


def beside(path: Path) -> tuple[Path, Path]:
    """The pictures beside a results file."""
    return path.with_suffix(".png"), path.with_suffix(".svg")


@contextlib.contextmanager
def drawing(
    name: str, rows: Any, files: Sequence[Path], width: float, height: float, **settings: Any
) -> Iterator[Any]:
    """An empty figure, of inches, to be drawn within, and then written.

    Raises: ImportError without matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "fused-remat[bench]"') from error
    with matplotlib.rc_context({"svg.hashsalt": name, "font.size": 9.0, **settings}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        for path in files:
            silent = ("Software",) if path.suffix == ".png" else ("Date", "Creator")
            metadata = {**dict.fromkeys(silent), "Description": marked(rows)}
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata=metadata)


def points(
    axes: Any, at: Sequence[Sequence[Any]], style: Style, linewidth: float, label: str | None = None
) -> None:
    """Points (x, y, from, to, ...), with lines from the one to the other."""
    colour, marker, joined = style
    xs, ys, lows, highs = ([point[i] for point in at] for i in range(4))
    axes.vlines(xs, lows, highs, color=colour, linewidth=1.0, alpha=0.35, zorder=2)
    axes.plot(xs, ys, color=colour, marker=marker, markersize=9 if marker == "*" else 5.5,
              linewidth=linewidth, linestyle="-" if joined else "none", zorder=3,
              markeredgecolor="white", markeredgewidth=0.5, label=label)  # fmt: skip


def finish(axes: Any, title: str, x: str = "", y: str = "", level: float | None = None) -> None:
    """A panel's title, its axes' names, a dashed line at a level, and no frame above and right."""
    axes.set_title(title, fontsize=8.5, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if level is not None:
        axes.axhline(level, color="0.6", linewidth=0.8, linestyle="--", zorder=1)
    axes.spines[["top", "right"]].set_visible(False)


def surround(figure: Any, machines: Iterable[Row], columns: int) -> None:
    """Around all panels: what is labelled in any, once, above; what was measured on, below."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    where = dict(loc="outside upper left", ncols=columns, frameon=False)
    figure.legend(handles.values(), handles.keys(), **where)
    texts = dict.fromkeys(map(measured_on, machines))
    figure.supxlabel("; ".join(texts), fontsize=7.5, color="0.4")


def label(figure: Any, labels: Iterable[tuple[Any, Sequence[Label]]], veil: str = "white") -> None:
    """Axes' labels, once the layout is settled: where they fit depends on it."""
    figure.canvas.draw()
    figure.set_layout_engine("none")
    for axes, mine in labels:
        place(axes, mine, figure.canvas.get_renderer(), veil)


def marked(rows: Any) -> str:
    """What a file says that was drawn of these rows: their SHA-256."""
    text = json.dumps({"rows": rows}, sort_keys=True)
    return f"frontier data sha256:{hashlib.sha256(text.encode()).hexdigest()}"

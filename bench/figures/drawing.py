"""What the pictures share: styles, points with their spread, and by which data a file was drawn.

The same data gives the same SVG, and either file says by the data's digest what it is drawn of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.figures.labels import place
from bench.tables import measured_on

#: x, y, text, colour of a label.
Label = tuple[float, float, str, str]
#: Colour, marker, whether points are joined by a line.
Style = tuple[str, str, bool]
# Okabe and Ito's palette, told apart by the colour-blind too; markers tell the same once more.
STYLES: dict[str, Style] = {
    "stock": ("#222222", "*", False),
    "checkpointing": ("#D55E00", "s", False),
    "compile": ("#CC79A7", "D", True),
    "ours": ("#0072B2", "o", True),
    "ours, lossy": ("#F0E442", "X", False),
    "ours, eager backend": ("#56B4E9", "v", True),
    "ours, triton": ("#009E73", "^", True),
    "ours, compiled": ("#E69F00", "P", True),
}
#: Before the digest in a file.
MARK = "frontier data sha256:"


@contextlib.contextmanager
def drawing(name: str, width: float, height: float) -> Iterator[Any]:
    """An empty figure, of inches, to be saved within. Raises: ImportError without matplotlib."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError as error:
        raise ImportError('a picture needs matplotlib: pip install "fused-remat[bench]"') from error
    with matplotlib.rc_context({"svg.hashsalt": name, "font.size": 9.0}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def save(figure: Any, folder: Path, name: str, drawn: str) -> list[Path]:
    """Write `name`.png and `name`.svg, which say by a digest what they are drawn of."""
    mark = MARK + drawn
    folder.mkdir(parents=True, exist_ok=True)
    png, svg = folder / f"{name}.png", folder / f"{name}.svg"
    figure.savefig(png, dpi=150, metadata={"Software": None, "Description": mark})
    figure.savefig(svg, metadata={"Date": None, "Creator": None, "Description": mark})
    return [png, svg]


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


def bare(axes: Any) -> None:
    """Without the frame's upper and right sides."""
    axes.spines[["top", "right"]].set_visible(False)


def machines(figure: Any, rows: Iterable[dict[str, Any]]) -> None:
    """What was measured on, below all panels."""
    texts = dict.fromkeys(measured_on(row["machine"]) for row in rows)
    figure.supxlabel("; ".join(texts), fontsize=7.5, color="0.4")


def legend(figure: Any, axes: Any, columns: int) -> None:
    """What is labelled in `axes`, above all panels."""
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper left", ncols=columns, frameon=False)


def label(figure: Any, labels: Iterable[tuple[Any, Sequence[Label]]]) -> None:
    """Axes' labels, once the layout is settled: where they fit depends on it."""
    figure.canvas.draw()
    figure.set_layout_engine("none")
    for axes, mine in labels:
        place(axes, mine, figure.canvas.get_renderer())


def digest(data: dict[str, Any]) -> str:
    """SHA-256 of what is drawn."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def drawn_of(path: Path) -> str | None:
    """The digest of the data that a picture was drawn of; None where it does not say."""
    if not path.exists():
        return None
    content = path.read_bytes()
    text = _png_text(content) if path.suffix == ".png" else content.decode()
    found = re.search(MARK + "([0-9a-f]{64})", text)
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

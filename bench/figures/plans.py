"""Plans beside their peers, as a picture: time against peak; predicted against measured peak."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.figures import drawing
from bench.figures.drawing import STYLES, Picture, Style
from bench.figures.labels import Label
from bench.pages.plans import is_ours, right, title
from bench.tables import MIB, Row

_RULE = "ours, by a rule"
#: Family -> colour, marker, whether its ways are joined by a line.
FAMILIES: dict[str, Style] = {
    **{name: STYLES[name] for name in ("stock", "checkpointing", "ours")},
    "compile": (*STYLES["compile"][:2], False),
    _RULE: (*STYLES["ours, eager backend"][:2], False),
}
_SHOWN = {"stock": "stock (eager)", "ours": "ours, optimal"}


def picture(path: Path, rows: list[Row]) -> Picture:
    """Beside a results file: two panels for each of its cases."""
    return Picture(drawing.beside(path), rows, _draw)


def _draw(rows: list[Row], files: Sequence[Path]) -> None:
    """Raises: ValueError without cases."""
    cases = [row for row in rows if "eager" in right(row)]
    if not cases:
        raise ValueError("no case was measured beside eager's")
    with drawing.drawing("plan", rows, files, 11.5, 0.7 + 4.5 * len(cases)) as figure:
        grid = figure.subplots(len(cases), 2, width_ratios=(8, 5), squeeze=False)
        labels = []
        for (left, axes), row in zip(grid, cases, strict=True):
            labels.append((left, _times(left, row)))
            _peaks(axes, row)
        drawing.surround(figure, [row["machine"] for row in cases], columns=6)
        drawing.label(figure, labels)


def _times(axes: Any, row: Row) -> list[Label]:
    """Step time against measured peak; what is to be labelled."""
    labels = []
    for family, style in FAMILIES.items():
        at = sorted(
            (w["peak_bytes"] / MIB, *(w["step_ratio"]["eager"][p] for p in ("p50", "p20", "p80")),
             name)
            for name, w in right(row).items() if w["family"] == family
        )  # fmt: skip
        if at:
            width = 1.2 if family == "ours" else 0.8
            drawing.points(axes, at, style, width, _SHOWN.get(family, family))
        if family != "ours":
            labels += [Label(x, y, short(name), style[0]) for x, y, *_, name in at]
    eager = row["ways"]["eager"]["step_seconds"]["p50"]
    predicted = [(point["peak_bytes"] / MIB, point["seconds"] / eager) for point in row["frontier"]]
    axes.plot(*zip(*predicted, strict=True), color=FAMILIES["ours"][0], linewidth=0.9,
              linestyle=":", zorder=1.5, drawstyle="steps-post",
              label="ours, predicted")  # fmt: skip
    peak = "measured peak of the step, parameters and gradients included, MiB"
    drawing.finish(axes, title(row), peak, "step time relative to eager", 1.0)
    axes.margins(0.08)
    return labels


def _peaks(axes: Any, row: Row) -> None:
    """Predicted against measured peak, and the line where they are equal."""
    found = [(w["peak_bytes"] / MIB, w["predicted"]["peak_bytes"] / MIB, w["family"])
             for w in right(row).values() if is_ours(w)]  # fmt: skip
    if not found:
        return
    for family in ("ours", _RULE):
        mine = [(x, y, y, y) for x, y, of in found if of == family]
        if mine:
            drawing.points(axes, mine, (*FAMILIES[family][:2], False), 0.0)
    both = [value for x, y, _ in found for value in (x, y)]
    ends = [min(both), max(both)]
    axes.plot(ends, ends, color="0.6", linewidth=0.8, linestyle="--", zorder=1)
    worst = max(abs(y / x - 1) for x, y, _ in found)
    drawing.finish(axes, f"largest error {worst:.2%}", "measured peak, MiB", "predicted peak, MiB")


def short(way: str) -> str:
    """A way's label.

    >>> short("compile_budget_0.5"), short("checkpoint_every_2"), short("greedy_1")
    ('budget 0.5', 'checkpoint every 2', 'greedy')
    """
    words = way.removeprefix("compile_").split("_")
    return words[0] if words[0] in ("uniform", "sqrt", "greedy") else " ".join(words)

"""Plans beside their peers, as a picture: time against peak; predicted against measured peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.figures.drawing import (
    STYLES,
    Label,
    Style,
    bare,
    digest,
    drawing,
    label,
    legend,
    machines,
    points,
    save,
)
from bench.pages.plans import is_ours, right, title
from bench.tables import MIB

_RULE = "ours, by a rule"
#: Family -> colour, marker, whether its ways are joined by a line.
FAMILIES: dict[str, Style] = {
    **{name: STYLES[name] for name in ("stock", "checkpointing", "ours")},
    "compile": (*STYLES["compile"][:2], False),
    _RULE: (*STYLES["ours, eager backend"][:2], False),
}
_SHOWN = {"stock": "stock (eager)", "ours": "ours, optimal"}


def draw(data: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Write `name`.png and `name`.svg, two panels for each case of a results file.

    Raises: ImportError without matplotlib, ValueError without cases.
    """
    rows = [row for row in data["results"] if "eager" in right(row)]
    if not rows:
        raise ValueError("no case was measured beside eager's")
    with drawing("plan", 11.5, 0.7 + 4.5 * len(rows)) as figure:
        grid = figure.subplots(len(rows), 2, width_ratios=(8, 5), squeeze=False)
        labels = [(left, _times(left, row)) for (left, _), row in zip(grid, rows, strict=True)]
        for (_, axes), row in zip(grid, rows, strict=True):
            _peaks(axes, row)
        machines(figure, rows)
        legend(figure, grid[0][0], columns=6)
        label(figure, labels)
        return save(figure, folder, name, drawn_from(data))


def drawn_from(data: dict[str, Any]) -> str:
    """The digest of what is drawn."""
    return digest({"rows": data["results"]})


def _times(axes: Any, row: dict[str, Any]) -> list[Label]:
    """Step time against measured peak; what is to be labelled: x, y, text, colour."""
    labels: list[Label] = []
    for family, style in FAMILIES.items():
        at = sorted(
            (w["peak_bytes"] / MIB, *(w["step_ratio"]["eager"][p] for p in ("p50", "p20", "p80")),
             name)
            for name, w in right(row, family).items()
        )  # fmt: skip
        if at:
            width = 1.2 if family == "ours" else 0.8
            points(axes, at, style, width, _SHOWN.get(family, family))
        if family != "ours":
            labels += [(x, y, short(name), style[0]) for x, y, *_, name in at]
    _predicted(axes, row)
    axes.set_title(title(row), fontsize=8.5, loc="left")
    axes.axhline(1.0, color="0.6", linewidth=0.8, linestyle="--", zorder=1)
    axes.set_xlabel("measured peak of the step, parameters and gradients included, MiB")
    axes.set_ylabel("step time relative to eager")
    bare(axes)
    axes.margins(0.08)
    return labels


def _predicted(axes: Any, row: dict[str, Any]) -> None:
    """The predicted frontier, against eager's measured time."""
    eager = row["ways"]["eager"]["step_seconds"]["p50"]
    xs = [point["peak_bytes"] / MIB for point in row["frontier"]]
    ys = [point["seconds"] / eager for point in row["frontier"]]
    axes.plot(xs, ys, color=FAMILIES["ours"][0], linewidth=0.9, linestyle=":", zorder=1.5,
              drawstyle="steps-post", label="ours, predicted")  # fmt: skip


def _peaks(axes: Any, row: dict[str, Any]) -> None:
    """Predicted against measured peak, and the line where they are equal."""
    found = [(w["peak_bytes"] / MIB, w["predicted"]["peak_bytes"] / MIB, w["family"])
             for w in right(row).values() if is_ours(w)]  # fmt: skip
    if not found:
        return
    for family in ("ours", _RULE):
        colour, marker, _ = FAMILIES[family]
        mine = [(x, y) for x, y, of in found if of == family]
        if mine:
            axes.plot(*zip(*mine, strict=True), color=colour, marker=marker, markersize=5.5,
                      linestyle="none", zorder=3, markeredgecolor="white",
                      markeredgewidth=0.5)  # fmt: skip
    values = [value for x, y, _ in found for value in (x, y)]
    ends = (min(values), max(values))
    axes.plot(ends, ends, color="0.6", linewidth=0.8, linestyle="--", zorder=1)
    worst = max(abs(y / x - 1) for x, y, _ in found)
    axes.set_title(f"largest error {worst:.2%}", fontsize=8.5, loc="left")
    axes.set_xlabel("measured peak, MiB")
    axes.set_ylabel("predicted peak, MiB")
    bare(axes)


def short(way: str) -> str:
    """A way's label.

    >>> short("compile_budget_0.5"), short("checkpoint_every_2"), short("greedy_1")
    ('budget 0.5', 'checkpoint every 2', 'greedy')
    """
    words = way.removeprefix("compile_").split("_")
    if words[0] in ("uniform", "sqrt", "greedy"):
        return words[0]
    return " ".join(words)

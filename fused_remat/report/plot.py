"""Draws a memory report: one bar per layer, stacked by activation."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_remat.report import MemoryReport

_MOST = 11  # activations with a color of their own
_REST = "others"


def new_figure(caller: str, width: float, height: float) -> Any:
    """An empty matplotlib figure, without a window or any global state.

    Raises: ImportError without matplotlib; the message names `caller`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f'{caller} needs matplotlib: pip install "fused-remat[bench]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def axis_unit(largest: int) -> tuple[int, str]:
    """The bytes in one unit of an axis that reaches `largest` bytes, and the unit's name."""
    units = ((2**30, "GiB"), (2**20, "MiB"))
    return next((unit for unit in units if largest >= 2 * unit[0]), (2**10, "KiB"))


def plot(report: MemoryReport, path: str | Path) -> None:
    """See `MemoryReport.plot`."""
    layers, rows = report.layers, range(len(report.layers))
    figure = new_figure("MemoryReport.plot", 9.0, 1.6 + 0.34 * len(layers))
    sizes = [n for x in layers for n in (x.kept_bytes, x.forward_peak, x.backward_peak)]
    scale, unit = axis_unit(max(sizes, default=0))
    axes: Any = figure.add_subplot()
    _bars(axes, report, scale)
    predicted = [
        (layer.predicted_bytes / scale, y - 0.42, y + 0.42)
        for y, layer in zip(rows, layers, strict=True)
        if layer.predicted_bytes is not None
    ]
    if predicted:
        axes.vlines(*zip(*predicted, strict=True), color="black", label="predicted", zorder=3)
    for which, marker in (("forward", ">"), ("backward", "<")):
        peaks = [getattr(layer, f"{which}_peak") / scale for layer in layers]
        axes.scatter(peaks, rows, marker=marker, s=22, facecolors="none", edgecolors="black",
                     label=f"{which} peak", zorder=4)  # fmt: skip
    axes.set_yticks(rows, [f"{layer.name} {layer.policy or ''}".strip() for layer in layers])
    axes.invert_yaxis()
    axes.set_xlabel(f"kept for backward, {unit}")
    axes.set_xlim(left=0)
    axes.set_title(f"{report.model}: {report.kept_bytes / scale:,.1f} {unit} kept", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def _bars(axes: Any, report: MemoryReport, scale: int) -> None:
    """The bars; activations beyond the largest few share one color."""
    totals: dict[str, int] = {}
    for layer in report.layers:
        for a in layer.activations:
            totals[a.name] = totals.get(a.name, 0) + a.bytes
    largest = sorted(totals, key=lambda name: -totals[name])[:_MOST]
    lefts = [0.0] * len(report.layers)
    for i, name in enumerate([*largest, *([_REST] if len(totals) > _MOST else [])]):
        color = "0.75" if name == _REST else colorsys.hls_to_rgb(i * 0.381966 % 1, 0.6, 0.5)
        widths = [
            sum(a.bytes for a in layer.activations
                if (a.name if a.name in largest else _REST) == name) / scale
            for layer in report.layers
        ]  # fmt: skip
        axes.barh(range(len(lefts)), widths, left=lefts, height=0.7, color=color, label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]

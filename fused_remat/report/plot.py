"""A memory report as a picture: a bar per layer, stacked by activation."""

from __future__ import annotations

import colorsys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fused_remat.report import MemoryReport

_MOST = 11  # activations with a color of their own
_REST = "others"


def plot(report: MemoryReport, path: str | Path) -> None:
    """See `MemoryReport.plot`."""
    try:
        from matplotlib.figure import Figure  # not pyplot: no window, no global state
    except ImportError as error:
        raise ImportError(
            'MemoryReport.plot needs matplotlib: pip install "fused-remat[bench]"'
        ) from error
    scale, unit = _unit(report)
    figure = Figure(figsize=(9.0, 1.6 + 0.34 * len(report.layers)), layout="constrained")
    axes: Any = figure.add_subplot()
    _bars(axes, report, scale)
    rows = range(len(report.layers))
    predicted = [(y, layer.predicted_bytes) for y, layer in zip(rows, report.layers, strict=True)]
    known = [(nbytes / scale, y - 0.42, y + 0.42) for y, nbytes in predicted if nbytes is not None]
    if known:
        axes.vlines(*zip(*known, strict=True), color="black", label="predicted", zorder=3)
    for which, marker in (("forward", ">"), ("backward", "<")):
        xs = [getattr(layer, f"{which}_peak") / scale for layer in report.layers]
        axes.scatter(xs, rows, marker=marker, s=22, facecolors="none", edgecolors="black",
                     label=f"{which} peak", zorder=4)  # fmt: skip
    axes.set_yticks(rows, [f"{layer.name} {layer.policy or ''}".strip() for layer in report.layers])
    axes.invert_yaxis()
    axes.set_xlabel(f"kept for backward, {unit}")
    axes.set_xlim(left=0)
    axes.set_title(f"{report.model}: {report.kept_bytes / scale:,.1f} {unit} kept", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def _bars(axes: Any, report: MemoryReport, scale: int) -> None:
    totals: dict[str, int] = {}
    for layer in report.layers:
        for a in layer.activations:
            totals[a.name] = totals.get(a.name, 0) + a.bytes
    largest = sorted(totals, key=lambda name: -totals[name])[:_MOST]
    names = [*largest, *([_REST] if len(totals) > _MOST else [])]
    lefts = [0.0] * len(report.layers)
    for i, name in enumerate(names):
        color = "0.75" if name == _REST else colorsys.hls_to_rgb(i * 0.381966 % 1, 0.6, 0.5)
        widths = [
            sum(a.bytes for a in layer.activations
                if (a.name if a.name in largest else _REST) == name) / scale
            for layer in report.layers
        ]  # fmt: skip
        axes.barh(range(len(lefts)), widths, left=lefts, height=0.7, color=color, label=name)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]


def _unit(report: MemoryReport) -> tuple[int, str]:
    largest = max(
        (n for x in report.layers for n in (x.kept_bytes, x.forward_peak, x.backward_peak)),
        default=0,
    )
    return (2**20, "MiB") if largest >= 2**20 else (2**10, "KiB")

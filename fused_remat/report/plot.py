"""Charts of memory reports and plans, drawn by matplotlib without a window or global state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MOST = 9  # activations with a color of their own


def _new_figure(caller: str, width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f'{caller} needs matplotlib: pip install "fused-remat[bench]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def _unit_of(largest: int) -> tuple[int, str]:
    """Return the bytes in one unit of an axis that reaches `largest` bytes, and the unit's name."""
    units = ((2**30, "GiB"), (2**20, "MiB"))
    return next((unit for unit in units if largest >= 2 * unit[0]), (2**10, "KiB"))


def plot_report(
    title: str, bars: Sequence[tuple[str, Sequence[tuple[str, int]]]], path: str | Path
) -> None:
    """Draw one bar per layer, of (activation, bytes); see `MemoryReport.plot`."""
    figure = _new_figure("MemoryReport.plot", 9.0, 1.6 + 0.34 * len(bars))
    scale, unit = _unit_of(max((sum(n for _, n in parts) for _, parts in bars), default=0))
    totals: dict[str, int] = {}
    for name, nbytes in (part for _, parts in bars for part in parts):
        totals[name] = totals.get(name, 0) + nbytes
    names = sorted(totals, key=lambda name: -totals[name])
    axes, lefts = figure.add_subplot(), [0.0] * len(bars)
    groups = [*((name,) for name in names[:_MOST]), tuple(names[_MOST:])]
    for i, group in enumerate(filter(None, groups)):
        label, color = (group[0], f"C{i}") if i < _MOST else ("others", "0.75")
        widths = [sum(n for name, n in parts if name in group) / scale for _, parts in bars]
        axes.barh(range(len(bars)), widths, left=lefts, height=0.7, color=color, label=label)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel(f"kept for backward, {unit}")
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.savefig(path, dpi=150)


def plot_plan(
    title: str,
    columns: Sequence[tuple[str, Mapping[str, int]]],
    frontier: Sequence[tuple[int, float]],
    chosen: tuple[int, float],
    budget: int | None,
    path: str | Path,
) -> None:
    """Draw memory over a planned step, and the plan on the frontier; see `Plan.plot`.

    Args:
        columns: the spans of the step: what runs, and the parts of the most bytes.
        frontier, chosen: (peak in bytes, seconds) of the frontier's points and of the plan.
    """
    figure = _new_figure("Plan.plot", 12.0, 4.8)
    step, plane = figure.subplots(1, 2, width_ratios=(3, 2))
    scale, unit = _unit_of(max(chosen[0], budget or 0, *(peak for peak, _ in frontier)))
    names = list(dict.fromkeys(name for _, parts in columns for name in parts))
    heights = [[parts.get(name, 0) / scale for _, parts in columns] for name in names]
    ends = [[*height, height[-1]] for height in heights]
    step.stackplot(range(len(columns) + 1), *ends, step="post", labels=names)
    phases = [what for what, _ in columns]
    firsts = [i for i, what in enumerate(phases) if i == 0 or phases[i - 1] != what]
    step.set_xticks(firsts, [phases[i] for i in firsts], rotation=45, ha="right", fontsize=7)
    step.set_ylabel(f"peak of a span, {unit}")
    peaks, seconds = zip(*frontier, strict=True)
    plane.step([n / scale for n in peaks], [1e3 * s for s in seconds], where="post", marker=".")
    plane.plot(chosen[0] / scale, 1e3 * chosen[1], "k*", markersize=11, label="this plan")
    plane.set_xlabel(f"peak of the step, {unit}")
    plane.set_ylabel("forward and backward, ms")
    if budget is not None:
        step.axhline(budget / scale, color="black", linestyle="--", label="budget")
        plane.axvline(budget / scale, color="black", linestyle="--", label="budget")
    for axes in (step, plane):
        axes.legend(fontsize=7, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=150)

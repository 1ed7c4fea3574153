"""Draws a plan: memory over its step, and its place on the frontier."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fused_remat.planner.chain import Event
from fused_remat.planner.solve import METHODS, BudgetError, parts_at
from fused_remat.report.plot import axis_unit, new_figure

if TYPE_CHECKING:
    from fused_remat.planner.plan import Plan

#: Parts of a span's memory from bottom to top; other resting bytes are in "others". The colors are
#: of Okabe and Ito's palette, which color-blind readers can tell apart.
PARTS = {
    "parameters": "#999999",
    "optimizer state": "#E69F00",
    "others": "#CCCCCC",
    "gradients": "#009E73",
    "kept": "#0072B2",
    "at work": "#56B4E9",
}
_NAMES = {"kept": "kept by layers"}
_SHADES = {"forward": "#F7F7F7", "replay": "#F6DCE9", "backward": "#EAF1F7", "update": "#FBF1D9"}
_BUDGET = "#D55E00"
_ROOM = 0.12  # at the edges of an axis, relative to its length


def plot(plan: Plan, path: str | Path) -> None:
    """See `Plan.plot`."""
    figure = new_figure("Plan.plot", 12.0, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    peaks = [point.peak_bytes for point in plan.frontier]
    scale, unit = axis_unit(max(plan.peak_bytes, plan.budget or 0, *peaks))
    _step(left, plan, scale, unit)
    _frontier(right, plan, scale, unit)
    figure.suptitle(
        f"{plan.model} on {plan.device}: {plan.method}, costs {plan.costs}", fontsize=10
    )
    figure.savefig(path, dpi=150)


def _step(axes: Any, plan: Plan, scale: int, unit: str) -> None:
    """Memory over the step: the most bytes of each span, in columns of equal width."""
    events = plan.timeline()
    columns = [_parts(plan, event) for event in events]
    peak = max(range(len(events)), key=lambda i: events[i].peak)
    edges = range(len(events) + 1)
    names = [name for name in PARTS if any(column.get(name) for column in columns)]
    values = [[column.get(name, 0) / scale for column in columns] for name in names]
    axes.stackplot(
        edges, *([*row, row[-1]] for row in values), step="post", linewidth=0,
        labels=[_NAMES.get(name, name) for name in names], colors=[PARTS[name] for name in names],
    )  # fmt: skip
    top = max(events[peak].peak, plan.budget or 0) / scale
    axes.set_ylim(0, (1 + _ROOM) * top)
    axes.set_xlim(0, len(events))
    _phases(axes, events)
    at = (peak + 0.5, events[peak].peak / scale)
    axes.plot(*at, color="black", marker="v", markersize=6, linestyle="none")
    side = "right" if peak > len(events) / 2 else "left"
    axes.annotate(f"peak {at[1]:,.1f} {unit}", at, (0, 6), textcoords="offset points", ha=side,
                  fontsize=8)  # fmt: skip
    if plan.budget is not None:
        label = f"budget {plan.budget / scale:,.1f} {unit}"
        axes.axhline(plan.budget / scale, color=_BUDGET, linestyle="--", linewidth=1, label=label)
    axes.set_xlabel("spans of the step, in order")
    axes.set_ylabel(f"peak of a span, {unit}")
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper center", bbox_to_anchor=(0.5, -0.06),
                ncols=4, fontsize=7, frameon=False)  # fmt: skip


def _parts(plan: Plan, event: Event) -> dict[str, int]:
    """The bytes of a span by the names of `PARTS`."""
    found: dict[str, int] = {}
    for name, nbytes in parts_at(plan.chain, event).items():
        known = name if name in PARTS else "others"
        found[known] = found.get(known, 0) + nbytes
    return found


def _phases(axes: Any, events: list[Event]) -> None:
    """Shades behind the columns, and the name of each phase above its first span."""
    named: set[str] = set()
    first = 0
    for what, group in itertools.groupby(events, key=lambda event: event.what):
        last = first + len(list(group))
        axes.axvspan(first, last, color=_SHADES[what], zorder=0, linewidth=0)
        if what not in named:
            # The update is the last column alone, so its name ends there.
            x, ha = (last, "right") if what == "update" else (first, "left")
            axes.text(x, 1.0, what, transform=axes.get_xaxis_transform(), fontsize=7.5,
                      color="0.35", ha=ha, va="bottom")  # fmt: skip
        named.add(what)
        first = last


def _frontier(axes: Any, plan: Plan, scale: int, unit: str) -> None:
    """Time over peak: the frontier, this plan, and the plans of the other methods."""
    points = _points(plan)
    best = [plan.within(peak) for peak, _ in points]  # between the points of the frontier
    line = sorted(
        {(p.peak_bytes, p.seconds) for p in plan.frontier}
        | {(p.peak_bytes, p.seconds) for p in best}
    )
    xs, ys = [peak / scale for peak, _ in line], [1e3 * seconds for _, seconds in line]
    axes.plot(xs, ys, color=PARTS["kept"], marker="o", markersize=3, linewidth=1,
              drawstyle="steps-post", label="frontier")  # fmt: skip
    for (peak, seconds), methods in points.items():
        mine = plan.method in methods
        at = (peak / scale, 1e3 * seconds)
        axes.plot(*at, color="black" if mine else _BUDGET, marker="*" if mine else "s",
                  markersize=11 if mine else 5, linestyle="none", zorder=3)  # fmt: skip
        axes.annotate(", ".join(methods), at, (5, 5), textcoords="offset points", fontsize=8)
    xs += [peak / scale for peak, _ in points]
    ys += [1e3 * seconds for _, seconds in points]
    if plan.budget is not None:
        xs.append(plan.budget / scale)
        axes.axvline(xs[-1], color=_BUDGET, linestyle="--", linewidth=1, label="budget")
    for limit, values in ((axes.set_xlim, xs), (axes.set_ylim, ys)):
        room = _ROOM * (max(values) - min(values)) or 0.05 * max(values) or 1.0
        limit(min(values) - room, max(values) + 1.5 * room)
    axes.set_xlabel(f"peak of the step, {unit}")
    axes.set_ylabel("forward and backward, ms")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)


def _points(plan: Plan) -> dict[tuple[int, float], list[str]]:
    """Methods by (peak, seconds): the plan's own first, then all others within the budget."""
    found = {(plan.peak_bytes, plan.seconds): [plan.method]}
    for method in METHODS:
        if method != plan.method:
            try:
                other = plan.within(plan.budget, method)
            except BudgetError:
                continue
            found.setdefault((other.peak_bytes, other.seconds), []).append(method)
    return found

"""The frontier in words: the fastest way within each amount of memory, at every shape."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from bench import frontier, tables
from bench.frontier import MEMORY_POINTS, Panel, Point, kind, sets, title
from bench.tables import RESULTS, Cell

RULES = (
    "Time is a training step's (median ratio to eager, all ways in turns), memory what is kept for "
    f"backward; a memory point allows {frontier.SLACK:.0%} more, for statistics. The frontier: no "
    "other way is as fast within the same bytes."
)


def panel_table(panel: Panel) -> str:
    """Return a shape: the fastest ways at each memory point, the frontier, and absent ways."""
    head = "kept, of eager's", "fastest", "step", "kept bytes per token", "best of the other side"
    rows = [[f"at most {tables.fraction(m)}", *_cells(panel.within(m))] for m in MEMORY_POINTS]
    rounds = f", {panel.rounds} rounds" if panel.rounds else ""
    best = [f"`{p.way}` {p.kept:.3f} at {p.p50:.2f}×" for p in panel.frontier()]
    parts = [f"### {title(panel.case)}{rounds}", tables.markdown(head, rows)]
    parts.append(f"Frontier: {', '.join(best)}.")
    for what, ways in (("Wrong results", panel.wrong), ("Absent", panel.absent)):
        groups = itertools.groupby(sorted(ways, key=ways.__getitem__), key=ways.__getitem__)
        texts = [f"{', '.join(f'`{way}`' for way in names)} ({why})" for why, names in groups]
        parts += [f"{what}: {'; '.join(texts)}"] * bool(texts)
    return "\n\n".join(parts)


def _cells(within: Sequence[Point]) -> list[Cell]:
    if not within:
        return ["none keeps so little"]
    first = within[0]
    other = next((point for point in within if point.is_ours != first.is_ours), None)
    behind = None if other is None else f"`{other.way}` {other.p50:.2f}×"
    per_token = tables.number(first.kept_bytes_per_token)
    return [f"`{first.way}`", tables.number(first.p50, 2, "×"), per_token, behind]


def brief(found: Sequence[Panel]) -> str:
    """Return a line for each kind of layer: how often a preset is the fastest."""
    lines = []
    for name in dict.fromkeys(kind(panel.case) for panel in found):
        panels = [panel for panel in found if kind(panel.case) == name]
        wins = [w[0] for panel in panels for m in MEMORY_POINTS if (w := panel.within(m))]
        lines.append(
            f"- {name}: at {len(panels)} shapes and {len(MEMORY_POINTS)} memory points each, a "
            f"FusedRemat preset is the fastest at {sum(w.is_ours for w in wins)} of {len(wins)}."
        )
    return "\n".join(lines)


def _picture(folder: Path) -> str:
    shown = "Step time against bytes kept for backward, a panel per shape"
    return tables.picture(folder / frontier.DATA, shown)


def readme(root: Path = RESULTS) -> str:
    """Return the first CPU's figure, and a line for every set of a CPU."""
    found = {folder: of for folder, of in sets(root).items() if not of[0].machine.get("gpu")}
    if not found:
        return ""
    folder, first = next(iter(found.items()))
    lines = "\n".join(map(brief, found.values()))
    return "\n\n".join([_picture(folder), lines, tables.machine_line(first[0].machine)])


def section(root: Path = RESULTS) -> str:
    """Return every set: its figure, a line per kind of layer, and all tables, folded."""
    parts = []
    for folder, found in sets(root).items():
        machine = found[0].machine
        parts += [
            tables.heading(machine, folder), _picture(folder), tables.machine_line(machine),
            brief(found), RULES, tables.folded("Every shape", *map(panel_table, found)),
        ]  # fmt: skip
    return "\n\n".join(parts)

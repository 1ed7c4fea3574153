"""The frontier in words: who wins at which shape within how much memory, and along sweeps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from bench import frontier, tables
from bench.frontier import MEMORY_POINTS, Panel, Point, kind, sets, sweeps, title
from bench.tables import RESULTS, Cell

AXES = {"seq_len": "S", "d_model": "D"}
RULES = (
    "Time is a training step's (median ratio to eager, all ways in turns), memory what is kept for "
    f"backward; a memory point allows {frontier.SLACK:.0%} more, for statistics. A tie: the "
    "medians are nearer than the wider of the two spreads, 20th to 80th percentile. FusedRemat's "
    "ways are one side, all others the other. The frontier: nobody else is as fast within the same "
    "bytes."
)


def panel_table(panel: Panel) -> str:
    """A shape: the fastest way at each memory point, the frontier, and who is not on it at all."""
    head = (
        "kept, of eager's", "fastest", "step", "kept bytes per token", "runner-up",
        "the other side's best",
    )  # fmt: skip
    rows = [[_at_most(m), *_cells(panel.within(m))] for m in MEMORY_POINTS]
    rounds = f", {panel.rounds} rounds" if panel.rounds else ""
    parts = [f"### {title(panel.case)}{rounds}", tables.markdown(head, rows)]
    said = [f"`{p.way}` {p.kept:.3f} at {p.p50:.2f}×" for p in panel.frontier()]
    parts += [f"Frontier: {', '.join(said)}."]
    for what, ways in (("Wrong results", panel.wrong), ("Absent", panel.absent)):
        alike = itertools.groupby(sorted(ways, key=ways.__getitem__), key=ways.__getitem__)
        said = [f"{', '.join(f'`{way}`' for way in found)} ({why})" for why, found in alike]
        parts += [f"{what}: {'; '.join(said)}"] * bool(said)
    return "\n\n".join(parts)


def _at_most(at_most: float) -> str:
    return f"at most {tables.fraction(at_most)}"


def _cells(within: Sequence[Point]) -> list[Cell]:
    if not within:
        return ["nobody keeps so little"]
    first, *rest = within
    behind = [_behind(first, point) for point in (next(iter(rest), None), _other(within))]
    per_token = tables.number(first.kept_bytes_per_token)
    return [f"`{first.way}`", tables.number(first.p50, 2, "×"), per_token, *behind]


def _other(within: Sequence[Point]) -> Point | None:
    """The fastest of the other side than the winner's."""
    return next((point for point in within if point.is_ours != within[0].is_ours), None)


def _behind(first: Point, other: Point | None) -> str:
    if other is None:
        return "nobody"
    slower = other.p50 / first.p50 - 1
    gap = f"{slower:.1%} slower" if slower < 1 else f"{1 + slower:.1f} times its time"
    return f"`{other.way}`, {f'tie ({gap})' if first.ties(other) else gap}"


def sweep_tables(found: Sequence[Panel]) -> str:
    """A table for each sweep: who wins at each size and memory point."""
    parts = []
    for along, alike in sweeps(found):
        axis, case = AXES[along], alike[0].case
        fixed = next(f"{name} = {case[key]}" for key, name in AXES.items() if key != along)
        rows = []
        for at_most in MEMORY_POINTS:
            within = [panel.within(at_most) for panel in alike]
            rows.append([_at_most(at_most), *(f"`{w[0].way}`" if w else "-" for w in within)])
        values = [f"{axis} = {panel.case[along]}" for panel in alike]
        table = tables.markdown(["kept, of eager's", *values], rows)
        parts.append(f"**Along {axis}** ({fixed}, {kind(case)})\n\n{table}")
    return "\n\n".join(parts) or "The shapes are no sweep: nothing to compare."


def brief(found: Sequence[Panel]) -> str:
    """A line for each kind of layer: who is fastest how often, and how clearly."""
    lines = []
    for name in dict.fromkeys(kind(panel.case) for panel in found):
        alike = [panel for panel in found if kind(panel.case) == name]
        wins = [w for panel in alike for m in MEMORY_POINTS if (w := panel.within(m))]
        clear = [w for w in wins if (other := _other(w)) and not w[0].ties(other)]
        ours, ahead = (sum(w[0].is_ours for w in some) for some in (wins, clear))
        lines.append(
            f"- {name}: at {len(alike)} shapes and {len(MEMORY_POINTS)} memory points each, "
            f"FusedRemat's ways are the fastest at {ours} of {len(wins)}, by more than the "
            f"spread of the rounds at {ahead}; another way by more than that at "
            f"{len(clear) - ahead}."
        )
    return "\n".join(lines)


def _picture(folder: Path) -> str:
    shown = "Step time against bytes kept for backward, a panel per shape"
    return tables.picture(folder / frontier.DATA, shown)


def readme(root: Path = RESULTS) -> str:
    """The first CPU's picture, and what every set of a CPU says in a line."""
    found = {folder: of for folder, of in sets(root).items() if not of[0].machine.get("gpu")}
    if not found:
        return ""
    folder, first = next(iter(found.items()))
    lines = "\n".join(map(brief, found.values()))
    return "\n\n".join([_picture(folder), lines, tables.machine_line(first[0].machine)])


def section(root: Path = RESULTS) -> str:
    """Of every set: the picture, where the winner changes, and all tables, folded."""
    parts = []
    for folder, found in sets(root).items():
        machine = found[0].machine
        parts += [
            tables.heading(machine, folder), _picture(folder), tables.machine_line(machine),
            "Where the winner changes:", sweep_tables(found), RULES,
            tables.folded("Every shape", *map(panel_table, found)),
        ]  # fmt: skip
    return "\n\n".join(parts)

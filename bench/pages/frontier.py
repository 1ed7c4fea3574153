"""The frontier: what each way keeps and takes, relative to eager, and who wins within how much.

It reads the rows of `bench layers`, `bench frontier` and `bench gpu`.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench import tables
from bench.tables import RESULTS, Cell, Row, gpu_files, load
from fused_remat.policies import EXACT_PRESETS

BASELINE = "eager"
OURS = "ours"
#: Presets of earlier commits, whose rows in committed results are not shown.
REMOVED = ("balanced8", "fast8")
#: The file of a folder.
DATA = "frontier.json"
#: The folder of the set that is shown first.
THIS_CPU = "frontier-cpu"
#: Keys of the case of a layer's step.
NEEDED = {"dtype", "norm", "dropout", "batch", "seq_len", "d_model", "nhead"}
#: Kept bytes at most, relative to eager's.
MEMORY_POINTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
#: By how much a way may exceed them: a preset that keeps a sixteenth also keeps statistics, 16
#: bytes a token, which is 1.6% of that at D = 512 in 16 bits. The same for everyone.
SLACK = 0.02
_EXACT = "|".join(EXACT_PRESETS)
#: Family -> what its ways are called; the first that fits is theirs.
FAMILIES = {
    "ours, compiled": rf"({_EXACT})_compiled",
    OURS: _EXACT,
    "compile": r"compile(_budget_[\d.]+)?",
    "checkpointing": r"(checkpoint|selective|torch_remat).*",
    "stock": r".*",
}


def family(way: str) -> str:
    """Return the family of a way, by its name."""
    return next(name for name, pattern in FAMILIES.items() if re.fullmatch(pattern, way))


def is_ours(way: str) -> bool:
    """Return whether it is a preset of FusedRemat."""
    return family(way).startswith(OURS)


@dataclass(frozen=True)
class Point:
    """A way whose results are right."""

    way: str
    kept: float  # bytes kept for backward, relative to eager's
    kept_bytes_per_token: float
    time: dict[str, float]  # p20, p50, p80 of the step's ratio to eager's, round by round

    @property
    def p50(self) -> float:
        return self.time["p50"]

    @property
    def is_ours(self) -> bool:
        return is_ours(self.way)


@dataclass
class Panel:
    """All ways at one shape."""

    case: Row  # `NEEDED`, and what else sets it apart
    machine: Row
    points: list[Point] = field(default_factory=list)  # in the order of the table
    absent: dict[str, str] = field(default_factory=dict)  # way -> why there is no point
    wrong: dict[str, str] = field(default_factory=dict)
    rounds: int | None = None  # in which all ways took turns

    def add(self, row: Row) -> None:
        """Add a row's ways, but for those that an earlier row of the same shape had."""
        eager, known = row["ways"][BASELINE], {p.way for p in self.points} | set(self.wrong)
        for way, found in row["ways"].items():
            if way in REMOVED:
                continue
            kept, time = _kept(found), _ratio(found)
            reason = found.get("failure") or found.get("error")
            missing = found.get("unavailable") or found.get("absent")
            if reason:
                self.wrong.setdefault(way, reason)
            elif missing or not (kept and time):
                self.absent.setdefault(way, missing or "what it keeps was not measured")
            elif way not in known:
                per_token = kept / (self.case["batch"] * self.case["seq_len"])
                self.points.append(Point(way, kept / _kept(eager), per_token, time))
        for point in self.points:
            self.absent.pop(point.way, None)

    def frontier(self) -> list[Point]:
        """Return the ways that no other beats in both bytes and time, fewest bytes first."""
        found: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.kept, p.p50)):
            if not found or point.p50 < found[-1].p50:
                found.append(point)
        return found

    def within(self, at_most: float) -> list[Point]:
        """Return the ways that keep so little, the fastest first."""
        found = (p for p in self.points if p.kept <= at_most * (1 + SLACK))
        return sorted(found, key=lambda p: p.p50)


def kind(case: Row) -> str:
    """Return a layer in a few words, without its sizes."""
    return f"{case['dtype']}, {case['norm']}-norm, dropout {case['dropout']:g}"


def title(case: Row) -> str:
    """Return a shape in a few words."""
    if "title" in case:
        return str(case["title"])
    sizes = {"S": "seq_len", "D": "d_model", "B": "batch", "H": "nhead"}
    words = [*(f"{name} = {case[key]}" for name, key in sizes.items()), kind(case)]
    act = case.get("activation", "gelu")
    return ", ".join(words + [act] * (act != "gelu") + ["causal"] * bool(case.get("causal")))


def _kept(found: Row) -> float:
    """Return bytes kept: by autograd's account, or where that sees nothing, the allocator's."""
    return float(found.get("kept_bytes") or found.get("held_bytes") or 0.0)


def _ratio(found: Row) -> dict[str, float]:
    return tables.ratios(found).get(BASELINE, {})


def panels(*files: Row) -> list[Panel]:
    """Return the panels of rows of layers' steps that have eager's, the baseline of all."""
    found: dict[str, Panel] = {}
    for row in (row for data in files for row in tables.current(data)):
        case = row.get("layer") or row["case"]  # rows of `bench gpu` have "layer"
        eager = row.get("ways", {}).get(BASELINE, {})
        if set(case) >= NEEDED and _kept(eager) and _ratio(eager):
            machine = row.get("machine", {})
            key = json.dumps([case, {**machine, "date": None}], sort_keys=True)
            found.setdefault(key, Panel(case, machine, rounds=row.get("rounds"))).add(row)
    return list(found.values())


def sets(root: Path = RESULTS) -> dict[Path, list[Panel]]:
    """Return panels by folder: its frontier's, and those of layers' steps in a GPU's files."""
    paths = sorted(root.glob(f"*/{DATA}"), key=lambda path: (path.parent.name != THIS_CPU, path))
    files = {path.parent: [load(path)] for path in paths}
    for folder, data in gpu_files(root):
        files.setdefault(folder, []).append(data)
    found = {folder: panels(*held) for folder, held in files.items()}
    return {folder: drawn for folder, drawn in found.items() if drawn}


RULES = (
    "Time is a training step's (median ratio to eager, all methods interleaved), memory what is "
    f"kept for backward; a memory point allows {SLACK:.0%} more, for statistics. The frontier: no "
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
    path = tables.in_results((folder / DATA).with_suffix(".png"))
    return f"![Step time against bytes kept for backward, a panel per shape]({path})"


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

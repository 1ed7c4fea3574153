"""The frontier: what each way keeps and takes, relative to eager, and who wins within how much.

Read from the rows of `bench layers`, `bench frontier` and `bench gpu` alike, which are plain data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from bench import tables
from bench.tables import RESULTS, Row, gpu_sets, load
from fused_remat.policies import EXACT_PRESETS, LOSSY_PRESETS

BASELINE = "eager"
OURS = "ours"
LOSSY = "ours, lossy"
#: The file of a folder.
DATA = "frontier.json"
#: Key of a results file -> the files that it was made of.
COLLECTED = "from"
#: What the case of a layer's step says.
NEEDED = {"dtype", "norm", "dropout", "batch", "seq_len", "d_model", "nhead"}
#: Kept bytes at most, relative to eager's.
MEMORY_POINTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
#: By how much a way may exceed them: a preset that keeps a sixteenth keeps statistics besides, 16
#: bytes a token, which is 1.6% of that at D = 512 in 16 bits. The same for everyone.
SLACK = 0.02
#: What a sweep goes along -> what changes with it at a fixed number of tokens or head dim.
SWEEPS = {"seq_len": ("seq_len", "batch"), "d_model": ("d_model", "nhead")}
_EXACT = "|".join(EXACT_PRESETS)
#: Family -> what its ways are called; the first that fits is theirs.
FAMILIES = {
    "ours, compiled": rf"({_EXACT})_compiled",
    "ours, triton": rf"({_EXACT})_triton",
    "ours, eager backend": rf"({_EXACT})_eager",
    OURS: _EXACT,
    LOSSY: "|".join(LOSSY_PRESETS),
    "compile": r"compile(_budget_[\d.]+)?",
    "checkpointing": r"(checkpoint|selective|torch_remat).*",
    "stock": r".*",
}


def family(way: str) -> str:
    """The family of a way, by its name."""
    return next(name for name, pattern in FAMILIES.items() if re.fullmatch(pattern, way))


def is_ours(way: str) -> bool:
    """Whether it is a preset of FusedRemat."""
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
    def is_lossy(self) -> bool:
        """Whether its gradients are those of rounded values: it is shown, and wins nothing."""
        return family(self.way) == LOSSY

    def ties(self, other: Point) -> bool:
        """Whether the medians are nearer than the wider of the two spreads, p20 to p80."""
        spread = max(point.time["p80"] - point.time["p20"] for point in (self, other))
        return abs(other.p50 - self.p50) <= spread


class Win(NamedTuple):
    """The fastest way within so much memory."""

    point: Point
    runner_up: Point | None
    other: Point | None  # the fastest of the other side, FusedRemat's ways being one


@dataclass(frozen=True)
class Panel:
    """All ways at one shape."""

    case: Row  # `NEEDED`, and what else sets it apart
    machine: Row
    points: tuple[Point, ...]  # in the order of the table
    absent: dict[str, str] = field(default_factory=dict)  # way -> why there is no point
    wrong: dict[str, str] = field(default_factory=dict)
    rounds: int | None = None  # in which all ways took turns

    def frontier(self) -> list[Point]:
        """Exact ways of which none other is as fast within the same bytes, fewest bytes first."""
        found: list[Point] = []
        for point in sorted(self.points, key=lambda p: (p.kept, p.p50)):
            if not point.is_lossy and (not found or point.p50 < found[-1].p50):
                found.append(point)
        return found

    def winner(self, at_most: float) -> Win | None:
        """The fastest exact way within so much memory; None where none keeps so little."""
        within = [p for p in self.points if p.kept <= at_most * (1 + SLACK) and not p.is_lossy]
        if not within:
            return None
        first, *rest = sorted(within, key=lambda p: p.p50)
        others = (point for point in rest if is_ours(point.way) != is_ours(first.way))
        return Win(first, next(iter(rest), None), next(others, None))

    def with_more(self, other: Panel) -> Panel:
        """With the ways of the same shape that another row has, and this one has not."""
        known = {point.way for point in self.points} | set(self.wrong)
        points = (*self.points, *(point for point in other.points if point.way not in known))
        known = {point.way for point in points}
        absent = {w: why for w, why in (other.absent | self.absent).items() if w not in known}
        return replace(self, points=points, absent=absent, wrong=other.wrong | self.wrong)


def kind(case: Row) -> str:
    """What a layer computes, in a few words, but for its sizes."""
    return f"{case['dtype']}, {case['norm']}-norm, dropout {case['dropout']:g}"


def title(case: Row) -> str:
    """A shape in a few words."""
    sizes = {"S": "seq_len", "D": "d_model", "B": "batch", "H": "nhead"}
    words = [*(f"{name} = {case[key]}" for name, key in sizes.items()), kind(case)]
    act = case.get("activation", "gelu")
    return ", ".join(words + [act] * (act != "gelu") + ["causal"] * bool(case.get("causal")))


def sweeps(panels: Sequence[Panel]) -> Iterator[tuple[str, list[Panel]]]:
    """Panels that differ in one thing only, by its size: S at equal tokens, D at equal heads."""
    for along, moving in SWEEPS.items():
        alike: dict[str, list[Panel]] = {}
        for panel in panels:
            case = panel.case
            key = {k: v for k, v in case.items() if k not in moving}
            key["tokens"] = case["batch"] * case["seq_len"]
            key["machine"] = {**panel.machine, "date": None}
            if along == "d_model":
                key["head_dim"] = case["d_model"] // case["nhead"]
            alike.setdefault(json.dumps(key, sort_keys=True), []).append(panel)
        for group in alike.values():
            if len(group) > 1:
                yield along, sorted(group, key=lambda p: int(p.case[along]))


# --- from results files


def case_of(row: Row) -> Row:
    """The layer that a row is of: of `bench gpu`'s, "layer" says it; {} where it is of none."""
    case: Row = row.get("layer") or row["case"]
    return case if set(case) >= NEEDED else {}


def panel_of(row: Row) -> Panel | None:
    """The panel of a measured row; None where eager has none, so that nothing is relative to it."""
    ways = row.get("ways", {})
    eager = ways.get(BASELINE, {})
    if not (_kept(eager) and _ratio(eager)):
        return None
    case = case_of(row)
    points, absent, wrong = [], {}, {}
    for way, found in ways.items():
        kept, time = _kept(found), _ratio(found)
        reason = found.get("failure") or found.get("error")
        missing = found.get("unavailable") or found.get("absent")
        if reason or missing:
            (wrong if reason else absent)[way] = str(reason or missing)
        elif kept and time:
            per_token = kept / (case["batch"] * case["seq_len"])
            points.append(Point(way, kept / _kept(eager), per_token, time))
        else:
            absent[way] = "what it keeps was not measured"
    return Panel(case, row.get("machine", {}), tuple(points), absent, wrong, row.get("rounds"))


def _kept(found: Row) -> float:
    """Bytes kept: by autograd's account, or where that sees nothing, by the allocator's."""
    return float(found.get("kept_bytes") or found.get("held_bytes") or 0.0)


def _ratio(found: Row) -> dict[str, float] | None:
    ratios: dict[str, dict[str, float]] = found.get("step_ratio") or found.get("ratio") or {}
    return ratios.get(BASELINE)


def _current(data: Row) -> list[Row]:
    """A file's steps of whole layers, on its machine and code: not what is left of others.

    All of them in a file that was made of several (`collected`).
    """
    rows = data["results"] if COLLECTED in data else tables.current(data)
    return [row for row in rows if case_of(row)]


def collected(files: Mapping[str, Row]) -> Row:
    """One results file of several, by name: each row with the machine it was measured on."""
    rows = [
        {**row, "machine": row.get("machine", data["machine"])}
        for data in files.values()
        for row in _current(data)
    ]
    first = next(iter(files.values()))
    return {"machine": first["machine"], COLLECTED: list(files), "results": rows}


def panels(data: Row) -> list[Panel]:
    """A results file's panels. Raises: ValueError where no step was measured beside eager's."""
    found: dict[str, Panel] = {}
    for panel in filter(None, map(panel_of, _current(data))):
        key = json.dumps([panel.case, {**panel.machine, "date": None}], sort_keys=True)
        found[key] = found[key].with_more(panel) if key in found else panel
    if not found:
        raise ValueError("no step of a layer was measured beside eager's")
    return list(found.values())


def sets(root: Path = RESULTS) -> dict[Path, Row]:
    """Folder -> its frontier's data, or the layers' steps that were measured there on a GPU."""
    found: dict[Path, Row] = {path.parent: load(path) for path in sorted(root.glob(f"*/{DATA}"))}
    for folder, files in gpu_sets(root).items():
        data = collected({str(index): data for index, data in enumerate(files)})
        if folder not in found and any(map(panel_of, data["results"])):
            found[folder] = data
    return found

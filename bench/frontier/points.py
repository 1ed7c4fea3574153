"""What the frontier is drawn of: each way's kept bytes and step time, relative to eager's.

Read from the rows of `bench layers`, `bench frontier` and `bench gpu` alike, which are plain data.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace

from bench import tables
from bench.tables import Row
from fused_remat.policies import EXACT_PRESETS, LOSSY_PRESETS

BASELINE = "eager"
OURS = "ours"
LOSSY = "ours, lossy"
#: What the case of a layer's step says.
NEEDED = {"dtype", "norm", "dropout", "batch", "seq_len", "d_model", "nhead"}
#: Key of a results file -> the files that it was made of.
COLLECTED = "from"
_EXACT = "|".join(EXACT_PRESETS)
#: Family -> what its ways are called; the first that fits is theirs.
FAMILIES = {
    "ours, compiled": re.compile(rf"({_EXACT})_compiled"),
    "ours, triton": re.compile(rf"({_EXACT})_triton"),
    "ours, eager backend": re.compile(rf"({_EXACT})_eager"),
    OURS: re.compile(_EXACT),
    LOSSY: re.compile("|".join(LOSSY_PRESETS)),
    "compile": re.compile(r"compile(_budget_[\d.]+)?"),
    "checkpointing": re.compile(r"(checkpoint|selective|torch_remat).*"),
    "stock": re.compile(r".*"),
}


def family(way: str) -> str:
    """The family of a way, by its name."""
    return next(name for name, pattern in FAMILIES.items() if pattern.fullmatch(way))


def is_ours(way: str) -> bool:
    """Whether it is a preset of FusedRemat."""
    return family(way).startswith(OURS)


def is_lossy(way: str) -> bool:
    """Whether its gradients are those of rounded values: it is shown, and wins nothing."""
    return family(way) == LOSSY


@dataclass(frozen=True)
class Point:
    """A way whose results are right."""

    way: str
    kept: float  # bytes kept for backward, relative to eager's
    kept_bytes_per_token: float
    time: dict[str, float]  # p20, p50, p80 of the step's ratio to eager's, round by round
    step_peak_bytes: float | None = None

    @property
    def p50(self) -> float:
        return self.time["p50"]

    @property
    def spread(self) -> float:
        """From the 20th to the 80th percentile."""
        return self.time["p80"] - self.time["p20"]


@dataclass(frozen=True)
class Panel:
    """All ways at one shape."""

    case: Row  # `NEEDED`, and what else sets it apart
    machine: Row
    points: tuple[Point, ...]  # in the order of the table
    absent: dict[str, str] = field(default_factory=dict)  # way -> why there is no point
    wrong: dict[str, str] = field(default_factory=dict)
    rounds: int | None = None  # in which all ways took turns

    def within(self, at_most: float) -> list[Point]:
        """Exact ways that keep no more than so much of eager's, the fastest first."""
        found = (p for p in self.points if p.kept <= at_most and not is_lossy(p.way))
        return sorted(found, key=lambda p: p.p50)

    def with_more(self, other: Panel) -> Panel:
        """With the ways of the same shape that another row has, and this one has not."""
        known = {point.way for point in self.points} | set(self.wrong)
        points = (*self.points, *(point for point in other.points if point.way not in known))
        known = {point.way for point in points}
        absent = {w: why for w, why in (other.absent | self.absent).items() if w not in known}
        return replace(self, points=points, absent=absent, wrong=other.wrong | self.wrong)


def title(case: Row) -> str:
    """A shape in a few words."""
    text = (
        f"S = {case['seq_len']}, D = {case['d_model']}, B = {case['batch']}, H = {case['nhead']}, "
        f"{case['dtype']}, {case['norm']}-norm, dropout {case['dropout']:g}"
    )
    act = case.get("activation", "gelu")
    return text + (f", {act}" if act != "gelu" else "") + ", causal" * bool(case.get("causal"))


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
            points.append(
                Point(way, kept / _kept(eager), per_token, time, found.get("step_peak_bytes"))
            )
        else:
            absent[way] = "what it keeps was not measured"
    machine = row.get("machine", {})
    return Panel(case, machine, tuple(points), absent, wrong, row.get("rounds"))


def _kept(found: Row) -> float:
    """Bytes kept: by autograd's account, or where that sees nothing, by the allocator's."""
    return float(found.get("kept_bytes") or found.get("held_bytes") or 0.0)


def _ratio(found: Row) -> dict[str, float] | None:
    ratios: dict[str, dict[str, float]] = found.get("step_ratio") or found.get("ratio") or {}
    return ratios.get(BASELINE)


def current(data: Row) -> list[Row]:
    """A file's steps of whole layers, on its machine and code: not what is left of others.

    All of them in a file that was made of several (`collected`).
    """
    rows = data["results"] if COLLECTED in data else tables.current(data)
    return [row for row in rows if case_of(row)]


def collected(files: dict[str, Row]) -> Row:
    """One results file of several, by name: each row with the machine it was measured on."""
    rows = [
        {**row, "machine": row.get("machine", data["machine"])}
        for data in files.values()
        for row in current(data)
    ]
    first = next(iter(files.values()))
    return {"machine": first["machine"], COLLECTED: list(files), "results": rows}


def panels(data: Row) -> list[Panel]:
    """A results file's panels. Raises: ValueError where no step was measured beside eager's."""
    found: dict[str, Panel] = {}
    for row in current(data):
        panel = panel_of(row)
        if panel is not None:
            key = json.dumps([panel.case, {**panel.machine, "date": None}], sort_keys=True)
            found[key] = found[key].with_more(panel) if key in found else panel
    if not found:
        raise ValueError("no step of a layer was measured beside eager's")
    return list(found.values())

"""Kernels against their floor and their peers: a summary, and a table for each op."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.shapes import MODELS, Size
from bench.kernels.table import OPS
from bench.layers.report import current
from bench.measure.contest import UNITS, Rig
from bench.report.sets import RESULTS, gpu_sets, machine_line, read

KERNELS = RESULTS / "kernels-cpu.json"
UNMEASURED = "Not measured yet: `python -m bench kernels --device cpu`."
#: How the names of our providers begin.
OURS = "fused_remat"
#: Who does less than the op, the products alone: no peer.
BARE = "bare"
#: A ceiling's unit -> what of the work counts, and what it is called that cannot go faster.
BOUNDS = {"TFLOP/s": ("flops", "products"), "GB/s": ("bytes", "memory")}


@dataclass(frozen=True)
class Entry:
    """A measured case: its work, the time it takes at least, and who took how long.

    Attributes:
        floor: microseconds at the same run's ceilings.
        bound: what sets the floor, "products" or "memory".
        ours: microseconds by name, the fastest first.
        peer: the fastest of the others: name, microseconds; None where there is none.
        wrong: providers whose results are wrong.
    """

    op: str
    direction: str
    name: str
    flops: float
    bytes: float
    floor: float
    bound: str
    ours: dict[str, float]
    peer: tuple[str, float] | None
    wrong: tuple[str, ...]


def ceilings(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Unit -> the most of it that was measured in the same run."""
    return {
        row["unit"]: way[row["unit"]]
        for row in rows
        if "ceilings" in (row["case"].get("op"), row["case"].get("section")) and "unit" in row
        for way in row["ways"].values()
        if row["unit"] in way
    }


def of_op(row: dict[str, Any]) -> tuple[str, str, str] | None:
    """Op, direction and form of a contest of providers; None of any other row.

    `bench gpu` says all three in the name, and has contests of our own routes and tiles besides,
    whose ways are no peers: those are in its table, gpu.txt.
    """
    case = row["case"]
    if case.get("op") in OPS:
        return case["op"], case["direction"], case["name"]
    match = re.fullmatch(r"(\w+)_(fwd|bwd) (.+)", case.get("name", ""))
    if match is None or match[1] not in OPS:
        return None
    known = set(row.get("ways", ())) <= set(OPS[match[1]].providers)
    return (match[1], match[2], match[3]) if known else None


def entries(rows: Sequence[dict[str, Any]]) -> list[Entry]:
    """The rows of a run that have a floor."""
    most = ceilings(rows)
    return [_entry(row, most) for row in rows if row.get("floor_us") and of_op(row)]


def _entry(row: dict[str, Any], most: dict[str, float]) -> Entry:
    work, times = row["work"], {n: w["us"]["p50"] for n, w in row["ways"].items() if "us" in w}
    seconds = {
        bound: work[amount] / (UNITS[unit] * most[unit])
        for unit, (amount, bound) in BOUNDS.items()
        if work[amount]
    }
    order = sorted((us, name) for name, us in times.items() if name != BARE)
    ours = {n.removeprefix(OURS).strip() or n: us for us, n in order if n.startswith(OURS)}
    peers = [(name, us) for us, name in order if not name.startswith(OURS)]
    wrong = tuple(name for name, way in row["ways"].items() if "error" in way)
    found = of_op(row)
    assert found is not None
    op, direction, form = found
    return Entry(
        op, direction, _name(row["case"], form), work["flops"],
        work["bytes"], row["floor_us"], max(seconds, key=lambda bound: seconds[bound]),
        ours, peers[0] if peers else None, wrong,
    )  # fmt: skip


def _name(case: dict[str, Any], form: str) -> str:
    """What tells the case from others of its op, in words."""
    told = {"op", "section", "direction", "name", "model", "batch", "seq_len", "tokens", "sizes"}
    words = [form, *filter(None, [case.get("model")])]
    known = case | case.get("sizes", {})
    words += [f"{n} = {known[k]}" for k, n in (("batch", "B"), ("seq_len", "S")) if k in known]
    if not {"batch", "seq_len"} <= set(known) and "tokens" in known:
        words.append(f"{known['tokens']} tokens")
    return ", ".join([*words, *(f"{k} {v}" for k, v in known.items() if k not in told)])


def work_table() -> str:
    """What is counted of each op, as the code that counts it says."""
    rig = Rig(torch.device("cpu"), torch.float32, True, None, math.inf)  # no tensor is made of it
    lines = ["| op | FLOPs of the products, and bytes; forward, or backward |", "|---|---|"]
    for op, row in OPS.items():
        problems = (p for m in MODELS.values() for p in row.of_model(rig, Size(m, 1, m.seq_len)))
        said = dict.fromkeys(" ".join((type(p).work.__doc__ or "").split()) for p in problems)
        lines.append(f"| {op} | {' '.join(said)} |")
    return "\n".join(lines)


def summary(found: Sequence[Entry]) -> str:
    """A row for each op, direction and way of ours, beside the best peer at the same cases."""
    lines = [
        "| op | | bound by | ours | cases | of the floor's speed | the best peer | our time over "
        "the best peer's |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (op, direction), alike in _grouped(found).items():
        bound = " or ".join(sorted({e.bound for e in alike}))
        names = dict.fromkeys(name for e in alike for name in e.ours)
        for name in names or [""]:
            cells = [op, direction, bound, *_summary_cells(name, alike)]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _summary_cells(name: str, alike: Sequence[Entry]) -> list[str]:
    mine = [e for e in alike if name in e.ours] if name else list(alike)
    ours = [e.floor / e.ours[name] for e in mine if name]
    peers = [e.floor / e.peer[1] for e in mine if e.peer]
    ratios = [e.ours[name] / e.peer[1] for e in mine if e.peer and name]
    over = f"{_mean(ratios):.2f}× ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
    return [name or "absent", str(len(mine)), _shares(ours), _shares(peers), over]


def _grouped(found: Sequence[Entry]) -> dict[tuple[str, str], list[Entry]]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in found:
        groups.setdefault((entry.op, entry.direction), []).append(entry)
    return groups


def _mean(values: Sequence[float]) -> float:
    """Geometric: of ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _shares(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{_mean(values):.0%} ({min(values):.0%} to {max(values):.0%})"


def tables(found: Sequence[Entry]) -> str:
    """Every case, op by op, folded."""
    ops = dict.fromkeys(entry.op for entry in found)
    return "\n\n".join(_table(op, [e for e in found if e.op == op]) for op in ops)


def _table(op: str, found: Sequence[Entry]) -> str:
    lines = [
        "<details>",
        f"<summary>{op}: {len(found)} cases</summary>",
        "",
        "| case | | GFLOP | MB at least | floor | bound by | ours (of the floor's speed) "
        "| the best peer | our best time over it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for e in found:
        best = next(iter(e.ours.values()), None)
        cells = [
            e.name + _failed(e), e.direction, f"{e.flops / 1e9:,.2f}" if e.flops else "-",
            f"{e.bytes / 1e6:,.2f}", f"{e.floor:,.0f} µs", e.bound,
            "; ".join(_time(*item, e.floor) for item in e.ours.items()) or "absent",
            _time(*e.peer, e.floor) if e.peer else "absent",
            f"{best / e.peer[1]:.2f}×" if best and e.peer else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "</details>"])


def _time(name: str, us: float, floor: float) -> str:
    return f"{name}, {us:,.0f} µs ({floor / us:.0%})"


def _failed(entry: Entry) -> str:
    return f" (FAIL: {', '.join(entry.wrong)})" if entry.wrong else ""


def absences(rows: Sequence[dict[str, Any]]) -> str:
    """Who took part in no case, and why; whose results were wrong; which cases failed whole."""
    why: dict[str, set[str]] = {}
    present: set[str] = set()
    wrong: dict[str, int] = {}
    for row in rows:
        for name, way in row.get("ways", {}).items():
            present |= {name} if "us" in way else set()
            if "absent" in way:
                why.setdefault(name, set()).add(way["absent"])
            if "error" in way:
                wrong[name] = wrong.get(name, 0) + 1
    missing = [f"{n} ({'; '.join(sorted(r))})" for n, r in why.items() if n not in present]
    parts = [f"Absent everywhere: {', '.join(missing)}."] if missing else []
    parts += [f"Wrong results: {n} in {count} cases." for n, count in wrong.items()]
    failed = sum("error" in row for row in rows)
    parts += [f"{failed} cases could not be measured."] if failed else []
    return " ".join(parts)


def section(data: dict[str, Any]) -> str:
    """A results file: where it was measured, its ceilings, summary and tables.

    Raises: ValueError for a dry run, which measures nothing.
    """
    if data["config"].get("dry_run"):
        raise ValueError("a dry run is no measurement: not for a page")
    rows = current(data)
    most = ", ".join(f"{amount:,.4g} {unit}" for unit, amount in ceilings(rows).items())
    found = entries(rows)
    missing = absences([row for row in rows if of_op(row)])
    parts = [f"{machine_line(data['machine'])} Ceilings: {most}.", summary(found), missing]
    return "\n\n".join(filter(None, [*parts, tables(found)]))


def cpu() -> str:
    """This CPU's kernels."""
    data = read(KERNELS)
    return UNMEASURED if data is None else section(data)


def gpu() -> str:
    """Every set that was measured on a GPU."""
    return "\n\n".join(_sets()) or "Not yet run on hardware: `bench/results` has no set of a GPU's."


def _sets() -> Iterator[str]:
    for folder, files in gpu_sets().items():
        yield f"### {files[0]['machine']['gpu']} (`bench/results/{folder.name}`)"
        for data in files:
            if entries(current(data)):
                yield section(data)

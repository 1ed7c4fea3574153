"""Kernels against their floor and their peers: rows for a terminal, tables for a page."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import geometric_mean
from typing import NamedTuple

import torch

from bench import tables
from bench.kernels.shapes import MODELS, Size
from bench.kernels.table import OPS
from bench.measure.contest import UNITS, Rig
from bench.tables import RESULTS, Cell, Row

KERNELS = RESULTS / "kernels-cpu.json"
UNMEASURED = "Not measured yet: `python -m bench kernels --device cpu`."
NO_GPU = "Not yet run on hardware: `bench/results` has no set of a GPU's."
#: How the names of our providers begin.
OURS = "fused_remat"
#: Who does less than the op, the products alone: no peer.
BARE = "bare"
#: A ceiling's unit -> what of the work counts, and what it is called that cannot go faster.
BOUNDS = {"TFLOP/s": ("flops", "products"), "GB/s": ("bytes", "memory")}


# --- for a terminal


def ceilings_line(most: Mapping[str, float]) -> str:
    """What this machine does at most."""
    found = ", ".join(f"{tables.significant(amount)} {unit}" for unit, amount in most.items())
    return f"ceilings of this machine: {found}"


def title(row: Row) -> str:
    """A case in a line, with the least time that it can take."""
    case = row["case"]
    sizes = ", ".join(f"{name} {size}" for name, size in case["sizes"].items())
    words = ", ".join(filter(None, [sizes, case.get("dtype")]))
    text = f"{case['op']}: {case['name']} {case['direction']}, {case['model']} ({words})"
    floor = row.get("floor_us")
    return text if floor is None else f"{text}, floor {floor:,.0f} µs"


def _way_cells(name: str, way: Row) -> list[Cell]:
    us, share = way["us"], way.get("of_ceiling")
    rates = [tables.significant(way[unit]) if unit in way else None for unit in UNITS]
    return [
        name, *(tables.number(us[level]) for level in ("p50", "p20", "p80")),
        tables.times(next(iter(way["ratio"].values()), None)), *rates,
        None if share is None else f"{share:.0%}",
    ]  # fmt: skip


def block(row: Row) -> str:
    """A row: a line for each provider, FAIL instead of a time where its results are wrong."""
    if "error" in row:
        return f"\n{title(row)}\n  FAIL: {row['error']}"
    ways = row["ways"].items()
    head = ("", "p50 µs", "p20", "p80", "ratio", *UNITS, "of ceiling")
    text = [f"\n{title(row)}"]
    text += [
        tables.terminal(head, [_way_cells(n, way) for n, way in ways if "us" in way], indent="  ")
    ]
    text += [f"  {name}  FAIL: {way['error']}" for name, way in ways if "error" in way]
    absent = [f"{name} ({way['absent']})" for name, way in ways if "absent" in way]
    return "\n".join(text + [f"  absent: {', '.join(absent)}"] * bool(absent))


def failures(rows: Sequence[Row]) -> list[str]:
    """Everything that is wrong, in a line each."""
    return tables.errors_of(rows, title)


# --- for a page


class Entry(NamedTuple):
    """A measured case: its work, the least time that it takes, and who took how long (µs)."""

    op: str
    direction: str
    name: str
    work: Mapping[str, float]  # "flops" and "bytes"
    floor: float  # at the same run's ceilings
    bound: str  # what sets the floor, "products" or "memory"
    ours: dict[str, float]  # the fastest first
    peer: tuple[str, float] | None  # the fastest of the others
    wrong: list[str]  # providers whose results are wrong


def ceilings(rows: Sequence[Row]) -> dict[str, float]:
    """Unit -> the most of it that was measured in the same run."""
    return {
        row["unit"]: way[row["unit"]]
        for row in rows
        if "ceilings" in (row["case"].get("op"), row["case"].get("section")) and "unit" in row
        for way in row["ways"].values()
        if row["unit"] in way
    }


def of_op(row: Row) -> tuple[str, str, str] | None:
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
    known = set(row.get("ways", ())) <= set(OPS[match[1]])
    return (match[1], match[2], match[3]) if known else None


def entries(rows: Sequence[Row]) -> list[Entry]:
    """The rows of a run that have a floor."""
    most = ceilings(rows)
    found = ((row, of_op(row)) for row in rows if row.get("floor_us"))
    return [_entry(row, most, *op) for row, op in found if op]


def _entry(row: Row, most: Mapping[str, float], op: str, direction: str, form: str) -> Entry:
    work, ways = row["work"], row["ways"]
    seconds = {
        bound: work[amount] / (UNITS[unit] * most[unit])
        for unit, (amount, bound) in BOUNDS.items()
        if work[amount]
    }
    timed = ((way["us"]["p50"], name) for name, way in ways.items() if "us" in way)
    order = [(name, us) for us, name in sorted(timed) if name != BARE]
    ours = {n.removeprefix(OURS).strip() or n: us for n, us in order if n.startswith(OURS)}
    peers = (item for item in order if not item[0].startswith(OURS))
    wrong = [name for name, way in ways.items() if "error" in way]
    bound = max(seconds, key=seconds.__getitem__)
    return Entry(op, direction, _name(row["case"], form), work, row["floor_us"], bound, ours,
                 next(peers, None), wrong)  # fmt: skip


def _name(case: Row, form: str) -> str:
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
    rows = []
    for op, row in OPS.items():
        problems = (p for m in MODELS.values() for p in row.of_model(rig, Size(m, 1, m.seq_len)))
        said = dict.fromkeys(" ".join((type(p).work.__doc__ or "").split()) for p in problems)
        rows.append([op, " ".join(said)])
    return tables.markdown(("op", "FLOPs of the products, and bytes; forward, or backward"), rows)


def summary(found: Sequence[Entry]) -> str:
    """A row for each op, direction and way of ours, beside the best peer at the same cases."""
    head = (
        "op", "", "bound by", "ours", "cases", "of the floor's speed", "the best peer",
        "our time over the best peer's",
    )  # fmt: skip
    rows = []
    for op, direction in dict.fromkeys((e.op, e.direction) for e in found):
        alike = [e for e in found if (e.op, e.direction) == (op, direction)]
        bound = " or ".join(sorted({e.bound for e in alike}))
        for name in dict.fromkeys(name for e in alike for name in e.ours) or [""]:
            mine = [e for e in alike if name in e.ours or not name]
            ours = _mean([e.floor / e.ours[name] for e in mine if name], ".0%")
            peers = _mean([e.floor / e.peer[1] for e in mine if e.peer], ".0%")
            over = _mean([e.ours[name] / e.peer[1] for e in mine if e.peer and name], ".2f", "×")
            cells = [name or "absent", str(len(mine)), ours or "-", peers or "-", over]
            rows.append([op, direction, bound, *cells])
    return tables.markdown(head, rows)


def _mean(ratios: Collection[float], form: str, unit: str = "") -> str:
    """The geometric mean, and in brackets the least and the largest."""
    if not ratios:
        return ""
    return f"{geometric_mean(ratios):{form}}{unit} ({min(ratios):{form}} to {max(ratios):{form}})"


def _table(op: str, found: Sequence[Entry]) -> str:
    head = (
        "case", "", "GFLOP", "MB at least", "floor", "bound by", "ours (of the floor's speed)",
        "the best peer", "our best time over it",
    )  # fmt: skip
    return tables.folded(f"{op}: {len(found)} cases", tables.markdown(head, map(_cells, found)))


def _cells(e: Entry) -> list[Cell]:
    def timed(name: str, us: float) -> str:
        return f"{name}, {us:,.0f} µs ({e.floor / us:.0%})"

    best = next(iter(e.ours.values()), None)
    failed = f" (FAIL: {', '.join(e.wrong)})" if e.wrong else ""
    flops, nbytes = e.work["flops"], e.work["bytes"]
    return [
        e.name + failed, e.direction, tables.number(flops / 1e9, 2) if flops else "-",
        tables.number(nbytes / 1e6, 2), tables.number(e.floor, 0, " µs"), e.bound,
        "; ".join(timed(*item) for item in e.ours.items()) or "absent",
        timed(*e.peer) if e.peer else "absent",
        f"{best / e.peer[1]:.2f}×" if best and e.peer else None,
    ]  # fmt: skip


def absences(rows: Sequence[Row]) -> str:
    """Who took part in no case, and why; which cases failed whole."""
    ways = [item for row in rows for item in row.get("ways", {}).items()]
    present = {name for name, way in ways if "us" in way}
    why: dict[str, set[str]] = {}
    for name, way in ways:
        if "absent" in way and name not in present:
            why.setdefault(name, set()).add(way["absent"])
    missing = ", ".join(f"{name} ({'; '.join(sorted(r))})" for name, r in why.items())
    failed = sum("error" in row for row in rows)
    parts = [f"Absent everywhere: {missing}."] * bool(why)
    return " ".join(parts + [f"{failed} cases could not be measured."] * bool(failed))


def section(data: Row) -> str:
    """A results file: where it was measured, its ceilings, summary and tables.

    Raises: ValueError for a dry run, which measures nothing.
    """
    if data["config"].get("dry_run"):
        raise ValueError("a dry run is no measurement: not for a page")
    rows = tables.current(data)
    most = ", ".join(f"{tables.significant(n, 4)} {unit}" for unit, n in ceilings(rows).items())
    found = entries(rows)
    missing = absences([row for row in rows if of_op(row)])
    parts = [f"{tables.machine_line(data['machine'])} Ceilings: {most}.", summary(found), missing]
    ops = dict.fromkeys(entry.op for entry in found)
    parts += [_table(op, [e for e in found if e.op == op]) for op in ops]
    return "\n\n".join(filter(None, parts))


def cpu() -> str:
    """This CPU's kernels."""
    return tables.part(KERNELS, section, UNMEASURED)


def gpu() -> str:
    """Every set that was measured on a GPU."""
    return "\n\n".join(_sets()) or NO_GPU


def _sets() -> Iterator[str]:
    for folder, files in tables.gpu_sets().items():
        yield f"### {tables.where(files[0]['machine'], folder)}"
        for data in files:
            if entries(tables.current(data)):
                yield section(data)

"""Kernels compared with their floor and their peers: rows for a terminal, tables for a page."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

from bench import tables
from bench.kernels.ops import OPS
from bench.measure.contest import UNITS
from bench.tables import RESULTS, Cell, Columns, Row

#: The start of the names of our providers.
OURS = "fused_remat"
#: Sections of `bench gpu` whose rows are contests of our own routes and tiles, and way of committed
#: rows that does less than the op: no peers.
_OWN, _LESS = ("products", "tiles", "attention tiles", "pointwise"), "bare"
#: A ceiling's unit -> the amount of work that counts, and the name of its bound.
BOUNDS = {"TFLOP/s": ("flops", "products"), "GB/s": ("bytes", "memory")}


def amounts(most: Mapping[str, float], digits: int = 3) -> str:
    """Return the ceilings of a machine in a line."""
    return ", ".join(f"{tables.significant(n, digits)} {unit}" for unit, n in most.items())


def title(row: Row) -> str:
    """Return a case in a line, with the least time that it can take."""
    case, floor = row["case"], row.get("floor_us")
    at_least = "" if floor is None else f", floor {floor:,.0f} µs"
    return f"{case['op']} {case['direction']}: {_name(case, case['name'])}{at_least}"


def _rate(way: Row, unit: str) -> Cell:
    return tables.significant(way[unit]) if unit in way else None


#: The columns of a provider.
COLUMNS: Columns = [
    ("p50 µs", lambda way: tables.number(way["us"]["p50"])),
    ("p20", lambda way: tables.number(way["us"]["p20"])),
    ("p80", lambda way: tables.number(way["us"]["p80"])),
    ("ratio", lambda way: tables.times(next(iter(way["ratio"].values()), None))),
    *((unit, functools.partial(_rate, unit=unit)) for unit in UNITS),
    ("of ceiling", lambda way: f"{way['of_ceiling']:.0%}" if "of_ceiling" in way else None),
]


def block(row: Row) -> str:
    """Return a row: a line per provider, FAIL in place of a time where its results are wrong."""
    if "error" in row:
        return f"\n{title(row)}\nFAIL: {row['error']}"
    return f"\n{title(row)}\n{tables.ways_table(row['ways'], COLUMNS, write=tables.terminal)}"


class Entry(NamedTuple):
    """A measured case: the least time that it takes, and the time of each provider (µs)."""

    op: str
    direction: str
    name: str
    floor: float  # at the same run's ceilings
    bound: str  # of the floor: "products" or "memory"
    ours: dict[str, float]  # the fastest first
    peer: tuple[str, float] | None  # the fastest of the others
    wrong: list[str]  # providers whose results are wrong


def ceilings(rows: Sequence[Row]) -> dict[str, float]:
    """Return the ceilings by unit that the same run measured."""
    return {row["unit"]: row["ways"]["torch"][row["unit"]] for row in rows if "unit" in row}


def of_op(row: Row) -> tuple[str, str, str] | None:
    """Return op, direction and form of a contest of providers; None of any other row."""
    case = row["case"]
    if case.get("op") in OPS:
        return case["op"], case["direction"], case["name"]
    match = re.fullmatch(r"(\w+)_(fwd|bwd) (.+)", case.get("name", ""))
    if match is None or match[1] not in OPS or case.get("section") in _OWN:
        return None
    return match[1], match[2], match[3]


def entries(rows: Sequence[Row]) -> list[Entry]:
    """Return the rows of a run that have a floor."""
    most, found = ceilings(rows), []
    for row in rows:
        op = of_op(row)
        if not (op and row.get("floor_us")):
            continue
        work, ways = row["work"], row["ways"]
        seconds = {
            bound: work[amount] / (UNITS[unit] * most[unit])
            for unit, (amount, bound) in BOUNDS.items()
            if work[amount]
        }
        us = {name: way["us"]["p50"] for name, way in ways.items() if "us" in way and name != _LESS}
        order = sorted(us.items(), key=lambda item: item[1])
        ours = {n.removeprefix(OURS).strip() or n: t for n, t in order if n.startswith(OURS)}
        peer = next((item for item in order if not item[0].startswith(OURS)), None)
        wrong = [name for name, way in ways.items() if "error" in way]
        name, bound = _name(row["case"], op[2]), max(seconds, key=seconds.__getitem__)
        found.append(Entry(*op[:2], name, row["floor_us"], bound, ours, peer, wrong))
    return found


def _name(case: Row, form: str) -> str:
    """Return the words that distinguish the case from others of its op."""
    hidden = {"op", "section", "direction", "name", "model", "batch", "seq_len", "tokens", "sizes"}
    words = [form, *filter(None, [case.get("model")])]
    known = case | case.get("sizes", {})
    words += [f"{n} = {known[k]}" for k, n in (("batch", "B"), ("seq_len", "S")) if k in known]
    if not {"batch", "seq_len"} <= set(known) and "tokens" in known:
        words.append(f"{known['tokens']} tokens")
    return ", ".join([*words, *(f"{k} {v}" for k, v in known.items() if k not in hidden)])


def summary(found: Sequence[Entry]) -> str:
    """Return a table: each op, direction and way of ours, and the best peer at the same cases."""
    head = (
        "op", "", "bound by", "ours", "cases", "of the floor's speed", "the best peer",
        "our time over the best peer's",
    )  # fmt: skip
    rows = []
    for op, direction in dict.fromkeys((e.op, e.direction) for e in found):
        group = [e for e in found if (e.op, e.direction) == (op, direction)]
        bound = " or ".join(sorted({e.bound for e in group}))
        for name in dict.fromkeys(name for e in group for name in e.ours) or [""]:
            mine = [e for e in group if name in e.ours or not name]
            ours = _mean([e.floor / e.ours[name] for e in mine if name], ".0%")
            peers = _mean([e.floor / e.peer[1] for e in mine if e.peer], ".0%")
            over = _mean([e.ours[name] / e.peer[1] for e in mine if e.peer and name], ".2f", "×")
            cells = [name or "absent", str(len(mine)), ours or "-", peers or "-", over]
            rows.append([op, direction, bound, *cells])
    return tables.markdown(head, rows)


def _mean(ratios: Collection[float], form: str, unit: str = "") -> str:
    """Return the geometric mean, and in brackets the least and the largest."""
    if not ratios:
        return ""
    return f"{geometric_mean(ratios):{form}}{unit} ({min(ratios):{form}} to {max(ratios):{form}})"


def _table(found: Sequence[Entry]) -> str:
    head = (
        "case", "", "floor", "bound by", "ours (of the floor's speed)", "the best peer",
        "our best time over it",
    )  # fmt: skip
    rows = []
    for e in found:
        shown = {name: f"{name}, {us:,.0f} µs ({e.floor / us:.0%})"
                 for name, us in [*e.ours.items(), *filter(None, [e.peer])]}  # fmt: skip
        failed = f" (FAIL: {', '.join(e.wrong)})" if e.wrong else ""
        both = e.ours and e.peer
        rows.append([
            e.name + failed, e.direction, tables.number(e.floor, 0, " µs"), e.bound,
            "; ".join(shown[name] for name in e.ours) or "absent",
            shown[e.peer[0]] if e.peer else "absent",
            f"{min(e.ours.values()) / e.peer[1]:.2f}×" if both else None,
        ])  # fmt: skip
    return tables.folded(f"{found[0].op}: {len(found)} cases", tables.markdown(head, rows))


def section(data: Row) -> str:
    """Return the page of a results file: the machine, its ceilings, summary and tables."""
    if data["config"].get("dry_run"):
        raise ValueError("a dry run is no measurement: not for a page")
    rows = tables.current(data)
    found = entries(rows)
    machine = f"{tables.machine_line(data['machine'])} Ceilings: {amounts(ceilings(rows), 4)}."
    every = (_table([e for e in found if e.op == op]) for op in dict.fromkeys(e.op for e in found))
    return "\n\n".join([machine, summary(found), *every])


def cpu(root: Path = RESULTS) -> str:
    """Return the sections of all CPUs."""
    paths = tables.files("kernels-cpu.json", root)
    return "\n\n".join(section(tables.load(path)) for path in paths)


def gpu(root: Path = RESULTS) -> str:
    """Return the sections of all sets that were measured on a GPU."""
    return "\n\n".join(
        f"{tables.heading(data['machine'], folder)}\n\n{section(data)}"
        for folder, data in tables.gpu_files(root)
        if entries(tables.current(data))
    )

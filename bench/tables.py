"""Results as tables: result files, the one writer of tables, numbers and machines.

A cell is text; None is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.measure.machine import ROOT

RESULTS = ROOT / "bench" / "results"
MIB = 2**20

Cell = str | None
Row = dict[str, Any]
#: Name -> cell of a way; two columns may have one name.
Columns = Sequence[tuple[str, Callable[[Row], Cell]]]


def load(path: Path) -> Any:
    """Return a JSON file's content."""
    return json.loads(path.read_text())


class ResultsFile:
    """A JSON file with the machine and the config of the last run, and a row per measured case."""

    def __init__(self, path: Path, machine: Row, config: Row) -> None:
        self.path, self.machine, self.config = path, machine, config
        self.rows: list[Row] = load(path)["results"] if path.exists() else []

    @property
    def data(self) -> Row:
        return {"machine": self.machine, "config": self.config, "results": self.rows}

    @property
    def own(self) -> list[Row]:
        """Rows of this machine, commit, code and config, whatever the ways."""

        def of(where: Row, how: Row) -> tuple[Row, Row]:
            return {**where, "date": None}, {**how, "ways": None}

        here = of(self.machine, self.config)
        return [row for row in self.rows if of(row["machine"], row["config"]) == here]

    def find(self, case: Row, ways: Iterable[str]) -> Row | None:
        """Return the case's row if these ways were measured; one that failed is tried again."""
        same = (row for row in self.own if row["case"] == case and "ways" in row)
        return next((row for row in same if set(ways) <= set(row["ways"])), None)

    def put(self, row: Row) -> None:
        """Add or replace the row of a case, and write the file."""
        new = row | {"machine": self.machine, "config": self.config}
        cases = [old["case"] for old in self.rows]
        at = cases.index(row["case"]) if row["case"] in cases else len(cases)
        self.rows[at : at + 1] = [new]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".new")
        unfinished.write_text(json.dumps(self.data, indent=1) + "\n")
        unfinished.replace(self.path)


def files(pattern: str, root: Path = RESULTS) -> list[Path]:
    """Return the files of a folder by name, then those of its folders, the last names first."""
    return [*sorted(root.glob(pattern)), *sorted(root.glob(f"*/{pattern}"), reverse=True)]


def current(data: Row) -> list[Row]:
    """Return the rows that were measured on the file's machine and commit."""
    here = {**data["machine"], "date": None}
    return [row for row in data["results"] if {**row.get("machine", here), "date": None} == here]


def gpu_files(root: Path = RESULTS) -> Iterator[tuple[Path, Row]]:
    """Yield the results that were measured on a GPU, each with its folder, the newest first."""
    found = []
    for path in root.glob("*/*.json"):
        data = load(path)
        dry = data.get("config", {}).get("dry_run")
        if data.get("machine", {}).get("gpu") and "results" in data and not dry:
            found.append((path.parent, data))
    yield from sorted(found, key=lambda pair: pair[1]["machine"]["date"], reverse=True)


def measured_on(machine: Row, full: bool = False) -> str:
    """Return a machine in a few words; `full`: with all versions that numbers may depend on.

    >>> measured_on({"cpu": "a CPU", "threads": 2, "torch": "2.13.0", "commit": "0123456789"})
    'a CPU, 2 threads, torch 2.13.0, commit 0123456'
    """
    gpu, threads, commit = (machine.get(key) for key in ("gpu", "threads", "commit"))
    words = [gpu or machine.get("cpu")]
    if not gpu and threads:
        words.append(f"{threads} thread{'s' * (threads > 1)}")
    if full and gpu and machine.get("driver"):
        words.append(f"driver {machine['driver']}")
    if full and not gpu and not machine.get("native_bfloat16", True):
        words.append("without bfloat16 products of its own")
    if full and machine.get("products"):
        words.append(f"FUSED_REMAT_CPU_PRODUCTS={machine['products']}")
    versions = {"torch": machine.get("torch")} | (machine.get("versions", {}) if full else {})
    words += [f"{name} {version}" for name, version in versions.items() if version]
    words += [f"commit {commit[:7]}"] if commit else []
    return ", ".join(filter(None, words))


def machine_line(machine: Row) -> str:
    """Return a sentence: the machine, versions and commit of a measurement."""
    unknown = "" if machine.get("commit") else ", commit unknown"
    changed = " with uncommitted changes" if machine.get("dirty") else ""
    return f"Measured on {measured_on(machine, full=True)}{unknown}{changed}."


def us(way: Row) -> dict[str, float] | None:
    """Return the percentiles of a way's call or step in microseconds, or None."""
    seconds: dict[str, float] = way.get("step_seconds", {})
    return way.get("us") or {level: 1e6 * time for level, time in seconds.items()} or None


def ratios(way: Row) -> dict[str, dict[str, float]]:
    """Return the percentiles of a way's ratio to each baseline."""
    return way.get("ratio") or way.get("step_ratio") or {}


def number(value: float | None, digits: int = 0, unit: str = "") -> Cell:
    """Format with so many digits after the point; None of None."""
    return None if value is None else f"{value:,.{digits}f}{unit}"


def significant(value: float, digits: int = 3) -> str:
    """Format with so many digits, or all before the point.

    >>> significant(1234.5), significant(0.00123), significant(0.5)
    ('1,234', '0.00123', '0.5')
    """
    large = abs(value) >= 10 ** (digits - 1)
    return f"{value:,.0f}" if large else f"{value:.{digits}g}"


def ms(seconds: float | None, digits: int = 0) -> Cell:
    """Format seconds in milliseconds."""
    return number(seconds and 1e3 * seconds, digits, " ms")


def mib(nbytes: float | None, digits: int = 0) -> Cell:
    """Format bytes in MiB."""
    return number(nbytes and nbytes / MIB, digits, " MiB")


def times(quantiles: Mapping[str, float] | None, digits: int = 2, spread: bool = False) -> Cell:
    """Format the median of a ratio; `spread`: with the 20th and the 80th percentile."""
    if quantiles is None:
        return None
    around = f" ({quantiles['p20']:.{digits}f} to {quantiles['p80']:.{digits}f})" if spread else ""
    return f"{quantiles['p50']:.{digits}f}×{around}"


def span(values: Collection[float]) -> str:
    """Format the least and the largest of values."""
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def fraction(x: float) -> str:
    """Format a power of two as a fraction."""
    return f"{x:.0f}" if x >= 1 else f"1/{1 / x:.0f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table for a page; a row of fewer cells than the head lacks the last ones."""
    full = [head, *([*row, *[None] * (len(head) - len(row))] for row in rows)]
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in full]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def terminal(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table for a terminal: the first column to the left, numbers to the right.

    A row of two cells in a wider table is a name and a sentence, which widens no column.
    """
    shown = [["-" if cell is None else cell for cell in row] for row in (head, *rows)]
    full = [row for row in shown if len(row) == len(head)]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[0] = max(len(row[0]) for row in shown)
    lines = []
    for first, *others in shown:
        if len(others) + 1 == len(head):
            others = list(map(str.rjust, others, widths[1:]))
        lines.append("  ".join([first.ljust(widths[0]), *others]))
    return "\n".join(lines)


def ways_table(
    ways: Mapping[str, Row], columns: Columns, first: str = "", write: Any = markdown
) -> str:
    """Return a line for each way: its name and cells, or its name and why it has no numbers."""
    rows = []
    for name, way in ways.items():
        absent = way.get("unavailable") or way.get("absent")
        reason = absent or way.get("failure") or way.get("error")
        if reason:
            why = ("absent: " if absent else "FAIL: ") + " ".join(reason.split())
        rows.append([name, *([why] if reason else [cell(way) for _, cell in columns])])
    return write([first, *(heading for heading, _ in columns)], rows)


def errors_of(rows: Iterable[Row], title: Callable[[Row], str]) -> list[str]:
    """Return every error of the rows and of their ways, a line each."""
    found = []
    for row in rows:
        ways = row.get("ways", {}).items()
        named = [("", row), *((f"{name}: ", way) for name, way in ways)]
        found += [f"{title(row)}: {name}{o['error']}" for name, o in named if "error" in o]
    return found


def heading(machine: Row, path: Path) -> str:
    """Return a heading: the device that a file or a folder was measured on, and its path."""
    return f"### {machine.get('gpu') or machine['cpu']} (`{in_results(path)}`)"


def in_results(path: Path) -> str:
    """Return the path of a results file from the root of the repository."""
    folder = "" if path.parent.name == RESULTS.name else f"{path.parent.name}/"
    return f"bench/results/{folder}{path.name}"


def folded(summary: str, *parts: str) -> str:
    """Return a part of a page that opens at a click."""
    return "\n\n".join([f"<details>\n<summary>{summary}</summary>", *parts, "</details>"])

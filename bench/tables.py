"""Results as tables: the reader of result files, the writer of tables, numbers and machines.

A cell is text; None is one of which nothing is known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.measure.machine import ROOT

RESULTS = ROOT / "bench" / "results"
MIB = 2**20

Cell = str | None
Row = dict[str, Any]

# --- result files


def load(path: Path) -> Any:
    """A JSON file's content; None where it is not there yet."""
    return json.loads(path.read_text()) if path.exists() else None


def read(path: Path, keys: Collection[str] = (), command: str = "bench") -> Row:
    """A results file. Raises: ValueError where it is none of `command`, whose rows have `keys`."""
    try:
        data: Row = json.loads(path.read_text())
        if not isinstance(data["machine"], dict) or not isinstance(data["results"], list):
            raise TypeError("machine or results of another kind")
        if missing := {key for row in data["results"] for key in keys if key not in row}:
            raise KeyError(*missing)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a results file of {command}: {error!r}") from error
    return data


def current(data: Row) -> list[Row]:
    """The rows that were measured on the file's machine and commit, not those left of others."""
    here = {**data["machine"], "date": None}
    rows: list[Row] = data["results"]
    return [row for row in rows if {**row.get("machine", here), "date": None} == here]


def gpu_sets(root: Path = RESULTS) -> dict[Path, list[Row]]:
    """Folder -> the results files in it that were measured on a GPU, the newest set first."""
    found: dict[Path, list[Row]] = {}
    for path in sorted(root.glob("*/*.json"), reverse=True):
        data = load(path)
        if isinstance(data, dict) and isinstance(data.get("results"), list):
            machine = data.get("machine", {})
            if machine.get("gpu") and not data.get("config", {}).get("dry_run"):
                found.setdefault(path.parent, []).append(data)
    return found


def measured_on(machine: Row, full: bool = False) -> str:
    """A machine in a few words; `full`: with all that numbers may depend on.

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
    versions = {"torch": machine.get("torch")} | (machine.get("versions", {}) if full else {})
    words += [f"{name} {version}" for name, version in versions.items() if version]
    words += [f"commit {commit[:7]}"] if commit else []
    return ", ".join(filter(None, words))


def machine_line(machine: Row) -> str:
    """Where, with what and of which code something was measured."""
    unknown = "" if machine.get("commit") else ", commit unknown"
    changed = " with uncommitted changes" if machine.get("dirty") else ""
    return f"Measured on {measured_on(machine, full=True)}{unknown}{changed}."


# --- numbers


def number(value: float | None, digits: int = 0, unit: str = "", group: str = ",") -> Cell:
    """With so many digits after the point, thousands apart; None of None.

    >>> number(1234.5, 1, " ms"), number(None)
    ('1,234.5 ms', None)
    """
    return None if value is None else f"{value:{group}.{digits}f}{unit}"


def significant(value: float, digits: int = 3) -> str:
    """So many digits, or all before the point.

    >>> significant(1234.5), significant(0.00123), significant(0.5)
    ('1,234', '0.00123', '0.5')
    """
    whole = abs(value) >= 10 ** (digits - 1)
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def ms(seconds: float | None, digits: int = 0, group: str = ",") -> Cell:
    """Milliseconds."""
    return None if seconds is None else number(1e3 * seconds, digits, " ms", group)


def mib(nbytes: float | None, digits: int = 0) -> Cell:
    """Mebibytes."""
    return None if nbytes is None else number(nbytes / MIB, digits, " MiB")


def kib(nbytes: float) -> str:
    """Kibibytes."""
    return f"{nbytes / 1024:,.1f} KiB"


def times(quantiles: Mapping[str, float] | None, digits: int = 2, spread: bool = False) -> Cell:
    """The median of a ratio; `spread`: with the 20th and the 80th percentile.

    >>> times({"p20": 0.9, "p50": 1.0, "p80": 1.25}, spread=True)
    '1.00× (0.90 to 1.25)'
    """
    if quantiles is None:
        return None
    around = f" ({quantiles['p20']:.{digits}f} to {quantiles['p80']:.{digits}f})" if spread else ""
    return f"{quantiles['p50']:.{digits}f}×{around}"


def span(values: Collection[float], form: str = ".2f", unit: str = "") -> str:
    """The least and the largest, once if they are shown alike; "12 to 40%" has its sign once.

    >>> span([1.0, 2.0], unit="×"), span([0.12, 0.4], ".0%"), span([1.0, 1.001])
    ('1.00 to 2.00×', '12 to 40%', '1.00')
    """
    low, high = format(min(values), form), format(max(values), form)
    return (low if low == high else f"{low.rstrip('%')} to {high}") + unit


def fraction(x: float) -> str:
    """A power of two as people say it.

    >>> fraction(1.0), fraction(0.0625), fraction(2.0)
    ('1', '1/16', '2')
    """
    return f"{x:.0f}" if x >= 1 else f"1/{1 / x:.0f}"


# --- tables


def markdown(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table for a page; a row of fewer cells than the head lacks the last ones."""
    full = [head, *([*row, *[None] * (len(head) - len(row))] for row in rows)]
    lines = ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in full]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def terminal(head: Sequence[str], rows: Iterable[Sequence[Cell]], indent: str = "") -> str:
    """A table for a terminal: the first column to the left, numbers to the right.

    A row of two cells in a wider table is a name and a sentence, which no column is widened for.
    """
    shown = [["-" if cell is None else cell for cell in row] for row in (head, *rows)]
    whole = [row for row in shown if len(row) == len(head)]
    widths = [max(map(len, column)) for column in zip(*whole, strict=True)]
    widths[0] = max(len(row[0]) for row in shown)
    lines = []
    for first, *others in shown:
        if len(others) + 1 == len(head):
            others = list(map(str.rjust, others, widths[1:]))
        lines.append(indent + "  ".join([first.ljust(widths[0]), *others]))
    return "\n".join(lines)


#: Name -> cell of a way; two columns may have one name.
Columns = Sequence[tuple[str, Callable[[Row], Cell]]]


def ways_table(
    ways: Mapping[str, Row],
    columns: Columns,
    first: str = "",
    write: Callable[[Sequence[str], Iterable[Sequence[Cell]]], str] = markdown,
) -> str:
    """A line for each way: its name and cells, or its name and why it has no numbers."""
    rows: list[list[Cell]] = []
    for name, way in ways.items():
        absent = way.get("unavailable") or way.get("absent")
        reason = absent or way.get("failure") or way.get("error")
        if reason:
            why = ("absent: " if absent else "FAIL: ") + " ".join(reason.split())
        rows.append([name, *([why] if reason else [cell(way) for _, cell in columns])])
    return write([first, *(heading for heading, _ in columns)], rows)


def errors_of(
    rows: Iterable[Row], title: Callable[[Row], str], most: int | None = None
) -> list[str]:
    """Every error of the rows and of their ways, in a line; `most`: letters of an error."""
    found = []
    for row in rows:
        ways = row.get("ways", {}).items()
        named = [("", row), *((f"{name}: ", way) for name, way in ways)]
        found += [f"{title(row)}: {name}{o['error'][:most]}" for name, o in named if "error" in o]
    return found


def place(path: Path) -> str:
    """Of a file in the results folder, or in a folder of it: its path in the repository.

    >>> place(RESULTS / "a.json"), place(Path("copied/folder/a.json"))
    ('bench/results/a.json', 'bench/results/folder/a.json')
    """
    folder = "" if path.parent.name == RESULTS.name else f"{path.parent.name}/"
    return f"bench/results/{folder}{path.name}"


def where(machine: Row, path: Path) -> str:
    """What a file or a folder was measured on, and where it is."""
    return f"{machine.get('gpu') or machine['cpu']} (`{place(path)}`)"


def part(path: Path, make: Callable[[Any], str], unmeasured: str) -> str:
    """A part of a page, made of a results file, or why there is none."""
    data = load(path)
    return make(data) if data else unmeasured


def picture(path: Path, text: str) -> str:
    """The picture beside a results file; `text` says what it shows."""
    return f"![{text}]({place(path.with_suffix('.png'))})"


def folded(summary: str, *parts: str) -> str:
    """A part of a page that opens at a click."""
    return "\n\n".join([f"<details>\n<summary>{summary}</summary>", *parts, "</details>"])


# --- targets


@dataclass(frozen=True)
class Verdict:
    """What was measured for a target; `met` is None where nothing was."""

    target: str
    measured: str
    met: bool | None

    @property
    def cells(self) -> tuple[str, str, str]:
        said = "-" if self.met is None else "yes" if self.met else "no"
        return self.target, self.measured, said


def verdict_table(verdicts: Iterable[Verdict], of: str = "target") -> str:
    """Targets, met or not."""
    return markdown((of, "measured", "met"), [verdict.cells for verdict in verdicts])

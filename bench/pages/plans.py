"""Plans: beside their peers at equal peaks, and what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median_high
from typing import NamedTuple

from bench import tables
from bench.tables import RESULTS, Cell, Columns, Row, load

#: What a prediction is held against: its name, its key, and that of what was measured.
PREDICTIONS = (
    ("peak", "peak_bytes", "peak_bytes"),
    ("kept", "kept_bytes", "kept_bytes"),
    ("time, costs measured", "seconds", "step_seconds"),
    ("time, costs analytic", "analytic_seconds", "step_seconds"),
)


def title(row: Row) -> str:
    """The model in a few words."""
    c = row["case"]
    return (
        f"{c['layers']} layers, D = {c['width']}, H = {c['heads']}, B = {c['batch']}, "
        f"S = {c['seq_len']}, {c['dtype']}, {c['norm']}-norm, dropout {c['dropout']:g}"
    ) + ", causal" * c["causal"]


def right(row: Row) -> dict[str, Row]:
    """The ways whose results were right."""
    return {name: way for name, way in row["ways"].items() if "step_ratio" in way}


def is_ours(way: Row) -> bool:
    return str(way["family"]).startswith("ours")


class Rival(NamedTuple):
    """A peer, and our plan for a budget of the peer's peak."""

    peer: str
    way: str | None  # None where there is no plan within the budget
    least: int | None = None  # of a plan's peak, where there is none


def rivals(row: Row) -> Iterator[Rival]:
    """One for each peer that was measured."""
    measured = right(row)
    for asked in row["plans"]:
        if asked["method"] == "optimal" and asked["of"] in measured:
            way = asked.get("way")
            if way in measured or "least_bytes" in asked:
                yield Rival(asked["of"], way, asked.get("least_bytes"))


def _ms(seconds: float | None) -> Cell:
    return None if seconds is None else f"{tables.significant(1e3 * seconds)} ms"


def _predicted(key: str, form: Callable[[float | None], Cell]) -> Callable[[Row], Cell]:
    return lambda way: form(way.get("predicted", {}).get(key))


def _mib(nbytes: float | None) -> Cell:
    return tables.mib(nbytes, 1)


#: What is said of a way: measured, the spread of its time, and predicted.
MEASURED: Columns = [
    ("peak", lambda way: _mib(way["peak_bytes"])),
    ("kept", lambda way: _mib(way["kept_bytes"])),
    ("vs eager", lambda way: tables.times(way["step_ratio"].get("eager"))),
]
COLUMNS: Columns = [
    *MEASURED[:2],
    ("step", lambda way: _ms(way["step_seconds"]["p50"])),
    (
        "vs eager (p20 to p80)",
        lambda way: tables.times(way["step_ratio"].get("eager"), spread=True),
    ),
    ("predicted: peak", _predicted("peak_bytes", _mib)),
    ("kept", _predicted("kept_bytes", _mib)),
    ("step, costs measured", _predicted("seconds", _ms)),
    ("analytic", _predicted("analytic_seconds", _ms)),
]


def table(row: Row) -> str:
    """Every way: peak, kept bytes, time, and what was predicted of ours."""
    return tables.ways_table(row["ways"], COLUMNS, "way")


def rival_table(row: Row) -> str:
    """Each peer, beside the best plan within its measured peak."""
    ways, names = row["ways"], [name for name, _ in MEASURED]
    head = ("peer", *names, "ours within its peak", *names, "vs the peer (p20 to p80)")
    rows = []
    for peer, way, least in rivals(row):
        found: list[Cell] = [f"none: the least possible is {_mib(least)}"]
        if way is not None:
            over = ways[way]["peak_bytes"] / ways[peer]["peak_bytes"] - 1
            ratio = str(tables.times(ways[way]["step_ratio"][peer], spread=True))
            found = [way + f" (over by {over:.1%})" * (over > 0), *_cells(ways[way])]
            found.append(f"**{ratio.replace('×', '×**')}")
        rows.append([peer, *_cells(ways[peer]), *found])
    return tables.markdown(head, rows)


def _cells(way: Row) -> list[Cell]:
    return [cell(way) for _, cell in MEASURED]


def errors(row: Row) -> dict[str, dict[str, float]]:
    """By what is predicted, then by our way: predicted over measured, less 1."""
    mine = {name: way for name, way in right(row).items() if "predicted" in way}
    found: dict[str, dict[str, float]] = {}
    for name, way in mine.items():
        measured = way | {"step_seconds": way["step_seconds"]["p50"]}
        for what, key, of in PREDICTIONS:
            found.setdefault(what, {})[name] = way["predicted"][key] / measured[of] - 1
    return found


def error_table(row: Row) -> str:
    """How far predictions are off what was measured of all our plans that were run."""
    rows = []
    for what, found in errors(row).items():
        worst = max(found, key=lambda way: abs(found[way]))
        middle = percent(median_high(map(abs, found.values())))
        rows.append([what, str(len(found)), percent(found[worst], "+"), worst, middle])
    return tables.markdown(("predicted", "plans", "largest error", "at", "median error"), rows)


def step_table(row: Row) -> str:
    """A layer's steps: measured, and from FLOPs and bytes over the ceilings."""
    sums = [sum(step[i] for step in row["steps"]) for i in (2, 3)]
    rows = [
        [which, step, _ms(measured), _ms(analytic), f"{analytic / measured:.2f}"]
        for which, step, measured, analytic in [*row["steps"], [None, "all", *sums]]
    ]
    return tables.markdown(("pass", "step", "measured", "analytic", "analytic / measured"), rows)


def percent(error: float, sign: str = "") -> str:
    """With enough digits to tell small from none."""
    if error == 0:
        return "0%"
    return format(error, f"{sign}.{1 if abs(error) >= 1e-3 else 3}%")


def summary(row: Row) -> str:
    """How our plans do within the peaks of their peers, and how well they were predicted."""
    ways, found = right(row), list(rivals(row))
    against = {r.peer: ways[r.way]["step_ratio"][r.peer]["p50"] for r in found if r.way in ways}
    if not against:
        return f"{title(row)}: no peer was measured."
    won = sum(ratio < 1 for ratio in against.values())
    best, worst = min(against, key=against.__getitem__), max(against, key=against.__getitem__)
    off, kept = (errors(row)[what].values() for what in ("peak", "kept"))
    tight = [rival.peer for rival in found if rival.way is None]
    none = f"; within that of {', '.join(tight)} there is no plan" if tight else ""
    return (
        f"{title(row)}: within the measured peak of each of {len(against)} other ways, the optimal "
        f"plan is faster than {won}: {against[best]:.2f} times the time of {best} at best, "
        f"{against[worst]:.2f} times that of {worst} at worst{none}. Of {len(off)} plans the "
        f"predicted peak is off by at most {percent(max(map(abs, off)))}, kept bytes are "
        f"{'not exact' if any(kept) else 'exact'}."
    )


#: What the picture shows.
SHOWN = "Step time against the measured peak; predicted against measured peak"


def readme(root: Path = RESULTS) -> str:
    """This CPU's picture, and how its cases come out in a line each."""
    path = root / "plan-cpu.json"
    rows = load(path)["results"]
    lines = "\n".join(f"- {summary(row)}" for row in rows)
    machine = tables.machine_line(rows[0]["machine"])
    return "\n\n".join([tables.picture(path, SHOWN), lines, machine])


def section(root: Path = RESULTS) -> str:
    """Of every file: the picture, and the tables of every case."""
    parts = []
    for path in tables.files("plan-*.json", root):
        data = load(path)
        parts += [tables.heading(data["machine"], path), tables.picture(path, SHOWN)]
        for row in data["results"]:
            parts += [
                f"**{title(row)}**, {row['rounds']} rounds. {tables.machine_line(row['machine'])}",
                "Each peer, and our optimal plan whose budget is the peer's measured peak:",
                rival_table(row),
                "Predictions against what was measured, of all our plans that were run:",
                error_table(row),
                tables.folded("Every way", table(row)),
                tables.folded("A layer's steps: measured, and analytic", step_table(row)),
            ]
    return "\n\n".join(parts)

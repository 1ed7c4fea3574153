"""Plans compared with their peers at equal peaks, and predictions with measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median_high
from typing import NamedTuple

from bench import tables
from bench.tables import RESULTS, Cell, Columns, Row, load

#: Predictions: the name, the key, and the key of the measurement.
PREDICTIONS = (
    ("peak", "peak_bytes", "peak_bytes"),
    ("kept", "kept_bytes", "kept_bytes"),
    ("time", "seconds", "step_seconds"),
)


def title(row: Row) -> str:
    """Return the model in a few words."""
    c = row["case"]
    return (
        f"{c['layers']} layers, D = {c['width']}, H = {c['heads']}, B = {c['batch']}, "
        f"S = {c['seq_len']}, {c['dtype']}, {c['norm']}-norm, dropout {c['dropout']:g}"
    ) + ", causal" * c["causal"]


def right(row: Row) -> dict[str, Row]:
    """Return the ways whose results were right."""
    return {name: way for name, way in row["ways"].items() if "step_ratio" in way}


class Rival(NamedTuple):
    """A peer, and our plan for a budget of the peer's peak."""

    peer: str
    way: str | None  # None where no plan fits the budget
    least: int | None = None  # of a plan's peak, where none fits


def rivals(row: Row) -> Iterator[Rival]:
    """Yield an entry for each peer that was measured."""
    measured = right(row)
    for request in row["plans"]:
        if request["method"] == "optimal" and request["of"] in measured:
            way = request.get("way")
            if way in measured or "least_bytes" in request:
                yield Rival(request["of"], way, request.get("least_bytes"))


def _mib(nbytes: float | None) -> Cell:
    return tables.mib(nbytes, 1)


def _predicted(key: str, show: Callable[[float | None], Cell]) -> Callable[[Row], Cell]:
    return lambda way: show(way.get("predicted", {}).get(key))


MEASURED: Columns = [
    ("peak", lambda way: _mib(way["peak_bytes"])),
    ("kept", lambda way: _mib(way["kept_bytes"])),
    ("vs eager", lambda way: tables.times(way["step_ratio"].get("eager"))),
]
COLUMNS: Columns = [
    *MEASURED,
    ("step", lambda way: tables.ms(way["step_seconds"]["p50"], 1)),
    ("predicted: peak", _predicted("peak_bytes", _mib)),
    ("kept", _predicted("kept_bytes", _mib)),
    ("step", _predicted("seconds", lambda seconds: tables.ms(seconds, 1))),
]


def table(row: Row) -> str:
    """Return every way: peak, kept bytes, time, and the predictions for plans."""
    return tables.ways_table(row["ways"], COLUMNS, "way")


def rival_table(row: Row) -> str:
    """Return each peer next to the best plan within its measured peak."""
    ways, names = row["ways"], [name for name, _ in MEASURED]
    head = ("peer", *names, "plan within its peak", *names, "vs the peer (p20 to p80)")
    rows = []
    for peer, way, least in rivals(row):
        plan: list[Cell] = [f"none: the least possible is {_mib(least)}"]
        if way is not None:
            over = ways[way]["peak_bytes"] / ways[peer]["peak_bytes"] - 1
            ratio = str(tables.times(ways[way]["step_ratio"][peer], spread=True))
            plan = [way + f" (over by {over:.1%})" * (over > 0), *_cells(ways[way])]
            plan.append(f"**{ratio.replace('×', '×**')}")
        rows.append([peer, *_cells(ways[peer]), *plan])
    return tables.markdown(head, rows)


def _cells(way: Row) -> list[Cell]:
    return [cell(way) for _, cell in MEASURED]


def errors(row: Row) -> dict[str, dict[str, float]]:
    """Return predicted over measured, less 1, by prediction and by plan."""
    plans = {name: way for name, way in right(row).items() if "predicted" in way}
    found: dict[str, dict[str, float]] = {}
    for name, way in plans.items():
        measured = way | {"step_seconds": way["step_seconds"]["p50"]}
        for what, key, of in PREDICTIONS:
            found.setdefault(what, {})[name] = way["predicted"][key] / measured[of] - 1
    return found


def error_table(row: Row) -> str:
    """Return how far predictions are from measurements, over all plans that were run."""
    rows = []
    for what, found in errors(row).items():
        worst = max(found, key=lambda way: abs(found[way]))
        middle = percent(median_high(map(abs, found.values())))
        rows.append([what, str(len(found)), percent(found[worst], "+"), worst, middle])
    return tables.markdown(("predicted", "plans", "largest error", "at", "median error"), rows)


def percent(error: float, sign: str = "") -> str:
    """Format an error with enough digits to distinguish a small one from none."""
    if error == 0:
        return "0%"
    return format(error, f"{sign}.{1 if abs(error) >= 1e-3 else 3}%")


def summary(row: Row) -> str:
    """Return in a sentence how plans do within the peaks of their peers."""
    ways, found = right(row), list(rivals(row))
    against = {r.peer: ways[r.way]["step_ratio"][r.peer]["p50"] for r in found if r.way in ways}
    if not against:
        return f"{title(row)}: no peer was measured."
    won = sum(ratio < 1 for ratio in against.values())
    best, worst = min(against, key=against.__getitem__), max(against, key=against.__getitem__)
    off, kept = (errors(row)[what].values() for what in ("peak", "kept"))
    tight = [rival.peer for rival in found if rival.way is None]
    none = f"; no plan fits within that of {', '.join(tight)}" if tight else ""
    return (
        f"{title(row)}: within the measured peak of each of {len(against)} other methods, the "
        f"optimal plan is faster than {won}: {against[best]:.2f} times the time of {best} at best, "
        f"{against[worst]:.2f} times that of {worst} at worst{none}. Of {len(off)} plans the "
        f"predicted peak is off by at most {percent(max(map(abs, off)))}, kept bytes are "
        f"{'not exact' if any(kept) else 'exact'}."
    )


def readme(root: Path = RESULTS) -> str:
    """Return a line for each case of this CPU, and the machine."""
    rows = load(root / "plan-cpu.json")["results"]
    lines = "\n".join(f"- {summary(row)}" for row in rows)
    return f"{lines}\n\n{tables.machine_line(rows[0]['machine'])}"


def section(root: Path = RESULTS) -> str:
    """Return the tables of every case of every file."""
    parts = []
    for path in tables.files("plan-*.json", root):
        data = load(path)
        parts.append(tables.heading(data["machine"], path))
        for row in data["results"]:
            parts += [
                f"**{title(row)}**, {row['rounds']} rounds. {tables.machine_line(row['machine'])}",
                "Each peer, and the optimal plan whose budget is the peer's measured peak:",
                rival_table(row),
                "Predictions compared with measurements, over all plans that were run:",
                error_table(row),
                tables.folded("Every way", table(row)),
            ]
    return "\n\n".join(parts)

"""Plans: beside their peers at equal peaks, and what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.tables import (
    RESULTS,
    Cell,
    Columns,
    Row,
    folded,
    machine_line,
    markdown,
    mib,
    picture,
    place,
    significant,
    times,
    ways_table,
)
from bench.tables import read as read_results

UNMEASURED = "Not measured yet: `python -m bench plan --device cpu`."
#: What a prediction is held against: its name, the key of what was measured, and whether both are
#: taken relative to those of our plan with the largest peak, which no change of the machine between
#: planning and measuring shows in.
PREDICTIONS = (
    ("peak", "peak_bytes", "peak_bytes", False),
    ("kept", "kept_bytes", "kept_bytes", False),
    ("time, costs measured", "seconds", "step_seconds", False),
    ("time, costs analytic", "analytic_seconds", "step_seconds", False),
    ("time relative to the fastest plan, costs measured", "seconds", "step_seconds", True),
    ("time relative to the fastest plan, costs analytic", "analytic_seconds", "step_seconds", True),
)


def read(path: Path) -> Row:
    """A results file of `bench plan`. Raises: ValueError where it is none."""
    return read_results(path, ("resting", "ways"), "bench plan")


def title(row: Row) -> str:
    """The model in a few words."""
    c = row["case"]
    return (
        f"{c['layers']} layers, D = {c['width']}, H = {c['heads']}, B = {c['batch']}, "
        f"S = {c['seq_len']}, {c['dtype']}, {c['norm']}-norm, dropout {c['dropout']:g}"
        + ", causal"
        * c["causal"]
    )


def right(row: Row, *families: str) -> dict[str, Row]:
    """The ways whose results were right, of these families or of all."""
    return {
        name: way
        for name, way in row["ways"].items()
        if "step_ratio" in way and (not families or way["family"] in families)
    }


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


# --- tables of a case


#: What is said of a way.
COLUMNS: Columns = [
    ("peak", lambda way: mib(way["peak_bytes"], 1)),
    ("kept", lambda way: mib(way["kept_bytes"], 1)),
    ("step", lambda way: _ms(way["step_seconds"]["p50"])),
    ("vs eager (p20 to p80)", lambda way: times(way["step_ratio"].get("eager"), spread=True)),
    ("predicted: peak", lambda way: mib(way.get("predicted", {}).get("peak_bytes"), 1)),
    ("kept", lambda way: mib(way.get("predicted", {}).get("kept_bytes"), 1)),
    ("step, costs measured", lambda way: _ms(way.get("predicted", {}).get("seconds"))),
    ("analytic", lambda way: _ms(way.get("predicted", {}).get("analytic_seconds"))),
]


def table(row: Row) -> str:
    """Every way: peak, kept bytes, time, and what was predicted of ours."""
    return ways_table(row["ways"], COLUMNS, "way")


def _ms(seconds: float | None) -> Cell:
    return None if seconds is None else f"{significant(1e3 * seconds)} ms"


def rival_table(row: Row) -> str:
    """Each peer, beside the best plan within its measured peak."""
    ways = row["ways"]
    head = (
        "peer", "peak", "kept", "vs eager", "ours within its peak", "peak", "kept", "vs eager",
        "vs the peer (p20 to p80)",
    )  # fmt: skip
    rows = []
    for rival in rivals(row):
        peer = [rival.peer, *_cells(ways[rival.peer])]
        if rival.way is None:
            assert rival.least is not None
            rows.append([*peer, f"none: the least possible is {mib(rival.least, 1)}"])
            continue
        found = ways[rival.way]
        ratio = found["step_ratio"][rival.peer]
        over = found["peak_bytes"] / ways[rival.peer]["peak_bytes"] - 1
        shown = rival.way + (f" (over by {over:.1%})" if over > 0 else "")
        spread = f"**{times(ratio)}** ({ratio['p20']:.2f} to {ratio['p80']:.2f})"
        rows.append([*peer, shown, *_cells(found), spread])
    return markdown(head, rows)


def _cells(way: Row) -> list[Cell]:
    ratio = way["step_ratio"].get("eager")
    return [mib(way["peak_bytes"], 1), mib(way["kept_bytes"], 1), times(ratio)]


def rule_table(row: Row) -> str:
    """What simpler rules choose within the peers' peaks, against the best: as predicted."""
    methods = list(dict.fromkeys(a["method"] for a in row["plans"] if a["method"] != "optimal"))
    rows = []
    for of in dict.fromkeys(a["of"] for a in row["plans"] if a["of"] != "sweep"):
        mine = {a["method"]: a for a in row["plans"] if a["of"] == of}
        least, best = mine["optimal"], mine["optimal"].get("predicted")
        cells = [of, mib(least["budget_bytes"], 1), _ms(best["seconds"]) if best else "none"]
        for found in (mine[method].get("predicted") for method in methods):
            ratio = f"{found['seconds'] / best['seconds']:.3f}×" if found else "does not fit"
            cells.append(ratio)
        rows.append(cells)
    return markdown(["within the peak of", "budget", "optimal, predicted", *methods], rows)


def errors(row: Row) -> dict[str, dict[str, float]]:
    """By what is predicted, then by our way: predicted over measured, less 1."""
    mine = {name: way for name, way in right(row).items() if "predicted" in way}
    if not mine:
        return {}
    best = [way for way in mine.values() if way["family"] == "ours"] or mine.values()
    fastest = max(best, key=lambda way: float(way["peak_bytes"]))

    def share(way: Row, key: str, measured: str) -> float:
        actual = way[measured]
        actual = actual["p50"] if isinstance(actual, dict) else actual
        return float(way["predicted"][key] / actual)

    found = {}
    for what, key, measured, relative in PREDICTIONS:
        unit = share(fastest, key, measured) if relative else 1.0
        found[what] = {name: share(way, key, measured) / unit - 1 for name, way in mine.items()}
    return found


def error_table(row: Row) -> str:
    """How far predictions are off what was measured of all our plans that were run."""
    rows = []
    for what, found in errors(row).items():
        worst = max(found, key=lambda way: abs(found[way]))
        middle = sorted(map(abs, found.values()))[len(found) // 2]
        rows.append([what, str(len(found)), percent(found[worst], "+"), worst, percent(middle)])
    return markdown(("predicted", "plans", "largest error", "at", "median error"), rows)


def step_table(row: Row) -> str:
    """A layer's steps: measured, and from FLOPs and bytes over the ceilings."""
    sums = [sum(step[i] for step in row["steps"]) for i in (2, 3)]
    rows = [
        [which, step, _ms(measured), _ms(analytic), f"{analytic / measured:.2f}"]
        for which, step, measured, analytic in [*row["steps"], [None, "all", *sums]]
    ]
    return markdown(("pass", "step", "measured", "analytic", "analytic / measured"), rows)


def percent(error: float, sign: str = "") -> str:
    """With enough digits to tell small from none."""
    if error == 0:
        return "0%"
    digits = 1 if abs(error) >= 1e-3 else 3
    return format(error, f"{sign}.{digits}%")


def summary(row: Row) -> str:
    """How our plans do within the peaks of their peers, and how well they were predicted."""
    ways = right(row)
    against = {
        rival.peer: ways[rival.way]["step_ratio"][rival.peer]["p50"]
        for rival in rivals(row)
        if rival.way is not None and rival.way in ways
    }
    if not against:
        return f"{title(row)}: no peer was measured."
    won = sum(ratio < 1 for ratio in against.values())
    best, worst = min(against, key=against.__getitem__), max(against, key=against.__getitem__)
    mine = [way for way in ways.values() if "predicted" in way]
    off = [abs(way["predicted"]["peak_bytes"] / way["peak_bytes"] - 1) for way in mine]
    exact = all(way["predicted"]["kept_bytes"] == way["kept_bytes"] for way in mine)
    tight = [rival.peer for rival in rivals(row) if rival.way is None]
    none = f"; within that of {', '.join(tight)} there is no plan" if tight else ""
    return (
        f"{title(row)}: within the measured peak of each of {len(against)} other ways, the optimal "
        f"plan is faster than {won}: {against[best]:.2f} times the time of {best} at best, "
        f"{against[worst]:.2f} times that of {worst} at worst{none}. Of {len(mine)} plans the "
        f"predicted peak is off by at most {percent(max(off))}, kept bytes are "
        f"{'exact' if exact else 'not exact'}."
    )


# --- parts of pages


def files(root: Path = RESULTS) -> list[Path]:
    """Every results file of plans: this CPU's first, then those of folders, the newest first."""
    return [*sorted(root.glob("plan-*.json")), *sorted(root.glob("*/plan-*.json"), reverse=True)]


def _picture(path: Path) -> str:
    return picture(path, "Step time against the measured peak; predicted against measured peak")


def readme(root: Path = RESULTS) -> str:
    """Of the first file: the picture, and how its cases come out in a line each."""
    for path in files(root)[:1]:
        rows = read(path)["results"]
        lines = "\n".join(f"- {summary(row)}" for row in rows)
        return "\n\n".join([_picture(path), lines, machine_line(rows[0]["machine"])])
    return UNMEASURED


def section(root: Path = RESULTS) -> str:
    """Of every file: the picture, and the tables of every case."""
    return "\n\n".join(text for path in files(root) for text in _set(path)) or UNMEASURED


def _set(path: Path) -> Iterator[str]:
    data = read(path)
    machine = data["machine"]
    yield f"### {machine.get('gpu') or machine['cpu']} (`{place(path)}`)"
    yield _picture(path)
    for row in data["results"]:
        yield f"**{title(row)}**, {row['rounds']} rounds. {machine_line(row['machine'])}"
        yield "Each peer, and our optimal plan whose budget is the peer's measured peak:"
        yield rival_table(row)
        yield "Predictions against what was measured, of all our plans that were run:"
        yield error_table(row)
        yield (
            "Simpler rules within the same budgets: predicted time, relative to the optimal plan's:"
        )
        yield rule_table(row)
        yield folded("Every way", table(row))
        yield folded("A layer's steps: measured, and analytic", step_table(row))

"""Plans: beside their peers at equal peaks, and what was predicted beside what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """The model in a few words.

    >>> title({"case": {"layers": 8, "dtype": "float32", "norm": "pre", "dropout": 0.0, "batch": 2,
    ...        "seq_len": 256, "width": 512, "heads": 8, "causal": True}})
    '8 layers, D = 512, H = 8, B = 2, S = 256, float32, pre-norm, dropout 0, causal'
    """
    case = row["case"]
    words = [
        f"{case['layers']} layers", f"D = {case['width']}", f"H = {case['heads']}",
        f"B = {case['batch']}", f"S = {case['seq_len']}", case["dtype"], f"{case['norm']}-norm",
        f"dropout {case['dropout']:g}",
    ]  # fmt: skip
    return ", ".join([*words, *["causal"] * case["causal"]])


def right(row: Row, *families: str) -> dict[str, Row]:
    """The ways whose results were right, of these families or of all."""
    return {
        name: way
        for name, way in row["ways"].items()
        if "step_ratio" in way and (not families or way["family"] in families)
    }


def is_ours(way: Row) -> bool:
    return str(way["family"]).startswith("ours")


@dataclass(frozen=True)
class Rival:
    """A peer, and our plan for a budget of the peer's peak.

    Attributes:
        way: ours; None where there is no plan within the budget.
        least: of a plan's peak, where there is none.
    """

    peer: str
    way: str | None
    least: int | None = None


def rivals(row: Row) -> Iterator[Rival]:
    """One for each peer that was measured."""
    measured = right(row)
    for asked in row["plans"]:
        if asked["method"] == "optimal" and asked["of"] in measured:
            way = asked.get("way")
            if way in measured or "least_bytes" in asked:
                yield Rival(asked["of"], way, asked.get("least_bytes"))


# --- tables of a case


def table(row: Row) -> str:
    """Every way: peak, kept bytes, time, and what was predicted of ours."""
    columns: Columns = [
        ("peak", lambda way: mib(way["peak_bytes"], 1)),
        ("kept", lambda way: mib(way["kept_bytes"], 1)),
        ("step", lambda way: _ms(way["step_seconds"]["p50"])),
        ("vs eager (p20 to p80)", lambda way: times(way["step_ratio"].get("eager"), spread=True)),
        ("predicted: peak", lambda way: mib(_predicted(way, "peak_bytes"), 1)),
        ("kept", lambda way: mib(_predicted(way, "kept_bytes"), 1)),
        ("step, costs measured", lambda way: _ms(_predicted(way, "seconds"))),
        ("analytic", lambda way: _ms(_predicted(way, "analytic_seconds"))),
    ]
    return ways_table(row["ways"], columns, "way")


def _predicted(way: Row, key: str) -> float | None:
    found: float | None = way.get("predicted", {}).get(key)
    return found


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
    best = [way for way in mine.values() if way["family"] == "ours"] or list(mine.values())
    fastest = max(best, key=lambda way: float(way["peak_bytes"]))
    found = {}
    for what, key, measured, relative in PREDICTIONS:
        unit = _share(fastest, key, measured) if relative else 1.0
        found[what] = {name: _share(way, key, measured) / unit - 1 for name, way in mine.items()}
    return found


def _share(way: Row, key: str, measured: str) -> float:
    """Predicted over measured."""
    actual = way[measured]
    return float(way["predicted"][key] / (actual["p50"] if isinstance(actual, dict) else actual))


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
    """With enough digits to tell small from none.

    >>> percent(0.123, "+"), percent(-0.00006, "+"), percent(0.0)
    ('+12.3%', '-0.006%', '0%')
    """
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
        if rival.way is not None and rival.way in ways and rival.peer in ways
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


def section(root: Path = RESULTS) -> str:
    """Of every file: the picture, and the tables of every case."""
    return "\n\n".join(map(_set, files(root))) or UNMEASURED


def readme(root: Path = RESULTS) -> str:
    """Of the first file: the picture, and how its cases come out in a line each."""
    path = next(iter(files(root)), None)
    if path is None:
        return UNMEASURED
    rows = read(path)["results"]
    lines = "\n".join(f"- {summary(row)}" for row in rows)
    return "\n\n".join([_picture(path), lines, machine_line(rows[0]["machine"])])


def _set(path: Path) -> str:
    data = read(path)
    machine = data["machine"]
    heading = f"### {machine.get('gpu') or machine['cpu']} (`{place(path)}`)"
    cases = [text for row in data["results"] for text in _case(row)]
    return "\n\n".join([heading, _picture(path), *cases])


def _case(row: Row) -> Iterator[str]:
    yield f"**{title(row)}**, {row['rounds']} rounds. {machine_line(row['machine'])}"
    yield "Each peer, and our optimal plan whose budget is the peer's measured peak:"
    yield rival_table(row)
    yield "Predictions against what was measured, of all our plans that were run:"
    yield error_table(row)
    yield "Simpler rules within the same budgets: predicted time, relative to the optimal plan's:"
    yield rule_table(row)
    yield folded("Every way", table(row))
    yield folded("A layer's steps: measured, and analytic", step_table(row))

"""What was found of plans, in tables of Markdown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 2**20
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


def read(path: Path) -> dict[str, Any]:
    """A results file of `bench plan`. Raises: ValueError where it is none."""
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        assert isinstance(data["machine"], dict)
        assert all("resting" in row and "ways" in row for row in data["results"])
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise ValueError(f"{path} is not a results file of bench plan: {error!r}") from error
    return data


def title(row: dict[str, Any]) -> str:
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


def right(row: dict[str, Any], *families: str) -> dict[str, dict[str, Any]]:
    """The ways whose results were right, of these families or of all."""
    return {
        name: way
        for name, way in row["ways"].items()
        if "step_ratio" in way and (not families or way["family"] in families)
    }


def is_ours(way: dict[str, Any]) -> bool:
    return str(way["family"]).startswith("ours")


@dataclasses.dataclass(frozen=True)
class Rival:
    """A peer, and our plan for a budget of the peer's peak.

    Attributes:
        way: ours; None where there is no plan within the budget.
        least: of a plan's peak, where there is none.
    """

    peer: str
    way: str | None
    least: int | None = None


def rivals(row: dict[str, Any]) -> Iterator[Rival]:
    """One for each peer that was measured."""
    measured = right(row)
    for asked in row["plans"]:
        if asked["method"] == "optimal" and asked["of"] in measured:
            way = asked.get("way")
            if way in measured or "least_bytes" in asked:
                yield Rival(asked["of"], way, asked.get("least_bytes"))


def table(row: dict[str, Any]) -> str:
    """Every way: peak, kept bytes, time, and what was predicted of ours."""
    lines = [
        "| way | peak | kept | step | vs eager (p20 to p80) | predicted: peak | kept "
        "| step, costs measured | analytic |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(name, way) for name, way in row["ways"].items())])


def _line(name: str, way: dict[str, Any]) -> str:
    if "step_ratio" not in way:
        why = f"FAIL: {way['failure']}" if "failure" in way else f"absent: {way['unavailable']}"
        return f"| {name} | {why} |" + " |" * 7
    ratio = way["step_ratio"].get("eager")
    spread = "" if ratio is None else f"{times(ratio)} ({ratio['p20']:.2f} to {ratio['p80']:.2f})"
    cells = [name, mib(way["peak_bytes"]), mib(way["kept_bytes"]),
             ms(way["step_seconds"]["p50"]), spread]  # fmt: skip
    given = way.get("predicted")
    if given is None:
        return f"| {' | '.join(cells)} |" + " |" * 4
    cells += [mib(given["peak_bytes"]), mib(given["kept_bytes"]), ms(given["seconds"]),
              ms(given["analytic_seconds"])]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def rival_table(row: dict[str, Any]) -> str:
    """Each peer, beside the best plan within its measured peak."""
    ways = row["ways"]
    lines = [
        "| peer | peak | kept | vs eager | ours within its peak | peak | kept | vs eager "
        "| vs the peer (p20 to p80) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rival in rivals(row):
        peer = [rival.peer, *_cells(ways[rival.peer])]
        if rival.way is None:
            assert rival.least is not None
            mine = [f"none: the least possible is {mib(rival.least)}", "", "", "", ""]
        else:
            found = ways[rival.way]
            ratio = found["step_ratio"][rival.peer]
            over = found["peak_bytes"] / ways[rival.peer]["peak_bytes"] - 1
            shown = rival.way + (f" (over by {over:.1%})" if over > 0 else "")
            spread = f"**{times(ratio)}** ({ratio['p20']:.2f} to {ratio['p80']:.2f})"
            mine = [shown, *_cells(found), spread]
        lines.append(f"| {' | '.join([*peer, *mine])} |")
    return "\n".join(lines)


def summary(row: dict[str, Any]) -> str:
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
    errors = [abs(way["predicted"]["peak_bytes"] / way["peak_bytes"] - 1) for way in mine]
    exact = all(way["predicted"]["kept_bytes"] == way["kept_bytes"] for way in mine)
    tight = [rival.peer for rival in rivals(row) if rival.way is None]
    none = f"; within that of {', '.join(tight)} there is no plan" if tight else ""
    return (
        f"{title(row)}: within the measured peak of each of {len(against)} other ways, the optimal "
        f"plan is faster than {won}: {against[best]:.2f} times the time of {best} at best, "
        f"{against[worst]:.2f} times that of {worst} at worst{none}. Of {len(mine)} plans the "
        f"predicted peak is off by at most {percent(max(errors))}, kept bytes are "
        f"{'exact' if exact else 'not exact'}."
    )


def _cells(way: dict[str, Any]) -> list[str]:
    ratio = way["step_ratio"].get("eager")
    return [mib(way["peak_bytes"]), mib(way["kept_bytes"]), times(ratio) if ratio else ""]


def rule_table(row: dict[str, Any]) -> str:
    """What simpler rules choose within the peers' peaks, against the best: as predicted."""
    methods = list(dict.fromkeys(a["method"] for a in row["plans"] if a["method"] != "optimal"))
    lines = [
        f"| within the peak of | budget | optimal, predicted | {' | '.join(methods)} |",
        "|---|---|---|" + "---|" * len(methods),
    ]
    for of in dict.fromkeys(a["of"] for a in row["plans"] if a["of"] != "sweep"):
        mine = {a["method"]: a for a in row["plans"] if a["of"] == of}
        least = mine["optimal"].get("predicted")
        first = "none" if least is None else ms(least["seconds"])
        cells = [of, mib(mine["optimal"]["budget_bytes"]), first]
        for method in methods:
            found = mine[method].get("predicted")
            cells.append(
                "does not fit" if found is None else f"{found['seconds'] / least['seconds']:.3f}×"
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def errors(row: dict[str, Any]) -> dict[str, dict[str, float]]:
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


def _share(way: dict[str, Any], key: str, measured: str) -> float:
    """Predicted over measured."""
    actual = way[measured]
    return float(way["predicted"][key] / (actual["p50"] if isinstance(actual, dict) else actual))


def error_table(row: dict[str, Any]) -> str:
    """How far predictions are off what was measured of all our plans that were run."""
    lines = ["| predicted | plans | largest error | at | median error |", "|---|---|---|---|---|"]
    for what, found in errors(row).items():
        worst = max(found, key=lambda way: abs(found[way]))
        middle = sorted(map(abs, found.values()))[len(found) // 2]
        cells = [what, str(len(found)), percent(found[worst], "+"), worst, percent(middle)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def step_table(row: dict[str, Any]) -> str:
    """A layer's steps: measured, and from FLOPs and bytes over the ceilings."""
    lines = ["| pass | step | measured | analytic | analytic / measured |", "|---|---|---|---|---|"]
    for which, step, measured, analytic in row["steps"]:
        cells = [which, step, ms(measured), ms(analytic), f"{analytic / measured:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    sums = [sum(s[i] for s in row["steps"]) for i in (2, 3)]
    total = f"| | all | {ms(sums[0])} | {ms(sums[1])} | {sums[1] / sums[0]:.2f} |"
    return "\n".join([*lines, total])


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.1f} MiB"


def ms(seconds: float) -> str:
    """Three digits, or all before the point.

    >>> ms(0.9), ms(0.00123)
    ('900 ms', '1.23 ms')
    """
    given = 1e3 * seconds
    return f"{given:,.0f} ms" if given >= 100 else f"{given:.3g} ms"


def times(ratio: dict[str, float]) -> str:
    return f"{ratio['p50']:.2f}×"


def percent(error: float, sign: str = "") -> str:
    """With enough digits to tell small from none.

    >>> percent(0.123, "+"), percent(-0.00006, "+"), percent(0.0)
    ('+12.3%', '-0.006%', '0%')
    """
    if error == 0:
        return "0%"
    digits = 1 if abs(error) >= 1e-3 else 3
    return format(error, f"{sign}.{digits}%")

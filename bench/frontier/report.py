"""The frontier in words: Markdown of `pareto.derive`'s data."""

from __future__ import annotations

import itertools

from bench.figures.frontier import fraction
from bench.frontier.pareto import SLACK
from bench.frontier.points import LOSSY, is_ours
from bench.tables import Cell, Row, markdown, number, span

AXES = {"seq_len": "S", "d_model": "D"}


def report(derived: Row) -> str:
    """The whole page: what is said, where the winner changes, a table for each shape."""
    parts = ["# The memory-time frontier", rules(), *map(panel_table, derived["panels"])]
    return "\n\n".join([*parts, "## Where the winner changes", changes(derived)]) + "\n"


def rules() -> str:
    """How to read the tables."""
    return (
        "Time is a training step's (median ratio to eager, all ways in turns), memory what is kept "
        "for backward; a memory point allows "
        f"{SLACK:.0%} more, for statistics. A tie: the medians are nearer than the wider of the "
        "two spreads, 20th to 80th percentile. FusedRemat's ways are one side, all others the "
        "other. The frontier: nobody else is as fast within the same bytes."
    )


def panel_table(panel: Row) -> str:
    """A shape: the fastest way at each memory point, the frontier, and who is not on it at all."""
    head = (
        "kept, of eager's", "fastest", "step", "kept bytes per token", "runner-up",
        "the other side's best",
    )  # fmt: skip
    rows = [_winner_cells(row["at_most"], row["fastest"]) for row in panel["winners"]]
    rounds = f", {panel['rounds']} rounds" if panel["rounds"] else ""
    best = sorted((p for p in panel["points"] if p["on_frontier"]), key=lambda p: p["kept"])
    lossy = [p for p in panel["points"] if p["family"] == LOSSY]
    parts = [f"### {panel['title']}{rounds}", markdown(head, rows), f"Frontier: {_places(best)}."]
    if lossy:
        parts.append(f"With 8 bits, which no exact way is held against: {_places(lossy)}.")
    for what, ways in (("Wrong results", panel["wrong"]), ("Absent", panel["absent"])):
        if ways:
            parts.append(f"{what}: {_reasons(ways)}")
    return "\n\n".join(parts)


def _places(ways: list[Row]) -> str:
    return ", ".join(f"`{p['way']}` {p['kept']:.3f} at {p['time']['p50']:.2f}×" for p in ways)


def _reasons(ways: dict[str, str]) -> str:
    """Ways that give the same reason, together."""
    by_reason = itertools.groupby(sorted(ways, key=lambda w: ways[w]), key=lambda w: ways[w])
    return "; ".join(f"{_names(list(found))} ({reason})" for reason, found in by_reason)


def _winner_cells(at_most: float, found: Row | None) -> list[Cell]:
    if found is None:
        return [f"at most {fraction(at_most)}", "nobody keeps so little"]
    return [
        f"at most {fraction(at_most)}", f"`{found['way']}`", number(found["time"], 2, "×"),
        number(found["kept_bytes_per_token"]), _behind(found["runner_up"]), _behind(found["other"]),
    ]  # fmt: skip


def _behind(other: Row | None) -> str:
    if other is None:
        return "nobody"
    slower = other["slower"]
    gap = f"{slower:.1%} slower" if slower < 1 else f"{1 + slower:.1f} times its time"
    return f"`{other['way']}`, {'tie (' + gap + ')' if other['tie'] else gap}"


def _names(ways: list[str]) -> str:
    return ", ".join(f"`{way}`" for way in ways)


def changes(derived: Row) -> str:
    """A table for each sweep: who wins at each size and memory point, changes in words below."""
    if not derived["sweeps"]:
        return "The shapes are no sweep: nothing to compare."
    return "\n\n".join(map(_sweep_table, derived["sweeps"]))


def _sweep_table(sweep: Row) -> str:
    axis, fixed = AXES[sweep["along"]], sweep["fixed"]
    where = [f"{AXES[k]} = {fixed[k]}" for k in AXES if k in fixed]
    where += [fixed["dtype"], f"{fixed['norm']}-norm", f"dropout {fixed['dropout']:g}"]
    rows = []
    for row in sweep["winners"]:
        cells = ["-" if way is None else f"`{way}`" for way in row["ways"]]
        steps = "; ".join(_change(axis, step) for step in row["changes"]) or "no change"
        rows.append([f"at most {fraction(row['at_most'])}", *cells, steps])
    values = [f"{axis} = {value}" for value in sweep["values"]]
    table = markdown(["kept, of eager's", *values, "changes"], rows)
    return f"**Along {axis}** ({', '.join(where)})\n\n{table}"


def _change(axis: str, step: Row) -> str:
    low, high = step["between"]
    ways = ["nobody" if way is None else f"`{way}`" for way in (step["from"], step["to"])]
    note = " (within a tie)" if step["tie"] else ""
    return f"between {axis} = {low} and {high}, from {ways[0]} to {ways[1]}{note}"


def sentences(derived: Row) -> str:
    """What the frontier says, a list: per memory point, who is fastest at how many shapes."""
    return "\n".join(
        f"- {kind}: within {_sentence(at_most, fastest)}."
        for kind, panels in _kinds(derived).items()
        for at_most, fastest in _by_memory(panels).items()
    )


def brief(derived: Row) -> str:
    """The same in a line for each kind of layer: who is fastest how often, and how clearly."""
    lines = []
    for kind, panels in _kinds(derived).items():
        wins = [w for found in _by_memory(panels).values() for w in found if w is not None]
        ours, theirs = ([w for w in wins if is_ours(w["way"]) is mine] for mine in (True, False))
        clear = [
            [w for w in side if w["other"] and not w["other"]["tie"]] for side in (ours, theirs)
        ]
        shapes, points = len(panels), len(_by_memory(panels))
        lines.append(
            f"- {kind}: at {shapes} shapes and {points} memory points each, FusedRemat's ways are "
            f"the fastest at {len(ours)} of {len(wins)}, by more than the spread of the rounds at "
            f"{len(clear[0])}; another way by more than that at {len(clear[1])}."
        )
    return "\n".join(lines)


def _kinds(derived: Row) -> dict[str, list[Row]]:
    """Panels by the kind of layer."""
    alike: dict[str, list[Row]] = {}
    for panel in derived["panels"]:
        case = panel["case"]
        kind = f"{case['dtype']}, {case['norm']}-norm, dropout {case['dropout']:g}"
        alike.setdefault(kind, []).append(panel)
    return alike


def _by_memory(panels: list[Row]) -> dict[float, list[Row | None]]:
    found: dict[float, list[Row | None]] = {}
    for row in (row for panel in panels for row in panel["winners"]):
        found.setdefault(row["at_most"], []).append(row["fastest"])
    return found


def _sentence(at_most: float, found: list[Row | None]) -> str:
    wins = [win for win in found if win is not None]
    where = f"{fraction(at_most)} of eager's bytes" if at_most < 1 else "eager's bytes"
    if not wins:
        return f"{where} nobody stays"
    ways = sorted({win["way"] for win in wins}, key=lambda way: [w["way"] for w in wins].index(way))
    times = [win["time"] for win in wins]
    text = f"{where} the fastest way takes {span(times, unit='×')} eager's time ({_names(ways)})"
    ours = [win for win in wins if is_ours(win["way"])]
    lost = [win for win in wins if not is_ours(win["way"])]
    text += f"; FusedRemat's ways win at {len(ours)} of {len(found)} shapes"
    text += _beyond(ours, ", at")
    return text + _beyond(lost, ", and lose at")


def _beyond(wins: list[Row], how_often: str) -> str:
    """At how many of some shapes the winner is ahead by more than the spread, and by how much."""
    gaps = [win["other"]["slower"] for win in wins if win["other"] and not win["other"]["tie"]]
    if not gaps:
        return f"{how_often} none by more than the spread" if wins else ""
    share = span(gaps, ".0%")
    if max(gaps) >= 1:
        share = f"{span([1 + gap for gap in gaps], unit='×')} the time"
    return f"{how_often} {len(gaps)} by more than the spread ({share})"

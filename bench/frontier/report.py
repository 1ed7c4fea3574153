"""The frontier in words: Markdown of `pareto.derive`'s data."""

from __future__ import annotations

import itertools
from typing import Any

from bench.frontier.figure import fraction
from bench.frontier.pareto import SLACK
from bench.frontier.points import LOSSY, is_ours

AXES = {"seq_len": "S", "d_model": "D"}


def report(derived: dict[str, Any]) -> str:
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


def panel_table(panel: dict[str, Any]) -> str:
    """A shape: the fastest way at each memory point, the frontier, and who is not on it at all."""
    lines = [
        f"### {panel['title']}{_rounds(panel)}",
        "",
        "| kept, of eager's | fastest | step | kept bytes per token | runner-up | the other "
        "side's best |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_winner_row(row["at_most"], row["fastest"]) for row in panel["winners"]]
    best = sorted((p for p in panel["points"] if p["on_frontier"]), key=lambda p: p["kept"])
    steps = [f"`{p['way']}` {p['kept']:.3f} at {p['time']['p50']:.2f}×" for p in best]
    lines += ["", f"Frontier: {', '.join(steps)}."]
    lossy = [p for p in panel["points"] if p["family"] == LOSSY]
    if lossy:
        shown = [f"`{p['way']}` {p['kept']:.3f} at {p['time']['p50']:.2f}×" for p in lossy]
        lines += ["", f"With 8 bits, which no exact way is held against: {', '.join(shown)}."]
    for what, ways in (("Wrong results", panel["wrong"]), ("Absent", panel["absent"])):
        if ways:
            lines += ["", f"{what}: {_reasons(ways)}"]
    return "\n".join(lines)


def _rounds(panel: dict[str, Any]) -> str:
    return f", {panel['rounds']} rounds" if panel["rounds"] else ""


def _reasons(ways: dict[str, str]) -> str:
    """Ways that give the same reason, together."""
    by_reason = itertools.groupby(sorted(ways, key=lambda w: ways[w]), key=lambda w: ways[w])
    return "; ".join(f"{_names(list(found))} ({reason})" for reason, found in by_reason)


def _winner_row(at_most: float, found: dict[str, Any] | None) -> str:
    if found is None:
        return f"| at most {fraction(at_most)} | nobody keeps so little | | | | |"
    cells = [
        f"at most {fraction(at_most)}", f"`{found['way']}`", f"{found['time']:.2f}×",
        f"{found['kept_bytes_per_token']:,.0f}", _behind(found["runner_up"]),
        _behind(found["other"]),
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _behind(other: dict[str, Any] | None) -> str:
    if other is None:
        return "nobody"
    slower = other["slower"]
    gap = f"{slower:.1%} slower" if slower < 1 else f"{1 + slower:.1f} times its time"
    return f"`{other['way']}`, {'tie (' + gap + ')' if other['tie'] else gap}"


def _names(ways: list[str]) -> str:
    return ", ".join(f"`{way}`" for way in ways)


def changes(derived: dict[str, Any]) -> str:
    """A table for each sweep: who wins at each size and memory point, changes in words below."""
    if not derived["sweeps"]:
        return "The shapes are no sweep: nothing to compare."
    return "\n\n".join(map(_sweep_table, derived["sweeps"]))


def _sweep_table(sweep: dict[str, Any]) -> str:
    axis, fixed = AXES[sweep["along"]], sweep["fixed"]
    where = [f"{AXES[k]} = {fixed[k]}" for k in AXES if k in fixed]
    where += [fixed["dtype"], f"{fixed['norm']}-norm", f"dropout {fixed['dropout']:g}"]
    values = [f"{axis} = {value}" for value in sweep["values"]]
    lines = [
        f"**Along {axis}** ({', '.join(where)})",
        "",
        f"| kept, of eager's | {' | '.join(values)} | changes |",
        "|---|" + "---|" * (len(values) + 1),
    ]
    for row in sweep["winners"]:
        cells = ["-" if way is None else f"`{way}`" for way in row["ways"]]
        steps = "; ".join(_change(axis, step) for step in row["changes"]) or "no change"
        lines.append(f"| at most {fraction(row['at_most'])} | {' | '.join(cells)} | {steps} |")
    return "\n".join(lines)


def _change(axis: str, step: dict[str, Any]) -> str:
    low, high = step["between"]
    ways = ["nobody" if way is None else f"`{way}`" for way in (step["from"], step["to"])]
    note = " (within a tie)" if step["tie"] else ""
    return f"between {axis} = {low} and {high}, from {ways[0]} to {ways[1]}{note}"


def sentences(derived: dict[str, Any]) -> str:
    """What the frontier says, a list: per memory point, who is fastest at how many shapes."""
    return "\n".join(
        f"- {kind}: within {_sentence(at_most, fastest)}."
        for kind, panels in _kinds(derived).items()
        for at_most, fastest in _by_memory(panels).items()
    )


def brief(derived: dict[str, Any]) -> str:
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


def _kinds(derived: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Panels by the kind of layer."""
    alike: dict[str, list[dict[str, Any]]] = {}
    for panel in derived["panels"]:
        case = panel["case"]
        kind = f"{case['dtype']}, {case['norm']}-norm, dropout {case['dropout']:g}"
        alike.setdefault(kind, []).append(panel)
    return alike


def _by_memory(panels: list[dict[str, Any]]) -> dict[float, list[dict[str, Any] | None]]:
    found: dict[float, list[dict[str, Any] | None]] = {}
    for row in (row for panel in panels for row in panel["winners"]):
        found.setdefault(row["at_most"], []).append(row["fastest"])
    return found


def _sentence(at_most: float, found: list[dict[str, Any] | None]) -> str:
    wins = [win for win in found if win is not None]
    where = f"{fraction(at_most)} of eager's bytes" if at_most < 1 else "eager's bytes"
    if not wins:
        return f"{where} nobody stays"
    ways = sorted({win["way"] for win in wins}, key=lambda way: [w["way"] for w in wins].index(way))
    times = [win["time"] for win in wins]
    ours = [win for win in wins if is_ours(win["way"])]
    lost = [win for win in wins if not is_ours(win["way"])]
    text = f"{where} the fastest way takes {_span(times)} eager's time ({_names(ways)})"
    text += f"; FusedRemat's ways win at {len(ours)} of {len(found)} shapes"
    gains = [win["other"]["slower"] for win in ours if win["other"] and not win["other"]["tie"]]
    if gains:
        text += f", at {len(gains)} by more than the spread ({_percents(gains)})"
    elif ours:
        text += ", at none by more than the spread"
    losses = [win["other"]["slower"] for win in lost if win["other"] and not win["other"]["tie"]]
    if losses:
        text += f", and lose at {len(losses)} by more than the spread ({_percents(losses)})"
    elif lost:
        text += ", and lose at none by more than the spread"
    return text


def _span(times: list[float]) -> str:
    low, high = f"{min(times):.2f}", f"{max(times):.2f}"
    return f"{low}×" if low == high else f"{low} to {high}×"


def _percents(gaps: list[float]) -> str:
    if max(gaps) >= 1:
        return f"{_span([1 + gap for gap in gaps])} the time"
    low, high = f"{min(gaps):.0%}", f"{max(gaps):.0%}"
    return low if low == high else f"{low.rstrip('%')} to {high}"

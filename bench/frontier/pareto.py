"""Who is fastest within how much memory, and where that changes: from panels, plain data again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

from bench.frontier.points import Panel, Point, family, is_lossy, is_ours, title
from bench.tables import Row

#: Kept bytes at most, relative to eager's.
MEMORY_POINTS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
#: By how much a way may exceed them: a preset that keeps a sixteenth keeps statistics besides, 16
#: bytes a token, which is 1.6% of that at D = 512 in 16 bits. The same for everyone.
SLACK = 0.02
#: What a sweep goes along -> what changes with it at a fixed number of tokens or head dim.
SWEEPS = {"seq_len": ("seq_len", "batch"), "d_model": ("d_model", "nhead")}


def frontier(points: Iterable[Point]) -> list[Point]:
    """The ways of which none other is as fast within the same bytes, fewest bytes first."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.kept, p.p50)):
        if not found or point.p50 < found[-1].p50:
            found.append(point)
    return found


def is_tie(first: Point, second: Point) -> bool:
    """Whether two medians are nearer than the wider of the two spreads, p20 to p80."""
    return abs(second.p50 - first.p50) <= max(first.spread, second.spread)


def winner(panel: Panel, at_most: float) -> Row | None:
    """The fastest way within so much memory, and by how much; None where none keeps so little.

    `other`: the fastest of the other side, FusedRemat's ways being one.
    """
    order = panel.within(at_most * (1 + SLACK))
    if not order:
        return None
    first, rest = order[0], order[1:]
    others = [point for point in rest if is_ours(point.way) != is_ours(first.way)]
    return {
        "way": first.way, "time": first.p50, "kept": first.kept,
        "kept_bytes_per_token": first.kept_bytes_per_token,
        "runner_up": _behind(first, rest), "other": _behind(first, others),
    }  # fmt: skip


def _behind(first: Point, rest: Sequence[Point]) -> Row | None:
    if not rest:
        return None
    second = rest[0]
    slower = second.p50 / first.p50 - 1
    return {"way": second.way, "time": second.p50, "slower": slower, "tie": is_tie(first, second)}


def changes(panels: Sequence[Panel]) -> list[Row]:
    """Along each sweep, at each memory point: who wins at each size, and where that changes."""
    found = []
    for along, alike in sweeps(panels):
        rows = []
        for at_most in MEMORY_POINTS:
            wins = [winner(panel, at_most) for panel in alike]
            ways = [None if win is None else win["way"] for win in wins]
            steps = [
                _change(along, at_most, a, b)
                for (a, one), (b, other) in itertools.pairwise(zip(alike, ways, strict=True))
                if one != other
            ]
            rows.append({"at_most": at_most, "ways": ways, "changes": steps})
        fixed = {k: v for k, v in alike[0].case.items() if k not in SWEEPS[along]}
        values = [panel.case[along] for panel in alike]
        found.append({"along": along, "values": values, "fixed": fixed, "winners": rows})
    return found


def sweeps(panels: Sequence[Panel]) -> Iterator[tuple[str, list[Panel]]]:
    """Panels that differ in one thing only, by its size: S at equal tokens, D at equal heads."""
    for along, moving in SWEEPS.items():
        alike: dict[str, list[Panel]] = {}
        for panel in panels:
            case = panel.case
            key = {k: v for k, v in case.items() if k not in moving}
            key["tokens"] = case["batch"] * case["seq_len"]
            key["machine"] = {**panel.machine, "date": None}
            if along == "d_model":
                key["head_dim"] = case["d_model"] // case["nhead"]
            alike.setdefault(json.dumps(key, sort_keys=True), []).append(panel)
        for group in alike.values():
            if len(group) > 1:
                yield along, sorted(group, key=lambda p: int(p.case[along]))


def _change(along: str, at_most: float, before: Panel, after: Panel) -> Row:
    """Clear, unless at either end the two that change places are in a tie there."""
    one, other = winner(before, at_most), winner(after, at_most)
    ways = [None if win is None else win["way"] for win in (one, other)]
    tie = None not in ways and any(
        {point.way for point in pair} == set(ways) and is_tie(*pair)
        for panel in (before, after)
        for pair in itertools.combinations(panel.within(at_most * (1 + SLACK)), 2)
    )
    between = [before.case[along], after.case[along]]
    return {"between": between, "from": ways[0], "to": ways[1], "tie": tie}


def derive(panels: Sequence[Panel]) -> Row:
    """All that is drawn and said, as JSON holds it."""
    found = []
    for panel in panels:
        best = {point.way for point in frontier(p for p in panel.points if not is_lossy(p.way))}
        points = [
            asdict(point) | {"family": family(point.way), "on_frontier": point.way in best}
            for point in panel.points
        ]
        winners = [{"at_most": m, "fastest": winner(panel, m)} for m in MEMORY_POINTS]
        found.append({
            "title": title(panel.case), "case": panel.case, "machine": panel.machine,
            "points": points, "absent": panel.absent, "wrong": panel.wrong, "winners": winners,
            "rounds": panel.rounds,
        })  # fmt: skip
    derived = {"panels": found, "sweeps": changes(panels)}
    copied: Row = json.loads(json.dumps(derived))
    return copied

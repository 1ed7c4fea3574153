"""What kernels move and issue, beside their peers: rows for a terminal, tables for a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from bench import tables
from bench.tables import RESULTS, Cell, Columns, Row

OURS = "fused_remat"
_SECTOR = 32  # bytes


def moved(way: Row, touched: bool = True) -> int:
    """Bytes of the sectors that launches touch, or of all that warps request; ATen's besides."""
    counts, word = way["counts"], "touched " * touched
    sectors = sum(counts.get(f"{word}{kind} sectors", 0) for kind in ("load", "store"))
    return _SECTOR * sectors + way["aten"].get("bytes", 0)


def conflicts(way: Row) -> int:
    """Passes over shared memory beyond those that its bytes need."""
    counts = way["counts"]
    return counts.get("shared passes", 0) - counts.get("shared passes least", 0)


def products(way: Row) -> int:
    """Multiply-adds: of matrix instructions, and of ATen's products."""
    return way["counts"].get("multiply-adds", 0) + way["aten"].get("mma", 0)


def instructions(way: Row) -> int:
    return way["counts"].get("warp instructions", 0)


def _millions(count: int) -> str:
    return tables.significant(count / 1e6)


#: What is said of a way.
COLUMNS: Columns = [
    ("MB", lambda way: _millions(moved(way))),
    ("MB requested", lambda way: _millions(moved(way, touched=False))),
    ("M instructions", lambda way: _millions(instructions(way))),
    ("conflicts", lambda way: f"{conflicts(way):,}"),
    ("M multiply-adds", lambda way: _millions(products(way)) if products(way) else None),
    ("kernels", lambda way: str(len(way["launches"]))),
    ("left to ATen", lambda way: _left(way)),
]


def _left(way: Row) -> Cell:
    if not way["aten"].get("calls"):
        return None
    return f"{way['aten']['calls']} ({_millions(way['aten']['bytes'])} MB)"


def title(row: Row) -> str:
    """A case in a line, with the fewest bytes that it can move."""
    case = row["case"]
    sizes = ", ".join(f"{name} {n}" for name, n in case["sizes"].items())
    least = f", {_millions(row['work']['bytes'])} MB at least" if "work" in row else ""
    return f"sm_{case['arch']} {case['name']} {case['direction']}: {sizes}{least}"


def block(row: Row) -> str:
    """A row: a line for each way, FAIL instead of counts where its results are wrong."""
    return f"\n{title(row)}\n{tables.ways_table(row['ways'], COLUMNS, write=tables.terminal)}"


def failures(rows: Sequence[Row]) -> list[str]:
    """Everything that is wrong, in a line each."""
    return tables.errors_of(rows, title)


def _over(ours: int, theirs: int) -> Cell:
    if not theirs:
        return None if not ours else f"{ours:,} : 0"
    return f"{ours / theirs:.2f}×"


def _whole_steps(rows: Sequence[Row]) -> Iterator[tuple[Row, dict[str, Row]]]:
    """Cases and what is right of them: forward, backward, and the sums of both."""
    forward: dict[str, Row] = {}
    for row in rows:
        case = row["case"]
        right = {name: way for name, way in row["ways"].items() if "counts" in way}
        yield case, right
        if case["direction"] == "fwd":
            forward = right
        else:
            both = {n: _sum(forward[n], way) for n, way in right.items() if n in forward}
            yield case | {"direction": "both"}, both


def _sum(one: Row, other: Row) -> Row:
    """Counts of two launches after each other."""
    counts, aten = (Counter(one[k]) + Counter(other[k]) for k in ("counts", "aten"))
    return {"counts": counts, "aten": aten, "launches": one["launches"] + other["launches"]}


def _pairs(rows: Sequence[Row]) -> Iterator[list[Cell]]:
    """Each of our ways beside each peer's."""
    for case, right in _whole_steps(rows):
        for name, ours in right.items():
            for peer, theirs in right.items():
                if not name.startswith(OURS) or peer.startswith(OURS):
                    continue
                mine = name.removeprefix(OURS).strip()
                apart = len({way["aten"].get("calls", 0) for way in (ours, theirs)}) > 1
                yield [
                    f"sm_{case['arch']}", case["name"], case["direction"], mine, peer,
                    _over(moved(ours), moved(theirs)),
                    _over(moved(ours, False), moved(theirs, False)),
                    (_over(instructions(ours), instructions(theirs)) or "") + " *" * apart,
                    _over(conflicts(ours), conflicts(theirs)),
                    _over(products(ours), products(theirs)),
                ]  # fmt: skip


def summary(rows: Sequence[Row], directions: Collection[str] = ("fwd", "bwd", "both")) -> str:
    """Ours over each peer's, of all cases."""
    head = (
        "", "step", "", "ours", "peer", "bytes", "requested", "instructions", "conflicts",
        "multiply-adds",
    )  # fmt: skip
    return tables.markdown(head, (pair for pair in _pairs(rows) if pair[2] in directions))


def section(data: Row) -> str:
    """A results file: how it was counted, its ratios and its tables.

    Raises: ValueError for a dry run, whose sizes are no real ones.
    """
    if data["config"].get("dry_run"):
        raise ValueError("a dry run is no measurement: not for a page")
    rows = tables.current(data)
    said = tables.machine_line(data["machine"]).replace("Measured", "Executed")
    each = (f"{title(row)}\n\n{tables.ways_table(row['ways'], COLUMNS)}" for row in rows)
    apart = tables.folded("Forward and backward", summary(rows, ("fwd", "bwd")))
    return "\n\n".join([said, summary(rows, ("both",)), apart, tables.folded("Counts", *each)])


def table(root: Path = RESULTS) -> str:
    return section(tables.load(root / "counts.json"))

"""What the compiler made of the kernels, and what tests executed of them: tables of docs/tables."""

from __future__ import annotations

import csv

from bench.tables import RESULTS, Cell, Row, load, markdown, number

AUDIT = RESULTS / "audit" / "audit.json"
OTHERS = AUDIT.parent / "others" / "audit.json"
#: Written by tests/executed.py.
EXECUTED = RESULTS / "executed" / "executed.tsv"


def table() -> str:
    """Return the compiled products in their largest tile."""
    found = load(AUDIT)
    rows = found["rows"]
    largest: dict[str, tuple[str, Row]] = {}  # kernel -> its largest tile, which comes first
    for row in (row for row in rows if row["product"]):
        name, *_, block, warps, stages = row["name"].split(" ")
        tile = f"{block} {warps} {stages}"
        first, most = largest.get(name, (tile, row))
        if tile == first:
            largest[name] = tile, max(most, row, key=lambda r: r["registers"])
    cells: list[list[Cell]] = [
        [f"`{name}`", tile, str(row["registers"]), f"{row['shared'] / 1024:.0f} KiB",
         str(row["tensor_core"]), str(row["tma"]), f"{row['code'] / 1024:.0f} KiB"]
        for name, (tile, row) in largest.items()
    ]  # fmt: skip
    head = ("kernel", "tile", "registers", "shared", "HGMMA", "TMA loads", "code")
    return (
        f"Triton {found['triton']}, {rows[0]['target'].replace(' ', ', ')}: {len(rows)} default "
        f"configurations, {_spilling(rows)} of which spill. The products in their largest tile "
        "(warps w, stages s, parts of the end after /), with what needs most registers:"
        f"\n\n{markdown(head, cells)}"
    )


def _all_rows() -> list[Row]:
    return [row for file in (AUDIT, OTHERS) for row in load(file)["rows"]]


def _spilling(rows: list[Row]) -> int:
    return sum(bool(row["spills"] or row["stack"]) for row in rows)


def targets() -> str:
    """Return the spills of every architecture; AMD's registers are not read."""
    found: dict[str, list[Row]] = {}
    for row in _all_rows():
        found.setdefault(row["target"], []).append(row)
    cells: list[list[Cell]] = []
    for target, rows in sorted(found.items()):
        read = ["not read", "not read"]
        if "registers" in rows[0]:
            plain = sum(row["product"] and not row["tensor_core"] for row in rows)
            read = [str(_spilling(rows)), str(plain)]
        cells.append([target, str(len(rows)), *read])
    return markdown(("target", "compiled", "spilling", "products without tensor cores"), cells)


def spills() -> str:
    """Return every default configuration that spills, and the targets where it does."""
    found: dict[str, list[Row]] = {}
    for row in _all_rows():
        if row.get("spills") or row.get("stack"):
            found.setdefault(row["name"], []).append(row)
    cells: list[list[Cell]] = [
        [f"`{name}`", ", ".join(row["target"].split(" ")[0] for row in rows),
         str(max(row["stack"] for row in rows)),
         str(max(row["spills"] for row in rows))]
        for name, rows in sorted(found.items())
    ]  # fmt: skip
    head = ("configuration", "targets", "bytes of stack a thread", "instructions")
    return markdown(head, cells)


def executed() -> str:
    """Return how many of the audit's cases tests executed right, by target."""
    cells: list[list[Cell]] = []
    with EXECUTED.open() as file:
        every = list(csv.DictReader(file, delimiter="\t"))
    for target in sorted({row["target"] for row in every}):
        rows = [row for row in every if row["target"] == target]
        wrong = {row["case"] for row in rows if row["right"] != "1"}
        right = [
            {row["case"] for row in rows if row["default"] == default} - wrong for default in "10"
        ]
        cells.append([target, *(str(len(cases)) for cases in (*right, wrong)), number(len(rows))])
    head = ("target", "default cases right", "others right", "wrong", "launches")
    return markdown(head, cells)

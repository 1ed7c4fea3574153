"""Steps of models with adapters, relative to the models' own checkpointing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import tables
from bench.pages.models import FILE, NAMES, rows_of
from bench.tables import RESULTS, Cell, Row

OWN = "checkpoint"
KEPT, PEAK, STEP = "kept_below_head_bytes", "step_peak_bytes", "step_seconds"
#: Of a column: title, products, way, and the key of what is relative to own checkpointing.
COLUMNS = (
    ("kept", "aten", "full", KEPT),
    ("peak", "aten", "full", PEAK),
    ("step", "aten", "full", STEP),
    ("step, oneDNN", "onednn", "full", STEP),
    ("`loss=True`: peak", "aten", "full_loss", PEAK),
    ("step", "aten", "full_loss", STEP),
    ("TRL's head: peak", "aten", "trl_checkpoint", PEAK),
    ("step", "aten", "trl_checkpoint", STEP),
)
HEAD = tuple(title for title, *_ in COLUMNS)


class Entry(NamedTuple):
    """A case, and its row by the setting of the products."""

    case: Row
    rows: dict[str, Row]

    def ratio(self, products: str, way: str, key: str) -> float | None:
        """Return a way's bytes or median time relative to own checkpointing; None if unknown."""
        ways = self.rows.get(products, {"ways": {}})["ways"]
        mine, own = ways.get(way, {}), ways.get(OWN, {})
        if key == STEP:
            times = mine.get("step_ratio", {}).get(OWN)
            return times and times["p50"]  # type: ignore[no-any-return]
        return mine[key] / own[key] if mine.get(key) and own.get(key) else None


def newest(root: Path = RESULTS) -> tuple[dict[str, Row], list[Entry]]:
    """Return the machine of the newest run by the setting of the products, and all entries."""
    machines, entries = dict[str, Row](), list[Entry]()
    for path in tables.files(FILE, root):
        data = tables.load(path)
        rows = [row for row in rows_of(data) if row["case"].get("adapter")]
        products = data["machine"].get("products")
        if products in machines or not (products and rows):
            continue
        machines[products] = data["machine"]
        for row in rows:
            known = next((e for e in entries if e.case == row["case"]), None)
            if known is None:
                entries.append(known := Entry(row["case"], {}))
            known.rows[products] = row
    return machines, entries


def _groups(entries: Iterable[Entry]) -> dict[tuple[str, str], list[Entry]]:
    """Return entries by adapter and dtype."""
    found = dict[tuple[str, str], list[Entry]]()
    for entry in entries:
        found.setdefault((entry.case["adapter"], entry.case["dtype"]), []).append(entry)
    return dict(sorted(found.items(), key=lambda item: item[0][1], reverse=True))


def summary(root: Path = RESULTS) -> str:
    """Return the least and the largest ratio of the models, by adapter and dtype."""

    def cells(entries: Sequence[Entry]) -> Iterator[Cell]:
        for _, *column in COLUMNS:
            found = [x for entry in entries if (x := entry.ratio(*column)) is not None]
            yield f"{tables.span(found)}×" if found else None

    groups = _groups(newest(root)[1])
    rows = [[NAMES[kind], dtype, *cells(found)] for (kind, dtype), found in groups.items()]
    return tables.markdown(("trained", "dtype", *HEAD), rows) if rows else ""


def table(root: Path = RESULTS) -> str:
    """Return the machines, and an entry per model, by adapter and dtype."""
    machines, entries = newest(root)
    parts = [tables.machine_line(machine) for machine in machines.values()]
    head = ("model", "own: kept", "peak", "step", *HEAD, "losses off by")
    for (kind, dtype), found in _groups(entries).items():
        rows = tables.markdown(head, [list(_cells(entry)) for entry in found])
        parts.append(tables.folded(f"{NAMES[kind]}, {dtype}", rows))
    return "\n\n".join(parts)


def _cells(entry: Entry) -> Iterator[Cell]:
    own, new = (entry.rows["aten"]["ways"].get(way, {}) for way in (OWN, "full"))
    yield entry.case["model"]
    yield from (tables.mib(own.get(key), 1) for key in (KEPT, PEAK))
    yield tables.ms(own.get(STEP, {}).get("p50"))
    yield from (tables.number(entry.ratio(*column), 2, "×") for _, *column in COLUMNS)
    yield f"{new['losses']['error']:.0e}" if "losses" in new else new.get("error")

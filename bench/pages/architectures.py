"""What `bench architectures` found of each architecture: how it is read, and what a step keeps."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from bench.tables import RESULTS, Cell, Row, load, machine_line, markdown

FILE = RESULTS / "architectures.json"


def is_right(row: Row, allowed: float) -> bool:
    """Whether a row is of no failure, and no gradient is further than this from the stock one."""
    errors = [way["error"]["gradient"] for way in row.get("ways", {}).values() if "error" in way]
    return "error" not in row and all(error <= allowed for error in errors)


def pieces(row: Row) -> set[str]:
    """Names of the submodules that are replayed."""
    return {name for kind in row["conversion"] for name, _ in kind["pieces"]}


def converts(row: Row) -> bool:
    """Whether all classes of its layers are blocks."""
    left = {kind["name"] for kind in row["conversion"] if kind["state"] != "converted"}
    there = {kind["name"] for kind in row["conversion"]}
    return set(row["layers"]) <= there - left


def reading(row: Row) -> str:
    """How it is read: as a block, if any layers are, and of which layers more is to be said.

    >>> kind = {"name": "Layer", "count": 2, "state": "converted", "reason": ""}
    >>> kind |= {"pieces": [["mlp", "it loops"]]}
    >>> other = {"name": "Part", "count": 1, "state": "checkpointed", "reason": "it prints"}
    >>> reading({"conversion": [kind, other]})
    'a block; 2 × `Layer` replay `mlp` (it loops); 1 × `Part` is checkpointed: it prints'
    """
    said = ["a block"] if any(k["state"] == "converted" for k in row["conversion"]) else []
    for kind in row["conversion"]:
        layers, one = f"{kind['count']} × `{kind['name']}`", kind["count"] == 1
        if kind["reason"]:
            said.append(f"{layers} {'is' if one else 'are'} {kind['state']}: {kind['reason']}")
        elif kind["state"] == "converted" and kind["pieces"]:
            parts = ", ".join(f"`{piece}` ({why})" for piece, why in kind["pieces"])
            said.append(f"{layers} replay{'s' * one} {parts}")
    return "; ".join(said).replace("|", "\\|").replace("\n", " ")


def ratio(row: Row) -> float | None:
    """What "full" keeps, to what the model's own checkpointing holds."""
    own = row["ways"]["checkpoint"].get("held")
    return None if own is None else float(row["ways"]["full"]["kept"] / own)


def line(row: Row) -> str:
    """Of a row, while it runs."""
    name = row["case"]["name"]
    if "ways" not in row:
        return f"{name}: {row.get('absent') or row['error']}"
    kept = ", ".join(f"{way} {_kib(found.get('kept'))}" for way, found in row["ways"].items())
    return f"{name}: {reading(row)}; KiB: {kept}; gradients {_worst(row)}"


def _kib(nbytes: int | None) -> Cell:
    return "none" if nbytes is None else f"{nbytes / 1024:,.1f}"


def _worst(row: Row) -> str:
    found = [way for way in row["ways"].values() if "error" in way]
    return f"{max(way['error']['gradient'] for way in found):.0e}{' *' * _single(row)}"


def _single(row: Row) -> bool:
    """Whether it is compared in float32."""
    return bool(row["ways"]["full"]["dtype"] == "float32")


def _counts(rows: list[Row]) -> str:
    converted = [row for row in rows if converts(row)]
    few = [sum(len(pieces(row)) == n for row in converted) for n in (0, 1)]
    return (
        f"{len(converted)} of {len(rows)} architectures convert: {few[0]} without a replayed "
        f"piece, {few[1]} with one, {len(converted) - sum(few)} with more."
    )


def _cells(row: Row) -> Iterable[Cell]:
    ways, found = row["ways"], ratio(row)
    own = ways["checkpoint"]
    beside = own["held"] - own["kept"] if "held" in own else None
    yield from (row["case"]["name"], ", ".join(f"`{name}`" for name in row["layers"]))
    yield from (reading(row), _kib(ways["stock"]["kept"]))
    yield from (_kib(own.get("kept")), _kib(beside) if beside else None)
    yield from (_kib(ways[name]["kept"]) for name in ("full", "balanced", "none"))
    yield from (None if found is None else f"{found:.2f}×", _worst(row))


def table(file: Path = FILE) -> str:
    """Where it ran, how many convert, and a row for each."""
    data = load(file)
    ran = [row for row in data["results"] if "ways" in row]
    others = [row for row in data["results"] if "ways" not in row]
    config = data["config"]
    size = f"Batch {config['batch']}, {config['tokens']} tokens of text."
    head = (
        "architecture", "its layers", "how it is read", "stock", "own checkpointing", "held beside",
        "`full`", "`balanced`", "`none`", "`full` : checkpointing", "gradients",
    )  # fmt: skip
    parts = [f"{machine_line(data['machine'])} {size} {_counts(ran)}"]
    parts += [markdown(head, [list(_cells(row)) for row in ran])]
    if others:
        why = (f"{row['case']['name']} ({row.get('absent') or row['error']})" for row in others)
        parts += [f"Not run: {', '.join(why)}."]
    return "\n\n".join(parts)

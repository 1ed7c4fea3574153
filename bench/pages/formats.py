"""What gradients lose where kept activations are packed, as a table."""

from __future__ import annotations

from bench.formats.errors import KINDS
from bench.tables import RESULTS, Row, machine_line, markdown, part

UNMEASURED = "Not measured yet: `python -m bench formats`."


def section() -> str:
    """A row for each shape and size of outliers: the largest ratio to the error of "none"."""
    return part(RESULTS / "formats-cpu.json", _table, UNMEASURED)


def _table(data: Row) -> str:
    ways = [way for way in data["results"][0]["ways"] if way != "none"]
    head = ("layer", "outliers", "bf16's own error", *(f"`{way}`" for way in ways))
    lines = []
    for row in data["results"]:
        case, own = row["case"], row["ways"]["none"]
        name = f"{case['shape']} ({KINDS[case['shape']]})"
        error = f"{min(own) * 1e3:.1f} to {max(own) * 1e3:.1f}e-3"
        lines.append([name, f"×{case['scale']}", error, *(_largest(row, way) for way in ways)])
    return f"{markdown(head, lines)}\n\n{machine_line(data['machine'])}"


def _largest(row: Row, way: str) -> str:
    """The gradient that is the most times off, and how many."""
    pairs = zip(row["ways"][way], row["ways"]["none"], row["gradients"], strict=True)
    ratio, name = max((error / own, name) for error, own, name in pairs)
    return f"{ratio:.2f} ({name})"

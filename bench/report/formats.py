"""What gradients lose where kept activations are packed, as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.formats.errors import KINDS
from bench.report.sets import RESULTS, machine_line, read

UNMEASURED = "Not measured yet: `python -m bench formats`."


def section(path: Path = RESULTS / "formats-cpu.json") -> str:
    """A row for each shape and size of outliers: the largest ratio to the error of "none"."""
    data = read(path)
    if data is None:
        return UNMEASURED
    rows = data["results"]
    ways = [way for way in rows[0]["ways"] if way != "none"]
    lines = [
        f"| layer | outliers | bf16's own error | {' | '.join(f'`{way}`' for way in ways)} |",
        "|---|---|---|" + "---|" * len(ways),
    ]
    for row in rows:
        case, own = row["case"], row["ways"]["none"]
        shown = [_largest(row, way) for way in ways]
        name = f"{case['shape']} ({KINDS[case['shape']]})"
        lines.append(
            f"| {name} | ×{case['scale']} | {min(own) * 1e3:.1f} to {max(own) * 1e3:.1f}e-3 | "
            f"{' | '.join(shown)} |"
        )
    return "\n".join([*lines, "", machine_line(data["machine"])])


def _largest(row: dict[str, Any], way: str) -> str:
    """The gradient that is the most times off, and how many."""
    pairs = zip(row["ways"][way], row["ways"]["none"], row["gradients"], strict=True)
    ratio, name = max((error / own, name) for error, own, name in pairs)
    return f"{ratio:.2f} ({name})"

"""What the compiler made of the kernels: tables of docs/tables/audit.md."""

from __future__ import annotations

import json
from typing import Any

from bench.tables import RESULTS

AUDIT = RESULTS / "audit" / "audit.json"


def audit_table() -> str:
    """What the compiler made of every product in its largest tile, and of the norms."""
    found = json.loads(AUDIT.read_text())
    rows = found["rows"]
    spills = sum(bool(row["spills"] or row["stack"]) for row in rows)
    lines = [
        f"Triton {found['triton']}, {rows[0]['target'].replace(' ', ', ')}: {len(rows)} default "
        f"configurations, {spills} of which spill. The products in their largest tile (warps w, "
        "stages s, parts of the end after /), with what needs most registers:",
        "",
        "| kernel | tile | registers | shared | HGMMA | TMA loads | code |",
        "|---|---|---|---|---|---|---|",
    ]
    largest: dict[str, dict[str, Any]] = {}
    tiles: dict[str, str] = {}
    for row in rows:
        if not row["product"]:
            continue
        name, tile = row["name"].split(" ")[0], " ".join(row["name"].split(" ")[-3:])
        if tiles.setdefault(name, tile) == tile:
            worst = max(largest.get(name, row), row, key=lambda r: r["registers"])
            largest[name] = worst
    for name, row in largest.items():
        lines.append(
            f"| `{name}` | {tiles[name]} | {row['registers']} | {row['shared'] / 1024:.0f} KiB "
            f"| {row['tensor_core']} | {row['tma']} | {row['code'] / 1024:.0f} KiB |"
        )
    return "\n".join(lines)


def targets_compiled() -> str:
    """What the audit found for every architecture; of AMD's only that it compiles."""
    files = (AUDIT, AUDIT.parent / "others" / "audit.json")
    found: dict[str, list[dict[str, Any]]] = {}
    for row in [row for file in files for row in json.loads(file.read_text())["rows"]]:
        found.setdefault(row["target"], []).append(row)
    lines = [
        "| target | compiled | spilling | products without tensor cores |",
        "|---|---|---|---|",
    ]
    for target, rows in sorted(found.items()):
        cells = ["not read", "not read"]
        if "registers" in rows[0]:
            spilling = sum(bool(row["spills"] or row["stack"]) for row in rows)
            plain = sum(row["product"] and not row["tensor_core"] for row in rows)
            cells = [str(spilling), str(plain)]
        lines.append(f"| {target} | {len(rows)} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)

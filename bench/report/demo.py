"""The demo's results, and their table."""

from __future__ import annotations

import json
from typing import Any

from bench.report.sets import RESULTS

DEMO = RESULTS / "demo-cpu" / "demo.json"


def results() -> dict[str, Any]:
    """What `make demo` wrote."""
    found: dict[str, Any] = json.loads(DEMO.read_text())
    return found


def demo_table() -> str:
    """The demo's results, a row per way."""
    found = results()
    lines = [
        "| | validation loss | bytes kept per token per layer | whole-step peak | step time |",
        "|---|---|---|---|---|",
    ]
    for way, r in found["ways"].items():
        lines.append(
            f"| {way} | {r['validation_loss']:.3f} | {r['kept_bytes_per_token_per_layer']:,.0f} "
            f"| {r['step_peak_bytes'] / 2**20:,.0f} MiB | {r['step_time_ratio']['p50']:.2f}× |"
        )
    return "\n".join(lines)

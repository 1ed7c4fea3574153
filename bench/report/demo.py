"""The demo's table, and the README's first claim."""

from __future__ import annotations

import json
from typing import Any

from bench.report.sets import RESULTS

DEMO = RESULTS / "demo-cpu" / "demo.json"


def _demo() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(DEMO.read_text())
    return results


def claim() -> str:
    """One sentence with the demo's figures."""
    found = _demo()
    ways, machine, sizes = found["ways"], found["machine"], found["sizes"]
    kept = {w: r["kept_bytes_per_token_per_layer"] for w, r in ways.items()}
    time = {w: r["step_time_ratio"]["p50"] for w, r in ways.items()}
    full, fast = ("full", "fast")
    return (
        f"In the demo (`make demo`: a causal byte-level language model, dropout "
        f"{sizes['dropout']}, {sizes['dtype']}), the layers keep "
        f"**{kept['eager'] / kept[full]:.0f} times less** for backward than "
        f"`nn.TransformerEncoderLayer` at {time[full]:.2f} times its step time "
        f"(`torch.utils.checkpoint`: {kept['eager'] / kept['checkpoint']:.0f} times less at "
        f"{time['checkpoint']:.2f}), or {kept['eager'] / kept[fast]:.0f} times less at "
        f'{time[fast]:.2f} times (`"fast"`). Measured on {machine["cpu"]}, '
        f"{machine['threads']} threads, torch {machine['torch']}."
    )


def demo_table() -> str:
    """The demo's results, a row per way."""
    found = _demo()
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

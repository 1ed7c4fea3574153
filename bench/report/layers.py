"""One layer on a CPU: the targets, every measured case, and where the time goes."""

from __future__ import annotations

from typing import Any

from bench.commands import profile as profile_step
from bench.layers import report as layers_report
from bench.report.sets import RESULTS, machine_line, read

LAYERS = RESULTS / "layers-cpu.json"
PROFILE = RESULTS / "profile-cpu.json"
UNMEASURED = "Not measured yet: `python -m bench layers --device cpu`."
UNPROFILED = "Not measured yet: `python -m bench profile`."


def machine() -> str:
    """Where and with what the layers were measured."""
    found = read(LAYERS)
    return UNMEASURED if found is None else machine_line(found["machine"])


def targets() -> str:
    """The targets of CPUs, met or not."""
    found = read(LAYERS)
    return UNMEASURED if found is None else layers_report.target_table(found)


def profile() -> str:
    """Where a step spends its time."""
    found = read(PROFILE)
    return UNPROFILED if found is None else profile_step.table(found)


def tables() -> str:
    """Every measured case: times beside eager's and checkpoint's, kept bytes, peaks."""
    found = read(LAYERS)
    return UNMEASURED if found is None else "\n\n".join(map(_table, layers_report.current(found)))


def _table(row: dict[str, Any]) -> str:
    lines = [
        "<details>",
        f"<summary>{layers_report.title(row)}, {row['rounds']} rounds</summary>",
        "",
        "| | forward | backward | step | vs eager | vs checkpoint | kept bytes per token "
        "| backward's peak | step's peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, r in row["ways"].items():
        if "step_ratio" in r:
            lines.append(f"| {way} | {' | '.join(_cells(r))} |")
        else:
            reason = f"FAIL: {r['failure']}" if "failure" in r else f"absent: {r['unavailable']}"
            lines.append(f"| {way} | {reason} |" + " |" * 7)
    return "\n".join([*lines, "", "</details>"])


def _cells(r: dict[str, Any]) -> list[str]:
    times = (f"{1e3 * r[f'{part}_seconds']['p50']:.0f} ms" for part in layers_report.PARTS)
    ratios = (r["step_ratio"].get(peer) for peer in ("eager", "checkpoint"))
    peaks = (r.get(f"{part}_peak_bytes") for part in ("backward", "step"))
    return [
        *times,
        *("" if ratio is None else f"{ratio['p50']:.2f}×" for ratio in ratios),
        f"{r['kept_bytes_per_token']:,.0f}",
        *("" if peak is None else f"{peak / 2**20:,.0f} MiB" for peak in peaks),
    ]

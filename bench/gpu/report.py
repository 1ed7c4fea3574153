"""Rows of `bench.gpu`'s results as text: a line each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.gpu import targets
from bench.gpu.kinds import KINDS


def _way(name: str, way: dict[str, Any]) -> str:
    if "us" not in way:
        return f"{name} {'absent' if 'absent' in way else 'FAIL'}"
    text = f"{name} {way['us']['p50']:.0f}"
    baseline = next(iter(way["ratio"]), name)
    if baseline != name:
        text += f" {way['ratio'][baseline]['p50']:.2f}x"
    if "of_ceiling" in way:
        text += f" {way['of_ceiling']:.0%}"
    if way.get("step_peak_bytes") is not None:
        sizes = way["held_bytes"] / 2**20, way["step_peak_bytes"] / 2**20
        text += " {:.0f}/{:.0f}M".format(*sizes)
    if "tokens_per_second" in way:
        text += f" B={way['largest_batch']} {1e-3 * way['tokens_per_second']:.0f}k/s"
    return text


def line(row: dict[str, Any]) -> str:
    """A row in a line.

    Of each way: microseconds, ratio to the first baseline, share of the ceiling; of a training
    step, MiB held after forward and at the peak; of a model's, the largest batch within the cap
    and thousands of tokens a second there.
    """
    case = dict(row["case"])
    words = [case.pop("section"), case.pop("name"), *(f"{k}={v}" for k, v in case.items())]
    for key in ("error", "skipped"):
        if key in row:
            return f"{' '.join(words)}: {key.upper()} {row[key]}"
    if "found" in row:
        return f"{' '.join(words)}: " + ", ".join(f"{k} {v}" for k, v in row["found"].items())
    return f"{' '.join(words)}: " + " | ".join(_way(*item) for item in row["ways"].items())


def failures(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every error of the rows and of their ways, in a line."""
    found = []
    for row in rows:
        title = line({"case": row["case"], "ways": {}})
        if "error" in row:
            found.append(f"{title} {row['error'][:160]}")
        for name, way in row.get("ways", {}).items():
            if "error" in way:
                found.append(f"{title} {name}: {way['error'][:160]}")
    return found


def profile_table(row: dict[str, Any]) -> str:
    """A profiled case: microseconds a step by kind of kernel, the least that it takes in brackets.

    "busy" is the time in which anything ran on the device, "gaps" the rest of a step; "launches"
    are kernels, copies and fills; "host" is the time to launch a step.
    """
    ways = {name: way for name, way in row["ways"].items() if "kinds_us" in way}
    table = [["", *ways]]
    for kind in KINDS:
        table.append([kind, *(_kind(kind, way) for way in ways.values())])
    for label, key in (("busy", "busy_us"), ("gaps", "gaps_us"), ("host", "host_us")):
        table.append([label, *(f"{way[key]:.0f}" for way in ways.values())])
    table.append(["step", *(f"{way['us']['p50']:.0f}" for way in ways.values())])
    table.append(["launches", *(f"{way['launches']:.0f}" for way in ways.values())])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    title = line({"case": row["case"], "ways": {}}).rstrip(": ")
    lines = ["  ".join(map(str.rjust, cells, widths)) for cells in table]
    return "\n".join([f"{title}, microseconds a step (least)", *lines])


def _kind(kind: str, way: dict[str, Any]) -> str:
    least = way["least_us"].get(kind)
    return f"{way['kinds_us'][kind]:.0f}" + ("" if least is None else f" ({least:.0f})")


def report(path: Path, run: str) -> str:
    """What a run measured, and what failed; profiled steps by kind; the targets."""
    rows = json.loads(path.read_text())["results"] if path.exists() else []
    rows = [row for row in rows if row.get("run") == run]
    lines = [line(row) for row in rows if "ways" in row or "found" in row]
    wrong, skipped = failures(rows), sum("skipped" in row for row in rows)
    lines += [f"\n{len(wrong)} failures, {skipped} cases without time", *wrong]
    legend = "\nmicroseconds, ratio to the first, share of the ceiling or MiB held/peak"
    tables = ["\n" + profile_table(row) for row in rows if "profiled" in row]
    return "\n".join([legend, *lines, *tables, "\n" + targets.table(rows)])

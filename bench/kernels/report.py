"""Rows of `bench.kernels`' results, which are plain data, as text."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

_HEADER = ("", "p50 µs", "p20", "p80", "ratio", "GB/s", "TFLOP/s", "of ceiling")


def ceilings_line(ceilings: Mapping[str, float]) -> str:
    """What this machine does at most."""
    found = ", ".join(f"{amount:,.3g} {unit}" for unit, amount in ceilings.items())
    return f"ceilings of this machine: {found}"


def title(row: Mapping[str, Any]) -> str:
    """A case in a line, with the least time that it can take."""
    case = row["case"]
    sizes = ", ".join(f"{name} {size}" for name, size in case["sizes"].items())
    words = ", ".join(filter(None, [sizes, case.get("dtype")]))
    text = f"{case['op']}: {case['name']} {case['direction']}, {case['model']} ({words})"
    floor = row.get("floor_us")
    return text if floor is None else f"{text}, floor {floor:,.0f} µs"


def _rate(way: Mapping[str, Any], unit: str) -> str:
    return f"{way[unit]:,.3g}" if unit in way else "-"


def _cells(name: str, way: Mapping[str, Any]) -> tuple[str, ...]:
    us = way["us"]
    ratio = next(iter(way["ratio"].values()), None)
    share = way.get("of_ceiling")
    return (
        name, f"{us['p50']:,.0f}", f"{us['p20']:,.0f}", f"{us['p80']:,.0f}",
        "-" if ratio is None else f"{ratio['p50']:.2f}x", _rate(way, "GB/s"),
        _rate(way, "TFLOP/s"), "-" if share is None else f"{share:.0%}",
    )  # fmt: skip


def block(row: Mapping[str, Any]) -> str:
    """A row: a line for each provider, FAIL instead of a time where its results are wrong."""
    if "error" in row:
        return f"\n{title(row)}\n  FAIL: {row['error']}"
    ways = row["ways"].items()
    lines = [_HEADER, *(_cells(name, way) for name, way in ways if "us" in way)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"\n{title(row)}"]
    for first, *others in lines:
        cells = map(str.rjust, others, widths[1:])
        text.append("  ".join(["", first.ljust(widths[0]), *cells]))
    text += [f"  {name}  FAIL: {way['error']}" for name, way in ways if "error" in way]
    absent = [f"{name} ({way['absent']})" for name, way in ways if "absent" in way]
    return "\n".join(text + [f"  absent: {', '.join(absent)}"] * bool(absent))


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Per op, direction and provider: the geometric mean of the ratios to the baseline."""
    ratios: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        key = row["case"]["op"], row["case"]["direction"]
        for name, way in row.get("ways", {}).items():
            if way.get("ratio"):
                ratios[key][name].append(next(iter(way["ratio"].values()))["p50"])
    lines = ["time over the baseline's, geometric mean over the cases:"]
    for (op, direction), found in ratios.items():
        means = (
            f"{name} {math.exp(sum(map(math.log, values)) / len(values)):.2f}x ({len(values)})"
            for name, values in found.items()
        )
        lines.append(f"  {op} {direction}: {', '.join(means)}")
    return "\n".join(lines)


def failures(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Everything that is wrong, in a line each."""
    found = [f"{title(row)}: {row['error']}" for row in rows if "error" in row]
    for row in rows:
        ways = row.get("ways", {}).items()
        found += [f"{title(row)}: {name}: {way['error']}" for name, way in ways if "error" in way]
    return found

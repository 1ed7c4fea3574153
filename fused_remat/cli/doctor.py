"""`doctor`: what there is on this machine, what runs on it, and whether it computes right."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fused_remat.autograd import replay_check
from fused_remat.cli import machine, tiny_step
from fused_remat.report.report import human
from fused_remat.version import __version__

_EXAMPLES = """
examples:
  python -m fused_remat doctor
  python -m fused_remat doctor --json > machine.json     # for a bug report

The exit status is 1 if a step is wrong or raises, on any device.
"""


def examine() -> dict[str, Any]:
    """All that `doctor` says, as plain data."""
    devices, versions, compilers = machine.devices(), machine.versions(), machine.compilers()
    steps = [tiny_step.examine(d["device"], dtype) for d in devices for dtype in tiny_step.DTYPES]
    return {
        "fused_remat": __version__,
        "devices": devices,
        "versions": versions,
        "steps": steps,
        "compile": compilers,
        "replay_check": {"on": replay_check.ON, "environment": os.environ.get("FUSED_REMAT_CHECK")},
        "missing": machine.missing(versions, compilers),
        "ok": all(step["ok"] for step in steps),
    }


def main(arguments: Sequence[str]) -> int:
    """Print what was found; 1 if a step is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m fused_remat doctor",
        description="Says what devices and packages there are, which backend and which attention "
        "each device and dtype gets and why not a faster one, and runs a small step of a "
        "FusedRematLayer on each, whose gradients are compared with the stock layer's.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    args = parser.parse_args(arguments)
    found = examine()
    print(json.dumps(found, indent=1) if args.json else "\n".join(_lines(found)))
    return 0 if found["ok"] else 1


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"fused_remat {found['fused_remat']}"
    yield "\ndevices"
    yield from _indented([[d["device"], d["name"], _facts(d)] for d in found["devices"]])
    yield "\nversions"
    yield from _indented([[n, v or "not installed"] for n, v in found["versions"].items()])
    yield '\nbackends that "auto" chooses'
    yield from _indented([_backend(step) for step in found["steps"]])
    yield "\nattention, of heads of 64 without masks"
    yield from _attention(found["steps"])
    yield "\ntorch.compile (looked for, not tried)"
    reasons = found["compile"].items()
    yield from _indented([[kind, f"no: {why}" if why else "yes"] for kind, why in reasons])
    yield "\nreplay check"
    yield f"  {_replay(found['replay_check'])}"
    yield "\na small step: its gradients beside the stock layer's in float64"
    yield from _indented([_step(step) for step in found["steps"]])
    yield "\nmissing"
    rows = [[row["what"], row["for"], row["get"]] for row in found["missing"]]
    yield from _indented(rows or [["nothing"]])
    yield "\nall right" if found["ok"] else "\nwrong: see the steps above"


def _indented(rows: list[list[str]]) -> Iterator[str]:
    """Columns side by side, all to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield ("  " + "  ".join(cells)).rstrip()


def _facts(device: dict[str, Any]) -> str:
    memory = human(device["memory_bytes"])
    if "threads" in device:
        return f"{device['threads']} threads, {memory}"
    return f"compute capability {device['capability']}, {memory}"


def _backend(step: dict[str, Any]) -> list[str]:
    why_not = "; ".join(f"not {name}: {why}" for name, why in step["why_not"].items())
    return [step["device"], step["dtype"], step["backend"], why_not]


def _attention(steps: list[dict[str, Any]]) -> Iterator[str]:
    """One row for the dtypes of a device that take the same route."""
    routes: dict[tuple[str, str, str], list[str]] = {}
    for step in steps:
        for key, shown in (("attention", "no dropout"), ("attention_dropout", "dropout")):
            route = step[key] or "not known"
            routes.setdefault((step["device"], shown, route), []).append(step["dtype"])
    yield from _indented(
        [[device, ", ".join(dtypes), shown, route]
         for (device, shown, route), dtypes in routes.items()]
    )  # fmt: skip


def _replay(found: dict[str, Any]) -> str:
    given = found["environment"]
    value = "not set" if given is None else repr(given)
    return f"{'on' if found['on'] else 'off'} (FUSED_REMAT_CHECK is {value})"


def _step(step: dict[str, Any]) -> list[str]:
    if step["error"] is not None:
        return [step["device"], step["dtype"], "FAIL", step["error"]]
    shown = f"{step['difference']:.1e} apart (the stock layer in this dtype: {step['stock']:.1e})"
    return [step["device"], step["dtype"], "ok" if step["ok"] else "WRONG", shown]

"""`doctor`: shows devices, packages and backends, and checks a small step on each device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from fused_remat.autograd import replay_check
from fused_remat.cli import machine, tiny_step
from fused_remat.cli.options import new_parser
from fused_remat.report.units import aligned, human
from fused_remat.version import __version__

_DESCRIPTION = """\
Lists devices and packages. For each device and dtype, shows which backend and attention
implementation run and why no faster one does, and compares the gradients of a small
FusedRematLayer with those of torch.nn.TransformerEncoderLayer.
"""
_EXAMPLES = """
examples:
  python -m fused_remat doctor
  python -m fused_remat doctor --json > machine.json     # for a bug report

The exit status is 1 if a step raises an error or computes wrong gradients on any device.
"""


def examine() -> dict[str, Any]:
    """Everything that `doctor` prints, as plain data."""
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
    """Print the findings; 1 if a step is wrong."""
    parser = new_parser("doctor", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(arguments)
    found = examine()
    print(json.dumps(found, indent=1) if args.json else "\n".join(_lines(found)))
    return 0 if found["ok"] else 1


def _lines(found: dict[str, Any]) -> Iterator[str]:
    check = found["replay_check"]
    value = "not set" if check["environment"] is None else repr(check["environment"])
    reasons = found["compile"].items()
    missing = [[row["what"], row["for"], row["get"]] for row in found["missing"]]
    yield f"fused_remat {found['fused_remat']}"
    for title, rows in (
        ("devices", [[d["device"], d["name"], _facts(d)] for d in found["devices"]]),
        ("versions", [[n, v or "not installed"] for n, v in found["versions"].items()]),
        ('backends that "auto" chooses', [_backend(step) for step in found["steps"]]),
        ("attention, with heads of width 64 and no masks", _attention(found["steps"])),
        ("torch.compile (its requirements; nothing was compiled)",
         [[kind, f"no: {why}" if why else "yes"] for kind, why in reasons]),
        ("replay check", [[f"{'on' if check['on'] else 'off'} (FUSED_REMAT_CHECK is {value})"]]),
        ("gradients of a small step, compared with the stock layer in float64",
         [_step(step) for step in found["steps"]]),
        ("missing", missing or [["nothing"]]),
    ):  # fmt: skip
        yield f"\n{title}"
        yield from (f"  {line}" for line in aligned(rows, left=len(rows[0])))
    yield "\nresult: ok" if found["ok"] else "\nresult: failed; see the small steps above"


def _facts(device: dict[str, Any]) -> str:
    memory = human(device["memory_bytes"])
    if "threads" in device:
        count = device["threads"]
        return f"{count} thread{'' if count == 1 else 's'}, {memory}"
    return f"compute capability {device['capability']}, {memory}"


def _backend(step: dict[str, Any]) -> list[str]:
    why_not = "; ".join(f"not {name}: {why}" for name, why in step["why_not"].items())
    return [step["device"], step["dtype"], step["backend"], why_not]


def _attention(steps: list[dict[str, Any]]) -> list[list[str]]:
    """One row for all dtypes of a device with the same implementation."""
    routes: dict[tuple[str, str, str], list[str]] = {}
    for step in steps:
        for key, shown in (("attention", "no dropout"), ("attention_dropout", "dropout")):
            route = step[key] or "unknown"
            routes.setdefault((step["device"], shown, route), []).append(step["dtype"])
    return [
        [device, ", ".join(dtypes), shown, route]
        for (device, shown, route), dtypes in routes.items()
    ]


def _step(step: dict[str, Any]) -> list[str]:
    if step["error"] is not None:
        return [step["device"], step["dtype"], "FAIL", step["error"]]
    errors = f"error {step['difference']:.1e} (stock layer in this dtype: {step['stock']:.1e})"
    return [step["device"], step["dtype"], "ok" if step["ok"] else "WRONG", errors]

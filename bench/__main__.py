"""The benchmarks: `python -m bench layers --device cpu`; each sub-command takes `--help`."""

from __future__ import annotations

import importlib
import os
import sys

# Read when torch is loaded: keeps the profiler, which counts bytes on CPU, from logging its starts.
os.environ["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", "99")

#: Sub-command -> module with `main(arguments) -> exit status`; loaded only when it is asked for.
COMMANDS = {
    "audit": "bench.audit.command",
    "formats": "bench.formats.command",
    "frontier": "bench.frontier.command",
    "gpu": "bench.gpu.command",
    "kernels": "bench.kernels.command",
    "layers": "bench.layers.command",
    "model": "bench.model.command",
    "plan": "bench.plan.command",
    "profile": "bench.layers.profile_step",
    "report": "bench.pages.command",
    "scale": "bench.scale.command",
}


def main(arguments: list[str]) -> int:
    """Run the sub-command that the first argument names; 2 and the usage if there is none such."""
    usage = f"usage: python -m bench {{{','.join(COMMANDS)}}} [options]"
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(usage)
        return 0
    if name not in COMMANDS:
        print(f"{usage}\nunknown sub-command: {name!r}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(COMMANDS[name]).main(arguments[1:])
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

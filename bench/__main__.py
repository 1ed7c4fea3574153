"""The benchmarks: `python -m bench layers --device cpu`; each sub-command takes `--help`."""

from __future__ import annotations

import importlib
import os
import sys

# Read when torch is loaded: keeps the profiler, which counts bytes on CPU, from logging its starts.
os.environ["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", "99")

#: Sub-command -> module with `main(arguments) -> exit status`; loaded only when it is asked for.
COMMANDS = {
    "architectures": "bench.commands.architectures",
    "audit": "bench.audit.command",
    "frontier": "bench.commands.frontier",
    "gpu": "bench.commands.gpu",
    "host": "bench.commands.host",
    "kernels": "bench.kernels.command",
    "layers": "bench.commands.layers",
    "model": "bench.commands.model",
    "plan": "bench.commands.plan",
    "profile": "bench.commands.profile",
    "report": "bench.pages.command",
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

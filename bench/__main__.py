"""Benchmarks: `python -m bench layers --device cpu`; every command takes `--help`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NamedTuple

# Read when torch is loaded: keeps the profiler, which counts bytes on CPU, from logging its starts.
os.environ["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", "99")


class Command(NamedTuple):
    """A command: its module has `main(arguments) -> exit status`, and is imported when it runs."""

    module: str
    measures: str
    takes: str
    writes: str


COMMANDS = {
    "kernels": Command("bench.kernels.command", "each op, forward and backward, and its peers",
                       "20 minutes", "kernels-DEVICE.json"),
    "layers": Command("bench.commands.layers", "time and memory of a layer's step, by method",
                      "30 minutes", "layers-DEVICE.json"),
    "frontier": Command("bench.commands.frontier", "memory against time of a layer's step",
                        "30 minutes", "frontier-DEVICE/"),
    "model": Command("bench.commands.model", "time and memory of a Hugging Face model's step",
                     "10 minutes", "model-DEVICE.json"),
    "mixtures": Command("bench.commands.mixtures", "time and memory of a layer with experts",
                        "10 minutes", "mixtures-DEVICE.json"),
    "plan": Command("bench.commands.plan", "plans and their peers at equal peaks",
                    "5 minutes", "plan-DEVICE.json"),
    "architectures": Command("bench.commands.architectures",
                             "converted models and their own checkpointing", "hours",
                             "architectures.json"),
    "gpu": Command("bench.commands.gpu", "kernels, layers and models on one GPU",
                   "8 minutes (--minutes)", "gpu/"),
    "host": Command("bench.commands.host", "host time of a layer's step, without a GPU",
                    "2 minutes", "host.json"),
    "log_probs": Command("bench.commands.log_probs", "log-probabilities of tokens, and TRL's",
                         "20 minutes", "log_probs.json"),
    "profile": Command("bench.commands.profile", "a layer's step on a CPU, operator by operator",
                       "1 minute", "profile-cpu.json"),
    "audit": Command("bench.audit.command", "registers, spills and tensor cores of every kernel",
                     "10 minutes per GPU", "audit.json in --out"),
    "demo": Command("bench.commands.demo", "a small language model, by training method",
                    "5 minutes", "demo-cpu/"),
    "report": Command("bench.pages.command", "nothing: writes pages and figures from results",
                      "10 seconds", "README.md, docs/"),
}  # fmt: skip


def usage() -> str:
    """Return the help: a line per command."""
    rows = [(name, c.measures, c.takes, c.writes) for name, c in COMMANDS.items()]
    rows = [("command", "measures", "takes", "writes"), *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([
        "usage: python -m bench COMMAND [options]", "", *lines, "",
        "Results are written to build/bench, or to the folder --out; --publish writes them to",
        "bench/results, from which `report` makes the pages. Times are of a CPU with two cores.",
    ])  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; 2 and the usage if there is no such one."""
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name not in COMMANDS:
        print(f"{usage()}\n\nunknown command: {name!r}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(COMMANDS[name].module).main(arguments[1:])
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

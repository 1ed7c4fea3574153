"""The command line, `python -m fused_remat`: what works here, what a model keeps, what to keep."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import torch

from fused_remat.cli.outputs import CommandError

_USAGE = """\
usage: python -m fused_remat {doctor,report,plan,scale} ...

Train transformers in a fraction of the activation memory.

  doctor   what there is on this machine, what runs on it, and whether it computes right
  report   what each layer of a model keeps for backward, by name, and its peaks
  plan     what each layer should keep, so that a step is fastest within a memory budget
  scale    what a large model takes on a mesh of devices, and what fits, on paper

examples:
  python -m fused_remat doctor
  python -m fused_remat report gpt2 --layers 2 --seq 256 --policy lean
  python -m fused_remat plan vit-l --layers 2 --batch 2 --budget 500MiB --compare
  python -m fused_remat plan mine:training_step --budget 80%
  python -m fused_remat scale --model llama3-70b --mesh 8x8

python -m fused_remat COMMAND --help says more."""


def _doctor(arguments: Sequence[str]) -> int:
    from fused_remat.cli.doctor import main

    return main(arguments)


def _report(arguments: Sequence[str]) -> int:
    from fused_remat.cli.report import main

    return main(arguments)


def _plan(arguments: Sequence[str]) -> int:
    from fused_remat.cli.plan import main

    return main(arguments)


def _scale(arguments: Sequence[str]) -> int:
    from fused_remat.cli.scale import main

    return main(arguments)


#: Command -> what runs it; its module is loaded only when it is asked for.
COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": _doctor,
    "report": _report,
    "plan": _plan,
    "scale": _scale,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; returns the exit status.

    0: done; 1: no plan within the budget, nothing that fits, out of memory, or a step that
    `doctor` finds wrong; 2: a command line that means nothing, or a target that raises. 1 and 2
    have a message on stderr, but for `doctor`; Python's development mode (-X dev) shows the
    traceback of 2.

    >>> main(["--help"])  # doctest: +ELLIPSIS
    usage: python -m fused_remat {doctor,report,plan,scale} ...
    ...
    0
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else ""
    if name in ("-h", "--help"):
        print(_USAGE)
        return 0
    if name == "--version":
        from fused_remat.version import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        what = f"unknown command {name!r}" if name else "a command is missing"
        print(f"{_USAGE}\n\nerror: {what}; valid: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # Read when the profiler, which counts bytes on CPU, is first used: it logs its starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        return COMMANDS[name](given[1:])
    except CommandError as error:
        if sys.flags.dev_mode:
            raise
        print(f"python -m fused_remat {name}: error: {error}", file=sys.stderr)
        return 2
    except torch.OutOfMemoryError as error:
        print(f"python -m fused_remat {name}: out of memory: {error}", file=sys.stderr)
        return 1

"""The command line `python -m fused_remat`: doctor, report, plan and scale."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from fused_remat.cli.options import CommandError

_USAGE = """\
usage: python -m fused_remat {doctor,report,plan,scale} ...

Train transformers in a fraction of the activation memory.

  doctor   shows devices, packages and backends, and checks a small training step on each device
  report   shows what each layer of a model keeps for backward, by name, and peak memory
  plan     chooses what each layer keeps, so that a step is fastest within a memory budget
  scale    estimates memory and time of a large model on many devices, without running it

examples:
  python -m fused_remat doctor
  python -m fused_remat report gpt2 --layers 2 --seq 256 --policy lean
  python -m fused_remat plan vit-l --layers 2 --batch 2 --accumulate-gradients --budget 490MiB
  python -m fused_remat plan mine:training_step --budget 80%
  python -m fused_remat scale --model llama3-70b --mesh 8x8 --batch 2

For the options of a command: python -m fused_remat COMMAND --help"""

COMMANDS = ("doctor", "report", "plan", "scale")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, and return the exit status.

    0: done. 1: no plan within the budget, nothing that fits, out of memory, or a wrong result in
    `doctor`. 2: a wrong command line, or an error in the user's function. Errors are printed to
    stderr; Python's development mode (-X dev) shows the traceback of status 2.

    >>> main(["--help"])  # doctest: +ELLIPSIS
    usage: python -m fused_remat {doctor,report,plan,scale} ...
    ...
    0
    """
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
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
    try:  # only a command's own modules are imported
        if name == "doctor":
            from fused_remat.cli.doctor import main as run
        elif name == "report":
            from fused_remat.cli.report import main as run
        elif name == "plan":
            from fused_remat.cli.plan import main as run
        else:
            from fused_remat.cli.scale import main as run
        return run(rest)
    except CommandError as error:
        if sys.flags.dev_mode and error.status == 2:
            raise
        print(f"python -m fused_remat {name}: error: {error}", file=sys.stderr)
        return error.status
    except torch.OutOfMemoryError as error:
        print(f"python -m fused_remat {name}: out of memory: {error}", file=sys.stderr)
        return 1

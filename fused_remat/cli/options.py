"""What the commands share: errors, parsers, common options, and files to write."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Any, NoReturn

import torch

from fused_remat.planner import Plan
from fused_remat.report import MemoryReport
from fused_remat.report.units import bytes_of
from fused_remat.scale.memory import OPTIMIZERS

#: Dtypes by the names that the options accept.
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32,
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32,
}  # fmt: skip
_PICTURES = (".png", ".svg", ".pdf")


class CommandError(Exception):
    """A command that cannot be carried out; the message has the reason and the value."""

    status = 2  # exit status


class NothingFits(CommandError):
    """No plan or policy fits into the memory."""

    status = 1


_COSTS = "give --costs FILE"
#: Options that were removed, and what to use instead.
REMOVED = {
    "--lossy": "plans choose among exact presets, so leave it out",
    "--accumulates": "use --accumulate-gradients",
    **dict.fromkeys(("--devices", "--fewest-devices"), "give --mesh"),
    **dict.fromkeys(("--tflops", "--peak-tflops", "--bandwidth"), _COSTS),
    **dict.fromkeys(("--link-GBps", "--network-GBps"), _COSTS),
    "'here'": _COSTS,  # of --hardware
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        for name in REMOVED.keys() & message.split():
            message += f"; {name} was removed: {REMOVED[name]}"
        super().error(message)


def new_parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return the parser of a command, whose epilog keeps its line breaks."""
    return _Parser(
        prog=f"python -m fused_remat {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_sizes(group: Any, batch: str = "sequences in a step") -> None:
    """Add --batch, which `batch` describes, and --seq."""
    group.add_argument("--batch", type=int, help=f"{batch} (default: 1)")
    group.add_argument(
        "--seq", type=int, help="tokens per sequence (default: the model's usual length)"
    )


def add_dtype(group: Any, option: str, what: str, default: str | None, shown: str) -> None:
    """Add --dtype, or an option like it; `shown` describes the default."""
    group.add_argument(
        option, choices=DTYPES, default=default, metavar="DTYPE",
        help=f"dtype of {what}: {', '.join(DTYPES)} (default: {shown})",
    )  # fmt: skip


def add_training(group: Any) -> None:
    """Add --optimizer and --accumulate-gradients."""
    group.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw",
        help="optimizer whose state takes memory (default: adamw)",
    )  # fmt: skip
    group.add_argument(
        "--accumulate-gradients", dest="accumulates", action="store_true",
        help="gradients are accumulated across steps, so they stay in memory",
    )  # fmt: skip


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add --json and --plot."""
    group = parser.add_argument_group("files to write")
    group.add_argument("--json", type=Path, metavar="PATH", help="write the result as JSON")
    group.add_argument("--plot", type=Path, metavar="PATH", help="draw a .png, .svg or .pdf")


def memory_of(option: str, text: str, device: torch.device | str = "cpu") -> int:
    """Return the bytes that the text of an option means.

    Raises: CommandError if it cannot be read.
    """
    try:
        return bytes_of(text, device)
    except (ValueError, NotImplementedError) as error:
        raise CommandError(f"{option}: {error}") from error


def check_sizes(args: argparse.Namespace, *names: str) -> None:
    """Raise a CommandError if one of these options has a value that is not positive."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CommandError(f"--{name} must be at least 1, got {value}")


def check_outputs(args: argparse.Namespace) -> None:
    """Raise a CommandError if a file cannot be written; called before anything is measured."""
    for path in filter(None, (args.json, args.plot)):
        if not path.parent.is_dir():
            raise CommandError(f"cannot write {str(path)!r}: no folder {str(path.parent)!r}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            kind = "it is a folder" if path.is_dir() else "permission denied"
            raise CommandError(f"cannot write {str(path)!r}: {kind}")
    if args.plot is not None and args.plot.suffix.lower() not in _PICTURES:
        raise CommandError(f"--plot writes {', '.join(_PICTURES)} files, got {str(args.plot)!r}")
    if args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise CommandError('--plot needs matplotlib: pip install "fused-remat[bench]"')


def write_outputs(args: argparse.Namespace, result: Plan | MemoryReport) -> None:
    """Write the requested files, which `check_outputs` checked, and print their names."""
    for path, write in ((args.json, result.to_json), (args.plot, result.plot)):
        if path is not None:
            try:
                write(path)
            except OSError as error:
                raise CommandError(f"cannot write {str(path)!r}: {error}") from error
            print(f"wrote {path}")

"""`--json` and `--plot`: checked before anything is measured, written after."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Protocol

_PICTURES = (".png", ".svg", ".pdf")


class Written(Protocol):
    """A plan or a report."""

    def to_json(self, path: str | Path | None = None) -> str: ...

    def plot(self, path: str | Path) -> None: ...


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """The two options."""
    group = parser.add_argument_group("files to write")
    group.add_argument("--json", type=Path, metavar="PATH", help="all of it, to be read again")
    group.add_argument("--plot", type=Path, metavar="PATH", help=".png, .svg or .pdf")


def check_outputs(args: argparse.Namespace) -> None:
    """Raises: CommandError if one could not be written."""
    for path in filter(None, (args.json, args.plot)):
        if not path.parent.is_dir():
            raise CommandError(f"there is no folder {str(path.parent)!r} for {str(path)!r}")
        if path.is_dir():
            raise CommandError(f"{str(path)!r} is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise CommandError(f"{str(path)!r} may not be written")
    if args.plot is None:
        return
    if args.plot.suffix.lower() not in _PICTURES:
        raise CommandError(f"--plot writes {', '.join(_PICTURES)}, got {str(args.plot)!r}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CommandError('--plot needs matplotlib: pip install "fused-remat[bench]"')


def write_outputs(args: argparse.Namespace, found: Written) -> None:
    """Write what is asked for, and say so.

    Raises: CommandError if that fails.
    """
    for path, write in ((args.json, found.to_json), (args.plot, found.plot)):
        if path is None:
            continue
        try:
            write(path)
        except OSError as error:
            raise CommandError(f"cannot write {str(path)!r}: {error}") from error
        print(f"written: {path}")


class CommandError(Exception):
    """The command line asks for something that cannot be; the message says what, with the value."""

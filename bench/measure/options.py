"""The parser of the commands: shared options, and the folder of the results."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from bench.measure.case import DTYPES
from bench.measure.machine import ROOT
from bench.measure.registry import Absent, Registry
from fused_remat.triton.launch import INTERPRETED

T = TypeVar("T")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def progress(items: Iterable[T], total: int, unit: str) -> Iterable[T]:
    """Return the items, with a progress bar where a person looks on and tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    bar: Iterable[T] = tqdm(items, total=total, unit=unit, file=sys.stderr, disable=None)
    return bar


def positive(text: str) -> int:
    """Parse an integer from 1 on. Raises: ArgumentTypeError, whose text the user sees."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, not {text}")
    return int(text)


#: Shared options by name; defaults come from the command.
SHARED: dict[str, dict[str, Any]] = {
    "device": {"choices": ("cpu", "cuda"), "default": DEVICE, "help": f"(default here: {DEVICE})"},
    "dtype": {"choices": DTYPES, "help": "(default: float32; on cuda bfloat16)"},
    "rounds": {"type": positive, "help": "timed of a case at most (%(default)s)"},
    "seconds": {"type": float, "help": "timed of a case, about (%(default)g)"},
    "threads": {"type": positive, "help": "torch's threads on CPU"},
    "fresh": {"action": "store_true", "help": "measure again what is in the file"},
    "dry-run": {"action": "store_true", "help": "tiny sizes, one round: no measurement"},
}


class Parser(argparse.ArgumentParser):
    """The parser of `python -m bench NAME`; every command has --out and --publish.

    `shared` names options of `SHARED`, with spaces between; `defaults` are theirs.
    """

    def __init__(
        self, name: str, about: str | None, shared: str, folder: str = "", **defaults: Any
    ) -> None:
        super().__init__(
            prog=f"python -m bench {name}",
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add = self.add_argument
        self._folder = folder
        self._by_device: dict[str, Sequence[Any]] = {}
        self.by_device(dtype=("float32", "bfloat16"))
        for option in shared.split():
            self.add(f"--{option}", **SHARED[option])
        within = folder.format(device="DEVICE")
        where = self.add_mutually_exclusive_group()
        help_ = f"folder of the results (default: build/bench/{within})"
        where.add_argument("--out", type=Path, help=help_)
        help_ = f"write to bench/results/{within}, which pages are made of"
        where.add_argument("--publish", action="store_true", help=help_)
        self.set_defaults(**defaults)

    def several(self, option: str, **rest: Any) -> None:
        """Add an option of one or more values."""
        if option == "dtype":
            self.by_device(dtype=(["float32"], ["bfloat16"]))
        self.add(f"--{option}", nargs="+", **{**SHARED.get(option, {}), **rest})

    def by_device(self, **usual: Sequence[Any]) -> None:
        """Set defaults on a CPU, and on a GPU."""
        self._by_device |= usual

    def add_ways(self, ways: Registry[Any], default: Sequence[str]) -> None:
        """Add the option of ways and their groups."""
        shown = f"names, groups ({', '.join(default)})"
        self.add("--ways", nargs="+", default=list(default), metavar="WAY", help=shown)
        self.epilog = f"ways: {', '.join(ways)}\ngroups of them: {', '.join(ways.groups)}"

    @contextlib.contextmanager
    def usage_errors(self) -> Iterator[None]:
        """End the process with a usage error for ValueError and Absent within."""
        try:
            yield
        except (ValueError, Absent) as error:
            self.error(str(error))

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse the command line, resolve defaults and the folder, and set torch's threads.

        Ends the process with status 2 and a message for bad values or a missing device.
        """
        args = self.parse_args(arguments)
        device, dry = getattr(args, "device", "cpu"), getattr(args, "dry_run", False)
        if device == "cuda" and not torch.cuda.is_available():
            self.error("no CUDA device")
        if INTERPRETED and hasattr(args, "dry_run") and not dry:
            self.error("times under Triton's interpreter mean nothing: --dry-run")
        for name, usual in self._by_device.items():
            if hasattr(args, "device") and getattr(args, name, "") is None:
                setattr(args, name, usual[device == "cuda"])
        if args.publish and dry:
            self.error("a dry run is no measurement: without --publish")
        usual = "bench/results" if args.publish else "build/dry-run" if dry else "build/bench"
        args.out = args.out or ROOT / usual / self._folder.format(device=device)
        if getattr(args, "threads", None) is not None:
            torch.set_num_threads(args.threads)
        return args

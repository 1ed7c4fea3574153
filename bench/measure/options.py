"""One parser of what every command takes; a command adds only its own options."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.measure.case import DTYPES
from bench.measure.machine import ROOT
from bench.measure.registry import Absent, Registry
from fused_remat.triton.launch import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def positive(text: str) -> int:
    """A whole number from 1 on. Raises: ArgumentTypeError, whose text the user sees."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text}")
    return int(text)


#: Shared options by name; defaults come from the command.
SHARED: dict[str, dict[str, Any]] = {
    "device": {"choices": ("cpu", "cuda"), "default": DEVICE, "help": f"(default here: {DEVICE})"},
    "dtype": {"choices": DTYPES, "help": "(default: float32; on cuda bfloat16)"},
    "rounds": {"type": positive, "help": "timed of a case at most (%(default)s)"},
    "seconds": {"type": float, "help": "timed of a case, about (%(default)g)"},
    "threads": {"type": positive, "help": "torch's threads on CPU"},
    "out": {"type": Path},
    "fresh": {"action": "store_true", "help": "measure again what is in the file already"},
    "dry-run": {"action": "store_true", "help": "tiny sizes, one round: no measurement"},
}


class Parser(argparse.ArgumentParser):
    """Of `python -m bench NAME`.

    Args:
        about: the command's docstring.
        shared: names of `SHARED`, with spaces between.
        folder: of the results, within the usual one; "{device}" stands for the device.
        defaults: of those, where they are not `DEVICE`, the device's dtype and no limit.
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
        usual = f"folder of the results (default: bench/results/{folder.format(device='DEVICE')})"
        for option in shared.split():
            self.add(f"--{option}", **SHARED[option] | ({"help": usual} if option == "out" else {}))
        self.set_defaults(**defaults)

    def several(self, option: str, **rest: Any) -> None:
        if option == "dtype":
            self.by_device(dtype=(["float32"], ["bfloat16"]))
        self.add(f"--{option}", nargs="+", **{**SHARED.get(option, {}), **rest})

    def by_device(self, **usual: Sequence[Any]) -> None:
        """Values of options that are not given: on a CPU, and on a GPU."""
        self._by_device |= usual

    def add_ways(self, ways: Registry[Any], default: Sequence[str]) -> None:
        shown = f"names, groups ({', '.join(default)})"
        self.add("--ways", nargs="+", default=list(default), metavar="WAY", help=shown)
        self.epilog = f"ways: {', '.join(ways)}\ngroups of them: {', '.join(ways.groups)}"

    @contextlib.contextmanager
    def usage_errors(self) -> Iterator[None]:
        """What is raised within of bad values, or of what is absent, ends the process as such."""
        try:
            yield
        except (ValueError, Absent) as error:
            self.error(str(error))

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The command line: the device is there; values are set, as are torch's threads.

        Ends the process with status 2 and a message where that cannot be.
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
        if hasattr(args, "out"):
            args.out_is_usual = args.out is None
            usual = ROOT / ("build/dry-run" if dry else "bench/results")  # which pages are made of
            args.out = args.out or usual / self._folder.format(device=device)
        if getattr(args, "threads", None) is not None:
            torch.set_num_threads(args.threads)
        return args

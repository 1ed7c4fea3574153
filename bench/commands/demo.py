"""The demo (`make demo`): a small language model trained eagerly, with checkpointing and presets.

It runs examples/train_byte_lm.py, whose options follow `--`: `python -m bench demo -- --quick`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from bench.measure.machine import ROOT
from bench.measure.options import Parser


def main(arguments: Sequence[str]) -> int:
    """Train, and write demo.json and demo.png; return the script's status."""
    parser = Parser("demo", __doc__, "", folder="demo-cpu")
    parser.add("rest", nargs="*", metavar="OPTION", help="options of the script, after --")
    args = parser.parse(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    files = ["--out", str(args.out / "demo.png"), "--json", str(args.out / "demo.json")]
    script = str(ROOT / "examples" / "train_byte_lm.py")
    return subprocess.run([sys.executable, script, *files, *args.rest], check=False).returncode

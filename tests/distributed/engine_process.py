"""One rank of a script of examples/engines: a first start, or one that resumes, or both in turn.

    python engine_process.py SCRIPT[:FLAG] OUT [RESUMED_FROM OUT_OF_THAT]...

OUT "-": no first start. One that is not the process's first has everything built anew, and random
state scrambled before. Leaves how many blocks ran that kept something beside the losses of a start.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fused_remat import FusedRematWarning
from fused_remat.autograd.function import OBSERVERS

SCRIPTS = Path(__file__).parents[2] / "examples" / "engines"


def prepare(name: str) -> None:
    """What an engine needs before it is imported, or before it starts anew."""
    if name == "deepspeed_zero3":
        from deepspeed import ops

        # Its collectives in shared memory, which it would compile: half a minute at the first time.
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if name == "accelerate_loop":
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def start(script: Any, out: str, *arguments: str) -> None:
    """Run the script once; whatever leaves the fused path is an error."""
    blocks: list[int] = []

    def note(invocation: Any) -> None:
        blocks.append(len(invocation.kept))

    OBSERVERS.append(note)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FusedRematWarning)
            script.main(["--steps", "20", "--save-at", "10", "--out", out, *arguments])
    finally:
        OBSERVERS.remove(note)
    (Path(out) / f"blocks-{os.environ['RANK']}").write_text(str(len(blocks)))


def scramble() -> None:
    """Nothing that resumes may depend on where random numbers were."""
    torch.manual_seed(12345)
    np.random.seed(12345)
    random.seed(12345)


def main() -> None:
    script_and_flag, out, *resumed = sys.argv[1:]
    name, *flags = script_and_flag.split(":")
    sys.path.insert(0, str(SCRIPTS))
    torch.set_num_threads(1)
    prepare(name)
    script: Any = importlib.import_module(name)
    if out != "-":
        start(script, out, *flags)
    for source, target in zip(resumed[::2], resumed[1::2], strict=True):
        scramble()
        prepare(name)
        start(script, target, "--resume", source, *flags)
    importlib.import_module("tiny_lm").leave()
    sys.stdout.flush()
    # Not by sys.exit: a thread of gloo's that lets go of its last tensor while Python ends aborts.
    os._exit(0)


if __name__ == "__main__":
    main()

"""The driver for PLACE "compiled", and a record of the audit's cases that were executed.

FUSED_REMAT_EXECUTED names the record's file: a line of tab-separated `COLUMNS` for each launch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from places import EXECUTED

RECORD = os.environ.get("FUSED_REMAT_EXECUTED", "")
#: Of `Outcome.counts`.
COUNTS = (
    "multiply-adds", "load sectors", "touched load sectors", "store sectors",
    "touched store sectors", "shared passes", "shared passes least",
)  # fmt: skip
COLUMNS = (
    "target", "defaults", "case", "default", "kernel", "sizes", "right", "opcodes",
    "warp instructions", "matrix instructions", "least multiply-adds", *COUNTS,
)  # fmt: skip
_MATRIX = ("mma.sync", "wgmma.mma_async")
#: What was launched since the test began: a case's line, for each launch of one.
_LINES: list[list[Any]] = []
driver: Any = None


def install() -> contextlib.ExitStack:
    """Until the stack is closed Triton's active driver is one that executes what is compiled."""
    global driver
    from ptx import driver as drivers

    stack = contextlib.ExitStack()
    driver = stack.enter_context(drivers.installed(EXECUTED, sms=3, count=bool(RECORD)))
    return stack


def took(case: str, dtype: str, sizes: str, defaults: Collection[str], least: int) -> None:
    """Note that the last launch was of a case of the audit, which has so many by default.

    `least`: multiply-adds that its products need; 0 where they are not counted.
    """
    done = driver.launches[-1]
    counts, opcodes = done.outcome.counts, done.outcome.opcodes
    matrix = sum(n for name, n in opcodes.items() if name.startswith(_MATRIX))
    _LINES.append(
        [f"sm_{EXECUTED} {dtype}", len(defaults), case, int(case in defaults), done.kernel, sizes,
         0, len(opcodes), opcodes.total(), matrix, least,
         *(counts[name] for name in COUNTS)]
    )  # fmt: skip


def write(right: bool) -> None:
    """Record the launches of a test that is over, and forget them."""
    driver.launches.clear()
    if RECORD and _LINES:
        import fcntl

        path = Path(RECORD)
        path.parent.mkdir(parents=True, exist_ok=True)
        for row in _LINES:
            row[COLUMNS.index("right")] = int(right)
        with path.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            head = [] if os.fstat(file.fileno()).st_size else [COLUMNS]
            file.write("".join("\t".join(map(str, row)) + "\n" for row in (*head, *_LINES)))
    _LINES.clear()

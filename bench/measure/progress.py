"""A bar with the time left, for what takes more than ten seconds."""

from __future__ import annotations

import time
from typing import Any

PATIENCE = 10.0  # seconds without a bar


class Progress:
    """Context manager: how much of `total` is done, and the lines of what was found.

    The bar is tqdm's, on a terminal; without either, only the lines are printed.

    >>> with Progress(2, "cases") as progress:
    ...     for case in ("first", "second"):
    ...         progress.line(f"{case}: measured")
    ...         progress.done()
    first: measured
    second: measured
    """

    def __init__(self, total: int, unit: str) -> None:
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(
            total=total, unit=f" {unit}", delay=PATIENCE, disable=None, dynamic_ncols=True,
            smoothing=0.1, leave=False,
        )  # fmt: skip

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is None or self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def at(self, what: str) -> None:
        """Say what is being measured now: until the next is done the bar is not drawn again."""
        if self._bar is not None:
            shown = not self._bar.disable and time.time() >= self._bar.start_t + PATIENCE
            self._bar.set_description(what, refresh=shown)

    def done(self, count: int = 1) -> None:
        """So much more is done."""
        if self._bar is not None:
            self._bar.update(count)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar is not None:
            self._bar.close()

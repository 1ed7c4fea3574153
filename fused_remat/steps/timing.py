"""Which of two implementations is faster on this machine: timed once in a process, then known.

The choice depends on sizes alone, so that forward and the rebuild in backward agree. An environment
variable can make it instead. Under deterministic algorithms callers do not ask.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

Run = Callable[[], Any]

#: What was found faster: by setting and sizes, whether the other implementation is.
FOUND: dict[Hashable, bool] = {}
#: Multiply-adds of the smallest product for which there is a choice.
LEAST_PRODUCT = 256 * 256 * 512
_ROUNDS = 6
_lock = threading.Lock()
# How much faster another implementation has to be than the standard one.
_MARGIN = 0.97


def prefers(setting: str, other: str, key: Hashable, make: Callable[[], tuple[Run, Run]]) -> bool:
    """Whether the implementation `other` serves rather than ATen's.

    The environment variable `setting` is "aten", `other`, or "measure", the default. Then the two
    functions that `make` returns, of ATen's implementation and of the other, are timed in turns;
    what is found holds for `key` from then on.

    Raises: ValueError if the variable is none of these.
    """
    found = FOUND.get((setting, key))
    if found is None:
        with _lock:
            found = _decide(setting, other, key, make)
    return found


def _decide(setting: str, other: str, key: Hashable, make: Callable[[], tuple[Run, Run]]) -> bool:
    if (setting, key) not in FOUND:  # another thread may just have decided
        said = os.environ.get(setting, "measure")
        if said not in ("aten", other, "measure"):
            raise ValueError(f"{setting} is {said!r}; valid: 'measure', 'aten', {other!r}")
        FOUND[setting, key] = _is_faster(make) if said == "measure" else said == other
    return FOUND[setting, key]


def _is_faster(make: Callable[[], tuple[Run, Run]]) -> bool:
    best = [float("inf"), float("inf")]
    quiet = torch._C.DisableTorchFunction()
    with torch.no_grad(), quiet, _disable_current_modes(), torch.autocast("cpu", enabled=False):
        runs = make()
        for _ in range(_ROUNDS):
            for index, run in enumerate(runs):
                start = time.perf_counter()
                run()
                best[index] = min(best[index], time.perf_counter() - start)
    return best[1] < _MARGIN * best[0]

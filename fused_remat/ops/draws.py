"""Whether a function of the caller's draws random numbers, while other threads may.

Generators are the process's: their state changes with whoever draws. Alone, a change says it all.
Beside other threads it counts where an operator called here may have drawn, or where nobody else is
seen to draw.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

State = TypeVar("State")
_WAIT = 0.02
#: Operators outside of these may call others where no mode sees them.
_PYTORCHS = ("aten", "prims", "prim")


class Draws(TorchDispatchMode):
    """Notes whether an operator of this thread may draw random numbers.

    >>> with Draws() as draws:
    ...     x = torch.ones(2).bernoulli_(0.5)
    >>> draws.drew
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        may = torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in _PYTORCHS
        self.drew = self.drew or may
        return func(*args, **(kwargs or {}))


def is_ours(
    draws: Draws, state: Callable[[], State], same: Callable[[State, State], bool], elapsed: float
) -> bool:
    """Whether a change of generators, while `draws` watched, is to be put down to this thread.

    `state` reads the generators; `elapsed` is how long it was watched, in seconds. Where no
    operator explains the change and there are other threads, it waits some times as long: if the
    state changes by itself, somebody else draws.

    >>> is_ours(Draws(), torch.get_rng_state, torch.equal, 0.0)  # in a program of one thread
    True
    """
    if draws.drew or threading.active_count() == 1:
        return True
    before = state()
    time.sleep(max(_WAIT, 10 * elapsed))
    return same(before, state())

"""Observers of blocks: reports, explanations, tests. The lists are usually empty."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from fused_remat.graph.schedule import Step
from fused_remat.steps.chunk import Chunk

if TYPE_CHECKING:
    from fused_remat.execution.prepare import BlockConfig, Execution, Functions


class BlockRun(NamedTuple):
    """A call that keeps something for backward."""

    execution: Execution
    functions: Functions
    tensors: Sequence[Tensor | None]
    output: Tensor
    # kept activations other than `tensors` and `output`, chunk by chunk; None for a side output
    # that backward does not read
    kept: Sequence[Tensor | None]
    saves: Sequence[bool]  # for each of `tensors`, whether it is kept
    offloaded: Sequence[tuple[str, Tensor]]  # by name, those on the host

    @property
    def call(self) -> BlockConfig:
        return self.execution.call


class LossRun(NamedTuple):
    """A loss that computed its gradients in forward."""

    backend: str
    implementation: str
    kept: Mapping[str, Tensor]  # the gradients, by name
    predicted: Mapping[str, int]  # their bytes, from the shapes and dtypes of the call


#: Called when such a loss is about to save its gradients.
LOSSES: list[Callable[[LossRun], None]] = []

#: Called when a block is about to save what it keeps.
OBSERVERS: list[Callable[[BlockRun], None]] = []

#: Called with each step before it runs, and its chunk.
TRACERS: list[Callable[[Step, Chunk], None]] = []

#: Called with each layer that does not take the fused path, and why.
DECISIONS: list[Callable[[nn.Module, str], None]] = []

#: "on" where the replay check is, and records of its calls whose backward may follow: until then, a
#: call may be a replay.
CHECKS: set[Any] = set()

_thread = threading.local()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Hide the blocks and steps that run inside, in this thread, from observers."""
    before, _thread.off = not is_observed(), True
    try:
        yield
    finally:
        _thread.off = before


def is_observed() -> bool:
    """Return whether observers see this thread's runs."""
    return not getattr(_thread, "off", False)


def is_checked() -> bool:
    """Return whether calls are under the replay check."""
    return "on" in CHECKS

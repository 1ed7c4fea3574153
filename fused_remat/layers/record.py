"""Records of layers (what their training calls ran as), and warnings, each shown once."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from fused_remat.autograd.accumulate import sharded_by
from fused_remat.autograd.engine import current_pass
from fused_remat.steps.operations import FusedRematWarning, user_stacklevel

#: How a training call runs: as a block; as the layer's own forward under checkpointing; or as that
#: forward without checkpointing, which keeps all its activations.
Ran = Literal["block", "checkpoint", "plain"]
State = Literal["converted", "checkpointed", "plain", "not called", "stock"]
#: State of a layer in reports, by what its last training call ran as.
STATES: dict[Ran | None, State] = {
    "block": "converted", "checkpoint": "checkpointed", "plain": "plain", None: "not called",
}  # fmt: skip
#: Attributes of a layer that hold notes about it; copies and pickles do not have them.
NOTES = ("_record", "last_trace", "_trace_notes")
#: How many different reasons are counted for a layer; calls with others count together.
_MOST_REASONS = 8
_order = itertools.count(1)
_LEAF = (
    "; under DeepSpeed ZeRO-3, deepspeed.utils.set_z3_leaf_modules(model, [type(layer)]) before "
    "deepspeed.initialize makes it gather the entire layer"
)


class _Stages(threading.local):
    """Whether a thread runs a stage that runs again in backward (`layers.converted`)."""

    inside = False


STAGES = _Stages()


@dataclass(eq=False)
class Record:
    """Notes about one layer."""

    path: str = ""  # of the layer in the converted model, if known
    #: Numbers of training calls by what they ran as, and why not as a block ("" for a block).
    calls: Counter[tuple[Ran, str]] = field(default_factory=Counter)
    last: Ran | None = None  # what the last training call ran as
    reason: str = ""  # why that was not a block
    advice: str = ""  # on the policy of the last block
    order: int = 0  # of the last call in forward, among the calls of all layers
    #: Whether a call was noted in forward. If not, reentrant checkpointing around the layer, whose
    #: forward has no gradients, makes a call in backward the first to train.
    in_forward: bool = False
    #: Exception of the layer's block: from then on, its own forward runs under checkpointing.
    failure: str = ""
    warned: set[str] = field(default_factory=set)  # shared by layers converted together
    #: By the training flag, tensors that forward changes, so that it is not repeated.
    changes: dict[bool, list[str]] = field(default_factory=dict)
    swaps_parameters: bool = False  # whether forward changes parameters and restores them
    reached: int = 0  # how often forward has reached `FusedLayer._call`
    watch: Callable[[], None] | None = None  # called with each training call in forward
    stage: str = ""  # the policy in the stage around the layer, if that runs again in backward

    @property
    def is_in_stage(self) -> bool:
        """Whether a call, or the forward that it repeats, is in a stage that runs again."""
        return STAGES.inside or self.repeats

    @property
    def repeats(self) -> bool:
        """Whether a checkpoint around the layer repeats its last call in backward.

        If that ran plainly, the layer may have changed, so that it would run as a block now.
        """
        return self.in_forward and current_pass() != -1

    def note(self, ran: Ran, reason: str = "") -> None:
        """Count a training call, unless a checkpoint around the layer repeats it in backward."""
        in_backward = current_pass() != -1
        if in_backward and self.in_forward:
            return
        self.last, self.reason = ran, reason
        if not in_backward:
            self.in_forward, self.order = True, next(_order)
            if self.watch is not None:
                self.watch()
        if (ran, reason) not in self.calls and len(self.calls) >= _MOST_REASONS:
            reason = "other reasons"
        self.calls[ran, reason] += 1

    def advise(self, advice: str) -> None:
        """Note the advice on a block, and log it once for layers that were converted together."""
        self.advice = advice
        if advice and advice not in self.warned:
            self.warned.add(advice)
            logging.getLogger("fused_remat").info(advice)

    def number(self, ran: Ran) -> int:
        """Return how many training calls ran as `ran`."""
        return sum(count for (what, _), count in self.calls.items() if what == ran)


def record_of(layer: nn.Module) -> Record:
    """Return the record of a layer, a new one if it has none."""
    own = layer.__dict__
    record: Record | None = own.get("_record")
    if record is None:
        record = own["_record"] = Record()
    return record


@contextlib.contextmanager
def noted_apart(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Note the calls of `layers` in empty records inside, and restore their records."""
    before = [(record := record_of(layer), dict(vars(record))) for layer in layers]
    try:
        for record, _ in before:
            vars(record).update(calls=Counter(), last=None, reason="", in_forward=False, advice="")
            record.watch = None
        yield
    finally:
        for record, kept in before:
            failure = record.failure
            vars(record).update(kept)
            record.failure = failure  # no later call runs as a block


def warn(layer: nn.Module, message: str, category: type[Warning] = FusedRematWarning) -> None:
    """Warn, at the user's line, that `layer` does `message`.

    Each message is shown once for the layers of a class that were converted together.
    """
    record, name = record_of(layer), type(layer).__name__
    key = f"{name} {re.sub(r'[0-9][^ ]*', '', message)}"  # numbers differ from layer to layer
    if key in record.warned:
        return
    record.warned.add(key)
    # ZeRO-3 gathers by hooks on the modules inside a layer, unless that is a leaf module.
    is_leaf = getattr(layer, "_z3_leaf", False)
    hint = _LEAF if not is_leaf and sharded_by(layer) == "ZeRO-3" else ""
    who = f"{record.path} ({name})" if record.path else name
    text = f"fused_remat: {who} {message}{hint}"
    warnings.warn(text, category, stacklevel=user_stacklevel())


def listed(names: Sequence[str]) -> str:
    """Return names as text, the first three of many."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def warn_compiled(layer: str, reason: str, keeps: str = "") -> None:
    """Warn while compiling. What PyTorch's forward keeps is then the compiler's choice."""
    what = keeps or "runs PyTorch's own forward and saves no memory"
    text = f"fused_remat: {layer}, compiled, {what}: {reason}"
    warnings.warn(text, FusedRematWarning, stacklevel=2)


# Not traced by the compiler, but called.
warn_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]

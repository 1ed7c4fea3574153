"""What is recorded of a layer: what its training calls ran as, and where it is in its model."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

#: What a training call runs as: a block; the layer's own forward under checkpointing; or that
#: forward as it is, which keeps all its activations.
Ran = Literal["block", "checkpoint", "plain"]
#: Attributes of a layer that hold notes about it; copies and pickles do not have them.
NOTES = ("_record",)


@dataclass(eq=False)
class Record:
    """Notes about one layer.

    Attributes:
        path: of the layer in the model that was converted, "" if unknown.
        calls: how many training calls ran as a block, under checkpointing, and as they are.
        last: what the last training call ran as, None before the first.
        reason: why the last training call was not a block's, "" if it was.
        failure: what a block of the layer raised, "" if none did: the layer's own forward runs
            under checkpointing from then on.
        warned: messages that were shown; layers that were converted together share it.
    """

    path: str = ""
    calls: Counter[Ran] = field(default_factory=Counter)
    last: Ran | None = None
    reason: str = ""
    failure: str = ""
    warned: set[str] = field(default_factory=set)

    def note(self, ran: Ran, reason: str = "") -> None:
        """Count a training call."""
        self.calls[ran] += 1
        self.last, self.reason = ran, reason


def record_of(layer: nn.Module) -> Record:
    """Return the record of a layer, a new one if it has none.

    >>> record_of(nn.Linear(2, 2)).last is None
    True
    """
    own = layer.__dict__
    record: Record | None = own.get("_record")
    if record is None:
        record = own["_record"] = Record()
    return record

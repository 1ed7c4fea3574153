"""What few calls do besides computing: segments, offload, the replay check.

A call on the common path has no `Extras` at all. In forward they say what is saved and where it
goes; in backward they bring it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.autograd import segments
from fused_remat.autograd.offload import OffloadRecord, move
from fused_remat.autograd.replay_check import Record
from fused_remat.autograd.segments import Replayed, Segment
from fused_remat.autograd.unchanged import check_unchanged
from fused_remat.execution import executor
from fused_remat.execution.prepare import Execution
from fused_remat.steps.chunk import Chunk


class Saved(NamedTuple):
    """What a backward pass computes from.

    Attributes:
        execution: of the call; that of a block in a segment keeps more once it was run again.
        tensors: of the call, None where backward does not read them.
        output: if it is kept.
        kept: what the schedule keeps, piece by piece.
    """

    execution: Execution
    tensors: Sequence[Tensor | None]
    output: Tensor | None
    kept: Sequence[Tensor]


@dataclass(eq=False)
class Extras:
    """What one call does besides computing.

    Attributes:
        record: copies of what forward computes, for the replay check.
        segment: the block's place in a segment.
        offload: names of what is copied to the host until backward.
        offloaded: what was copied.
    """

    record: Record | None = None
    segment: Segment | None = None
    offload: frozenset[str] = frozenset()
    offloaded: OffloadRecord | None = None

    @property
    def note(self) -> Callable[[Any, Chunk], None] | None:
        """Called after every step of forward."""
        return None if self.record is None else self.record.note

    def saves(self, rereads: Sequence[bool], out: Tensor) -> Sequence[bool]:
        """Which tensors of the call are saved: those that backward reads, or, of a block in a
        segment, all that running it again takes."""
        if self.record is not None:
            self.record.note_output(out)
        if self.segment is None:
            return rereads
        self.segment.made = segments.state_of(out)
        return (self.segment.input_kept, *(True for _ in rereads[1:]))

    def moved(
        self, ctx: Any, saved: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Sequence[tuple[str, Tensor]]]:
        """What to save instead of `saved`, and what of it is on the host, by name."""
        if not self.offload:
            return saved, ()
        graph = ctx.execution.call.graph
        names = [*graph.tensors, "output", *(name for name, _ in ctx.execution.pieces())]
        callers = {*graph.inputs, "output"}
        self.offloaded, saved = move(ctx, self.offload, names, saved, callers)
        places = () if self.offloaded is None else self.offloaded.places
        return saved, [(names[i], t) for i in places if (t := saved[i]) is not None]

    def unpacked(self, node: Any, again: Replayed | None) -> Sequence[Tensor | None]:
        """What a call saved, on the device; `again`: what running it again in this pass gave.

        Read it once: each access unpacks everything.
        """
        if again is not None:
            return again.saved
        saved: Sequence[Tensor | None] = node.saved_tensors
        return saved if self.offloaded is None else self.offloaded.returned(saved)

    def restored(self, ctx: Any, dy: Tensor) -> Saved:
        """What the call saved, on the device and checked."""
        segment = self.segment
        again = None if segment is None else segment.now()
        saved = self.unpacked(ctx, again)
        if segment is not None and not segment.input_kept:
            x = segments.input_of(ctx) if again is None else again.input
            saved = (x, *saved[1:])
        execution: Execution = ctx.execution
        check_unchanged(execution.call.graph.tensors, execution.given, ctx.dtypes, saved, dy)
        count = len(execution.given)
        found = Saved(execution, saved[:count], saved[count], saved[count + 1 :])  # type: ignore[arg-type]
        if self.record is not None:
            self._check(self.record, found, ctx.functions)
        if again is None:
            return found
        return Saved(again.execution, found.tensors, again.output, again.kept)

    @staticmethod
    def _check(record: Record, saved: Saved, functions: Any) -> None:
        """Run the forward again and compare everything with what it computed."""
        tensors, execution = record.compare_given(saved.tensors), saved.execution
        x = tensors[0]
        assert x is not None
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            executor.forward(execution, tensors, functions, record.compare)
            # After: where a checkpoint around the block computed them anew, the first difference
            # is found above.
            record.compare_kept(saved.output, saved.kept)

    def done(self, keeps_graph: bool) -> None:
        """After a backward pass: copies go with what autograd saved."""
        if not keeps_graph:
            self.record = None
        if self.segment is not None:
            self.segment.replayed = None

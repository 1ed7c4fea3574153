"""State of calls with segments, offload or the replay check.

A call on the common path has no `Extras`. In forward they decide what is saved and where; in
backward they restore it.
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
    """Operands of a backward pass."""

    execution: Execution  # of a replayed block in a segment: one that keeps more
    tensors: Sequence[Tensor | None]  # None where backward does not read them
    output: Tensor | None
    kept: Sequence[Tensor]


@dataclass(eq=False)
class Extras:
    """Rare requests of one call."""

    record: Record | None = None
    segment: Segment | None = None
    offload: frozenset[str] = frozenset()
    offloaded: OffloadRecord | None = None

    @property
    def note(self) -> Callable[[Any, Chunk], None] | None:
        """Callback after every step of forward."""
        return None if self.record is None else self.record.note

    def saves(self, rereads: Sequence[bool], out: Tensor) -> Sequence[bool]:
        """Return which tensors are saved: those that backward or another run of the block reads."""
        if self.record is not None:
            self.record.note_output(out)
        if self.segment is None:
            return rereads
        self.segment.made = segments.state_of(out)
        return (self.segment.input_kept, *(True for _ in rereads[1:]))

    def moved(
        self, ctx: Any, saved: list[Tensor | None]
    ) -> tuple[list[Tensor | None], Sequence[tuple[str, Tensor]]]:
        """Return what to save instead of `saved`, and the tensors on the host by name."""
        if not self.offload:
            return saved, ()
        graph = ctx.execution.call.graph
        names = [*graph.tensors, "output", *(name for name, _ in ctx.execution.kept_chunks())]
        callers = {*graph.inputs, "output"}
        self.offloaded, saved = move(ctx, self.offload, names, saved, callers)
        indices = () if self.offloaded is None else self.offloaded.indices
        return saved, [(names[i], t) for i in indices if (t := saved[i]) is not None]

    def unpacked(self, node: Any, again: Replayed | None) -> Sequence[Tensor | None]:
        """Return what a call saved, on the device; `again`: the result of its replay in this pass.

        Each access of saved tensors unpacks all of them, so call this once.
        """
        if again is not None:
            return again.saved
        saved: Sequence[Tensor | None] = node.saved_tensors
        return saved if self.offloaded is None else self.offloaded.returned(saved)

    def restored(self, ctx: Any, dy: Tensor) -> Saved:
        """Return what the call saved, on the device and checked."""
        segment = self.segment
        again = None if segment is None else segment.now()
        saved = self.unpacked(ctx, again)
        if segment is not None and not segment.input_kept:
            x = segments.input_of(ctx) if again is None else again.input
            saved = (x, *saved[1:])
        execution: Execution = ctx.execution
        check_unchanged(execution.call.graph.tensors, execution.given, ctx.dtypes, saved, dy)
        count = len(execution.given)
        restored = Saved(execution, saved[:count], saved[count], saved[count + 1 :])  # type: ignore[arg-type]
        if self.record is not None:
            self._check(self.record, restored, ctx.functions)
        if again is None:
            return restored
        return Saved(again.execution, restored.tensors, again.output, again.kept)

    @staticmethod
    def _check(record: Record, saved: Saved, functions: Any) -> None:
        """Run the forward again and compare everything with what it computed."""
        tensors, execution = record.compare_given(saved.tensors), saved.execution
        x = tensors[0]
        assert x is not None
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            executor.forward(execution, tensors, functions, record.compare)
            # Last: under a checkpoint around the block, an earlier difference has raised above.
            record.compare_kept(saved.output, saved.kept)

    def done(self, keeps_graph: bool) -> None:
        """Free copies after a backward pass, as autograd frees saved tensors."""
        if not keeps_graph:
            self.record = None
        if self.segment is not None:
            self.segment.replayed = None

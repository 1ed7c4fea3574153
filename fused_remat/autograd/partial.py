"""Calls and backward passes off the common path.

A call with segments, offload or the replay check has `Extras`: in forward they decide what is saved
and where; in backward they restore it.

Autograd requests all gradients of a node or some: `torch.autograd.grad(loss, inputs)`,
`backward(inputs=...)`, and the zero-bubble schedules of pipeline parallelism, which compute the
gradient of a stage's input first and those of its weights later. For a partial request, a block
runs the schedule of those gradients alone, on what it kept for all of them. The second of two
passes therefore rebuilds and propagates inside the block again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.autograd import replay_check, segments
from fused_remat.autograd.accumulate import Accumulation
from fused_remat.autograd.engine import asked, dead_outputs, edges_of, keeps_graph, side_grads
from fused_remat.autograd.gradients import finish, not_differentiable
from fused_remat.autograd.offload import OffloadRecord, move
from fused_remat.autograd.replay_check import Record
from fused_remat.autograd.segments import Replayed, Segment
from fused_remat.execution import executor
from fused_remat.execution.observe import CHECKS, is_checked
from fused_remat.execution.prepare import Execution
from fused_remat.graph.schedule import needs_by_node, schedule
from fused_remat.steps.operations import warn

_functorch = torch._C._functorch


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
        callers = {*graph.inputs, "output", *graph.side_outputs}
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
        names = execution.call.graph.tensors
        executor.check_unchanged(names, execution.given, ctx.dtypes, saved, dy)
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


def begin(
    segment: str | None,
    execution: Execution,
    tensors: Sequence[Tensor | None],
    node_type: type,
    warn_of_input: Callable[[str], None],
) -> tuple[Extras | None, Execution]:
    """Return the extras of a call with `tensors`, None if it has none, and what to execute."""
    call, x = execution.call, tensors[0]
    assert x is not None
    if segment is None and not call.offload and not is_checked():
        return None, execution
    extras = Extras(offload=call.offload)
    if segment is not None:
        extras.segment = segments.begin(segment, execution, x, node_type)
        if extras.segment.why_kept:
            warn_of_input(extras.segment.why_kept)
        call = replace(call, save=frozenset())
        execution = call.prepare(tensors, fused=not CHECKS)
    if is_checked():
        extras.record = replay_check.record_of(execution, call.graph.tensors, tensors)
    return extras, execution


def backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """Return the gradients of the call's tensors, in its order."""
    if torch.compiler.is_compiling():  # compiled autograd, after a forward in eager mode
        from fused_remat.autograd import graph_break

        return graph_break.eagerly(_backward, ctx, dy)  # type: ignore[no-any-return]
    return _backward(ctx, dy)


def _backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    grads = gradients(ctx, dy, asked(ctx))
    if ctx.extras is not None:
        ctx.extras.done(keeps_graph())
    return grads


def gradients(ctx: Any, dy: Tensor, needs_grad: frozenset[str]) -> list[Tensor | None]:
    """Return the gradients of `needs_grad`, in the order of the call's tensors; None for others."""
    creates_graph = torch.is_grad_enabled()
    saved = (ctx.extras or Extras()).restored(ctx, dy)
    with torch.no_grad():
        grads = _grads(ctx, saved, dy, needs_grad, creates_graph)
    return not_differentiable(grads) if creates_graph else grads


def _grads(
    ctx: Any, saved: Saved, dy: Tensor, needs_grad: frozenset[str], creates_graph: bool
) -> list[Tensor | None]:
    """Return the gradients of `needs_grad`, batched if `dy` is; None for others.

    Autograd rounds those of matrices to the dtypes of the tensors.
    """
    unbatched, rebatch = _batching(dy)
    if rebatch is not None:
        each = [_grads(ctx, saved, one, needs_grad, creates_graph) for one in unbatched.unbind()]
        return [
            None if grads[0] is None else rebatch(torch.stack(grads))
            for grads in zip(*each, strict=True)
        ]
    execution, tensors, out, kept = saved
    dead = dead_outputs(ctx)
    if dead or len(needs_grad) < len(execution.needs_grad):
        execution, kept = _narrowed(execution, kept, needs_grad, dead)
        needs_grad = execution.needs_grad
    sink = _buffers(ctx, needs_grad, creates_graph)
    record = None if ctx.extras is None else ctx.extras.record
    watch = None if record is None else record.compare
    side = side_grads(ctx)
    grads = executor.backward(execution, tensors, kept, out, dy, ctx.functions, watch, sink, side)
    return finish(ctx, dy, grads, needs_grad, sink or ())


def _narrowed(
    execution: Execution, kept: Sequence[Tensor], needs_grad: frozenset[str], dead: frozenset[str]
) -> tuple[Execution, Sequence[Tensor]]:
    """Return the same call with gradients of `needs_grad` alone, and those of `kept` that it reads.

    Those of outputs other than the `dead`: what these alone depend on has no gradient.
    Groups, tiles and rebuilt bits are the same. A schedule for fewer gradients reads nothing that a
    schedule for more does not read, so all of it was kept.
    """
    known, key = execution.narrowed, (needs_grad, dead)
    less = known.get(key)
    if less is None:
        if len(known) >= _MOST_NARROWED:
            known.clear()
        less = known[key] = _with_gradients_of(execution, needs_grad, dead)
    names = frozenset(less.plan.kept)
    reads = [t for (name, _), t in zip(execution.kept_chunks(), kept, strict=True) if name in names]
    return less, reads


#: Number of executions of one call with fewer gradients that are held.
_MOST_NARROWED = 16


def _with_gradients_of(
    execution: Execution, needs_grad: frozenset[str], dead: frozenset[str]
) -> Execution:
    call, tiled, fusions = execution.call, execution.chunks.tiled, execution.fusions
    if dead:
        reached = needs_by_node(call.graph, needs_grad, dead).values()
        needs_grad = needs_grad.intersection(frozenset().union(*reached))
    plan = schedule(call.graph, call.save, needs_grad, tiled, fusions, dead)
    call = replace(call, needs_grad=needs_grad)
    return replace(execution, call=call, plan=plan, needs_grad=needs_grad)


def _buffers(ctx: Any, needs_grad: frozenset[str], creates_graph: bool) -> dict[str, Tensor] | None:
    """Return the buffers to add gradients to, or None for a call that does not accumulate.

    The graph's edges lead to the parameters, so the call keeps none.
    """
    accumulation: Accumulation | None = ctx.accumulation
    if accumulation is None:
        return None
    buffers = accumulation.buffers(edges_of(ctx), creates_graph)
    execution: Execution = ctx.execution
    if (
        not buffers
        and accumulation.target == "main_grad"
        and len(needs_grad) < len(execution.needs_grad)
        and needs_grad.isdisjoint(execution.call.graph.inputs)
    ):
        warn(
            "a backward pass computed the gradients of a block's weights alone, as zero-bubble "
            "schedules do; they were returned to autograd, and not added to main_grad: use the "
            '1F1B schedule with accumulate_into="main_grad"'
        )
    return buffers


def _batching(dy: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Return `dy` with a vmap's hidden dimension first, and a function that hides it again.

    `torch.autograd.grad(..., is_grads_batched=True)` maps backward over a batch of gradients. The
    schedule writes in place, so it runs once for each gradient instead.
    """
    if _functorch.is_legacy_batchedtensor(dy):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        whole = torch._remove_batch_dim(dy, level, 0, 0)
        return whole, lambda grad: torch._add_batch_dim(grad, 0, level)
    if _functorch.is_batchedtensor(dy):
        level, dim = _functorch.maybe_get_level(dy), _functorch.maybe_get_bdim(dy)
        whole = _functorch.get_unwrapped(dy).movedim(dim, 0)
        return whole, lambda grad: _functorch._add_batch_dim(grad, 0, level)
    return dy, None

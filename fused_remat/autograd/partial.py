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

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fused_remat.autograd import segments
from fused_remat.autograd.accumulate import Accumulation
from fused_remat.autograd.offload import OffloadRecord, move
from fused_remat.autograd.replay_check import Record
from fused_remat.autograd.segments import Replayed, Segment
from fused_remat.execution import executor
from fused_remat.execution.prepare import Execution
from fused_remat.graph.schedule import schedule
from fused_remat.steps.operations import warn

_functorch = torch._C._functorch
_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


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


def is_rare(ctx: Any, dy: Tensor) -> bool:
    """Return whether a backward pass needs more than all gradients of a call without extras."""
    return (
        ctx.extras is not None
        or ctx.accumulation is not None
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _functorch.is_legacy_batchedtensor(dy)
        or _functorch.is_batchedtensor(dy)
        or not asks_all(ctx)
    )


def backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """Return the gradients of the call's tensors, in its order."""
    if torch.compiler.is_compiling():  # compiled autograd, after a forward in eager mode
        from fused_remat.autograd import graph_break

        return graph_break.eagerly(_backward, ctx, dy)  # type: ignore[no-any-return]
    return _backward(ctx, dy)


def _backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    grads = gradients(ctx, dy, asked(ctx))
    if ctx.extras is not None:
        ctx.extras.done(_keeps_graph())
    return grads


def gradients(ctx: Any, dy: Tensor, needs_grad: frozenset[str]) -> list[Tensor | None]:
    """Return the gradients of `needs_grad`, in the order of the call's tensors; None for others."""
    creates_graph = torch.is_grad_enabled()
    saved = (ctx.extras or Extras()).restored(ctx, dy)
    with torch.no_grad():
        grads = _grads(ctx, saved, dy, needs_grad, creates_graph)
    return not_differentiable(grads) if creates_graph else grads


def asks_all(ctx: Any) -> bool:
    """Return whether the present backward pass takes all gradients of a node."""
    if not issubclass(type(ctx), BackwardCFunction):  # compiled autograd
        return True
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    while True:
        try:
            return all(map(_executes, nodes))
        except (RuntimeError, TypeError):
            continue  # this node's gradient is taken (see `takes`)


def asked(ctx: Any) -> frozenset[str]:
    """Return which of the call's `needs_grad` the present backward pass takes; all if unknown.

    The engine knows which nodes a pass executes. A partial pass omits the nodes behind gradients
    that were not requested; an ordinary `backward()` executes every node that it can reach.
    """
    needs_grad: frozenset[str] = ctx.execution.needs_grad
    needs_grad -= ctx.delivered
    if asks_all(ctx):
        return needs_grad
    names = [name for name, node in _edges(ctx) if node is None or takes(node)]
    return needs_grad.intersection(names) or needs_grad


def _edges(ctx: Any) -> Iterator[tuple[str, Any]]:
    """Return the names of the call's tensors with the nodes that take their gradients."""
    execution: Execution = ctx.execution
    given = zip(execution.call.graph.tensors, execution.given, strict=True)
    names = [n for n, shape in given if shape is not None and n not in ctx.delivered]
    # After the call's tensors, the node may have those of a rescue (`run_block`).
    return ((name, node) for name, (node, _) in zip(names, ctx.next_functions))  # noqa: B905


def takes(node: Any) -> bool:
    """Return whether the present pass takes the gradient that goes to `node`."""
    try:
        return bool(_executes(node))
    except (RuntimeError, TypeError):
        # Raised for a leaf whose gradient torch.autograd.grad returns. After any other error, the
        # engine drops gradients that it does not need.
        return True


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
    if len(needs_grad) < len(execution.needs_grad):
        execution, kept = _narrowed(execution, kept, needs_grad)
    sink = _buffers(ctx, needs_grad, creates_graph)
    record = None if ctx.extras is None else ctx.extras.record
    watch = None if record is None else record.compare
    grads = executor.backward(execution, tensors, kept, out, dy, ctx.functions, watch, sink)
    return finish(ctx, dy, grads, needs_grad, sink or ())


def _narrowed(
    execution: Execution, kept: Sequence[Tensor], needs_grad: frozenset[str]
) -> tuple[Execution, Sequence[Tensor]]:
    """Return the same call with gradients of `needs_grad` alone, and those of `kept` that it reads.

    Groups, tiles and rebuilt bits are the same. A schedule for fewer gradients reads nothing that a
    schedule for more does not read, so all of it was kept.
    """
    call, tiled, fusions = execution.call, execution.chunks.tiled, execution.fusions
    plan = schedule(call.graph, call.save, needs_grad, tiled, fusions)
    names = frozenset(plan.kept)
    reads = [t for (name, _), t in zip(execution.kept_chunks(), kept, strict=True) if name in names]
    call = replace(call, needs_grad=needs_grad)
    return replace(execution, call=call, plan=plan, needs_grad=needs_grad), reads


def rounds(
    tensors: Sequence[Tensor | None],
) -> tuple[torch.dtype, list[torch.dtype | Tensor | None]]:
    """Return the first tensor's dtype, and for each vector that needs a gradient a leaf or dtype.

    The `grad_dtype` of a leaf may change until backward.
    """
    x = tensors[0]
    assert x is not None
    vectors = [t if t is not None and t.dim() == 1 and t.requires_grad else None for t in tensors]
    return x.dtype, [t if t is None or t.is_leaf else t.dtype for t in vectors]


def finish(
    ctx: Any,
    dy: Tensor,
    grads: list[Tensor | None],
    needs_grad: frozenset[str],
    sink: Collection[str] = (),
) -> list[Tensor | None]:
    """Round the gradients of vectors, and fill in zeros for `needs_grad` without influence.

    None stays for tensors that the call has not read, and for `sink`.
    """
    if ctx.rounds is not None:
        low, of = ctx.rounds
        round_vectors(grads, low, [t.grad_dtype if isinstance(t, Tensor) else t for t in of])
    graph = ctx.execution.call.graph
    unread = {*sink, *(graph.unsure if dy.numel() else ())}
    for i, name in enumerate(graph.tensors):
        if grads[i] is None and name in needs_grad and name not in unread:
            grads[i] = dy.new_zeros(ctx.execution.given[i])
    return grads


def round_vectors(
    grads: list[Tensor | None], low: torch.dtype, dtypes: Sequence[torch.dtype | None]
) -> None:
    """Round float32 gradients of biases and norms to `low`, all in one kernel.

    `dtypes`, one for each of `grads`, selects them. Autograd would launch a kernel for each. It
    rounds matrices itself, and frees one before it rounds the next.
    """
    wide: dict[int, Tensor] = {}
    for i, (grad, dtype) in enumerate(zip(grads, dtypes, strict=True)):
        if dtype is low and grad is not None and grad.dtype is torch.float32 and grad.dim() == 1:
            wide[i] = grad
    if wide:
        rounded = [torch.empty_like(grad, dtype=low) for grad in wide.values()]
        torch._foreach_copy_(rounded, list(wide.values()))
        for i, grad in zip(wide, rounded, strict=True):
            grads[i] = grad


def _buffers(ctx: Any, needs_grad: frozenset[str], creates_graph: bool) -> dict[str, Tensor] | None:
    """Return the buffers to add gradients to, or None for a call that does not accumulate.

    The graph's edges lead to the parameters, so the call keeps none.
    """
    accumulation: Accumulation | None = ctx.accumulation
    if accumulation is None:
        return None
    buffers = accumulation.buffers(_edges(ctx), creates_graph)
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


NO_DOUBLE_BACKWARD = (
    "fused_remat: double backward is not supported: the gradients of a fused block cannot be "
    "differentiated"
)


def not_differentiable(grads: list[Tensor | None]) -> list[Tensor | None]:
    """Return gradients that raise when differentiated (backward ran with create_graph=True).

    Not `once_differentiable`: that leaves gradients constant, silently, when dy needs no gradient.
    """
    error = torch._C._functions.DelayedError(NO_DOUBLE_BACKWARD.encode(), len(grads))
    inputs: list[Any] = [None if g is None else g.detach().requires_grad_() for g in grads]
    outputs = error(*inputs)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


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

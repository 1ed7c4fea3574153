"""Backward passes off the common path: partial gradients, batched gradients, double backward.

Autograd requests all gradients of a node or some: `torch.autograd.grad(loss, inputs)`,
`backward(inputs=...)`, and the zero-bubble schedules of pipeline parallelism, which compute the
gradient of a stage's input first and those of its weights later. For a partial request, a block
runs the schedule of those gradients alone, on what it kept for all of them. The second of two
passes therefore rebuilds and propagates inside the block again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fused_remat.autograd.accumulate import Accumulation
from fused_remat.autograd.extras import Extras, Saved
from fused_remat.execution import executor
from fused_remat.execution.prepare import Execution
from fused_remat.graph.schedule import schedule
from fused_remat.steps.operations import warn

_functorch = torch._C._functorch
_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def is_rare(ctx: Any, dy: Tensor) -> bool:
    """Whether a backward pass asks for anything but all gradients of a call on the common path."""
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
    """Gradients of the call's tensors, in its order."""
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


# --- which gradients a pass asks for


def asks_all(ctx: Any) -> bool:
    """Whether the present backward pass takes the gradients of all that a node gives them for."""
    if not issubclass(type(ctx), BackwardCFunction):  # compiled autograd
        return True
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    while True:
        try:
            return all(map(_executes, nodes))
        except (RuntimeError, TypeError):
            continue  # this node's gradient is taken (see `takes`); on to the others


def asked(ctx: Any) -> frozenset[str]:
    """Which of the call's `needs_grad` the present backward pass takes; all, if it cannot be told.

    The engine knows which nodes a pass executes: those behind a gradient that nobody asked for are
    not among them. An ordinary `backward()` executes every node that it can reach.
    """
    needs_grad: frozenset[str] = ctx.execution.needs_grad
    needs_grad -= ctx.delivered
    if asks_all(ctx):
        return needs_grad
    found = [name for name, node in _edges(ctx) if node is None or takes(node)]
    return needs_grad.intersection(found) or needs_grad


def _edges(ctx: Any) -> Iterator[tuple[str, Any]]:
    """The names of the call's tensors, and the nodes that their gradients go to."""
    execution: Execution = ctx.execution
    given = zip(execution.call.graph.tensors, execution.given, strict=True)
    names = [n for n, shape in given if shape is not None and n not in ctx.delivered]
    # After the call's tensors, the node may have those of a rescue (`run_block`).
    return ((name, node) for name, (node, _) in zip(names, ctx.next_functions))  # noqa: B905


def takes(node: Any) -> bool:
    """Whether the pass that runs now takes the gradient that goes to `node`."""
    try:
        return bool(_executes(node))
    except (RuntimeError, TypeError):
        # The engine raises RuntimeError for a leaf whose gradient torch.autograd.grad returns. For
        # whatever else it raises, it drops the gradients that it did not ask for.
        return True


# --- gradients of some, or of a batch


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
    reads = [t for (name, _), t in zip(execution.pieces(), kept, strict=True) if name in names]
    call = replace(call, needs_grad=needs_grad)
    return replace(execution, call=call, plan=plan, needs_grad=needs_grad), reads


def rounds(
    tensors: Sequence[Tensor | None],
) -> tuple[torch.dtype, list[torch.dtype | Tensor | None]]:
    """The first tensor's dtype, and for each vector that needs a gradient what says its dtype: the
    leaf itself, whose `grad_dtype` may change until backward, or its dtype."""
    x = tensors[0]
    assert x is not None
    found = [t if t is not None and t.dim() == 1 and t.requires_grad else None for t in tensors]
    return x.dtype, [t if t is None or t.is_leaf else t.dtype for t in found]


def finish(
    ctx: Any,
    dy: Tensor,
    grads: list[Tensor | None],
    needs_grad: frozenset[str],
    sink: Collection[str] = (),
) -> list[Tensor | None]:
    """`grads`, vectors rounded, with zeros for those of `needs_grad` of empty inputs and of what
    has no influence; None stays for what the call has not read."""
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
    """Round gradients of biases and norms, summed in float32, to `low`: all in one kernel.

    Those that `dtypes` asks in `low`, one for each of `grads`. Autograd would round each in a
    kernel of its own; matrices are left to it, for it frees one before it makes the next.
    """
    wide: dict[int, Tensor] = {}
    for place, (grad, dtype) in enumerate(zip(grads, dtypes, strict=True)):
        if dtype is low and grad is not None and grad.dtype is torch.float32 and grad.dim() == 1:
            wide[place] = grad
    if wide:
        rounded = [torch.empty_like(grad, dtype=low) for grad in wide.values()]
        torch._foreach_copy_(rounded, list(wide.values()))
        for place, grad in zip(wide, rounded, strict=True):
            grads[place] = grad


def _buffers(ctx: Any, needs_grad: frozenset[str], creates_graph: bool) -> dict[str, Tensor] | None:
    """What this pass adds gradients to; None for a call that does not accumulate.

    The graph's edges lead to the parameters, so no parameter is kept for this.
    """
    accumulation: Accumulation | None = ctx.accumulation
    if accumulation is None:
        return None
    found = accumulation.buffers(_edges(ctx), creates_graph)
    execution: Execution = ctx.execution
    if (
        not found
        and accumulation.target == "main_grad"
        and len(needs_grad) < len(execution.needs_grad)
        and needs_grad.isdisjoint(execution.call.graph.inputs)
    ):
        warn(
            "a backward pass asked a block for the gradients of its weights alone, as zero-bubble "
            "schedules do; they were returned to autograd, and not added to main_grad: use the "
            '1F1B schedule with accumulate_into="main_grad"'
        )
    return found


NO_DOUBLE_BACKWARD = (
    "fused_remat: double backward is not supported: the gradients of a fused block cannot be "
    "differentiated"
)


def not_differentiable(grads: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients, made to raise when differentiated (backward ran with create_graph=True).

    Not `once_differentiable`: that leaves gradients constant, silently, when dy needs no gradient.
    """
    error = torch._C._functions.DelayedError(NO_DOUBLE_BACKWARD.encode(), len(grads))
    inputs: list[Any] = [None if g is None else g.detach().requires_grad_() for g in grads]
    made = error(*inputs)  # of one gradient, that one
    return [made] if isinstance(made, Tensor) else list(made)


def _batching(dy: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """`dy` with the dimension first that a vmap around backward hides, and how to hide it again.

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

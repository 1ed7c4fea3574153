"""The present pass of autograd's engine, and the hooks on what it saves."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fused_remat.execution.prepare import Execution

_functorch = torch._C._functorch
_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node
#: Returns a number of the backward pass that this thread runs, -1 outside of one.
current_pass: Callable[[], int] = torch._C._current_graph_task_id
#: Returns whether that pass keeps its graph for another one.
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
#: Returns the active hooks on saved tensors, a pair, or None.
active_hooks = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def in_checkpoint() -> bool:
    """Return whether a non-reentrant `torch.utils.checkpoint` takes what is saved now."""
    return getattr((active_hooks() or [None])[0], "__module__", "") == "torch.utils.checkpoint"


def runs_now(node: Any) -> bool:
    """Return whether the present backward pass runs `node`.

    False where it returns the gradient of the leaf `node` (`torch.autograd.grad`) instead of
    accumulating it, and where no pass of autograd's engine runs (a compiled one).
    """
    try:
        return node is not None and bool(_executes(node))
    except RuntimeError:
        return False


def is_compiled() -> bool:
    """Return whether compiled autograd, which frees what all nodes saved first, is enabled."""
    compiler = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiler, "compiled_autograd_enabled", False))


def is_batched(grad: Tensor) -> bool:
    """Return whether a gradient is one of a batch that vmap hides."""
    return bool(_functorch.is_legacy_batchedtensor(grad) or _functorch.is_batchedtensor(grad))


def is_rare(ctx: Any, dy: Tensor) -> bool:
    """Return whether a backward pass is not that of all gradients from all outputs, no extras."""
    return (
        ctx.extras is not None
        or ctx.accumulation is not None
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _functorch.is_legacy_batchedtensor(dy)  # as `is_batched`, without a call
        or _functorch.is_batchedtensor(dy)
        or bool(ctx.execution.call.graph.side_outputs and dead_outputs(ctx))
        or not asks_all(ctx)
    )


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
    names = [name for name, node in edges_of(ctx) if node is None or takes(node)]
    return needs_grad.intersection(names) or needs_grad


def edges_of(ctx: Any) -> Iterator[tuple[str, Any]]:
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


def dead_outputs(block: Any) -> frozenset[str]:
    """Return the outputs of a block that have no gradient in the present pass."""
    sides = block.execution.call.graph.side_outputs
    if not sides:
        return frozenset()
    unused = ("output",) if current_pass() in block.unused else ()
    return frozenset((*sides, *unused)).difference(block.side.get(current_pass(), ()))


def output_grads(block: Any, dy: Tensor) -> dict[str, Tensor | None]:
    """Return the gradients of all outputs of a block in the present pass, by name."""
    if not block.execution.call.graph.side_outputs:
        return {"output": dy}
    unused = current_pass() in block.unused
    return {"output": None if unused else dy, **block.side.get(current_pass(), {})}


def side_grads(block: Any) -> Mapping[str, Tensor] | None:
    """Remove and return the gradients of a block's side outputs in the present pass, by name."""
    of_passes = getattr(block, "side", None)
    if of_passes:
        block.unused.discard(current_pass())
    return of_passes.pop(current_pass(), None) if of_passes else None

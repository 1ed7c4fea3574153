"""Weight gradients delivered to autograd one after another, while a block's backward still runs.

A node returns all its gradients at its end, so the gradients of all weights of a layer would be
held at once. A block of large weights therefore has nodes before its own, each with some of its
tensors: the first one starts the block's backward pass, and each lets it run until the gradients of
its tensors are complete. Autograd adds those to `.grad`, and frees them, before the next node runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fused_remat.autograd.engine import (
    asked,
    asks_all,
    current_pass,
    is_batched,
    is_rare,
    output_grads,
    side_grads,
    takes,
)
from fused_remat.autograd.gradients import finish
from fused_remat.execution import executor
from fused_remat.execution.prepare import Execution

Dims = tuple[int, int]


class Delivery(torch.autograd.Function):
    """The block's output, and the gradients of those of its tensors that a node delivers."""

    @staticmethod
    def forward(
        ctx: Any,
        execution: Execution,
        dims: Mapping[str, Dims],
        first: bool,
        out: Tensor,
        *_: Tensor,
    ) -> Tensor:
        ctx.execution, ctx.dims, ctx.first = execution, dims, first
        ctx.set_materialize_grads(False)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (4 + len(ctx.dims))
        if not issubclass(type(ctx), BackwardCFunction):
            raise RuntimeError(
                "fused_remat: compiled autograd cannot run a block of large weights whose forward "
                "ran before it was enabled; enable it around forward too, or compile forward"
            )
        *_, block = nodes = _chain(ctx)
        names = ctx.execution.call.graph.tensors
        if ctx.first and not is_rare(block, dy) and all(map(asks_all, nodes)):
            saved, count = block.saved_tensors, len(names)
            executor.check_unchanged(names, ctx.execution.given, block.dtypes, saved, dy)
            operands = saved[:count], saved[count + 1 :], saved[count], dy
            given = output_grads(block, dy)
            stages = executor.stages(ctx.execution, *operands, block.functions, side_grads(block))
            block.stages[current_pass()] = stages, given
        if current_pass() not in block.stages:
            # A rare pass: its first node computes what all of them give.
            if current_pass() not in block.rare:
                needed = asked(block).union(*map(_asked, nodes[:-1]))
                grads = rare_grads(block, dy, needed) if needed else None
                block.rare[current_pass()] = grads
            grads = block.rare[current_pass()]
            if grads is None:
                return (None, None, None, dy, *(None for _ in ctx.dims))
        else:
            grads = finish(block, dy, advance(block, dy), frozenset(ctx.dims))
        of = dict(zip(names, grads, strict=True))
        found = [(of[name], dims) for name, dims in ctx.dims.items()]
        return (None, None, None, dy, *(g if g is None else g.transpose(*d) for g, d in found))


_NODE: Any = Delivery._backward_cls


def deliver(block: Any, out: Tensor, tensors: Mapping[str, Tensor | None]) -> Tensor:
    """Return the output of a block whose node is `block`, behind a node for each delivery."""
    block.stages, block.rare = {}, {}
    parts = block.execution.delivered
    for names in reversed(parts):
        first = names is parts[0]
        leaves = {name: _leaf(tensors[name]) for name in names}
        dims = {name: dims for name, (_, dims) in leaves.items()}
        out = Delivery.apply(block.execution, dims, first, out, *(t for t, _ in leaves.values()))
    return out


def _leaf(t: Any) -> tuple[Tensor, Dims]:
    """Return the leaf that `t` is a transpose of, and the two dimensions; else `t` itself.

    Autograd would run the node of the transpose after all younger nodes.
    """
    base = t._base
    if base is not None and base.is_leaf and base.dim() == t.dim() and not t._backward_hooks:
        for dims in itertools.combinations(range(t.dim()), 2):
            other = base.detach().transpose(*dims)
            if (other.shape, other.stride(), other.data_ptr()) == (
                t.shape,
                t.stride(),
                t.data_ptr(),
            ):
                return base, dims
    return t, (0, 0)


def advance(block: Any, dy: Tensor) -> list[Tensor | None]:
    """Return the next gradients of a pass, in the order of the call's tensors.

    A rescue (`run_block`) replaces the rest of a pass that raises.
    """
    names = block.execution.call.graph.tensors
    stages, given = block.stages[current_pass()]
    try:
        with executor.autocast_off(dy):
            grads = next(stages)
    except Exception as error:
        found = rescued(block, error, given)
        if found is None:
            del block.stages[current_pass()]
            raise
        grads = dict(zip(names, found, strict=True))
        block.stages[current_pass()] = itertools.repeat(grads), given
    return [grads.get(name) for name in names]


def remaining(block: Any, dy: Tensor) -> list[Tensor | None]:
    """Return the gradients that the block's own node returns, those of no delivery."""
    names, needs_grad = block.execution.call.graph.tensors, block.execution.needs_grad
    needs_grad -= block.delivered
    if current_pass() in block.stages:
        grads = advance(block, dy)
        del block.stages[current_pass()]
        finish(block, dy, grads, needs_grad)
    elif current_pass() in block.rare:
        grads = block.rare.pop(current_pass()) or [None] * len(names)
    else:
        return rare_grads(block, dy)
    return [g if n in needs_grad else None for n, g in zip(names, grads, strict=True)]


def rare_grads(block: Any, dy: Tensor, needed: frozenset[str] | None = None) -> list[Tensor | None]:
    """Return the gradients of a rare pass, all of them or those `needed`.

    A rescue computes them where a block of several outputs raises.
    """
    from fused_remat.autograd import partial

    given = output_grads(block, dy)
    try:
        if needed is None:
            return partial.backward(block, dy)
        return partial.gradients(block, dy, needed)
    except Exception as error:
        sides = block.execution.call.graph.side_outputs
        plain = sides and not (torch.is_grad_enabled() or is_batched(dy))
        if not plain or (found := rescued(block, error, given)) is None:
            raise
        return found


def rescued(block: Any, error: Exception, given: Mapping[str, Tensor | None]) -> list[Any] | None:
    """Return the gradients that a rescue computes where a block raised `error`, or None.

    `given`: the gradients of the block's outputs by name.
    """
    if block.rescue is None or not block.rescue.contains(error):
        return None
    names = block.execution.call.graph.tensors
    grads: list[Any] | None = block.rescue.gradients(error, names, given)
    return grads


def is_hooked(execution: Execution, tensors: Sequence[Tensor | None]) -> bool:
    """Return whether hooks on weights that are delivered may change them before the pass ends.

    An optimizer that steps in backward would change what later gradients are computed from.
    """
    late = {name for names in execution.delivered for name in names}
    for name, t in zip(execution.call.graph.tensors, tensors, strict=True):
        if t is not None and name in late:
            leaf: Any = t if t._base is None else t._base
            if leaf._backward_hooks or getattr(leaf, "_post_accumulate_grad_hooks", None):
                return True
    return False


def block_of(node: Any) -> Any:
    """Return the node of a block behind `node`, the first of its deliveries or itself."""
    return _chain(node)[-1]


def _chain(node: Any) -> list[Any]:
    """Return the nodes from one that delivers to the block's own."""
    nodes: list[Any] = [node]
    while isinstance(nodes[-1], _NODE):
        nodes.append(nodes[-1].next_functions[0][0])
    return nodes


def _asked(ctx: Any) -> frozenset[str]:
    """Return the names of a node's tensors whose gradients the present pass takes."""
    pairs = zip(ctx.dims, ctx.next_functions[1:], strict=True)
    return frozenset(name for name, (node, _) in pairs if node is None or takes(node))

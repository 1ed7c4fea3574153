"""Side outputs: activations that a block returns after its output, differentiably.

A block's node has one output, and autograd runs it when the gradient of that is complete. A node
after it therefore returns the output with the side outputs, waits for the gradients of all of them,
and notes those of the side outputs for the block's pass. An output that has none in a pass is
*dead* in it: what it alone depends on gets no gradient (`engine.dead_outputs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fused_remat.autograd.deliver import block_of
from fused_remat.autograd.engine import current_pass, is_batched
from fused_remat.execution.prepare import Execution


class SideOutputs(torch.autograd.Function):
    """The block's output and its side outputs, `names`."""

    @staticmethod
    def forward(ctx: Any, names: Sequence[str], out: Tensor, *sides: Tensor) -> tuple[Tensor, ...]:
        ctx.names, ctx.like = names, out.new_empty(()).expand(out.shape)
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in (out, *sides)])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.names, grads, strict=True)
        given = {name: grad for name, grad in pairs if grad is not None}
        if given:
            _check(ctx, given.values())
            block = block_of(ctx.next_functions[0][0])
            block.side[current_pass()] = given
            if dy is None:
                block.unused.add(current_pass())
                dy = ctx.like.new_zeros(()).expand(ctx.like.shape)
        return (None, dy, *(None for _ in grads))


def _check(ctx: Any, grads: Iterable[Tensor]) -> None:
    """Raise RuntimeError in a pass that the gradients of side outputs cannot be noted for."""
    what = ""
    if not issubclass(type(ctx), BackwardCFunction):
        what = "compiled autograd"
    elif any(map(is_batched, grads)):
        what = "torch.autograd.grad with is_grads_batched=True"
    if what:
        raise RuntimeError(
            f"fused_remat: {what} does not support gradients of {', '.join(ctx.names)}, which a "
            "block returns after its output; run backward without it"
        )


def sides_of(execution: Execution, kept: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Any]]:
    """Return the side outputs among what a call kept, and what it keeps then.

    Where groups or tiles computed a side output, its parts are kept as views of it; None is kept of
    one that backward does not read.
    """
    names, made = [name for name, _ in execution.kept_chunks()], list[Tensor]()
    held: list[Any] = [*kept]
    for name in execution.call.graph.side_outputs:
        at = [i for i, other in enumerate(names) if other == name]
        shape = (execution.chunks.batch, execution.lengths[name], execution.widths[name])
        dtype, device = execution.dtypes[name], execution.device
        parts = [held[i] for i in at] or [torch.empty(shape, dtype=dtype, device=device)]
        side = parts[0] if len(parts) == 1 else torch.cat(parts)
        views = side.split([len(held[i]) for i in at]) if len(at) > 1 else parts
        for i, view in zip(at, views, strict=False):
            held[i] = None if name in execution.plan.passed else view
        side = side.view(shape)
        made.append(side.transpose(0, 1) if execution.call.seq_first else side)
    return tuple(made), held

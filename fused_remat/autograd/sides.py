"""Side outputs: activations that a block returns after its output, differentiably.

A block's node has one output, and autograd runs it when the gradient of that is complete. A node
after it therefore returns the output with the side outputs, waits for the gradients of all of them,
and notes those of the side outputs for the block's pass. A side output is always kept: it is the
caller's tensor as well as the block's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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
            if any(is_batched(t) for t in (dy, *given.values()) if t is not None):
                raise RuntimeError(
                    "fused_remat: gradients of router logits cannot be batched; call "
                    "torch.autograd.grad without is_grads_batched"
                )
            block_of(ctx.next_functions[0][0]).side = current_pass(), given
            dy = torch.zeros_like(ctx.like) if dy is None else dy
        return (None, dy, *(None for _ in grads))


def sides_of(execution: Execution, out: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the side outputs among what a call kept, with the tokens of its output."""
    names = execution.call.graph.side_outputs
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for (name, _), t in zip(execution.kept_chunks(), kept, strict=True):
        if name in parts:
            parts[name].append(t)
    seq_first, made = execution.call.seq_first, []
    for each in parts.values():
        whole = each[0] if len(each) == 1 else torch.cat(each)
        batch, length = out.shape[int(seq_first)], out.shape[1 - int(seq_first)]
        side = whole.view(batch, length, -1)
        made.append(side.transpose(0, 1) if seq_first else side)
    return tuple(made)

"""Segments: runs of blocks of which only the first keeps its input; sublinear memory in depth.

A block whose policy has a segment keeps from forward what every policy keeps, statistics and the
seed; the "first" of a segment its input too. When backward reaches the last block, its input is
asked for and not there: the blocks before it are run forward again, from the first's input, and
each keeps from then on what its policy names, so that its own backward has less to rebuild. It is
the graph's rule one level up: a block's input is an activation that the block before it computes.

Which block was before is autograd's to say: the node that made the input. Where none of ours did,
because something stands in between, the input is kept.

Source: Chen et al. 2016 (arXiv 1604.06174), with segments of blocks that rebuild themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_remat.blocks.frame import Prepared
from fused_remat.blocks.reread import check_unchanged
from fused_remat.calls import BlockCall, Functions, forward_block
from fused_remat.policies import Policy


@dataclass(eq=False)
class Segment:
    """What a block's place in a segment adds to its autograd node.

    Attributes:
        call: the block, keeping what its policy names: how it is run again.
        fused: whether steps may be computed together, as in forward.
        input_kept: whether it kept its own first input.
        replayed: once it was run again, what that gave; until its backward has used it.
    """

    call: BlockCall
    fused: bool
    input_kept: bool
    replayed: Replayed | None = None


@dataclass(frozen=True, eq=False)
class Replayed:
    """A block that was run again: as if its forward had kept this."""

    call: BlockCall
    prepared: Prepared
    input: Tensor
    output: Tensor | None
    kept: Sequence[Tensor]


def segment_of(policy: str | Policy) -> str | None:
    """The place in a segment that a policy gives: "first", "inner" or None.

    >>> segment_of("full"), segment_of(Policy(segment="inner"))
    (None, 'inner')
    """
    return None if isinstance(policy, str) else policy.segment


def begin(place: str, call: BlockCall, fused: bool, x: Tensor, node_type: type) -> Segment:
    """For a call whose first input is `x`; `node_type`: of the autograd nodes of blocks."""
    linked = place == "inner" and _made_by_segment(x, node_type) and not _in_checkpoint()
    return Segment(call, fused, input_kept=not linked)


def _made_by_segment(x: Tensor, node_type: type) -> bool:
    return isinstance(x.grad_fn, node_type) and getattr(x.grad_fn, "segment", None) is not None


def _in_checkpoint() -> bool:
    """Its replay gives blocks leaves as inputs, and expects them to save as many tensors."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def input_of(ctx: Any) -> Tensor:
    """The first input of a block that did not keep it: those before it run again, without autograd.

    Raises: RuntimeError, PyTorch's own, if backward has freed what they need, or a tensor that they
        read was changed in place.
    """
    nodes = [ctx]
    while not (nodes[-1].segment.input_kept or nodes[-1].segment.replayed):
        nodes.append(nodes[-1].next_functions[0][0])
    x: Tensor | None = None
    with torch.no_grad():
        for node in reversed(nodes[1:]):
            x = _replay(node, x)
    return nodes[0].segment.replayed.input if x is None else x


def _replay(node: Any, x: Tensor | None) -> Tensor:
    """Run a block again, on `x` or on the input it has; note what it keeps; return its output."""
    segment: Segment = node.segment
    saved = node.saved_tensors
    count = len(node.prepared.given)
    if x is None:
        x = saved[0] if segment.input_kept else segment.replayed.input  # type: ignore[union-attr]
    tensors = (x, *saved[1:count])
    check_unchanged(node.call.graph.tensors, node.prepared.given, node.dtypes, tensors, x)
    call = segment.call
    prepared = call.prepare(tensors, fused=segment.fused)
    functions: Functions = node.functions
    out, kept = forward_block(call, prepared, tensors, functions)
    keeps = out if prepared.plan.keeps_output else None
    merged = list(_merged(node.prepared, saved[count + 1 :], prepared, kept))
    segment.replayed = Replayed(call, prepared, x, keeps, merged)
    return out


def _merged(
    before: Prepared, old: Sequence[Tensor], prepared: Prepared, new: Sequence[Tensor]
) -> Iterator[Tensor]:
    """`new`, but for what was kept all along, which is the same bits."""
    had: dict[str, list[Tensor]] = defaultdict(list)
    for (name, _), t in zip(before.pieces(), old, strict=True):
        had[name].append(t)
    for (name, _), t in zip(prepared.pieces(), new, strict=True):
        yield had[name].pop(0) if had[name] else t

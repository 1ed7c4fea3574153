"""Segments: runs of blocks of which only the first keeps its input; sublinear memory in depth.

In a segment, blocks keep statistics and the seed from forward, and the first one its input. When
backward reaches the last block, its input is missing: the blocks before it run forward again from
the first one's input, and each then keeps what its policy names, so that its own backward rebuilds
less. The graph's rule applies one level up: a block's input is an activation of the block before.

The block before is the autograd node that computed the input. If another operation did, the input
is kept.

Source: Chen et al. 2016 (arXiv 1604.06174), with segments of blocks that rebuild themselves.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fused_remat.autograd.engine import current_pass, in_checkpoint
from fused_remat.execution import executor
from fused_remat.execution.prepare import Execution


@dataclass(eq=False)
class Segment:
    """A block's part in a segment, an attribute of its autograd node."""

    execution: Execution  # of the replay, which keeps what the policy names
    input_kept: bool
    why_kept: str = ""  # by an "inner" block, for a warning
    made: tuple[int, int] = (0, 0)  # `state_of` the output at the end of forward
    replayed: Replayed | None = None  # until backward has used it

    def now(self) -> Replayed | None:
        """Return the replay of the block in this backward pass, or None."""
        replayed = self.replayed  # read once: other threads may be in a pass of theirs
        return None if replayed is None or replayed.task != current_pass() else replayed


@dataclass(frozen=True, eq=False)
class Replayed:
    """The results of a replayed block."""

    task: int  # the backward pass; in another one tensors may have changed
    # The node's saved tensors, unpacked once in a pass: checkpoint's hooks raise the second time,
    # and hooks that offload would fetch them again.
    saved: Sequence[Tensor]
    execution: Execution
    input: Tensor
    output: Tensor | None
    kept: Sequence[Tensor]


def begin(place: str, execution: Execution, x: Tensor, node_type: type) -> Segment:
    """Return the segment state of a call with first input `x`; blocks have nodes of `node_type`."""
    # In a checkpoint's replay inputs are leaves, and as many tensors must be saved as in forward.
    if place == "first" or in_checkpoint():
        return Segment(execution, input_kept=True)
    why = _unsupported_linked_reason(x, node_type)
    # No warning for an input without a gradient, nor for a checkpoint's replay in backward.
    warns = x.requires_grad and current_pass() == -1
    return Segment(execution, input_kept=bool(why), why_kept=why if warns else "")


def _unsupported_linked_reason(x: Tensor, node_type: type) -> str:
    """Return why a replay of the block before would not give `x`, or ""."""
    node = x.grad_fn
    extras: Any = getattr(node, "extras", None) if isinstance(node, node_type) else None
    before: Segment | None = None if extras is None else extras.segment
    if before is None:
        made = "is a leaf" if node is None else f"was made by {node.name()}"
        return f"the input {made}, and is not the output of another layer of the segment"
    if before.made != state_of(x):  # without autograd, which would have made another node
        return "the preceding layer's output was changed in place"
    return ""


def state_of(x: Tensor) -> tuple[int, int]:
    """Return a state that differs after a change of `x` in place or by `x.data = ...`."""
    return x._version, x.untyped_storage()._cdata


def input_of(ctx: Any) -> Tensor:
    """Return the first input of a block that did not keep it; the blocks before it run again.

    Raises: RuntimeError, PyTorch's own, if backward has freed what they need or a tensor that they
        read was changed in place; and under compiled autograd, where they have no saved tensors.
    """
    if not isinstance(ctx, BackwardCFunction):
        raise RuntimeError(
            "fused_remat: segments do not run under compiled autograd; use policies without one"
        )
    node, kept, before = ctx, False, None
    nodes: list[tuple[Any, Replayed | None]] = []
    while not (kept or before):
        node = node.next_functions[0][0]
        kept, before = node.extras.segment.input_kept, node.extras.segment.now()
        nodes.append((node, before))
    # torch.autograd.grad may not run all of them in this pass.
    at_end = functools.partial(_forget, [node.extras.segment for node, _ in nodes], current_pass())
    torch.autograd.Variable._execution_engine.queue_callback(at_end)
    x: Tensor | None = None
    with torch.no_grad():
        while nodes:
            x = _replay(*nodes.pop(), x)
    assert x is not None
    return x


def _forget(segments: Sequence[Segment], task: int) -> None:
    for segment in segments:
        replayed = segment.replayed
        if replayed is not None and replayed.task == task:
            segment.replayed = None


def _replay(node: Any, before: Replayed | None, x: Tensor | None) -> Tensor:
    """Run a block again on `x`, or on the input that it kept, and return its output.

    `before`: an earlier replay in this pass, for another block with the same input.
    """
    extras, execution = node.extras, node.execution
    segment: Segment = extras.segment
    try:
        saved = extras.unpacked(node, before)
    except RuntimeError as error:
        if "second time" not in str(error):
            raise
        raise RuntimeError(
            "fused_remat: backward of a block in a segment runs earlier blocks again, and one "
            "of them was freed by an earlier backward pass; zero-bubble pipeline schedules free "
            "them block by block: use a schedule that does not split backward (1F1B), policies "
            "without segment=, or retain_graph=True"
        ) from error
    count = len(execution.given)
    if x is None:
        x = saved[0] if before is None else before.input
    tensors = (x, *saved[1:count])
    executor.check_unchanged(execution.call.graph.tensors, execution.given, node.dtypes, tensors, x)
    watch = None
    if extras.record is not None:
        extras.record.compare_given(tensors)
        watch = extras.record.compare
    names, functions = execution.call.graph.tensors, node.functions
    pairs = zip(names, tensors, strict=True)  # what is not kept is computed again
    tensors = tuple([functions[n]() if t is None and n in functions else t for n, t in pairs])
    whole = segment.execution
    out, kept = executor.forward(whole, tensors, node.functions, watch)
    keeps = out if whole.plan.keeps_output else None
    merged = list(_merged(execution, saved[count + 1 :], whole, kept))
    segment.replayed = Replayed(current_pass(), saved, whole, x, keeps, merged)
    return out


def _merged(
    before: Execution, old: Sequence[Tensor], execution: Execution, new: Sequence[Tensor]
) -> Iterator[Tensor]:
    """Return `new`, with tensors kept since forward in place of their equals."""
    had: dict[str, list[Tensor]] = defaultdict(list)
    for (name, _), t in zip(before.kept_chunks(), old, strict=True):
        had[name].append(t)
    for (name, _), t in zip(execution.kept_chunks(), new, strict=True):
        yield had[name].pop(0) if had[name] else t

"""Runs a block's programs over groups of sequences and tiles of tokens.

Tokens of different sequences never meet, so a block is run group by group (whole sequences), and
within a group what follows attention runs tile by tile (tokens): no transient is ever larger than
a group, none of the MLP's larger than a tile. Forward and backward use the same groups and tiles
in every policy, which is why a rebuilt activation equals the forward's bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fused_remat.graph.schedule import Schedule, Step
from fused_remat.steps.chunk import TRACERS, Chunk, Execution, Observer, Pass


def _run_steps(steps: Sequence[Step], chunk: Chunk, out: Tensor | None = None) -> None:
    """Compute activations (the output into `out`), and run nodes' backwards."""
    if not (chunk.owner.observed or TRACERS):
        _run(steps, chunk, out)
        return
    for step in steps:
        for trace in TRACERS:
            trace(step, chunk)
        with torch.profiler.record_function(f"fused_remat::{step}"):
            _run((step,), chunk, out, chunk.owner.watch)


def _run(
    steps: Sequence[Step], chunk: Chunk, out: Tensor | None, watch: Observer | None = None
) -> None:
    for step in steps:
        node = step.node
        assert node is not None
        if step.kind == "compute":
            node.forward(chunk, out if node.name == "output" else None)
            if watch is not None:
                watch(step, chunk)
        else:
            dy, owned = chunk.take_grad(node.name)
            assert dy is not None
            chunk.freeing = step.free
            node.backward(chunk, dy, owned, step.needs_grad)
            del dy
        if step.free:
            chunk.free(step.free)


def _of(x: Tensor, seqs: tuple[int, int]) -> Tensor:
    return x if seqs[1] - seqs[0] == x.shape[0] else x[seqs[0] : seqs[1]]


def _rows(x: Tensor, seqs: tuple[int, int]) -> Tensor:
    """A group of (B, S, D) as a matrix of tokens: a view where the layout allows, else a copy.

    Of heads (B, H, S, E), the group's heads.
    """
    mine = _of(x, seqs)
    return mine if mine.dim() == 4 else mine.reshape(-1, mine.shape[-1])


def _frame(run: Pass, seqs: tuple[int, int], inputs: Iterable[str]) -> Chunk:
    """The frame of a group, holding those of `inputs` that are there."""
    chunk = Chunk(run, seqs, (0, (seqs[1] - seqs[0]) * run.chunks.seq_len))
    for name in inputs:
        x = run.tensors.get(name)
        if x is not None:
            chunk[name] = _rows(x, seqs)
    return chunk


def forward(run: Pass, out_BSD: Tensor) -> list[Tensor]:
    """Fill `out_BSD` with the block's output; returns what the plan keeps, in frame order."""
    kept: list[Tensor] = []
    plan = run.execution.plan
    for seqs in run.chunks.groups:
        chunk = _frame(run, seqs, run.execution.shapes)
        target = _of(out_BSD, seqs)
        in_place = target.is_contiguous()
        if in_place:
            out = target.view(-1, target.shape[-1])
        else:
            out = torch.empty((chunk.rows, target.shape[-1]), dtype=target.dtype, device=run.device)
        if plan.tile_forward:
            _forward_tiles(chunk, plan, out, kept)
        else:
            _run_steps(plan.forward, chunk, out)
            kept.extend(chunk[n] for n in plan.kept_group)
        if not in_place:
            target.copy_(out.view(target.shape))
    return kept


def _forward_tiles(chunk: Chunk, plan: Schedule, out: Tensor, kept: list[Tensor]) -> None:
    run = chunk.owner
    *before, _tiles = plan.forward
    _run_steps(before, chunk)
    kept.extend(chunk[n] for n in plan.kept_group)
    for span in run.chunks.tiles(chunk.rows):
        tile = Chunk(run, chunk.seqs, span, chunk)
        _run_steps(plan.tile_forward, tile, out[span[0] : span[1]])
        kept.extend(tile[n] for n in plan.kept_tile)


def backward(
    run: Pass, kept: Sequence[Tensor], out_BSD: Tensor | None, dy_BSD: Tensor
) -> dict[str, Tensor]:
    """Gradients of the wanted inputs, shaped like them; the params' gradients stay in `run`.

    `kept` is what `forward` returned; `out_BSD` the output, if the plan keeps it.
    """
    supply = iter(kept)
    execution = run.execution
    plan = execution.plan
    grads: dict[str, Tensor] = {}
    for seqs in run.chunks.groups:
        chunk = _frame(run, seqs, plan.kept_inputs)
        chunk.update((n, next(supply)) for n in plan.kept_group)
        if out_BSD is not None:
            chunk["output"] = _rows(out_BSD, seqs)
        chunk.grads["output"] = (_rows(dy_BSD, seqs), False)
        if plan.tile_backward:
            _backward_with_tiles(chunk, plan, supply)
        else:
            _run_steps(plan.backward, chunk)
        for name in execution.shapes:
            if name in run.needs_grad:
                _collect(name, chunk, execution, dy_BSD, grads)
    return grads


def _backward_with_tiles(chunk: Chunk, plan: Schedule, supply: Iterator[Tensor]) -> None:
    at = next(i for i, step in enumerate(plan.backward) if step.kind == "tiles")
    _run_steps(plan.backward[:at], chunk)
    _backward_tiles(chunk, plan, supply)
    chunk.free(plan.backward[at].free)
    _run_steps(plan.backward[at + 1 :], chunk)


def _collect(
    name: str, chunk: Chunk, execution: Execution, dy_BSD: Tensor, grads: dict[str, Tensor]
) -> None:
    """Add a group's gradient of an input to `grads`, the whole of it by name."""
    grad, owned = chunk.take_grad(name)
    assert grad is not None
    shape = execution.shapes[name]
    if owned and execution.chunks.group >= execution.chunks.batch:
        grads[name] = grad.view(shape)
        return
    if name not in grads:
        grads[name] = _empty_grad(shape, dy_BSD)
    target = _of(grads[name], chunk.seqs)
    target.copy_(grad.view(target.shape))


def _empty_grad(shape: tuple[int, ...], dy: Tensor) -> Tensor:
    """For an input's gradient: laid out as `dy`, unless that is expanded (from a sum, say)."""
    if len(shape) == 4:
        batch, heads, seq_len, width = shape
        return dy.new_empty((batch, seq_len, heads, width)).transpose(1, 2)
    if tuple(dy.shape) != tuple(shape) or 0 in dy.stride():
        return dy.new_empty(shape)
    return torch.empty_like(dy)


def _backward_tiles(chunk: Chunk, plan: Schedule, supply: Iterator[Tensor]) -> None:
    run = chunk.owner
    dout, _ = chunk.take_grad("output")
    assert dout is not None
    buffers = {
        name: torch.empty(
            (chunk.rows, run.widths[name]), dtype=run.execution.dtypes[name], device=run.device
        )
        for name in plan.tile_gives
    }
    for span in run.chunks.tiles(chunk.rows):
        tile = Chunk(run, chunk.seqs, span, chunk)
        tile.update((n, next(supply)) for n in plan.kept_tile)
        tile.grads["output"] = (dout[span[0] : span[1]], False)
        _run_steps(plan.tile_backward, tile)
        for name, buffer in buffers.items():
            grad, _ = tile.take_grad(name)
            assert grad is not None
            buffer[span[0] : span[1]].copy_(grad)
    for name, buffer in buffers.items():
        chunk.add_grad(name, buffer, owned=True)

"""Runs a block's programs over groups of sequences and tiles of tokens.

Tokens of different sequences never meet, so a block is run group by group (whole sequences), and
within a group what follows attention runs tile by tile (tokens): no transient is ever larger than
a group, none of the MLP's larger than a tile. Forward and backward use the same groups and tiles
in every policy, which is why a rebuilt activation equals the forward's bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_remat.backends.base import Backend
from fused_remat.blocks.frame import Chunks, Frame, Run
from fused_remat.blocks.program import Programs, Step


@dataclass(frozen=True, eq=False)
class Prepared:
    """What forward and backward of one call share, worked out from shapes alone.

    Attributes:
        backend, chunks, plan: who computes, in which pieces, by which programs.
        wants: "input" and params whose gradients are wanted.
        widths: elements per token of every activation and statistic.
    """

    backend: Backend
    chunks: Chunks
    plan: Programs
    wants: frozenset[str]
    widths: Mapping[str, int]

    def start(self, tensors: Mapping[str, Tensor | None], like: Tensor) -> Run:
        """A pass over `tensors`, with the dtype and device of `like`."""
        return Run(self.backend, self.chunks, self.wants, self.widths, tensors, like)


def _compute(steps: Sequence[Step], frame: Frame, out: Tensor | None) -> None:
    for step in steps:
        if step.node is not None:
            step.node.forward(frame, out if step.node.name == "output" else None)
        _free(step, frame)


def _free(step: Step, frame: Frame) -> None:
    for name in step.free:
        frame.values.pop(name, None)


def _run_step(step: Step, frame: Frame) -> None:
    """One step of a backward program: rebuild an activation, or run a node's backward."""
    assert step.node is not None
    if step.kind == "compute":
        step.node.forward(frame)
    else:
        dy, owned = frame.take_grad(step.node.name)
        assert dy is not None
        step.node.backward(frame, dy, owned, step.wants)
    _free(step, frame)


def _rows(x_BSD: Tensor, seqs: tuple[int, int]) -> Tensor:
    """Tokens of a group as a matrix: a view where the layout allows, else a copy of the group."""
    return _of(x_BSD, seqs).reshape(-1, x_BSD.shape[-1])


def _of(x_BSD: Tensor, seqs: tuple[int, int]) -> Tensor:
    return x_BSD if seqs[1] - seqs[0] == x_BSD.shape[0] else x_BSD[seqs[0] : seqs[1]]


def forward(run: Run, plan: Programs, x_BSD: Tensor, out_BSD: Tensor) -> list[Tensor]:
    """Fill `out_BSD` with the block's output; returns what the plan keeps, in frame order."""
    kept: list[Tensor] = []
    for seqs in run.chunks.groups():
        frame = Frame(run, seqs, (0, (seqs[1] - seqs[0]) * run.chunks.seq_len))
        frame.values["input"] = _rows(x_BSD, seqs)
        target = _of(out_BSD, seqs)
        in_place = target.is_contiguous()
        if in_place:
            out = target.view(-1, target.shape[-1])
        else:
            out = torch.empty((frame.rows, target.shape[-1]), dtype=run.dtype, device=run.device)
        if plan.tile_forward:
            _forward_tiles(frame, plan, out, kept)
        else:
            _compute(plan.forward, frame, out)
            kept.extend(frame.values[n] for n in plan.kept_group)
        if not in_place:
            target.copy_(out.view(target.shape))
    return kept


def _forward_tiles(frame: Frame, plan: Programs, out: Tensor, kept: list[Tensor]) -> None:
    run = frame.run
    *before, _tiles = plan.forward
    _compute(before, frame, None)
    kept.extend(frame.values[n] for n in plan.kept_group)
    for span in run.chunks.tiles(frame.rows):
        tile = Frame(run, frame.seqs, span, frame)
        _compute(plan.tile_forward, tile, out[span[0] : span[1]])
        kept.extend(tile.values[n] for n in plan.kept_tile)


def backward(
    run: Run, plan: Programs, x_BSD: Tensor | None, kept: Sequence[Tensor], dy_BSD: Tensor
) -> Tensor | None:
    """The input's gradient, (B, S, D), if wanted; the params' gradients stay in `run`.

    `x_BSD` may be None when the plan does not keep the input; `kept` is what `forward` returned.
    """
    supply = iter(kept)
    dx_BSD: Tensor | None = None
    for seqs in run.chunks.groups():
        frame = Frame(run, seqs, (0, (seqs[1] - seqs[0]) * run.chunks.seq_len))
        if x_BSD is not None:
            frame.values["input"] = _rows(x_BSD, seqs)
        frame.values.update((n, next(supply)) for n in plan.kept_group)
        frame.grads["output"] = (_rows(dy_BSD, seqs), False)
        for step in plan.backward:
            if step.kind == "tiles":
                _backward_tiles(frame, plan, supply)
                _free(step, frame)
            else:
                _run_step(step, frame)
        if "input" not in run.wants:
            continue
        dx, owned = frame.take_grad("input")
        assert dx is not None
        if owned and run.chunks.group >= run.chunks.batch:
            return dx.view(dy_BSD.shape)
        if dx_BSD is None:
            dx_BSD = torch.empty_like(dy_BSD, memory_format=_dense(dy_BSD))
        dx_BSD[seqs[0] : seqs[1]].copy_(dx.view(-1, *dy_BSD.shape[1:]))
    return dx_BSD


def _backward_tiles(frame: Frame, plan: Programs, supply: Iterator[Tensor]) -> None:
    run = frame.run
    dout, _ = frame.take_grad("output")
    assert dout is not None
    buffers = {
        name: torch.empty((frame.rows, run.widths[name]), dtype=run.dtype, device=run.device)
        for name in plan.tile_gives
    }
    for span in run.chunks.tiles(frame.rows):
        tile = Frame(run, frame.seqs, span, frame)
        tile.values.update((n, next(supply)) for n in plan.kept_tile)
        tile.grads["output"] = (dout[span[0] : span[1]], False)
        for step in plan.tile_backward:
            _run_step(step, tile)
        for name, buffer in buffers.items():
            grad, _ = tile.take_grad(name)
            assert grad is not None
            buffer[span[0] : span[1]].copy_(grad)
    for name, buffer in buffers.items():
        frame.add_grad(name, buffer, owned=True)


def _dense(x: Tensor) -> torch.memory_format:
    """The layout for a gradient: that of `x`, unless `x` is expanded (from a sum, say)."""
    return torch.contiguous_format if 0 in x.stride() else torch.preserve_format

"""Forward and backward of a block: the schedule's steps, run over groups of sequences and tiles.

No step mixes sequences, so a block is computed in groups of whole sequences; within a group, what
follows attention is computed in tiles of tokens. So no transient is larger than a group's, and none
of the MLP's larger than a tile's. Groups and tiles are the same in forward, in backward and in
every policy: a rebuilt activation equals the forward's bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fused_remat.execution.observe import TRACERS, is_observed
from fused_remat.execution.prepare import BlockConfig, Execution, Functions
from fused_remat.execution.program import text_of
from fused_remat.graph.graph import sizes
from fused_remat.graph.schedule import Step
from fused_remat.steps.chunk import Chunk, Pass, spans

#: Called after a step that computes an activation, with its chunk.
Watch = Callable[[Step, Chunk], None]
_NO_FUNCTIONS: Functions = {}
_NO_DELIVERIES: Mapping[str, Sequence[Sequence[str]]] = {}
_NOTHING: Sequence[Sequence[str]] = ((),)
#: Gradients of side outputs by name, laid out as the side outputs.
SideGrads = Mapping[str, Tensor] | None
#: A chunk and the steps that run on it.
BackwardChunk = tuple[Chunk, Collection[Step]]
#: With the rows of the output that they write, if any, and the names that are kept then.
ForwardChunk = tuple[Chunk, Collection[Step], Tensor | None, tuple[str, ...]]


def forward(
    execution: Execution,
    tensors: Sequence[Tensor | None],
    functions: Functions = _NO_FUNCTIONS,
    watch: Watch | None = None,
    by_steps: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """Return the block's output, and what the schedule keeps, in the order of computation.

    The output is shaped like the first of `tensors` (of heads: side by side, (B, S, H*E)) except
    for its width. Neither it nor what is kept shares memory with the inputs. `functions` are the
    caller's own; `watch` is called after every step, with the step and its chunk. `by_steps`: no
    program makes the pass.
    """
    x = tensors[0]
    assert x is not None
    if autocast_on(x):  # the graph describes which dtype is used where
        with autocast_off(x):
            return forward(execution, tensors, functions, watch)
    observed = watch is not None or _is_observed()
    special = by_steps or observed or (functions and execution.of_steps(functions))
    if not (special or isinstance(execution.programs, str)):
        program = execution.programs.find("forward", tensors)
        if program is not None:
            run = functools.partial(forward, execution, tensors, by_steps=True)
            return program(tensors, run)  # type: ignore[no-any-return]
    this = Pass(execution, execution.named(tensors), functions, x, watch)
    width, out = execution.widths["output"], None
    if not (execution.makes_output and x.is_contiguous()):
        out = empty_output(execution.call, width, execution.dtypes["output"], x)
    kept: list[Tensor] = []
    for chunk, steps, rows, keeps in _forward_chunks(this, execution, out):
        for step in steps:
            node = step.node
            assert node is not None
            if observed:
                _observed(this, step, chunk, rows)
            else:
                node.forward(chunk, rows if node.name == "output" else None)
            for name in step.free:
                chunk.pop(name, None)
        kept.extend([chunk[name] for name in keeps])
        if out is None:
            # No view for autograd, which would refuse to change it in place.
            out = torch.ops.aten._unsafe_view(chunk["output"], (*x.shape[:-1], width))
        del chunk, rows  # freed before the next chunk is allocated
    assert out is not None  # there is a group
    return out, kept


def _forward_chunks(this: Pass, execution: Execution, out: Tensor | None) -> Iterator[ForwardChunk]:
    """Yield each group, and after a group's own steps each of its tiles."""
    plan, chunks = execution.plan, execution.chunks
    if out is None:  # one group without tiles
        whole = _group(this, chunks.groups[0], execution.shapes)
        yield whole, plan.group_forward, None, plan.kept_group
        return
    out_BSD = out.transpose(0, 1) if execution.call.seq_first else out
    for seqs in chunks.groups:
        group, target = _group(this, seqs, execution.shapes), _of_group(out_BSD, seqs)
        is_view = target.is_contiguous()
        shape = (group.rows, target.shape[-1])
        rows = target.view(shape) if is_view else target.new_empty(shape)
        yield group, plan.group_forward, rows, plan.kept_group
        for lo, hi in spans(group.rows, chunks.tile) if plan.tile_forward else ():
            yield Chunk(this, seqs, (lo, hi), group), plan.tile_forward, rows[lo:hi], plan.kept_tile
        if not is_view:
            target.copy_(rows.view(target.shape))
        del group, rows


def backward(
    execution: Execution,
    tensors: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    out: Tensor | None,
    dy: Tensor,
    functions: Functions = _NO_FUNCTIONS,
    watch: Watch | None = None,
    sink: Mapping[str, Tensor] | None = None,
    side: SideGrads = None,
) -> list[Tensor | None]:
    """Return gradients of the call's tensors in its order; None where not needed, and of `sink`.

    `tensors` may be None where backward does not read them; `kept` is what `forward` returned;
    `out` the output, if the schedule keeps it. `watch` and `sink`: see `Pass`. `side`: gradients of
    side outputs, by name.
    """
    if autocast_on(dy):  # backward may be called inside autocast
        with autocast_off(dy):
            return backward(execution, tensors, kept, out, dy, functions, watch, sink, side)

    if functions:
        tensors, functions = execution.rebuilt(tensors, functions)

    def steps() -> dict[str, Tensor]:
        *_, grads = _stages(execution, tensors, kept, out, dy, functions, side, watch, sink)
        return grads

    special = functions or watch is not None or sink is not None or _is_observed()
    sides = execution.of_sides(side) if side else execution.no_sides
    program, given = None, (*tensors, *kept, out, *sides, dy)
    if not (special or isinstance(execution.programs, str)):
        program = execution.programs.find("backward", given)
    grads = steps() if program is None else program(given, steps)
    return [grads.pop(name, None) for name in execution.call.graph.tensors]


def stages(
    execution: Execution,
    tensors: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    out: Tensor | None,
    dy: Tensor,
    functions: Functions = _NO_FUNCTIONS,
    side: SideGrads = None,
) -> Iterator[dict[str, Tensor]]:
    """Return an iterator of gradients by name: those of each delivery in its order, and others.

    Arguments are those of `backward`, without autocast.
    """
    if functions:
        tensors, functions = execution.rebuilt(tensors, functions)
    arguments = execution, tensors, kept, out, dy, functions, side
    steps = functools.partial(_stages, *arguments, delivers=execution.delivers)
    if not (functions or _is_observed() or isinstance(execution.programs, str)):
        sides = execution.of_sides(side) if side else execution.no_sides
        given = (*tensors, *kept, out, *sides, dy)
        program = execution.programs.find("stages", given)
        if program is not None:
            return program(given, steps)  # type: ignore[no-any-return]
    return steps()


def _stages(
    execution: Execution,
    tensors: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    out: Tensor | None,
    dy: Tensor,
    functions: Functions = _NO_FUNCTIONS,
    side: SideGrads = None,
    watch: Watch | None = None,
    sink: Mapping[str, Tensor] | None = None,
    delivers: Mapping[str, Sequence[Sequence[str]]] = _NO_DELIVERIES,
) -> Iterator[dict[str, Tensor]]:
    """Yield gradients by name: those that `delivers` has for each step; then others."""
    observed = watch is not None or _is_observed()
    named = execution.named(tensors)
    this = Pass(execution, named, functions, dy, watch, sink)
    grads: dict[str, Tensor] = {}
    for chunk, steps in _backward_chunks(this, execution, kept, out, dy, grads, side):
        for step in steps:
            node = step.node
            assert node is not None
            *inner, after = _NOTHING
            if delivers and step.kind == "backward" and chunk.parent is None:
                *inner, after = delivers.get(node.name, _NOTHING)
            if inner:
                grad, owned = chunk.grads.pop(node.name)
                given = chunk, grad, owned, step.needs_grad, inner
                for _, names in zip(node.backward_in_parts(*given), inner, strict=True):
                    yield this.take_grads(names)
                del grad, given
            elif observed:
                _observed(this, step, chunk, None)
            elif step.kind == "backward":
                grad, owned = chunk.grads.pop(node.name)
                chunk.freeing = step.free
                node.backward(chunk, grad, owned, step.needs_grad)
                del grad
            else:
                node.forward(chunk)
            for name in step.free:
                chunk.pop(name, None)
            if after:
                yield this.take_grads(after)
        del chunk
    for name in execution.call.graph.inputs if execution.call.seq_first else ():
        if name in grads:
            grads[name] = grads[name].transpose(0, 1)
    grads.update(this.param_grads)
    for name in sink or ():
        del grads[name]
    yield grads


def _backward_chunks(
    this: Pass,
    execution: Execution,
    kept: Sequence[Tensor],
    out: Tensor | None,
    dy: Tensor,
    grads: dict[str, Tensor],
    side: SideGrads,
) -> Iterator[BackwardChunk]:
    """Yield each group up to its tiles, its tiles, and the group again; inputs' go to `grads`."""
    plan, chunks, supply = execution.plan, execution.chunks, iter(kept)
    before, free, after = plan.around_tiles
    seq_first = execution.call.seq_first
    dy_BSD, out_BSD = (t.transpose(0, 1) if seq_first and t is not None else t for t in (dy, out))
    assert dy_BSD is not None
    for seqs in chunks.groups:
        group = _group(this, seqs, plan.kept_inputs)
        group.update([(name, next(supply)) for name in plan.kept_group])
        if out_BSD is not None:
            group["output"] = _rows(out_BSD, seqs)
        rows = _rows(dy_BSD, seqs)
        group.grads["output"] = (rows, False)
        for name, grad in side.items() if side else ():
            own = _rows(grad.transpose(0, 1) if seq_first else grad, seqs)
            group.grads[name] = (own, False)  # a tile takes its rows
        yield group, before
        if plan.tile_backward:
            yield from _backward_tiles(this, execution, group, supply, side or ())
            for name in free:
                group.pop(name, None)
            yield group, after
        for name, shape in execution.shapes.items():
            if name in execution.needs_grad:
                _collect(name, shape, group, dy_BSD, rows, grads)
        del group, rows


def _backward_tiles(
    this: Pass, execution: Execution, group: Chunk, supply: Iterator[Tensor], side: Collection[str]
) -> Iterator[BackwardChunk]:
    """Yield a group's tiles, and join their gradients of the group's activations."""
    plan, (dout, _) = execution.plan, group.grads.pop("output")
    buffers = {name: group.empty(name) for name in plan.tile_gives}
    side_grads = {name: group.grads.pop(name)[0] for name in plan.kept_tile if name in side}
    for lo, hi in spans(group.rows, execution.chunks.tile):
        tile = Chunk(this, group.seqs, (lo, hi), group)
        tile.update([(name, next(supply)) for name in plan.kept_tile])
        tile.grads["output"] = (dout[lo:hi], False)
        tile.grads.update({name: (grad[lo:hi], False) for name, grad in side_grads.items()})
        yield tile, plan.tile_backward
        for name, buffer in buffers.items():
            buffer[lo:hi].copy_(tile.grads.pop(name)[0])
        del tile
    for name, buffer in buffers.items():
        group.add_grad(name, buffer, owned=True)


def _group(this: Pass, seqs: tuple[int, int], inputs: Iterable[str]) -> Chunk:
    """Return the chunk of a group of sequences, with those of `inputs` that are not None."""
    group = Chunk(this, seqs, (0, (seqs[1] - seqs[0]) * this.chunks.seq_len))
    for name in inputs:
        x = this.tensors.get(name)
        if x is not None:
            group[name] = _rows(x, seqs)
    return group


def _of_group(x: Tensor, seqs: tuple[int, int]) -> Tensor:
    return x if seqs[1] - seqs[0] == x.shape[0] else x[seqs[0] : seqs[1]]


def _rows(x: Tensor, seqs: tuple[int, int]) -> Tensor:
    """Return a group of (B, S, D) as a matrix of tokens, if possible a view; heads as they are."""
    own = _of_group(x, seqs)
    return own if own.dim() == 4 else own.reshape(-1, own.shape[-1])


def _collect(
    name: str,
    shape: tuple[int, ...],
    group: Chunk,
    dy: Tensor,
    rows: Tensor,
    grads: dict[str, Tensor],
) -> None:
    """Put a group's gradient of an input into `grads`: dy itself where it is `rows`, all of dy's.

    Autograd changes in place no gradient that anything else holds. But where tensors are reshaped,
    it makes views of dy, each a tensor of its own with the memory of all.
    """
    grad, owned = group.grads.pop(name)
    is_dy = grad is rows and 0 not in dy.stride() and dy._base is None
    if group.seqs == (0, shape[0]) and (owned or is_dy):
        grads[name] = grad.view(shape) if owned else dy  # there is one group
        return
    if name not in grads:
        if len(shape) == 4:
            batch, heads, seq_len, width = shape
            grads[name] = dy.new_empty((batch, seq_len, heads, width)).transpose(1, 2)
        elif tuple(dy.shape) != tuple(shape) or 0 in dy.stride():  # expanded, from a sum
            grads[name] = dy.new_empty(shape)
        else:
            grads[name] = torch.empty_like(dy)
    target = _of_group(grads[name], group.seqs)
    target.copy_(grad.view(target.shape))


def empty_output(call: BlockConfig, width: int, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return an uninitialized output of `width` and `dtype` for the first input `x`."""
    if x.dim() == 4:
        return x.new_empty((*sizes(x.shape), width), dtype=dtype)
    if width != x.shape[-1]:
        return x.new_empty((*x.shape[:-1], width), dtype=dtype)
    layout = torch.preserve_format if call.preserve_strides else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=layout)


def program_text(execution: Execution, tensors: Sequence[Tensor | None]) -> str:
    """Run both passes, and return the text of their programs, or a comment why there are none."""
    programs = execution.programs
    if isinstance(programs, str) or programs.backend.state(execution.device) is None:
        reason = programs if isinstance(programs, str) else "hooks observe launches of kernels"
        return f"# no program: {reason}\n"
    steps = functools.partial(forward, execution, tensors, by_steps=True)
    text, (out, kept) = text_of(programs, "forward", tensors, steps)
    read = [t if again else None for t, again in zip(tensors, execution.rereads, strict=True)]
    parts = read, kept, out if execution.plan.keeps_output else None, torch.ones_like(out)
    batch, lengths, widths = execution.chunks.batch, execution.lengths, execution.widths
    side = {
        name: out.new_ones((batch, lengths[name], widths[name]), dtype=execution.dtypes[name])
        for name in execution.call.graph.side_outputs
    }

    def stages() -> Any:
        grads = _stages(execution, *parts, side=side, delivers=execution.delivers)
        return grads if execution.delivers else [*grads][-1]

    if not execution.needs_grad:
        return text
    given = (*read, *kept, parts[2], *side.values(), parts[3])
    name = "stages" if execution.delivers else "backward"
    return f"{text}\n{text_of(programs, name, given, stages)[0]}"


def _is_observed() -> bool:
    """Return whether tracers or a profiler observe each step."""
    return (bool(TRACERS) and is_observed()) or torch._C._autograd._profiler_enabled()


def _observed(this: Pass, step: Step, chunk: Chunk, rows: Tensor | None) -> None:
    node = step.node
    assert node is not None
    for trace in TRACERS if is_observed() else ():
        trace(step, chunk)
    with torch.profiler.record_function(f"fused_remat::{step}"):
        if step.kind == "backward":
            grad, owned = chunk.grads.pop(node.name)
            chunk.freeing = step.free
            node.backward(chunk, grad, owned, step.needs_grad)
            return
        node.forward(chunk, rows if node.name == "output" else None)
        if this.watch is not None:
            this.watch(step, chunk)


def autocast_on(x: Tensor) -> bool:
    """Return whether autocast is on for tensors on the device of `x`."""
    kind = x.device.type
    if x.is_cpu or x.is_cuda:  # the first question is quick, and not about all other devices
        return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(kind)
    return torch._C._is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def autocast_off(x: Tensor) -> AbstractContextManager[None]:
    """Return a context without autocast: the graph describes which dtype is used where."""
    if not autocast_on(x):
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def check_unchanged(
    names: Sequence[str],
    shapes: Sequence[torch.Size | None],
    dtypes: Sequence[torch.dtype | None],
    tensors: Sequence[Tensor | None],
    dy: Tensor,
) -> None:
    """Raise RuntimeError if a tensor has another shape, dtype or device than in forward.

    Autograd detects changes in place, but not `p.data = ...`, which is how a module is moved and
    cast. `shapes` and `dtypes` are those of forward, whose device is that of `dy`; `tensors`, which
    may be longer, are None where backward does not read them.
    """
    # This runs in every backward, so devices are compared in the cheapest way.
    is_cpu, index = dy.is_cpu, dy.get_device()
    for i, (t, shape, dtype) in enumerate(zip(tensors, shapes, dtypes)):  # noqa: B905
        if t is None:
            continue
        is_there = t.is_cpu if is_cpu else t.get_device() == index
        # A scalar may be on another device, and a tensor that a user's function captures.
        is_there = is_there or t.dim() == 0 or names[i].startswith("activation.")
        if t.dtype is not dtype or t.shape != shape or not is_there:
            raise changed(names[i], (tuple(shape or ()), dtype, dy.device), t)


def changed(
    name: str, was: tuple[tuple[int, ...], torch.dtype | None, torch.device], now: Tensor
) -> RuntimeError:
    """Return the error for a tensor that had another shape, dtype or device in forward."""
    shape, dtype, device = was
    return RuntimeError(
        f"fused_remat: backward reads {name!r} again, which was {dtype} of shape {shape} on "
        f"{device} in forward, and is {now.dtype} of shape {tuple(now.shape)} on {now.device} now: "
        "do not move, cast or resize tensors between forward and backward"
    )

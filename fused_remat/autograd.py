"""The one autograd Function that runs any block.

`forward_block` and `backward_block` are plain functions of tensors, a hashable `BlockCall` (what to
compute) and what was worked out from it (`Prepared`): the Function below wraps them in eager mode,
and an opaque op can wrap them while compiling (`tests/test_opaque_op.py` does, as a spike). Neither
reads a module: what backward needs is saved from what forward read.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.backends.base import Backend
from fused_remat.backends.registry import get_backend
from fused_remat.blocks import run
from fused_remat.blocks.frame import Chunks
from fused_remat.blocks.program import Graph, programs

_functorch = torch._C._functorch


@dataclass(frozen=True)
class BlockCall:
    """What to compute, without tensors: the graph, what to keep, what gradients are wanted.

    Attributes:
        graph: the block; its `params` name the tensors after the input.
        save: names that the policy keeps.
        wants: "input" and params whose gradients are wanted.
        backend: a registered name or "auto".
        seq_first: the input is (S, B, D) rather than (B, S, D).
        preserve_strides: the output keeps a dense input's strides; else it is contiguous.
    """

    graph: Graph
    save: frozenset[str]
    wants: frozenset[str]
    backend: str
    seq_first: bool = False
    preserve_strides: bool = True

    def prepare(self, x: Tensor, tensors: Sequence[Tensor | None]) -> run.Prepared:
        """Chunks, programs and widths for these tensors, of which only shapes are read."""
        backend = get_backend(self.backend, x.device)
        shapes = tuple(None if t is None else t.shape for t in tensors)
        return _prepare(self, backend, backend.chunk_tokens(x), x.shape, shapes)  # type: ignore[arg-type]

    def batch_major(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.seq_first else x

    def named(self, tensors: Sequence[Tensor | None]) -> Mapping[str, Tensor | None]:
        return dict(zip(self.graph.params, tensors, strict=True))


@functools.lru_cache(maxsize=4096)
def _prepare(
    call: BlockCall,
    backend: Backend,
    chunk_tokens: int,
    shape: torch.Size,
    shapes: tuple[torch.Size | None, ...],
) -> run.Prepared:
    batch, seq_len = shape[1::-1] if call.seq_first else shape[:2]
    chunks = Chunks.of(batch, seq_len, chunk_tokens)
    plan = programs(call.graph, call.save, call.wants, chunks.tiled)
    named = {n: s for n, s in zip(call.graph.params, shapes, strict=True) if s is not None}
    widths = call.graph.widths({**named, "input": shape})
    return run.Prepared(backend, chunks, plan, call.wants, widths)


def forward_block(
    call: BlockCall, prepared: run.Prepared, x: Tensor, tensors: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor]]:
    """The output, shaped like `x`, and what backward keeps besides `x` and `tensors`.

    Neither the output nor what is kept shares memory with the inputs.
    """
    layout = torch.preserve_format if call.preserve_strides else torch.contiguous_format
    out = torch.empty_like(x, memory_format=layout)
    this = prepared.start(call.named(tensors), x)
    kept = run.forward(this, prepared.plan, call.batch_major(x), call.batch_major(out))
    return out, kept


def backward_block(
    call: BlockCall,
    prepared: run.Prepared,
    x: Tensor | None,
    tensors: Sequence[Tensor | None],
    kept: Sequence[Tensor],
    dy: Tensor,
) -> list[Tensor | None]:
    """Gradients of the input and of every tensor, None where not wanted.

    `x` and `tensors` may be None where the plan does not read them.
    """
    this, plan = prepared.start(call.named(tensors), dy), prepared.plan
    x_BSD = None if x is None else call.batch_major(x)
    if _autocast_on(dy.device.type):  # backward called inside autocast: not our precision
        with torch.autocast(dy.device.type, enabled=False):
            dx = run.backward(this, plan, x_BSD, kept, call.batch_major(dy))
    else:
        dx = run.backward(this, plan, x_BSD, kept, call.batch_major(dy))
    grads: list[Tensor | None] = [None if dx is None else call.batch_major(dx)]
    grads += [this.param_grads.pop(name, None) for name in call.graph.params]
    return grads


def _autocast_on(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


class _Invocation:
    """One call on its way through the Function: carries what forward keeps to setup_context."""

    __slots__ = ("call", "kept", "prepared")

    def __init__(self, call: BlockCall, prepared: run.Prepared) -> None:
        self.call, self.prepared = call, prepared
        self.kept: list[Tensor] = []


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(invocation: _Invocation, x: Tensor, *tensors: Tensor | None) -> Tensor:
        out, invocation.kept = forward_block(invocation.call, invocation.prepared, x, tensors)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        invocation, x, *tensors = inputs
        plan, params = invocation.prepared.plan, invocation.call.graph.params
        ctx.call, ctx.prepared = invocation.call, invocation.prepared
        ctx.set_materialize_grads(False)
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        saved = [
            t if name in plan.saved_params else None
            for name, t in zip(params, tensors, strict=True)
        ]
        kept, invocation.kept = invocation.kept, []
        ctx.save_for_backward(x if plan.keeps_input else None, *saved, *kept)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (2 + len(ctx.dtypes))
        saved = ctx.saved_tensors  # read once: each access unpacks everything again
        if not torch.is_grad_enabled():
            return (None, *_grads(ctx, saved, dy))
        with torch.no_grad():
            grads = _grads(ctx, saved, dy)
        return (None, *_not_differentiable(grads))


def _grads(ctx: Any, saved: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """Gradients of the input and of every tensor, in their dtypes; batched if `dy` is."""
    unbatched, rebatch = _batching(dy)
    if rebatch is not None:
        results = zip(*(_grads(ctx, saved, one) for one in unbatched.unbind()), strict=True)
        return [None if g[0] is None else rebatch(torch.stack(g)) for g in results]
    count = len(ctx.dtypes)
    x, tensors, kept = saved[0], saved[1 : 1 + count], saved[1 + count :]
    dx, *grads = backward_block(ctx.call, ctx.prepared, x, tensors, kept, dy)  # type: ignore[arg-type]
    for i, dtype in enumerate(ctx.dtypes):
        grad = grads[i]
        if grad is not None and grad.dtype != dtype:
            grads[i] = grad.to(dtype)
    return [dx, *grads]


def _not_differentiable(grads: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients, made to raise when differentiated (backward ran with create_graph=True).

    Not `once_differentiable`: that leaves gradients constant, silently, when dy needs no gradient.
    """
    message = (
        b"fused_remat: double backward is not supported; the gradients of a fused block cannot be "
        b"differentiated"
    )
    error = torch._C._functions.DelayedError(message, len(grads))
    inputs: list[Any] = [None if g is None else g.detach().requires_grad_() for g in grads]
    return list(error(*inputs))


def _batching(dy: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """`dy` with the dimension first that a vmap around backward hides, and how to hide it again.

    `torch.autograd.grad(..., is_grads_batched=True)` maps backward over a batch of gradients. The
    programs write in place, so they run once for each gradient instead.
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


# `apply` inspects forward's signature at every call; inspect finds it here at once.
_Block.forward.__signature__ = inspect.signature(_Block.forward)  # type: ignore[attr-defined]


def run_block(
    graph: Graph,
    save: frozenset[str],
    x: Tensor,
    tensors: Mapping[str, Tensor | None],
    *,
    backend: str = "auto",
    seq_first: bool = False,
    preserve_strides: bool = True,
) -> Tensor:
    """Run a block on `x`, differentiably, keeping `save` for backward.

    Shapes: x (B, S, D), or (S, B, D) if `seq_first`; returns the same shape and dtype.
    `tensors` maps names of `graph.params` to tensors; absent or None where the block has none.
    "seed" is drawn from torch's generator if the graph uses one and none is given.
    What needs a gradient is decided here, from grad mode.
    """
    given = [tensors.get(name) for name in graph.params]
    if graph.uses_seed and tensors.get("seed") is None:
        given[graph.params.index("seed")] = random.draw_seed(x.device)
    wants: frozenset[str] = frozenset()
    if torch.is_grad_enabled():
        named = zip(("input", *graph.params), (x, *given), strict=True)
        wants = frozenset(name for name, t in named if t is not None and t.requires_grad)
    call = BlockCall(graph, save, wants, backend, seq_first, preserve_strides)
    prepared = call.prepare(x, given)
    if not wants:
        return forward_block(call, prepared, x, given)[0]
    out: Tensor = _Block.apply(_Invocation(call, prepared), x, *given)
    return out

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
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.backends.base import Backend
from fused_remat.backends.registry import get_backend
from fused_remat.blocks import run
from fused_remat.blocks.frame import Chunks, Prepared, Run
from fused_remat.blocks.program import Graph, programs, sizes

_functorch = torch._C._functorch
Functions = Mapping[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class BlockCall:
    """What to compute, without tensors: the graph, what to keep, what gradients are wanted.

    Attributes:
        graph: the block; its `tensors` name what a call passes, inputs first.
        save: names that the policy keeps.
        wants: inputs and params whose gradients are wanted.
        backend: a registered name or "auto".
        seq_first: the first input is (S, B, D) rather than (B, S, D).
        preserve_strides: the output keeps a dense input's strides; else it is contiguous.
    """

    graph: Graph
    save: frozenset[str]
    wants: frozenset[str]
    backend: str
    seq_first: bool = False
    preserve_strides: bool = True

    def prepare(self, tensors: Sequence[Tensor | None]) -> Prepared:
        """Chunks, programs and widths for these tensors, of which only shapes are read."""
        x = tensors[0]
        assert x is not None
        backend = get_backend(self.backend, x)
        tokens, fusions = backend.chunk_tokens(x), backend.fusions(x)
        shapes = tuple(None if t is None else t.shape for t in tensors)
        return _prepare(self, backend, tokens, fusions, shapes)  # type: ignore[arg-type]

    def batch_major(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.seq_first else x

    def named(self, tensors: Sequence[Tensor | None]) -> Mapping[str, Tensor | None]:
        """Tensors by name, the first input batch first."""
        named = dict(zip(self.graph.tensors, tensors, strict=True))
        x = named["input"]
        named["input"] = None if x is None else self.batch_major(x)
        return named


@functools.lru_cache(maxsize=4096)
def _prepare(
    call: BlockCall,
    backend: Backend,
    chunk_tokens: int,
    fusions: frozenset[str],
    shapes: tuple[torch.Size | None, ...],
) -> Prepared:
    graph = call.graph
    given = zip(graph.tensors, shapes, strict=True)
    named: dict[str, tuple[int, ...]] = {n: s for n, s in given if s is not None}
    if call.seq_first:
        seq_len, batch, width = named["input"]
        named["input"] = (batch, seq_len, width)
    batch, seq_len = sizes(named["input"])
    if any(node.per_batch for node in graph.nodes):
        chunk_tokens = batch * seq_len
    chunks = Chunks.of(batch, seq_len, chunk_tokens)
    return Prepared(
        backend,
        chunks,
        programs(graph, call.save, call.wants, chunks.tiled, fusions),
        graph.kind,
        call.wants,
        graph.widths(named),
        {name: named[name] for name in graph.inputs},
    )


def forward_block(
    call: BlockCall,
    prepared: Prepared,
    tensors: Sequence[Tensor | None],
    functions: Functions = MappingProxyType({}),
) -> tuple[Tensor, list[Tensor]]:
    """The output, and what backward keeps besides it and `tensors`.

    The output is shaped like the first input (heads: side by side, (B, S, H*E)) but for its width.
    Neither it nor what is kept shares memory with the inputs.
    """
    x = tensors[0]
    assert x is not None
    out = _empty_output(call, prepared, x)
    this = Run(prepared, call.named(tensors), functions, x)
    kept = run.forward(this, call.batch_major(out))
    return out, kept


def _empty_output(call: BlockCall, prepared: Prepared, x: Tensor) -> Tensor:
    width = prepared.widths["output"]
    if x.dim() == 4:
        return x.new_empty((*sizes(x.shape), width))
    if width != x.shape[-1]:
        return x.new_empty((*x.shape[:-1], width))
    layout = torch.preserve_format if call.preserve_strides else torch.contiguous_format
    return torch.empty_like(x, memory_format=layout)


def backward_block(
    call: BlockCall,
    prepared: Prepared,
    tensors: Sequence[Tensor | None],
    out: Tensor | None,
    kept: Sequence[Tensor],
    dy: Tensor,
    functions: Functions = MappingProxyType({}),
) -> list[Tensor | None]:
    """Gradients of every tensor, None where not wanted.

    Of `tensors`, those may be None that the plan does not read; so may `out`, the output.
    """
    this = Run(prepared, call.named(tensors), functions, dy)
    dy_BSD, out_BSD = call.batch_major(dy), None if out is None else call.batch_major(out)
    if _autocast_on(dy.device.type):  # backward called inside autocast: not our precision
        with torch.autocast(dy.device.type, enabled=False):
            found = run.backward(this, kept, out_BSD, dy_BSD)
    else:
        found = run.backward(this, kept, out_BSD, dy_BSD)
    if "input" in found:
        found["input"] = call.batch_major(found["input"])
    found.update(this.param_grads)
    return [found.pop(name, None) for name in call.graph.tensors]


def _autocast_on(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


@dataclass(eq=False, slots=True)
class Invocation:
    """One call on its way through the Function: carries what forward keeps to setup_context."""

    call: BlockCall
    prepared: Prepared
    functions: Functions
    kept: list[Tensor] = field(default_factory=list)


#: Called with the call, its tensors and its output when a block saves what it keeps; for reports.
OBSERVERS: list[Callable[[Invocation, Sequence[Tensor | None], Tensor], None]] = []


class FusedRematBlock(torch.autograd.Function):
    """Any block, as profilers and autograd graphs name it; call `run_block`."""

    @staticmethod
    def forward(invocation: Invocation, *tensors: Tensor | None) -> Tensor:
        call, prepared, functions = invocation.call, invocation.prepared, invocation.functions
        out, invocation.kept = forward_block(call, prepared, tensors, functions)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        invocation, *tensors = inputs
        plan, graph = invocation.prepared.plan, invocation.call.graph
        ctx.call, ctx.prepared = invocation.call, invocation.prepared
        ctx.functions = invocation.functions
        ctx.set_materialize_grads(False)
        ctx.metas = [None if t is None else (t.shape, t.dtype) for t in tensors]
        needed = {*plan.kept_inputs, *plan.saved_params}
        saved = [t if n in needed else None for n, t in zip(graph.tensors, tensors, strict=True)]
        for observe in OBSERVERS:
            observe(invocation, tensors, output)
        kept, invocation.kept = invocation.kept, []
        ctx.save_for_backward(*saved, output if plan.keeps_output else None, *kept)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (1 + len(ctx.metas))
        saved = ctx.saved_tensors  # read once: each access unpacks everything again
        if not torch.is_grad_enabled():
            return (None, *_grads(ctx, saved, dy))
        with torch.no_grad():
            grads = _grads(ctx, saved, dy)
        return (None, *_not_differentiable(grads))


def _grads(ctx: Any, saved: Sequence[Tensor | None], dy: Tensor) -> list[Tensor | None]:
    """Gradients of every tensor, in their dtypes; batched if `dy` is."""
    unbatched, rebatch = _batching(dy)
    if rebatch is not None:
        results = zip(*(_grads(ctx, saved, one) for one in unbatched.unbind()), strict=True)
        return [None if g[0] is None else rebatch(torch.stack(g)) for g in results]
    count = len(ctx.metas)
    tensors, out, kept = saved[:count], saved[count], saved[count + 1 :]
    grads = backward_block(ctx.call, ctx.prepared, tensors, out, kept, dy, ctx.functions)  # type: ignore[arg-type]
    call: BlockCall = ctx.call
    wants = call.wants
    for i, (name, meta) in enumerate(zip(call.graph.tensors, ctx.metas, strict=True)):
        if name in wants:
            grad, (shape, dtype) = grads[i], meta
            if grad is None:  # of an empty input, or of what had no influence
                grads[i] = dy.new_zeros(shape, dtype=dtype)
            elif grad.dtype is not dtype:
                grads[i] = grad.to(dtype)
    return grads


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
FusedRematBlock.forward.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    FusedRematBlock.forward
)


def run_block(
    graph: Graph,
    save: frozenset[str],
    tensors: Mapping[str, Tensor | None],
    *,
    backend: str = "auto",
    seq_first: bool = False,
    preserve_strides: bool = True,
    functions: Functions = MappingProxyType({}),
) -> Tensor:
    """Run a block, differentiably, keeping `save` for backward.

    `tensors` maps the names of `graph.tensors` to tensors: "input" (B, S, D), or (S, B, D) if
    `seq_first`, or heads (B, H, S, E); absent or None where the block has none. "seed" is drawn
    from torch's generator if the graph uses one and none is given. What needs a gradient is decided
    here, from grad mode. Returns (B, S, width), in the layout of the input.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "fused_remat: a fused block cannot run inside torch.func transforms "
            "(grad, vjp, jacrev, vmap); use plain PyTorch operations there, or torch.autograd"
        )
    given = [tensors.get(name) for name in graph.tensors]
    x = given[0]
    assert x is not None
    if graph.uses_seed and tensors.get("seed") is None:
        given[graph.tensors.index("seed")] = random.draw_seed(x.device)
    wants: frozenset[str] = frozenset()
    if torch.is_grad_enabled():
        named = zip(graph.tensors, given, strict=True)
        wants = frozenset(name for name, t in named if t is not None and t.requires_grad)
    call = BlockCall(graph, save, wants, backend, seq_first, preserve_strides)
    prepared = call.prepare(given)
    if _autocast_on(x.device.type):  # in the dtype of the input all the same
        with torch.autocast(x.device.type, enabled=False):
            return _apply(Invocation(call, prepared, functions), given)
    return _apply(Invocation(call, prepared, functions), given)


def _apply(invocation: Invocation, tensors: Sequence[Tensor | None]) -> Tensor:
    call = invocation.call
    if not call.wants:
        return forward_block(call, invocation.prepared, tensors, invocation.functions)[0]
    out: Tensor = FusedRematBlock.apply(invocation, *tensors)
    return out

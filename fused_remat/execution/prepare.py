"""A call of a block as plain functions: `forward_block` and `backward_block`.

They are functions of tensors, a hashable `BlockCall` (what to compute) and what was worked out
from it (`Execution`): `autograd/function.py` wraps them in a Function, `autograd/operators.py` in
operators. Neither reads a module: what backward needs is saved from what forward read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from fused_remat.autograd.accumulate import Accumulation
from fused_remat.execution import executor
from fused_remat.execution.choose import has_faster, ops_for
from fused_remat.graph.graph import Graph, sizes
from fused_remat.graph.schedule import schedule
from fused_remat.spec import USER_FUNCTION
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.chunk import Chunks, Execution, Observer, Pass, WeightGrad
from fused_remat.steps.fused import linear_norm_fwd, mlp_bwd, mlp_up_fwd
from fused_remat.steps.norm import Norm
from fused_remat.steps.operations import Operations

Functions = Mapping[str, Callable[[Tensor], Tensor]]
Shapes = Sequence[torch.Size | None]


@dataclass(frozen=True)
class BlockCall:
    """What to compute, without tensors: the graph, what to keep, what gradients are wanted.

    Attributes:
        graph: the block; its `tensors` name what a call passes, inputs first.
        save: names that the policy keeps.
        wants: inputs and params whose gradients are wanted.
        backend: a registered name or "auto".
        seq_first: the inputs are (S, B, D) rather than (B, S, D).
        preserve_strides: the output keeps a dense input's strides; else it is contiguous.
        accumulation: whose gradients backward adds to buffers instead of returning them.
        offload: names, without formats, of what waits for backward on the host; whoever saves what
            is kept moves it.
    """

    graph: Graph
    save: frozenset[str]
    needs_grad: frozenset[str]
    backend: str
    seq_first: bool = False
    preserve_strides: bool = True
    accumulation: Accumulation | None = None
    offload: frozenset[str] = frozenset()

    def prepare(self, tensors: Sequence[Tensor | None], fused: bool = True) -> Execution:
        """Chunks, programs, widths and dtypes for these tensors, of which no value is read.

        Not `fused`: forward and backward take one routine for a step, as in deterministic mode.
        """
        x = tensors[0]
        assert x is not None
        return prepare(self, x, [None if t is None else t.shape for t in tensors], fused)

    def batch_major(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.seq_first else x

    def named_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Shapes by name, of those that are there, the inputs' batch first."""
        named: dict[str, tuple[int, ...]] = {
            name: shape
            for name, shape in zip(self.graph.tensors, shapes, strict=True)
            if shape is not None
        }
        for name in self.graph.inputs if self.seq_first else ():
            seq_len, batch, width = named[name]
            named[name] = (batch, seq_len, width)
        return named

    def named(self, tensors: Sequence[Tensor | None]) -> Mapping[str, Tensor | None]:
        """Tensors by name, the inputs batch first."""
        named = dict(zip(self.graph.tensors, tensors, strict=True))
        for name in self.graph.inputs if self.seq_first else ():
            x = named[name]
            named[name] = None if x is None else self.batch_major(x)
        return named


def prepare(
    call: BlockCall,
    like: Tensor,
    shapes: Shapes,
    fused: bool = True,
    dtype: torch.dtype | None = None,
) -> Execution:
    """`call.prepare` for tensors of `shapes`, the first of the device of `like`, and of its dtype
    if that is not given."""
    dtype = dtype or like.dtype
    compute = call.graph.compute or dtype
    ops, device = ops_for(call.backend, like, compute), like.device
    # Under deterministic algorithms every policy takes the same operation for a step.
    fuses = fused and not torch.are_deterministic_algorithms_enabled()
    tokens = ops.chunk_tokens(device)
    return _prepare(call, ops, tokens, device, fuses, dtype, tuple(shapes))


@functools.lru_cache(maxsize=4096)
def _prepare(
    call: BlockCall,
    ops: Operations,
    chunk_tokens: int,
    device: torch.device,
    fuses: bool,
    dtype: torch.dtype,
    shapes: tuple[torch.Size | None, ...],
) -> Execution:
    graph, named = call.graph, call.named_shapes(shapes)
    batch, seq_len = sizes(named["input"])
    lengths = graph.lengths(named)
    longest = max(lengths[node.name] for node in graph.nodes)
    if any(node.per_batch for node in graph.nodes):
        chunk_tokens = batch * longest
    chunks = Chunks.of(batch, seq_len, chunk_tokens, longest)
    widths = graph.widths(named)
    fusions = _fusions(ops, graph, widths, graph.compute or dtype, device) if fuses else frozenset()
    plan = schedule(graph, call.save, call.needs_grad, chunks.tiled, fusions)
    rereads = {*plan.kept_inputs, *plan.saved_params}
    return Execution(
        ops=ops,
        chunks=chunks,
        plan=plan,
        kind=graph.kind,
        needs_grad=call.needs_grad,
        widths=widths,
        lengths=lengths,
        dtypes=graph.dtypes(dtype),
        compute=graph.compute,
        casts=graph.casts,
        shapes={name: named[name] for name in graph.inputs},
        given=shapes,
        rereads=tuple([name in rereads for name in graph.tensors]),
        fusions=fusions,
    )


def _fusions(
    ops: Operations,
    graph: Graph,
    widths: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> frozenset[str]:
    """Rows of `graph.fusions.FUSIONS` that an operation of the backend's own serves here, with the
    name of the activation where there is one: products in `dtype`."""
    acts = {
        node.act
        for node in graph.nodes
        if isinstance(node, MLPActivation) and node.act != USER_FUNCTION
    }
    found = set()
    for act in acts:
        if has_faster(ops, mlp_bwd, (act, dtype, device)):
            found.add(f"mlp_bwd {act}")
        if has_faster(ops, mlp_up_fwd, (act, dtype, device, ())):
            found.add(f"linear_act {act}")
    norms = {(n.spec.kind, widths[n.name]) for n in graph.nodes if isinstance(n, Norm)}
    if norms and all(has_faster(ops, linear_norm_fwd, (k, dtype, device, n)) for k, n in norms):
        found.add("linear_norm")
    return frozenset(found)


def forward_block(
    call: BlockCall,
    execution: Execution,
    tensors: Sequence[Tensor | None],
    functions: Functions = MappingProxyType({}),
    watch: Observer | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The output, and what backward keeps besides it and `tensors`.

    The output is shaped like the first input (heads: side by side, (B, S, H*E)) but for its width.
    Neither it nor what is kept shares memory with the inputs.
    """
    x = tensors[0]
    assert x is not None
    out = empty_output(call, execution.widths["output"], execution.dtypes["output"], x)
    this = Pass(execution, call.named(tensors), functions, x, watch)
    out_BSD = call.batch_major(out)
    if autocast_on(x):  # the graph says what is computed in which dtype
        with torch.autocast(x.device.type, enabled=False):
            return out, executor.forward(this, out_BSD)
    return out, executor.forward(this, out_BSD)


def empty_output(call: BlockCall, width: int, dtype: torch.dtype, x: Tensor) -> Tensor:
    """Uninitialised, for the output of `width` and `dtype` for the first input `x`."""
    if x.dim() == 4:
        return x.new_empty((*sizes(x.shape), width), dtype=dtype)
    if width != x.shape[-1]:
        return x.new_empty((*x.shape[:-1], width), dtype=dtype)
    layout = torch.preserve_format if call.preserve_strides else torch.contiguous_format
    return torch.empty_like(x, dtype=dtype, memory_format=layout)


def backward_block(
    call: BlockCall,
    execution: Execution,
    tensors: Sequence[Tensor | None],
    out: Tensor | None,
    kept: Sequence[Tensor],
    dy: Tensor,
    functions: Functions = MappingProxyType({}),
    watch: Observer | None = None,
    into: Mapping[str, Tensor] | None = None,
    later: list[WeightGrad] | None = None,
) -> list[Tensor | None]:
    """Gradients of every tensor, None where not wanted and of what is in `into`.

    Of `tensors`, those may be None that the plan does not read; so may `out`, the output.
    Gradients of the params in `into` are added to those tensors, in float32 (float64) throughout.
    Weight gradients that are products of two matrices go to `later`, if given, as their factors.
    """
    this = Pass(execution, call.named(tensors), functions, dy, watch, into, later)
    dy_BSD, out_BSD = call.batch_major(dy), None if out is None else call.batch_major(out)
    if autocast_on(dy):  # backward called inside autocast, forward's or any other
        with torch.autocast(dy.device.type, enabled=False):
            found = executor.backward(this, kept, out_BSD, dy_BSD)
    else:
        found = executor.backward(this, kept, out_BSD, dy_BSD)
    for name in call.graph.inputs if call.seq_first else ():
        if name in found:
            found[name] = call.batch_major(found[name])
    found.update(this.param_grads)
    if into is not None:
        found = {name: grad for name, grad in found.items() if name not in into}
    return [found.pop(name, None) for name in call.graph.tensors]


def round_vectors(
    grads: list[Tensor | None], low: torch.dtype, dtypes: Sequence[torch.dtype | None]
) -> None:
    """Round gradients of biases and norms, summed in float32, to `low`: all in one kernel.

    Those that `dtypes` asks in `low`, one for each of `grads`. Autograd would round each in a
    kernel of its own; matrices are left to it, for it frees one before it makes the next.

    >>> grads = [torch.ones(2), torch.ones(3), None, torch.ones(2, 2)]
    >>> round_vectors(grads, torch.half, [torch.half, None, torch.half, torch.half])
    >>> [g if g is None else g.dtype for g in grads]
    [torch.float16, torch.float32, None, torch.float32]
    """
    wide: dict[int, Tensor] = {}
    for place, (grad, dtype) in enumerate(zip(grads, dtypes, strict=True)):
        if dtype is low and grad is not None and grad.dtype is torch.float32 and grad.dim() == 1:
            wide[place] = grad
    if wide:
        rounded = [torch.empty_like(grad, dtype=low) for grad in wide.values()]
        torch._foreach_copy_(rounded, list(wide.values()))
        for place, grad in zip(wide, rounded, strict=True):
            grads[place] = grad


def autocast_on(x: Tensor) -> bool:
    """Whether autocast is on for tensors on the device of `x`.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast_on(torch.ones(1)), autocast_on(torch.ones(1, device="meta"))
    (True, False)
    """
    if (x.is_cpu or x.is_cuda) and not torch._C._is_any_autocast_enabled():  # not of all others
        return False
    kind = x.device.type
    return torch._C._is_autocast_available(kind) and torch.is_autocast_enabled(kind)

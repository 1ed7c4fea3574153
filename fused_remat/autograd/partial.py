"""Rare requests of a backward pass: some gradients only, batches of them, weight gradients later.

Autograd calls a node for all gradients or for some: `torch.autograd.grad(loss, inputs)`,
`backward(inputs=...)`, and the zero-bubble schedules of pipeline parallelism, which ask a stage for
the gradient of its input first, and for those of its weights when it has nothing else to do. A
block that is asked for some runs the schedule of those alone, from what it kept for all.

The second of two such passes computes the inside of the block again. `defer_weight_gradients`
trades that for memory: the first pass keeps the two factors of every weight gradient.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from fused_remat.autograd.extras import Extras, Saved
from fused_remat.execution import executor
from fused_remat.execution.prepare import BlockCall, Execution
from fused_remat.graph.schedule import schedule
from fused_remat.steps.chunk import Chunk, Pass, WeightGrad
from fused_remat.steps.operations import warn

_functorch = torch._C._functorch
_executes: Callable[[Any], bool] = torch._C._will_engine_execute_node
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph

_lock = threading.Lock()

#: Whether passes for inputs hold the factors of weight gradients: inside `defer_weight_gradients`.
ON: int = 0


@contextlib.contextmanager
def defer_weight_gradients() -> Iterator[None]:
    """Backward passes inside that ask for inputs alone hold what the weights' pass will multiply.

    For zero-bubble schedules of `torch.distributed.pipelining`: put it around `schedule.step()`.
    Without it, the pass that asks for weights rebuilds and propagates inside of each block what the
    pass for inputs did already. With it, the pass for inputs, told to keep the graph, holds each
    weight gradient's two factors (the input and the output gradient of each linear layer) until the
    weights' pass has multiplied them, or the graph is freed. Gradients are the same bits. Any
    thread's passes count: autograd runs backward in threads of its own. The factors belong to one
    gradient of the output, unchanged; what changes it behind autograd's back (`.data`) is not seen.

    Units: bytes held by a pre-norm encoder layer of width D with F = 4D, in 16 bits: 32*D a token,
    less what its policy keeps.

    >>> weight = torch.nn.Parameter(torch.ones(3, 8))
    >>> x = torch.ones(2, 4, 8, requires_grad=True)
    >>> from fused_remat import ops
    >>> y = ops.mlp(x, weight, None, torch.ones(8, 3), None, "relu")
    >>> with defer_weight_gradients():
    ...     dy = torch.ones_like(y)
    ...     dx, = torch.autograd.grad(y, x, dy, retain_graph=True)
    ...     dw, = torch.autograd.grad(y, weight, dy)
    >>> dx.shape, dw.shape
    (torch.Size([2, 4, 8]), torch.Size([3, 8]))
    """
    global ON
    with _lock:
        ON += 1
    try:
        yield
    finally:
        with _lock:
            ON -= 1


def is_rare(ctx: Any, dy: Tensor) -> bool:
    """Whether a backward pass asks for anything but all gradients of a call on the common path."""
    return (
        ctx.extras is not None
        or ctx.accumulation is not None
        or ctx.deferred is not None
        or ON > 0
        or torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or _functorch.is_legacy_batchedtensor(dy)
        or _functorch.is_batchedtensor(dy)
        or not _asks_all(ctx)
    )


def backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    """Gradients of the call's tensors, in its order."""
    if torch.compiler.is_compiling():  # compiled autograd, after a forward in eager mode
        from fused_remat.autograd import graph_break

        return graph_break.eagerly(_backward, ctx, dy)  # type: ignore[no-any-return]
    return _backward(ctx, dy)


def _backward(ctx: Any, dy: Tensor) -> list[Tensor | None]:
    needs_grad, keeps_graph = asked(ctx), _keeps_graph()
    deferred: Deferred | None = ctx.deferred  # read once: other threads may take it
    if deferred is not None and deferred.serves(dy, needs_grad) and not torch.is_grad_enabled():
        grads = _deferred(ctx, deferred, needs_grad)
        if not keeps_graph:
            ctx.deferred = None
            if ctx.extras is not None:
                ctx.extras.record = None
        return grads
    extras: Extras | None = ctx.extras
    saved = (Extras() if extras is None else extras).restored(ctx, dy)
    if torch.is_grad_enabled():
        with torch.no_grad():
            grads = _grads(ctx, saved, dy, needs_grad, creates_graph=True)
        grads = _not_differentiable(grads)
    else:
        call = ctx.execution.call
        defers = ON and keeps_graph and _asks_inputs(call, needs_grad)
        defers = defers and not dy.is_inference()  # which has no version to know it by
        grads = _grads(ctx, saved, dy, needs_grad, deferred=[] if defers else None)
    if not keeps_graph:
        ctx.deferred = None  # factors go with what autograd saved
    if extras is not None:
        extras.done(keeps_graph)
    return grads


# --- which gradients a pass asks for


def _asks_all(ctx: Any) -> bool:
    if not issubclass(type(ctx), BackwardCFunction):  # compiled autograd
        return True
    try:
        return all(map(_executes, [node for node, _ in ctx.next_functions if node is not None]))
    except (RuntimeError, TypeError):  # see `_takes`
        return False


def asked(ctx: Any) -> frozenset[str]:
    """Which of the call's `needs_grad` the present backward pass takes; all, if it cannot be told.

    The engine knows which nodes a pass executes: those behind a gradient that nobody asked for are
    not among them. An ordinary `backward()` executes every node that it can reach.
    """
    execution: Execution = ctx.execution
    needs_grad = execution.needs_grad
    if _asks_all(ctx):
        return needs_grad
    given = zip(execution.call.graph.tensors, execution.given, strict=True)
    names = [name for name, shape in given if shape is not None]
    edges = zip(names, ctx.next_functions, strict=True)
    found = [name for name, (node, _) in edges if node is None or _takes(node)]
    return needs_grad.intersection(found) or needs_grad


def _takes(node: Any) -> bool:
    """Whether the pass that runs now takes the gradient that goes to `node`."""
    try:
        return bool(_executes(node))
    except (RuntimeError, TypeError):
        # RuntimeError is its way to say that torch.autograd.grad asks for this leaf's gradient;
        # whatever else it means, a gradient too many is dropped by the engine.
        return True


# --- gradients of some, or of a batch


def _grads(
    ctx: Any,
    saved: Saved,
    dy: Tensor,
    needs_grad: frozenset[str],
    creates_graph: bool = False,
    deferred: list[WeightGrad] | None = None,
) -> list[Tensor | None]:
    """Gradients of `needs_grad`, None for others; autograd rounds matrices to the tensors' dtypes.

    They are batched if `dy` is. Those of weights go to `deferred`, if given, as their factors.
    """
    unbatched, rebatch = _batching(dy)
    if rebatch is not None:
        each = [_grads(ctx, saved, one, needs_grad, creates_graph) for one in unbatched.unbind()]
        return [
            None if grads[0] is None else rebatch(torch.stack(grads))
            for grads in zip(*each, strict=True)
        ]
    execution, tensors, out, kept = saved
    if deferred is not None:
        with_weights = needs_grad.union(execution.needs_grad.difference(_inputs(execution)))
        execution, kept = _narrowed(execution, kept, with_weights, overwrites=False)
    elif len(needs_grad) < len(execution.needs_grad):
        execution, kept = _narrowed(execution, kept, needs_grad)
    sink = None if ctx.accumulation is None else _buffers(ctx, needs_grad, creates_graph)
    record = None if ctx.extras is None else ctx.extras.record
    watch = None if record is None else record.compare
    grads = executor.backward(
        execution, tensors, kept, out, dy, ctx.functions, watch, sink, deferred
    )
    if deferred is not None:
        ctx.deferred = Deferred.of(dy, execution.call, needs_grad, deferred, grads)
    return finish(ctx, dy, grads, needs_grad, sink or ())


def _narrowed(
    execution: Execution,
    kept: Sequence[Tensor],
    needs_grad: frozenset[str],
    overwrites: bool = True,
) -> tuple[Execution, Sequence[Tensor]]:
    """The same call with gradients of `needs_grad` alone, and what of `kept` it reads.

    The pieces are the same, and what is rebuilt is, to the bit. The schedule for fewer asks for no
    more, so all that it reads was kept. Not `overwrites`: it writes no activation over another.
    """
    call, tiled, fusions = execution.call, execution.chunks.tiled, execution.fusions
    plan = schedule(call.graph, call.save, needs_grad, tiled, fusions, overwrites)
    names = frozenset(plan.kept)
    mine = [t for (name, _), t in zip(execution.pieces(), kept, strict=True) if name in names]
    call = replace(call, needs_grad=needs_grad)
    return replace(execution, call=call, plan=plan, needs_grad=needs_grad), mine


def rounds(
    tensors: Sequence[Tensor | None],
) -> tuple[torch.dtype, list[torch.dtype | Tensor | None]]:
    """The first tensor's dtype, and for each vector that needs a gradient what says its dtype: the
    leaf itself, whose `grad_dtype` may change until backward, or its dtype."""
    x = tensors[0]
    assert x is not None
    found = [t if t is not None and t.dim() == 1 and t.requires_grad else None for t in tensors]
    return x.dtype, [t if t is None or t.is_leaf else t.dtype for t in found]


def finish(
    ctx: Any,
    dy: Tensor,
    grads: list[Tensor | None],
    needs_grad: frozenset[str],
    sink: Collection[str] = (),
) -> list[Tensor | None]:
    """`grads`, vectors rounded, with zeros for those of `needs_grad` of empty inputs and of what
    has no influence."""
    if ctx.rounds is not None:
        low, of = ctx.rounds
        round_vectors(grads, low, [t.grad_dtype if isinstance(t, Tensor) else t for t in of])
    for i, name in enumerate(ctx.execution.call.graph.tensors):
        if grads[i] is None and name in needs_grad and name not in sink:
            grads[i] = dy.new_zeros(ctx.execution.given[i])
    return grads


def round_vectors(
    grads: list[Tensor | None], low: torch.dtype, dtypes: Sequence[torch.dtype | None]
) -> None:
    """Round gradients of biases and norms, summed in float32, to `low`: all in one kernel.

    Those that `dtypes` asks in `low`, one for each of `grads`. Autograd would round each in a
    kernel of its own; matrices are left to it, for it frees one before it makes the next.
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


def _buffers(
    ctx: Any, needs_grad: frozenset[str], creates_graph: bool = False
) -> dict[str, Tensor]:
    """What gradients are added to; the graph's edges lead to the parameters, so none is kept."""
    execution: Execution = ctx.execution
    given = zip(execution.call.graph.tensors, execution.given, strict=True)
    names = [name for name, shape in given if shape is not None]
    found: dict[str, Tensor]
    found = ctx.accumulation.buffers(names, ctx.next_functions, creates_graph)
    if not found and ctx.accumulation.target == "main_grad" and _asks_weights(ctx, needs_grad):
        warn(
            "a backward pass asks a block for gradients of weights alone, as zero-bubble schedules "
            "do; they are returned, and not added to main_grad: use the 1F1B schedule with "
            'accumulate_into="main_grad"'
        )
    return found


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
    schedule writes in place, so it runs once for each gradient instead.
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


# --- weight gradients that are left for a later pass


@dataclass(eq=False)
class Deferred:
    """Weight gradients of a block as factors, from a pass that did not ask for them.

    Attributes:
        dy, version: the gradient of the output that they belong to.
        names: what there are gradients of, or none for want of influence.
        products: in the order of their adding up.
        versions: of their factors.
        grads: gradients that are no product, or were made together with another.
    """

    dy: Tensor
    version: int
    names: frozenset[str]
    products: Sequence[WeightGrad]
    versions: Sequence[tuple[int, int]]
    grads: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        dy: Tensor,
        call: BlockCall,
        needs_grad: frozenset[str],
        products: Sequence[WeightGrad],
        grads: list[Tensor | None],
    ) -> Deferred:
        """What a pass for `needs_grad` leaves for a later one; takes it out of its `grads`."""
        rest, found = call.needs_grad.difference(call.graph.inputs), {}
        for i, name in enumerate(call.graph.tensors):
            grad = grads[i]
            if name not in needs_grad and grad is not None:
                found[name], grads[i] = grad, None
        return cls(dy, dy._version, rest, products, _versions(products), found)

    def serves(self, dy: Tensor, needs_grad: Collection[str]) -> bool:
        """Whether these are the gradients of `needs_grad` for this `dy`."""
        same = dy is self.dy and dy._version == self.version
        return same and self.names.issuperset(needs_grad)

    def give(
        self, execution: Execution, needs_grad: Collection[str], sink: Mapping[str, Tensor] | None
    ) -> dict[str, Tensor]:
        """The gradients of `needs_grad`, but of those in `sink` added to what is there.

        Raises: RuntimeError if a factor was changed in place since.
        """
        if _versions(self.products) != self.versions:
            raise RuntimeError(
                "fused_remat: a tensor that a weight gradient is to be computed from was modified "
                "by an inplace operation after the backward pass that asked for the input's"
            )
        this = Pass(execution, {}, {}, self.dy, sink=sink)
        chunk = Chunk(this, (0, 0), (0, 0))
        with executor.autocast_off(self.dy):
            for name, grad in self.grads.items():
                if name in needs_grad:
                    chunk.add_param_grad(name, grad.clone())  # it may be given again
            for product in self.products:
                if product.name in needs_grad:
                    chunk.add_weight_grad(*product)
        return {name: grad for name, grad in this.param_grads.items() if name not in (sink or ())}


def _deferred(ctx: Any, deferred: Deferred, needs_grad: frozenset[str]) -> list[Tensor | None]:
    """Gradients of `needs_grad`, weights of which an earlier pass has left the factors."""
    sink = None if ctx.accumulation is None else _buffers(ctx, needs_grad)
    found = deferred.give(ctx.execution, needs_grad, sink)
    grads = [found.get(name) for name in ctx.execution.call.graph.tensors]
    return finish(ctx, deferred.dy, grads, needs_grad, sink or ())


def _versions(products: Sequence[WeightGrad]) -> list[tuple[int, int]]:
    return [(product.dy._version, product.x._version) for product in products]


def _inputs(execution: Execution) -> tuple[str, ...]:
    return execution.call.graph.inputs


def _asks_inputs(call: BlockCall, needs_grad: frozenset[str]) -> bool:
    """Whether a pass for `needs_grad` asks for inputs alone, of a block that has weights."""
    inputs = call.graph.inputs
    return needs_grad.issubset(inputs) and not call.needs_grad.issubset(inputs)


def _asks_weights(ctx: Any, needs_grad: frozenset[str]) -> bool:
    """Whether a pass for `needs_grad` asks for weights alone, of a block whose inputs need some."""
    execution: Execution = ctx.execution
    fewer = len(needs_grad) < len(execution.needs_grad)
    return fewer and needs_grad.isdisjoint(_inputs(execution))

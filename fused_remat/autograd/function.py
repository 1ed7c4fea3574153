"""The one autograd Function that runs any block, and who runs a call: it, or an operator.

The Function is eager mode's: an operator has more Python around it. What looks at operators, the
compiler and selective checkpointing, gets one (`autograd/operators.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as _checkpoint
from torch import Tensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from fused_remat import random
from fused_remat.autograd import offload, operators, partial, replay_check
from fused_remat.autograd.accumulate import Accumulation
from fused_remat.autograd.replay_check import check_unchanged
from fused_remat.autograd.segments import Replayed, Segment, begin, input_of, segment_of
from fused_remat.autograd.shards import is_dtensor
from fused_remat.execution.prepare import (
    BlockCall,
    Functions,
    backward_block,
    forward_block,
    round_vectors,
)
from fused_remat.graph.graph import Graph
from fused_remat.graph.quantized import in_formats
from fused_remat.policies import ALL_PRESETS, Policy, kept_names, offload_of
from fused_remat.steps.chunk import Execution, WeightGrad
from fused_remat.steps.collective import in_context_parallel
from fused_remat.steps.operations import FusedRematWarning

_functorch = torch._C._functorch


class BlockRun(NamedTuple):
    """One call that keeps something for backward, as observers see it.

    Attributes:
        call, prepared, functions: what is computed, and how.
        tensors, output: of the call.
        kept: what is kept besides `tensors` and `output`, piece by piece.
        saves: whether each of `tensors` is kept.
        offloaded: by name, what is kept on the host of what is kept.
    """

    call: BlockCall
    execution: Execution
    tensors: Sequence[Tensor | None]
    output: Tensor
    kept: Sequence[Tensor]
    saves: Sequence[bool]
    offloaded: Sequence[tuple[str, Tensor]]
    functions: Functions


#: Called when a block is about to save what it keeps; for reports. Usually empty.
OBSERVERS: list[Callable[[BlockRun], None]] = []


class FusedRematBlock(torch.autograd.Function):
    """Any block, as profilers and autograd graphs name it; call `run_block`.

    Without `setup_context`, which only torch.func needs (where blocks raise): for its sake `apply`
    binds the arguments to forward's signature anew at every call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: BlockCall,
        execution: Execution,
        functions: Functions,
        segment: Segment | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        record = (
            replay_check.record_of(execution, call.graph.tensors, tensors)
            if replay_check.ON
            else None
        )
        watch = None if record is None else record.note
        out, kept = forward_block(call, execution, tensors, functions, watch)
        if record is not None:
            record.note_output(out)
        ctx.call, ctx.execution, ctx.functions, ctx.record = call, execution, functions, record
        ctx.segment, ctx.deferred = segment, None
        ctx.rounds = _rounds(tensors)
        ctx.set_materialize_grads(False)
        saves: Sequence[bool] = execution.rereads
        if segment is not None:  # all that running it again takes
            segment.note_output(out)
            saves = (segment.input_kept, *(True for _ in tensors[1:]))
        saved = [t if save else None for t, save in zip(tensors, saves, strict=True)]
        ctx.dtypes = [t if t is None else t.dtype for t in (tensors if segment else saved)]
        saved += [out if execution.plan.keeps_output else None, *kept]
        ctx.offloaded = None
        moved: Sequence[tuple[str, Tensor]] = ()
        if call.offload:
            saved, moved = _offload(ctx, saved)
        for observe in OBSERVERS:
            observe(BlockRun(call, execution, tensors, out, kept, saves, moved, functions))
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * (4 + len(ctx.call.graph.tensors))
        if torch.compiler.is_compiling():  # compiled autograd, after a forward in eager mode
            from fused_remat.autograd import graph_break

            return graph_break.eagerly(_backward, ctx, dy)  # type: ignore[no-any-return]
        return _backward(ctx, dy)


def _rounds(
    tensors: Sequence[Tensor | None],
) -> tuple[torch.dtype, list[torch.dtype | Tensor | None]] | None:
    """The first tensor's dtype if it has 16 bits, and of all vectors what says the dtype that
    autograd takes their gradients in: itself, or the leaf, of which it may change until backward.
    """
    x = tensors[0]
    assert x is not None
    if x.dtype.itemsize != 2:
        return None
    found = [t if t is not None and t.dim() == 1 and t.requires_grad else None for t in tensors]
    return x.dtype, [t if t is None or t.is_leaf else t.dtype for t in found]


def _offload(
    ctx: Any, saves: list[Tensor | None]
) -> tuple[list[Tensor | None], list[tuple[str, Tensor]]]:
    """What to save instead of `saves`, and what of it is on the host, by name."""
    graph = ctx.call.graph
    names = [*graph.tensors, "output", *(name for name, _ in ctx.execution.pieces())]
    callers = {*graph.inputs, "output"}
    ctx.offloaded, saves = offload.move(ctx, ctx.call.offload, names, saves, callers)
    places = () if ctx.offloaded is None else ctx.offloaded.places
    return saves, [(names[place], t) for place in places if (t := saves[place]) is not None]


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    needs_grad, keeps_graph = partial.asked(ctx), _keeps_graph()
    deferred: partial.Deferred | None = ctx.deferred  # read once: other threads may take it
    if deferred is not None and deferred.serves(dy, needs_grad) and not torch.is_grad_enabled():
        grads = _deferred(ctx, deferred, needs_grad)
        if not keeps_graph:
            ctx.deferred = ctx.record = None
        return (None, None, None, None, *grads)
    segment: Segment | None = ctx.segment
    again = None if segment is None else segment.now()
    # Read once: each access unpacks everything again.
    saved = ctx.saved_tensors if again is None else again.saved
    if ctx.offloaded is not None and again is None:
        saved = ctx.offloaded.returned(saved)
    if segment is not None and not segment.input_kept:
        saved = (input_of(ctx) if again is None else again.input, *saved[1:])
    check_unchanged(ctx.call.graph.tensors, ctx.execution.given, ctx.dtypes, saved, dy)
    if ctx.record is not None:
        _replay(ctx, saved)
    if torch.is_grad_enabled():
        with torch.no_grad():
            grads = _grads(ctx, saved, dy, needs_grad, again, creates_graph=True)
        grads = _not_differentiable(grads)
    else:
        defers = partial.ON and keeps_graph and partial.asks_inputs(ctx.call, needs_grad)
        defers = defers and not dy.is_inference()  # which has no version to know it by
        grads = _grads(ctx, saved, dy, needs_grad, again, later=[] if defers else None)
    if not keeps_graph:  # copies and factors go with what autograd saved
        ctx.record = ctx.deferred = None
    if segment is not None:
        segment.replayed = None
    return (None, None, None, None, *grads)


_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph


def _warn_of_split(target: str) -> None:
    """Of zero-bubble schedules, whose weights' passes hand gradients to the schedule."""
    if target == "main_grad":
        warnings.warn(
            "fused_remat: a backward pass asks a block for gradients of weights alone, as "
            "zero-bubble schedules do; they are returned, and not added to main_grad: use 1F1B "
            'with accumulate_into="main_grad"',
            FusedRematWarning,
            stacklevel=2,
        )


def _replay(ctx: Any, saved: Sequence[Tensor | None]) -> None:
    """Run the forward again and compare everything with what it computed: the replay check."""
    count, record = len(ctx.execution.given), ctx.record
    tensors = record.compare_given(saved[:count])
    with torch.no_grad(), torch.autocast(tensors[0].device.type, enabled=False):
        forward_block(ctx.call, ctx.execution, tensors, ctx.functions, record.compare)
        # After: where a checkpoint around the block made them anew, the first difference is above.
        record.compare_kept(saved[count], saved[count + 1 :])


def _grads(
    ctx: Any,
    saved: Sequence[Tensor | None],
    dy: Tensor,
    needs_grad: frozenset[str],
    again: Replayed | None,
    creates_graph: bool = False,
    later: list[WeightGrad] | None = None,
) -> list[Tensor | None]:
    """Gradients of `needs_grad`, None for others; autograd rounds matrices to the tensors' dtypes.

    They are batched if `dy` is. Those of weights are deferred to `later`, if given.
    """
    unbatched, rebatch = _batching(dy)
    if rebatch is not None:
        results = zip(
            *(
                _grads(ctx, saved, one, needs_grad, again, creates_graph)
                for one in unbatched.unbind()
            ),
            strict=True,
        )
        return [None if g[0] is None else rebatch(torch.stack(g)) for g in results]
    call: BlockCall = ctx.call
    execution: Execution = ctx.execution
    count = len(execution.given)
    tensors, out, kept = saved[:count], saved[count], saved[count + 1 :]
    if again is not None:
        call, execution, out, kept = again.call, again.execution, again.output, again.kept
    if later is not None:
        runs = partial.with_weights(call, needs_grad)
        call, execution, kept = partial.narrowed(call, execution, kept, runs, overwrites=False)
    elif len(needs_grad) < len(call.needs_grad):
        call, execution, kept = partial.narrowed(call, execution, kept, needs_grad)
    watch = None if ctx.record is None else ctx.record.compare
    into = None if call.accumulation is None else _buffers(ctx, needs_grad, creates_graph)
    functions = ctx.functions
    grads = backward_block(call, execution, tensors, out, kept, dy, functions, watch, into, later)  # type: ignore[arg-type]
    if later is not None:
        ctx.deferred = partial.Deferred.of(dy, call, needs_grad, later, grads)
    return _finished(ctx, dy, grads, needs_grad, into or ())


def _finished(
    ctx: Any,
    dy: Tensor,
    grads: list[Tensor | None],
    needs_grad: frozenset[str],
    into: Collection[str],
) -> list[Tensor | None]:
    """`grads`, vectors rounded, with zeros for those of `needs_grad` of empty inputs and of what
    has no influence."""
    if ctx.rounds is not None:
        low, of = ctx.rounds
        round_vectors(grads, low, [t.grad_dtype if isinstance(t, Tensor) else t for t in of])
    for i, name in enumerate(ctx.call.graph.tensors):
        if grads[i] is None and name in needs_grad and name not in into:
            grads[i] = dy.new_zeros(ctx.execution.given[i])
    return grads


def _deferred(
    ctx: Any, deferred: partial.Deferred, needs_grad: frozenset[str]
) -> list[Tensor | None]:
    """Gradients of `needs_grad`, weights of which an earlier pass has left the factors."""
    into = None if ctx.call.accumulation is None else _buffers(ctx, needs_grad)
    found = deferred.give(ctx.execution, needs_grad, into)
    grads = [found.get(name) for name in ctx.call.graph.tensors]
    return _finished(ctx, deferred.dy, grads, needs_grad, into or ())


def _buffers(
    ctx: Any, needs_grad: frozenset[str], creates_graph: bool = False
) -> dict[str, Tensor]:
    """What gradients are added to; the graph's edges lead to the parameters, so none is kept."""
    call: BlockCall = ctx.call
    given = zip(call.graph.tensors, ctx.execution.given, strict=True)
    names = [name for name, shape in given if shape is not None]
    assert call.accumulation is not None
    found = call.accumulation.buffers(names, ctx.next_functions, creates_graph)
    if not found and partial.asks_weights(ctx.call, needs_grad):
        _warn_of_split(call.accumulation.target)
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


def warn_of_kept_input(reason: str) -> None:
    """Warn, at the caller of an op, that a block inside a segment keeps its input."""
    warnings.warn(
        f"fused_remat: a block inside a segment keeps its input: {reason}",
        FusedRematWarning,
        stacklevel=5,
    )


def run_block(
    graph: Graph,
    policy: str | Policy,
    tensors: Mapping[str, Tensor | None],
    *,
    backend: str = "auto",
    seq_first: bool = False,
    preserve_strides: bool = True,
    functions: Functions | None = None,
    accumulation: Accumulation | None = None,
    tell: Callable[[str], None] = warn_of_kept_input,
) -> Tensor:
    """Run a block, differentiably, keeping what `policy` names for backward.

    `tensors` maps the names of `graph.tensors` to tensors: "input" (B, S, D), or (S, B, D) if
    `seq_first`, or heads (B, H, S, E); absent or None where the block has none. "seed" is drawn
    from torch's generator if the graph uses one and none is given. What needs a gradient is decided
    here, from grad mode. Autocast changes nothing: a graph of two dtypes is `graph.precision`'s.
    `tell` hears why a block inside a segment keeps its input.
    Returns (B, S, width), in the layout and dtype of the input.
    """
    options = (backend, seq_first, preserve_strides)
    compiling = torch.compiler.is_compiling()
    if not (compiling or _chosen_by_operator()):
        return _run_block(graph, policy, tensors, *options, functions or {}, accumulation, tell)
    if not functions and accumulation is None:
        return operators.run(graph, policy, tensors, *options)
    more = (*options, functions or {}, accumulation)  # which no text describes
    if compiling:
        from fused_remat.autograd import graph_break

        return graph_break.eagerly(_run_block, graph, policy, tensors, *more)  # type: ignore[no-any-return]
    with _disable_current_modes():  # its ATen operators, some in place, are not to be chosen from
        return _run_block(graph, policy, tensors, *more)


def _run_block(
    graph: Graph,
    policy: str | Policy,
    tensors: Mapping[str, Tensor | None],
    backend: str,
    seq_first: bool,
    preserve_strides: bool,
    functions: Functions,
    accumulation: Accumulation | None,
    tell: Callable[[str], None] = warn_of_kept_input,
) -> Tensor:
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "fused_remat: a fused block cannot run inside torch.func transforms "
            "(grad, vjp, jacrev, vmap); use plain PyTorch operations there, or torch.autograd"
        )
    graph, save = _kept(graph, policy)
    # A wrapper that outlived its transform (torch.func) is the tensor that it wraps.
    given = [None if (t := tensors.get(n)) is None else _unwrapped(t) for n in graph.tensors]
    x = given[0]
    assert x is not None
    if not _PLAIN.issuperset(map(type, given)):
        _check_plain(graph.tensors, given)
    if F.scaled_dot_product_attention is not _ATTENTION and in_context_parallel():
        raise RuntimeError("fused_remat: a block does not run inside context_parallel")
    if graph.uses_seed and tensors.get("seed") is None:
        given[graph.tensors.index("seed")] = random.draw_seed(x.device)
    needs: tuple[bool, ...] = ()
    if torch.is_grad_enabled():
        needs = tuple([t is not None and t.requires_grad for t in given])
    options = (backend, seq_first, preserve_strides, accumulation, offload_of(policy))
    call = _call(graph, save, needs, *options)
    needs_grad = call.needs_grad
    if accumulation is not None:
        accumulation.check(tensors, needs_grad)
    segment, place = None, segment_of(policy)
    fused = not (replay_check.ON or replay_check.RECORDED)
    if place is not None and needs_grad:
        segment = begin(place, call, call.prepare(given, fused), x, _NODE)
        if segment.why_kept:
            tell(segment.why_kept)
        call = dataclasses.replace(call, save=frozenset())
    execution = call.prepare(given, fused)
    if not needs_grad:
        return forward_block(call, execution, given, functions)[0]
    out: Tensor = _apply(call, execution, functions, segment, *given)
    return out


_unwrapped: Callable[[Tensor], Tensor] = _functorch.unwrap_if_dead
#: `FusedRematBlock.apply` without what it does for torch.func, for tensors that are unwrapped.
_apply = super(torch.autograd.Function, FusedRematBlock).apply


def _kept(graph: Graph, policy: str | Policy) -> tuple[Graph, frozenset[str]]:
    """`graph` with the steps that pack what `policy` keeps, and the names that it keeps."""
    row: Collection[str] | None = None
    if isinstance(policy, str) and policy in ALL_PRESETS:  # a table that may change
        row = ALL_PRESETS[policy].get(graph.kind)
    elif not isinstance(policy, Policy):
        kept_names(policy, graph)  # which raises
    return _kept_by(graph, policy, None if row is None else frozenset(row))


@functools.lru_cache(maxsize=4096)
def _kept_by(
    graph: Graph, policy: str | Policy, row: frozenset[str] | None
) -> tuple[Graph, frozenset[str]]:
    """`_kept`, looked up; `row`: of a table that may change, so another row is another call."""
    save = kept_names(policy, graph)
    return in_formats(graph, save), save


@functools.lru_cache(maxsize=4096)
def _call(graph: Graph, save: frozenset[str], needs: tuple[bool, ...], *options: Any) -> BlockCall:
    """The call where those of `graph.tensors` want gradients that `needs` marks."""
    needs_grad = frozenset(itertools.compress(graph.tensors, needs))
    return BlockCall(graph, save, needs_grad, *options)


_ATTENTION = F.scaled_dot_product_attention
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _check_plain(names: Sequence[str], given: Sequence[Any]) -> None:
    """Raise RuntimeError for a DTensor."""
    for name, t in zip(names, given, strict=True):
        if is_dtensor(t):
            raise RuntimeError(
                f"fused_remat: {name} is a DTensor, {t.placements} on {t.device_mesh}; a block "
                "takes this rank's plain tensors: use to_local(), or divide the layer as a whole "
                "with fused_remat.parallel.LayerParallel"
            )


def is_block(node: object) -> bool:
    """Whether an autograd node is that of a block.

    >>> is_block(torch.ones(1, requires_grad=True).exp().grad_fn)
    False
    """
    return isinstance(node, _NODE)


#: Type of the autograd nodes of blocks.
_NODE: type = FusedRematBlock._backward_cls


_SELECTIVE = (_checkpoint._CachingTorchDispatchMode, _checkpoint._CachedTorchDispatchMode)


def _chosen_by_operator() -> bool:
    """Whether selective checkpointing, which decides by operator, is watching."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack()
    )

"""The autograd Function that runs any block in eager mode, and `run_block`, which calls it.

The compiler and selective checkpointing, which decide by operator, get an operator instead
(`operators.py`). Rare backward passes are in `partial.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as _checkpoint
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from fused_remat import random
from fused_remat.autograd import deliver, engine, gradients
from fused_remat.autograd.sides import SideOutputs, sides_of
from fused_remat.execution import executor
from fused_remat.execution.observe import CHECKS, OBSERVERS, BlockRun, is_observed
from fused_remat.execution.prepare import BlockConfig, Execution, Functions
from fused_remat.graph.graph import Graph
from fused_remat.policies import EXACT_PRESETS, Policy, kept_names, offload_of
from fused_remat.steps.collective import in_context_parallel, is_dtensor
from fused_remat.steps.operations import warn

if TYPE_CHECKING:
    from fused_remat.autograd.accumulate import Accumulation
    from fused_remat.autograd.partial import Extras

_functorch = torch._C._functorch


class FusedRematBlock(torch.autograd.Function):
    """Any block, as profilers and autograd graphs name it; call `run_block`.

    It has no `setup_context`, which only torch.func needs (where blocks raise): with one, `apply`
    binds the arguments to forward's signature at every call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        execution: Execution,
        functions: Functions,
        accumulation: Accumulation | None,
        extras: Extras | None,
        rescue: Any | None,
        given: Sequence[Tensor | None] | None,
        *inputs: Tensor | None,
    ) -> Tensor:
        ctx.delivered, ctx.rescue = frozenset(), rescue
        if given is not None:  # inputs lack the tensors of `Delivery` nodes
            ctx.delivered = frozenset(itertools.chain(*execution.delivered))
        tensors = tuple(inputs[: len(execution.given)] if given is None else given)
        x = tensors[0]
        assert x is not None
        watch = None if extras is None or extras.record is None else extras.record.note
        try:
            out, kept = executor.forward(execution, tensors, functions, watch)
        except Exception as error:
            if rescue is None or not rescue.contains(error):
                raise
            raise BlockFailure from error
        if execution.call.graph.side_outputs:
            ctx.side, ctx.unused = {}, set()
            ctx.side_outputs, kept = sides_of(execution, kept)
        ctx.execution, ctx.functions, ctx.accumulation = execution, functions, accumulation
        ctx.extras = extras
        ctx.rounds = gradients.rounds(tensors) if x.dtype.itemsize == 2 else None
        ctx.set_materialize_grads(False)
        saves = execution.rereads if extras is None else extras.saves(execution.rereads, out)
        if functions:  # backward calls them again for their tensors
            names = execution.call.graph.tensors
            saves = [
                save and name not in functions for name, save in zip(names, saves, strict=True)
            ]
        saved = [t if save else None for t, save in zip(tensors, saves, strict=True)]
        ctx.dtypes = [None if t is None else t.dtype for t in (tensors if extras else saved)]
        saved += [out if execution.plan.keeps_output else None, *kept]
        moved: Sequence[tuple[str, Tensor]] = ()
        if extras is not None:
            saved, moved = extras.moved(ctx, saved)
        for observe in OBSERVERS if OBSERVERS and is_observed() else ():
            observe(BlockRun(execution, functions, tensors, out, kept, saves, moved))
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        execution: Execution = ctx.execution
        count, rescue, names = len(execution.given), ctx.rescue, execution.call.graph.tensors
        others: Sequence[None] = () if rescue is None else (None,) * rescue.count
        if dy is None:
            return (*_NONE, *(None,) * count, *others)
        if ctx.delivered:
            return (*_NONE, *deliver.remaining(ctx, dy), *others)
        if engine.is_rare(ctx, dy):
            grads = deliver.rare_grads(ctx, dy)
            return (*_NONE, *grads, *others[len(grads) - count :])
        saved = ctx.saved_tensors
        executor.check_unchanged(names, execution.given, ctx.dtypes, saved, dy)
        tensors, out, kept = saved[:count], saved[count], saved[count + 1 :]
        given: Mapping[str, Tensor | None] = {"output": dy}
        side = None
        if execution.call.graph.side_outputs:
            given, side = engine.output_grads(ctx, dy), engine.side_grads(ctx)
        try:
            grads = executor.backward(
                execution, tensors, kept, out, dy, ctx.functions, None, None, side
            )
        except Exception as error:
            rescued = deliver.rescued(ctx, error, given)
            if rescued is None:
                raise
            return (*_NONE, *rescued)
        gradients.finish(ctx, dy, grads, execution.needs_grad)
        return (*_NONE, *grads, *others)


#: Gradients of the arguments of `FusedRematBlock` before its tensors.
_NONE = (None,) * 6


class BlockFailure(Exception):
    """A block's forward raised the exception that is the cause of this one."""


def warn_of_kept_input(reason: str) -> None:
    """Warn, at the caller of an op, that a block inside a segment keeps its input."""
    warn(f"a block inside a segment keeps its input: {reason}")


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
    warn_of_input: Callable[[str], None] = warn_of_kept_input,
    rescue: Any | None = None,
) -> Tensor:
    """Run a block, differentiably, keeping what `policy` names for backward.

    `tensors` maps the names of `graph.tensors` to tensors: "input" (B, S, D), or (S, B, D) if
    `seq_first`, or heads (B, H, S, E); absent or None where the block has none. "seed" is drawn
    from torch's generator if the graph uses one and it is absent. What needs a gradient is decided
    here, from grad mode. Autocast changes nothing: for a graph of two dtypes see `graph.precision`.
    `accumulation`: where weight gradients are added. `warn_of_input` is called with the reason why
    a block inside a segment keeps its input. `rescue` (`layers.fallback.Rescue`) computes the
    gradients where backward raises an exception that nobody expected. Returns (B, S, width), in the
    layout and dtype of the input; with `graph.side_outputs`, a tuple of that and these.

    Raises: BlockFailure if there is a `rescue` and forward raises; RuntimeError inside torch.func
        transforms and context_parallel, and for DTensors.
    """
    functions = functions or {}
    if torch.compiler.is_compiling() or _chosen_by_operator():
        return _as_operator(
            graph, policy, tensors, functions, accumulation,
            backend=backend, seq_first=seq_first, preserve_strides=preserve_strides,
        )  # fmt: skip
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "fused_remat: a fused block cannot run inside torch.func transforms "
            "(grad, vjp, jacrev, vmap); use plain PyTorch operations there, or torch.autograd"
        )
    exact_names = _exact_names(graph, policy)
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
    call = _config(graph, policy, exact_names, needs, backend, seq_first, preserve_strides)
    checked = bool(CHECKS)
    execution, extras = call.prepare(given, fused=not checked), None
    if not call.needs_grad:
        y, kept = executor.forward(execution, given, functions)
        if graph.side_outputs:
            return (y, *sides_of(execution, kept)[0])  # type: ignore[return-value]
        return y
    if accumulation is not None:
        accumulation.check(tensors, call.needs_grad)
    segment = None if isinstance(policy, str) else policy.segment
    if segment is not None and graph.side_outputs:
        segment = None
        warn_of_input("it returns more than its output")
    if segment is not None or call.offload or checked:
        from fused_remat.autograd import partial

        extras, execution = partial.begin(segment, execution, given, _NODE, warn_of_input)
    if extras is not None or accumulation is not None or graph.uses_seed:
        rescue = None  # dropout was drawn, or gradients were added to: the step cannot be repeated
    roots: Sequence[Tensor] = rescue.roots if rescue is not None and rescue.count else []
    plain = accumulation is None and extras is None and not checked
    delivers = plain and execution.delivers and not engine.is_compiled()
    if delivers and not deliver.is_hooked(execution, given):
        if roots:  # whose gradients would wait for the block's own node
            rescue, roots = None, []
        late = frozenset(itertools.chain(*execution.delivered))
        rest = [None if n in late else t for n, t in zip(graph.tensors, given, strict=True)]
        out: Tensor = _apply(execution, functions, None, None, rescue, given, *rest, *roots)
        if (block := out.grad_fn) is not None:
            out = deliver.deliver(block, out, dict(zip(graph.tensors, given, strict=True)))
            return _with_sides(graph, block, out)  # type: ignore[no-any-return]
    out = _apply(execution, functions, accumulation, extras, rescue, None, *given, *roots)
    if graph.side_outputs:
        return _with_sides(graph, out.grad_fn, out)  # type: ignore[no-any-return]
    return out


def _with_sides(graph: Graph, block: Any, out: Tensor) -> Any:
    """Return the output of a block whose node is `block`, and its side outputs, if any."""
    if not graph.side_outputs:
        return out
    sides = block.side_outputs
    del block.side_outputs
    return SideOutputs.apply(graph.side_outputs, out, *sides)


def _as_operator(
    graph: Graph,
    policy: str | Policy,
    tensors: Mapping[str, Tensor | None],
    functions: Functions,
    accumulation: Accumulation | None,
    **options: Any,
) -> Tensor:
    """Run a block as an operator; one with functions, buffers or a traced graph in eager mode."""
    has_text = bool(graph.text) or torch.compiler.is_compiling()  # which raises without one
    if has_text and not (functions or graph.side_outputs) and accumulation is None:
        from fused_remat.autograd import operators

        return operators.run(graph, policy, tensors, **options)
    options |= {"functions": functions, "accumulation": accumulation}
    call = functools.partial(run_block, graph, policy, tensors, **options)
    if torch.compiler.is_compiling():
        from fused_remat.autograd import graph_break

        return graph_break.eagerly(call)  # type: ignore[no-any-return]
    with _disable_current_modes():  # its ATen operators, some in place, are not to be chosen from
        return call()


_unwrapped: Callable[[Tensor], Tensor] = _functorch.unwrap_if_dead
#: `FusedRematBlock.apply` without what it does for torch.func, for tensors that are unwrapped.
_apply = super(torch.autograd.Function, FusedRematBlock).apply


def _exact_names(graph: Graph, policy: str | Policy) -> frozenset[str] | None:
    """Return a user's names for a preset, from a table that may change; None without an entry."""
    names: Collection[str] | None = None
    if isinstance(policy, str) and policy in EXACT_PRESETS:
        names = EXACT_PRESETS[policy].get(graph.kind)
    elif not isinstance(policy, Policy):
        kept_names(policy, graph)  # which raises
    return None if names is None else frozenset(names)


@functools.lru_cache(maxsize=4096)
def _config(
    graph: Graph,
    policy: str | Policy,
    exact_names: frozenset[str] | None,  # a part of the key alone
    needs: tuple[bool, ...],
    backend: str,
    seq_first: bool,
    preserve_strides: bool,
) -> BlockConfig:
    """Return the call in which the tensors that `needs` marks need a gradient."""
    needs_grad = frozenset(itertools.compress(graph.tensors, needs))
    save, offload = kept_names(policy, graph), offload_of(policy)
    return BlockConfig(graph, save, needs_grad, backend, seq_first, preserve_strides, offload)


_ATTENTION = F.scaled_dot_product_attention
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _check_plain(names: Sequence[str], given: Sequence[Any]) -> None:
    """Raise RuntimeError for a DTensor."""
    for name, t in zip(names, given, strict=True):
        if is_dtensor(t):
            raise RuntimeError(
                f"fused_remat: {name} is a DTensor, {t.placements} on {t.device_mesh}; a block "
                "takes this rank's plain tensors: use to_local(), or divide the layer "
                "with fused_remat.parallel.LayerParallel"
            )


def is_block(node: object) -> bool:
    """Return whether an autograd node is that of a block."""
    return isinstance(node, _NODE)


#: Type of the autograd nodes of blocks.
_NODE: type = FusedRematBlock._backward_cls


_SELECTIVE = (_checkpoint._CachingTorchDispatchMode, _checkpoint._CachedTorchDispatchMode)


def _chosen_by_operator() -> bool:
    """Return whether selective checkpointing, which decides by operator, is active."""
    return torch._C._len_torch_dispatch_stack() > 0 and any(
        isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack()
    )

"""The description of a call, and what follows from it and from shapes alone, computed once.

A `BlockConfig` describes a computation, without tensors. An `Execution` adds everything that
follows from shapes, dtypes and the device: operations, chunks, schedule, widths. Both are cached,
and read no value of any tensor.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fused_remat.execution import choose
from fused_remat.execution.program import Programs
from fused_remat.graph.graph import Graph, sizes
from fused_remat.graph.schedule import Schedule, kept_bytes, schedule
from fused_remat.steps.activation import ACTIVATIONS, MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.chunk import Chunks, Layout, spans
from fused_remat.steps.fused import linear_norm_fwd, mlp_bwd, mlp_up_fwd
from fused_remat.steps.linear import Linear
from fused_remat.steps.mixture import ExpertsDown
from fused_remat.steps.modulation import GatedAdd, GatedLinear, ModulatedNorm
from fused_remat.steps.node import Node
from fused_remat.steps.norm import NORMS, HeadNorm, Norm
from fused_remat.steps.operations import OPERATIONS, Operations
from fused_remat.steps.replay import Replay
from fused_remat.steps.residual import Add, DrawMask
from fused_remat.steps.rotary import Rotary
from fused_remat.steps.streams import Concat, Join, Take

Shapes = Sequence[torch.Size | None]
#: The caller's own functions: of an activation, or of replays (`steps.replay`). One that has the
#: name of a tensor of the block makes that tensor again in backward, and the tensor is not kept.
Functions = Mapping[str, Callable[..., Tensor]]
#: Steps that do nothing but call PyTorch on tensors of the block, and the entries of tables that
#: they read: an entry of a user may depend on more.
_REPEATABLE = frozenset((
    Norm, Linear, Attention, MLPActivation, Add, DrawMask, Rotary, ModulatedNorm, GatedLinear,
    GatedAdd, HeadNorm, Concat, Join, Take,
))  # fmt: skip
_ENTRIES = (*NORMS.values(), *ACTIVATIONS.values())

#: Weights of fewer elements are not worth another node of autograd.
_DELIVERED = 1 << 18


@dataclass(frozen=True)
class BlockConfig:
    """A computation, without tensors."""

    graph: Graph  # the block; its `tensors` name what a call passes, inputs first
    save: frozenset[str]  # names that the policy keeps
    needs_grad: frozenset[str]  # inputs and params whose gradients are needed
    backend: str  # a registered name or "auto"
    seq_first: bool = False  # the inputs are (S, B, D) rather than (B, S, D)
    preserve_strides: bool = True  # the output keeps a dense input's strides; else it is contiguous
    offload: frozenset[str] = frozenset()  # names of what is copied to the host until backward

    def prepare(self, tensors: Sequence[Tensor | None], fused: bool = True) -> Execution:
        """Return the execution for these tensors.

        `fused=False`: each step is an operation of its own, as under deterministic algorithms, so
        that forward and backward of every policy run the same ones.
        """
        x = tensors[0]
        assert x is not None
        return prepare(self, x, [None if t is None else t.shape for t in tensors], fused)

    def named_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that are not None, by name; the inputs' batch first.

        That of a quantized weight is the shape of the weight, (out, in).
        """
        pairs = zip(self.graph.tensors, shapes, strict=True)
        named: dict[str, tuple[int, ...]] = {n: shape for n, shape in pairs if shape is not None}
        named |= self.graph.packed
        for name in self.graph.inputs if self.seq_first else ():
            seq_len, batch, width = named[name]
            named[name] = (batch, seq_len, width)
        return named

    def kept_bytes(self, tensors: Sequence[Tensor | None]) -> dict[str, int]:
        """Return the bytes that a call with these tensors keeps for backward, by name."""
        graph, shapes = self.graph, [None if t is None else t.shape for t in tensors]
        pairs = zip(graph.inputs, tensors, strict=False)
        dtypes = {name: t.dtype for name, t in pairs if t is not None}
        return kept_bytes(graph, self.save, self.needs_grad, self.named_shapes(shapes), dtypes)


@dataclass(frozen=True, eq=False)
class Execution(Layout):
    """A call with everything that follows from the shapes and dtypes of its tensors."""

    call: BlockConfig
    device: torch.device
    plan: Schedule  # of forward and backward
    shapes: Mapping[str, tuple[int, ...]]  # of the inputs, batch first
    # shapes of all tensors of the call, in its order
    given: tuple[torch.Size | None, ...]
    # for each tensor of the call, whether backward reads its values again
    rereads: tuple[bool, ...]
    fusions: frozenset[str]  # those of `graph.fusions` in the schedule
    # by names of steps of backward, the tensors whose gradients autograd gets, in order
    # within that step, and at last after it: of large weights, which are not held together
    delivers: Mapping[str, tuple[tuple[str, ...], ...]]
    programs: Programs | str = field(init=False)  # of passes, or why they run as steps alone

    def __post_init__(self) -> None:
        runs = [op.faster.get(self.ops.name) for op in OPERATIONS.values()]
        other = [x.run for x in runs if x and not x.run.__module__.startswith("fused_remat.")]
        steps = [node.label for node in self.call.graph.nodes if not _is_repeatable(node)]
        reason = "".join([f"{run.__qualname__} implements an operation" for run in other[:1]])
        reason = reason or "".join([f"{step} may do more than call PyTorch" for step in steps[:1]])
        object.__setattr__(self, "programs", reason or Programs(self))

    @functools.cached_property
    def delivered(self) -> tuple[tuple[str, ...], ...]:
        """Tensors whose gradients autograd gets together, in order."""
        return tuple([names for parts in self.delivers.values() for names in parts if names])

    @functools.cached_property
    def makes_output(self) -> bool:
        """True if the last step's own result is the output: ATen's norms write into no other."""
        last = self.call.graph.nodes[-1]
        is_norm = isinstance(last, Norm) and last.name == "output" and _is_repeatable(last)
        plain = self.ops.name == "eager" and self.compute is None and not self.call.seq_first
        return is_norm and plain and len(self.chunks.groups) == 1 and not self.plan.tile_forward

    def named(self, tensors: Sequence[Tensor | None]) -> Mapping[str, Tensor | None]:
        """Return tensors by name, inputs batch first and params in the dtypes that steps read."""
        graph = self.call.graph
        named = dict(zip(graph.tensors, tensors, strict=True))
        for name in graph.inputs if self.call.seq_first else ():
            x = named[name]
            named[name] = None if x is None else x.transpose(0, 1)
        for name, dtype in graph.casts.items():
            param = named[name]
            named[name] = None if param is None else param.to(dtype)
        return named

    def of_steps(self, functions: Functions) -> Functions:
        """Return the functions that steps call, without those that compute tensors of the call."""
        names = self.call.graph.tensors if functions else ()
        return {name: run for name, run in functions.items() if name not in names}

    def rebuilt(
        self, tensors: Sequence[Tensor | None], functions: Functions
    ) -> tuple[Sequence[Tensor | None], Functions]:
        """Return the call's tensors with those that functions compute, and others of these."""
        names = zip(self.call.graph.tensors, tensors, strict=True)
        made = [functions[name]() if name in functions else t for name, t in names]
        return made, self.of_steps(functions)

    @functools.cached_property
    def narrowed(self) -> dict[Any, Execution]:
        """Executions of the call with fewer gradients, by what a backward pass takes."""
        return {}

    @functools.cached_property
    def no_sides(self) -> tuple[None, ...]:
        """None for each side output."""
        return (None,) * len(self.call.graph.side_outputs)

    def of_sides(self, grads: Mapping[str, Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of side outputs in the order of these."""
        return [grads.get(name) for name in self.call.graph.side_outputs]

    def kept_chunks(self) -> Iterator[tuple[str, int]]:
        """Yield the name and tokens of every kept chunk, in the order of computation."""
        plan, lengths, seq_len = self.plan, self.lengths, self.chunks.seq_len
        for first, last in self.chunks.groups:
            count = last - first
            yield from ((name, count * lengths[name]) for name in plan.kept_group)
            for lo, hi in spans(count * seq_len, self.chunks.tile):
                yield from ((n, (hi - lo) * lengths[n] // seq_len) for n in plan.kept_tile)


_CHUNKS = threading.local()


@contextlib.contextmanager
def chunks_of(tokens: int) -> Iterator[None]:
    """Compute blocks about `tokens` tokens at a time, on any device, in this context."""
    before, _CHUNKS.tokens = getattr(_CHUNKS, "tokens", None), tokens
    try:
        yield
    finally:
        _CHUNKS.tokens = before


def prepare(
    call: BlockConfig,
    like: Tensor,
    shapes: Shapes,
    fused: bool = True,
    dtype: torch.dtype | None = None,
) -> Execution:
    """Return the execution for `shapes` on the device of `like`, in `dtype` or that of `like`."""
    dtype = dtype or like.dtype
    ops = choose.ops_for(call.backend, like, call.graph.compute or dtype)
    # Under deterministic algorithms every policy takes the same operation for a step.
    fuses = fused and not torch.are_deterministic_algorithms_enabled()
    asked = getattr(_CHUNKS, "tokens", None)
    tokens, elements = asked, (0, 0)
    if not asked:
        tokens = choose.chunk_tokens(like.device, dtype)
        elements = choose.CPU_ELEMENTS if like.is_cpu else choose.DEVICE_ELEMENTS
    return _prepare(call, ops, tokens, elements, like.device, fuses, dtype, tuple(shapes))


@functools.lru_cache(maxsize=4096)
def _prepare(
    call: BlockConfig,
    ops: Operations,
    chunk_tokens: int,
    elements: tuple[int, int],
    device: torch.device,
    fuses: bool,
    dtype: torch.dtype,
    shapes: tuple[torch.Size | None, ...],
) -> Execution:
    graph, named = call.graph, call.named_shapes(shapes)
    batch, seq_len = sizes(named["input"])
    lengths = graph.lengths(named)
    # Of one stream; a group of sequences has as many tokens of each.
    longest = max([lengths[n.name] for n in graph.nodes if graph.source[n.name] in graph.inputs])
    if any(node.per_batch for node in graph.nodes):
        chunk_tokens = batch * longest
    widths = graph.widths(named)
    cheap = all(isinstance(node, Add | DrawMask | Norm | Rotary) for node in graph.nodes)
    # A function that is replayed may have wider activations than those that are known.
    if cheap or not any(isinstance(node, Replay) for node in graph.nodes):
        chunk_tokens = max(chunk_tokens, elements[not cheap] // max(1, *widths.values()))
    if device.type == "cpu" and elements[0]:
        shares = [n.spec.experts // n.spec.top_k for n in graph.nodes if isinstance(n, ExpertsDown)]
        chunk_tokens *= min(choose.CPU_EXPERTS, max([1, *shares]))
    chunks = Chunks.of(batch, seq_len, chunk_tokens, longest)
    fuses = fuses and not any(node.chooses for node in graph.nodes)
    fusions = _fusions(ops, graph, widths, graph.compute or dtype, device) if fuses else frozenset()
    plan = schedule(graph, call.save, call.needs_grad, chunks.tiled, fusions)
    rereads = {*plan.kept_inputs, *plan.saved_params}
    return Execution(
        ops=ops,
        chunks=chunks,
        needs_grad=call.needs_grad,
        widths=widths,
        lengths=lengths,
        dtypes=graph.dtypes(dtype),
        compute=graph.compute,
        **_given_once(ops, graph, call.needs_grad),
        call=call,
        device=device,
        plan=plan,
        shapes={name: named[name] for name in graph.inputs},
        given=shapes,
        rereads=tuple([name in rereads for name in graph.tensors]),
        fusions=fusions,
        delivers=_delivers(graph, plan, call.needs_grad, named, widths, chunks),
    )


def _given_once(
    ops: Operations, graph: Graph, needs_grad: frozenset[str]
) -> dict[str, frozenset[str]]:
    """Return `Layout.summed` and `Layout.loose`: empty for "eager", which gains nothing."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes if ops.name != "eager" else ():
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    names = {name for name, nodes in readers.items() if len(nodes) == 1} - {*graph.side_outputs}
    once = [node for node in graph.nodes if node.name in names]
    summed = [
        n.name for n in once if isinstance(n, Linear) and not (n.mask or n.residual)
        if not needs_grad.isdisjoint(n.biases)
    ]  # fmt: skip
    loose = [
        n.name for n in once if isinstance(n, Rotary) and n.values
        if isinstance(readers[n.name][0], Attention)
    ]  # fmt: skip
    return {"summed": frozenset(summed), "loose": frozenset(loose)}


def _delivers(
    graph: Graph,
    plan: Schedule,
    needs_grad: frozenset[str],
    shapes: Mapping[str, tuple[int, ...]],
    widths: Mapping[str, int],
    chunks: Chunks,
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return `Execution.delivers`: empty for several groups, which all add to each gradient.

    Gradients of small weights take less memory than what a pass computes anyway.
    """
    sizes = {name: math.prod(shapes[name]) for name in graph.params if name in needs_grad}
    total, rows = sum(sizes.values()), chunks.batch * chunks.seq_len
    if len(chunks.groups) > 1 or total < max(_DELIVERED, rows * max(widths.values())):
        return {}
    last: dict[str, int] = {}
    for i, step in enumerate(plan.backward):
        for each in plan.tile_backward if step.kind == "tiles" else (step,):
            last.update(dict.fromkeys(each.needs_grad.intersection(sizes), i))
    pending, delivers = list[str](), dict[str, tuple[tuple[str, ...], ...]]()

    def taken() -> tuple[str, ...]:
        names = tuple(pending) if 8 * sum([sizes[n] for n in pending]) >= total else ()
        pending[:] = () if names else pending
        return names

    for i, step in enumerate(plan.backward):
        names, inner = [name for name, at in last.items() if at == i], list[tuple[str, ...]]()
        for part in step.node.in_order(names) if step.node and step.kind == "backward" else ():
            pending += part
            names = [name for name in names if name not in part]
            inner.append(taken())
        pending += names
        after = taken() if step.kind == "backward" else ()
        *inner, late = [part for part in inner if part] or [()]
        if late and after:
            inner.append(late)
        elif late:  # alone it would keep the graph for little else
            after = (*late, *pending)
            pending.clear()
        parts = (*inner, after if i + 1 < len(plan.backward) else ())  # the block gives the last
        if step.node and any(parts):
            delivers[step.node.name] = parts
    return delivers


def _is_repeatable(node: Node) -> bool:
    """Return whether equal dtypes, shapes and strides let a step make the same calls."""
    entry: Any = None
    if isinstance(node, Norm):
        entry = NORMS[node.spec.kind]
    elif isinstance(node, MLPActivation):
        entry = ACTIVATIONS[node.act]
    return type(node) in _REPEATABLE and (entry is None or entry in _ENTRIES)


def _fusions(
    ops: Operations,
    graph: Graph,
    widths: Mapping[str, int],
    dtype: torch.dtype,
    device: torch.device,
) -> frozenset[str]:
    """Return the `graph.fusions` that the backend has; products are in `dtype`."""
    acts = {node.act for node in graph.nodes if isinstance(node, MLPActivation)}
    found = set()
    for act in acts:
        if choose.has_faster(ops, mlp_bwd, (act, dtype, device)):
            found.add(f"mlp_bwd {act}")
        if choose.has_faster(ops, mlp_up_fwd, (act, dtype, device)):
            found.add(f"linear_act {act}")
    norms = {(n.spec.kind, widths[n.name]) for n in graph.nodes if isinstance(n, Norm)}
    if norms and all(
        choose.has_faster(ops, linear_norm_fwd, (k, dtype, device, n)) for k, n in norms
    ):
        found.add("linear_norm")
    return frozenset(found)

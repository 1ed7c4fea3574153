"""`explain`: what each fused block of a model runs, keeps and rebuilds, and why."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fused_remat.execution.choose import DEFAULTS, choose, unsupported_reason
from fused_remat.execution.executor import program_text
from fused_remat.execution.observe import DECISIONS, LOSSES, OBSERVERS, TRACERS, BlockRun, LossRun
from fused_remat.execution.prepare import Execution
from fused_remat.graph.schedule import Step
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.layers.record import record_of
from fused_remat.report.step import arguments_of, restored, tensors_in, trace_layers
from fused_remat.steps.chunk import Chunk, Pass
from fused_remat.steps.fused import MlpBackward, mlp_bwd
from fused_remat.steps.node import Node
from fused_remat.steps.operations import OPERATIONS, Function, Operations
from fused_remat.tracing.discovery import repeated_layers
from fused_remat.tracing.layer import description_if_converted

#: What a layer's own forward keeps, by what the layer ran as.
_RAN: dict[str | None, str] = {
    None: "",  # no gradients
    "checkpoint": " under checkpointing, which keeps its arguments",
    "plain": ", which keeps all its activations",
}


@dataclass
class BlockExplanation:
    """One call of a fused block, or of a layer that did not run as one.

    Attributes:
        name: qualified name of the layer, or "(op)" for a functional op outside any layer.
        title: the kind of block, its backend, and the chunks it works in; or the layer's class and
            what ran instead of a block.
        kept: names kept for backward.
        forward: (name, implementation) of every step of the first chunk.
        backward: every step; "compute x" rebuilds x, "backward x" computes its gradients. Inside a
            segment, "compute input" runs the preceding blocks again.
        reason: why it was not a block, or "".
        offloaded: the kept names that wait in the host's memory.
        code: the programs of both passes as Python, if `explain` was called with `code=True`; a
            comment with the reason where a pass has none.
    """

    name: str
    title: str = ""
    kept: tuple[str, ...] = ()
    forward: list[tuple[str, str]] = field(default_factory=list)
    backward: tuple[str, ...] = ()
    reason: str = ""
    offloaded: tuple[str, ...] = ()
    code: str = ""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.title}"]
        if self.reason or not self.forward:
            return "\n".join([*lines, *[f"  not fused: {self.reason}"] * bool(self.reason)])
        lines.append(f"  keeps: {', '.join(self.kept) or 'nothing'}")
        if self.offloaded:
            lines.append(f"  offloads to the host: {', '.join(self.offloaded)}")
        width = max((len(name) for name, _ in self.forward), default=0)
        lines.append("  forward:")
        for name, implementation in self.forward:
            kept = "kept" if name in self.kept else ""
            lines.append(f"    {name:<{width}}  {kept:<6}{implementation}")
        if self.backward:
            shown = [step.replace("compute ", "rebuild ") for step in self.backward]
            lines.append("  backward: " + ", ".join(shown))
        return "\n".join([*lines, *["", self.code] * bool(self.code)])


class Explanation(list[BlockExplanation]):
    """All calls in order, then fused layers that were not called; prints as text."""

    def __str__(self) -> str:
        first: dict[str, str] = {}
        blocks = [
            b if first.setdefault(b.code, b.name) == b.name or not b.code
            else replace(b, code=f"# its programs are those of {first[b.code]}")
            for b in self
        ]  # fmt: skip
        return "\n".join(map(str, blocks)) or "no layer ran as a block: convert the model first"

    __repr__ = __str__


def explain(model: nn.Module, *inputs: Any, code: bool = False, **kwargs: Any) -> Explanation:
    """Run `model(*inputs, **kwargs)` once and explain what each fused block in it does, and why.

    For every call: what is kept for backward, which implementation runs each step of the forward
    pass and why no faster one does, and what backward rebuilds. For a fused layer that does not run
    as a block: what ran instead, and the reason. For a stock layer: the block that `convert` would
    make of it. Print the result. Torch's random state, buffers and `.grad` are restored afterwards,
    and no training call is counted. Layers that are traced at their first call are traced by
    another run before.

    code: also print the programs of both passes (`docs/how-it-works.md`), two functions of Python
        that later passes run instead of the steps. Each block runs both passes again for that.

    Raises: whatever the model raises.

    >>> import torch
    >>> from fused_remat import FusedRematLayer
    >>> layer = FusedRematLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True, policy="lean")
    >>> print(explain(layer, torch.randn(2, 16, 64)))  # doctest: +NORMALIZE_WHITESPACE
    FusedRematLayer: encoder_prenorm, backend eager, 1 × 2 sequences
      keeps: input, norm1.mean, norm1.rstd, attn, attn.lse, norm2.mean, norm2.rstd
      forward:
        norm1         ATen's native_layer_norm
        qkv           ATen's addmm
        attn    kept  ATen's flash kernel for CPUs
        mid           ATen's addmm
        norm2         ATen's native_layer_norm
        up            ATen's addmm
        act           pointwise, eager
        output        ATen's addmm
      backward: rebuild mid, rebuild norm2, rebuild up, rebuild act, backward output, ...
    """
    inputs, kwargs = arguments_of(model, inputs, kwargs)
    tensors = list(tensors_in([inputs, kwargs]))
    trace_layers(model, inputs, kwargs)
    with _Recorder(model, code) as recorder, restored(model, tensors):
        model(*inputs, **kwargs)
    return recorder.explanation()


class _Noted(Operations):
    """A backend's operations that record which implementation ran for each call, and why."""

    def __init__(self, ops: Operations) -> None:
        super().__init__(ops.name, ops.__getitem__)
        self.reasons: list[str] = []

    def __getitem__(self, function: Function) -> Function:  # type: ignore[override]
        def noted(*args: Any, **kwargs: Any) -> Any:
            chosen = choose(function, self.name, OPERATIONS[function].key(*args, **kwargs))
            self.reasons.append(chosen.reason(*args, **kwargs))
            return self.serve(function)(*args, **kwargs)

        return noted


class _Recorder:
    """Observes one run of a model in this thread, and collects an explanation of every call."""

    def __init__(self, model: nn.Module, code: bool) -> None:
        self._stock, self._code = repeated_layers(model), code
        self._names = {m: n or type(m).__name__ for n, m in model.named_modules()}
        #: The explanations of running layers that are not blocks, and their records' order before.
        self._others: dict[nn.Module, tuple[BlockExplanation, int]] = {}
        self._uncalled = {m: None for m in self._names if isinstance(m, FusedLayer)}
        self._found = Explanation()
        self._inside: list[str] = []  # names of the layers that are running
        self._blocks: dict[Pass, tuple[BlockExplanation, Chunk]] = {}  # with its first chunk
        self._steps: list[tuple[BlockExplanation, Node, list[str]]] = []
        self._calls_of_stock: list[tuple[BlockExplanation, nn.Module, Any, Any]] = []
        self._thread = threading.get_ident()
        self._exit = contextlib.ExitStack()
        self._is_writing = False  # the programs of a block, whose passes run for that

    def __enter__(self) -> _Recorder:
        lists: tuple[list[Any], ...] = (TRACERS, DECISIONS, OBSERVERS, LOSSES)
        own = self._trace, self._decided, self._kept, self._loss
        for observers, observer in zip(lists, own, strict=True):
            observers.append(observer)
            self._exit.callback(observers.remove, observer)
        stock = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in self._stock]
        before = [m.register_forward_pre_hook(self._enter) for m in self._uncalled]
        after = [m.register_forward_hook(self._leave, always_call=True) for m in self._uncalled]
        for hook in (*stock, *before, *after):
            self._exit.callback(hook.remove)
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.close()

    def explanation(self) -> Explanation:
        """Return the explanations, with the implementations that the steps reported."""
        for block, layer, args, kwargs in self._calls_of_stock:
            block.reason = description_if_converted(layer, args, kwargs)
        for block, node, reasons in self._steps:
            parts = ("; ".join(dict.fromkeys(reasons)), node.description[0])
            text = ", ".join(filter(None, parts))
            names = [n for n in node.makes if n not in (*node.stats, *node.transients)]
            block.forward += [(name, text) for name in names]
        for layer in self._uncalled:
            self._added(self._names[layer], f"{type(layer).__name__}, not called")
        return self._found

    def _note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call of a stock layer."""
        block = self._added(self._names[layer], f"{type(layer).__name__}, not converted")
        self._calls_of_stock.append((block, layer, args, kwargs))

    def _added(self, name: str, title: str, reason: str = "") -> BlockExplanation:
        self._found.append(BlockExplanation(name, title, reason=reason))
        return self._found[-1]

    def _enter(self, layer: FusedLayer, *_: Any) -> None:
        self._uncalled.pop(layer, None)
        self._inside.append(self._names[layer])

    def _leave(self, layer: FusedLayer, *_: Any) -> None:
        self._inside.pop()
        if layer in self._others:
            block, order = self._others.pop(layer)
            record = record_of(layer)
            ran = _RAN[record.last if record.order > order else None]
            block.title = f"{type(layer).__name__}, {layer._owner} forward{ran}"

    def _decided(self, layer: nn.Module, reason: str) -> None:
        if threading.get_ident() == self._thread:
            kind = type(layer).__name__
            title = f"{kind}, its own head and loss"  # of a layer: see `_leave`
            block = self._added(self._names.get(layer, kind), title, reason)
            self._others[layer] = block, record_of(layer).order

    def _trace(self, step: Step, chunk: Chunk) -> None:
        is_other = threading.get_ident() != self._thread or self._is_writing
        if step.node is None or step.kind != "compute" or is_other:
            return
        if chunk.owner not in self._blocks:
            block = _explained(chunk, self._inside[-1] if self._inside else "(op)")
            self._blocks[chunk.owner] = block, chunk
            self._found.append(block)
        block, first = self._blocks[chunk.owner]
        if chunk is first or (chunk.parent is first and chunk.lo == 0):  # one chunk for all
            chunk.ops = ops = _Noted(first.owner.ops)
            self._steps.append((block, step.node, ops.reasons))

    def _loss(self, run: LossRun) -> None:
        """Note a loss whose gradients were computed in forward."""
        if threading.get_ident() == self._thread:
            title = f"linear_cross_entropy, backend {run.backend}, gradients in forward"
            block = self._added(self._inside[-1] if self._inside else "(op)", title)
            block.kept, block.forward = tuple(run.kept), [("output", run.implementation)]
            block.backward = ("multiply by the gradient of the loss",)

    def _kept(self, run: BlockRun) -> None:
        """Note what a block offloads, and that a block inside a segment drops its input."""
        blocks = [b for p, (b, _) in self._blocks.items() if p.execution is run.execution]
        if not blocks or threading.get_ident() != self._thread:
            return
        block, name = blocks[-1], run.call.graph.inputs[0]
        block.offloaded = tuple(dict.fromkeys(name for name, _ in run.offloaded))
        if not run.saves[0] and name in block.kept:
            block.kept = tuple(kept for kept in block.kept if kept != name)
            block.backward = (f"compute {name}", *block.backward)
        if self._code and not block.code:
            self._is_writing = True
            block.code = "# no program: a function of the caller runs in it"
            if not run.execution.of_steps(run.functions):
                block.code = program_text(run.execution, run.tensors)
            self._is_writing = False


def _explained(chunk: Chunk, name: str) -> BlockExplanation:
    """Return the explanation of a chunk's call without the steps of its forward."""
    execution = chunk.owner.execution
    assert isinstance(execution, Execution)
    plan, chunks, kind = execution.plan, execution.chunks, execution.call.graph.kind
    groups = f"{-(-chunks.batch // chunks.group)} × {chunks.group} sequences"
    tiles = f", then tiles of {chunks.tile} tokens" if chunks.tiled else ""
    low, stream = execution.compute, chunk.owner.dtype
    dtypes = f", products in {str(low)[6:]}, stream in {str(stream)[6:]}" if low else ""
    return BlockExplanation(
        name,
        f"{kind}, backend {_backend(chunk)}{dtypes}, {groups}{tiles}",
        kept=plan.kept_inputs + plan.saved + (("output",) if plan.keeps_output else ()),
        backward=tuple(_shown(step, chunk) for step in plan.steps("backward")),
    )


def _shown(step: Step, chunk: Chunk) -> str:
    """Return a step of backward with the implementation that runs, except for a rebuild."""
    if step.node is None or step.kind != "backward":
        return str(step)
    implementation, owner = step.node.description[1], chunk.owner
    if isinstance(step.node, MlpBackward):
        key = step.node.act.act, owner.execution.compute or owner.dtype, owner.device
        implementation = choose(mlp_bwd, chunk.ops.name, key).reason()
    return f"{step} ({implementation})" if implementation else str(step)


def _backend(chunk: Chunk) -> str:
    """Return the backend's name and, if it is not the device's default, why."""
    x, compute = chunk.owner.tensors["input"], chunk.owner.execution.compute
    if x is None or chunk.ops.name != "eager":
        return chunk.ops.name
    default = DEFAULTS.get(x.device.type, "eager")
    reason = unsupported_reason(default, x.device, compute or x.dtype)
    return f"eager ({reason})" if reason else "eager"

"""Runs one forward and backward of a model, observes it layer by layer, and restores the model."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from fused_remat.execution.observe import BlockRun
from fused_remat.layers import FusedLayer
from fused_remat.layers.fallback import attributes_as
from fused_remat.layers.record import Ran, Record, noted_apart, record_of
from fused_remat.report.allocations import AllocationTrace, Span
from fused_remat.report.saved import Saved, SavedBytes
from fused_remat.tracing.layer import TracedLayer

_LAYERS = (FusedLayer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_CONTAINERS = (nn.ModuleList, nn.Sequential)
_MOST_RUNS = 3  # until layers are traced
_FORWARD, _BACKWARD = "forward", "backward"
_OUTSIDE = (-1, 0)  # the position of what runs outside all layers


@dataclass(frozen=True)
class Step:
    """An observed step. Layers are indices into those that were watched, -1 outside them."""

    saved: list[Saved]
    predicted: dict[int, dict[str, int]]  # as in `SavedBytes`
    calls: list[int]  # how often each layer was called
    # What each layer's last training call ran as, None without any, and why it was not a block's.
    ran: list[tuple[Ran | None, str]]
    advice: str  # on the layers' policies
    # Consecutive; the first label is None, the others are (pass, layer, number of its call).
    spans: list[Span]
    ready: list[int]  # for each span, bytes of parameters whose gradients existed at its end

    @property
    def peak(self) -> int:
        """Most bytes in the step, above what was allocated before it."""
        return max(span.peak for span in self.spans)

    @functools.cached_property
    def peaks(self) -> dict[tuple[str, int], int]:
        """By pass and layer, the most bytes above those when one of the layer's calls began."""
        peaks: dict[tuple[str, int], int] = {}
        position, base = None, 0
        for span in self.spans:
            if span.label != position:
                position, base = span.label, span.start
            which, layer = position[:2] if position is not None else (_FORWARD, -1)
            peaks[which, layer] = max(peaks.get((which, layer), 0), span.peak - base)
        return peaks


def run_step(
    model: nn.Module,
    layers: list[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    accumulates: bool = False,
    on_block: Callable[[int, BlockRun], None] | None = None,
) -> Step:
    """Run `model(*args, **kwargs)` and backward from the sum of its output, watching `layers`.

    Args:
        loss: function of the model's output that replaces the sum.
        accumulates: whether gradients of an earlier step exist and are added to. If not, there are
            no gradients at the start.
        on_block: as in `SavedBytes`.
    """
    with torch.inference_mode(False), torch.enable_grad(), contextlib.ExitStack() as stack:
        if any(t.grad_fn is not None for t in tensors_in([args, kwargs])):
            args, kwargs = tree_map_only(  # intermediate results become leaves: backward ends there
                Tensor,
                lambda t: t if t.grad_fn is None else t.detach().requires_grad_(),
                (args, kwargs),
            )
        inputs = list(tensors_in([args, kwargs]))
        targets = [t for t in (*model.parameters(), *inputs) if t.requires_grad]
        device = device_of(model, inputs)
        trace_layers(model, args, kwargs)
        record = SavedBytes(weights_of(model), inputs, on_block)
        stack.enter_context(restored(model, inputs))
        if accumulates:
            for t in targets:
                t.grad = torch.zeros_like(t)
                if isinstance(getattr(t, "main_grad", None), Tensor):
                    t.main_grad = torch.zeros_like(t.main_grad)  # type: ignore[attr-defined]
        trace = stack.enter_context(AllocationTrace(device))
        watch = stack.enter_context(_Watch(layers, record, trace))
        with record:
            output = model(*args, **kwargs)
            sums = losses_of(output, loss)
        del output
        saved = record.named(sums)
        # Gradients that exist from the start never become ready, and blocks do not accumulate
        # into parameters that have hooks.
        trained = [p for p in model.parameters() if p.requires_grad]
        watch.backward(() if accumulates else trained)
        if sums and targets and accumulates:
            torch.autograd.backward(sums, inputs=targets)
        elif sums and targets:
            grads = torch.autograd.grad(sums, targets, allow_unused=True)
            del grads
        notes = [record_of(m) if isinstance(m, FusedLayer) else Record() for m in layers]
        ran = [(note.last, note.reason) for note in notes]
        advice = max((note.advice for note in notes), default="")
    return Step(saved, record.predicted, watch.calls, ran, advice, trace.spans, watch.ready())


def trace_layers(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a model whose layers are traced until no layer is traced any more.

    What tracing takes is no part of the step that is reported. Some layers set attributes at their
    first call, and are traced again at the second.
    """
    layers = [m for m in model.modules() if isinstance(m, TracedLayer)]
    inputs = list(tensors_in([args, kwargs]))
    for _ in range(_MOST_RUNS if layers else 0):
        before = [layer.last_trace for layer in layers]
        with restored(model, inputs):
            model(*args, **kwargs)
        if [layer.last_trace for layer in layers] == before:
            break


def losses_of(output: Any, loss: Callable[[Any], Tensor] | None) -> list[Tensor]:
    """Return the scalars that backward starts from: the loss, or the sums of the output's tensors.

    Raises: TypeError or ValueError if `loss` does not return a scalar with a gradient; TypeError if
        there is no loss and no floating-point tensor in the output.
    """
    if loss is None:
        tensors = [t for t in tensors_in(output) if t.is_floating_point()]
        if not tensors:
            raise TypeError(
                f"the model returned {type(output).__name__} without a floating-point tensor; "
                "backward needs one in the output (in tensors, lists, tuples, mappings or "
                "dataclasses)"
            )
        return [t.sum() for t in tensors if t.requires_grad]
    value = loss(output)
    if not isinstance(value, Tensor):
        raise TypeError(f"loss= must return a tensor, got {type(value).__name__}")
    if value.numel() != 1 or not value.requires_grad:
        raise ValueError(
            "loss= must return a scalar that requires a gradient, got a tensor of shape "
            f"{tuple(value.shape)} with requires_grad={value.requires_grad}"
        )
    return [value]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in nested lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name, None))


def weights_of(model: nn.Module) -> Iterator[Tensor]:
    """Yield parameters, buffers, and the scales and codes of quantized weights."""
    yield from (*model.parameters(), *model.buffers())
    for module in model.modules():
        yield from tensors_in(getattr(module, "meta", None))  # HQQ's
    for p in model.parameters():
        owner: Any = p  # bitsandbytes' weight, then the states of its 4 bits
        while owner is not None:
            names = ("SCB", "absmax", "code", "offset")
            yield from tensors_in([getattr(owner, name, None) for name in names])
            owner = getattr(owner, "quant_state", getattr(owner, "state2", None))


def arguments_of(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call: a lone dict is keyword arguments if they fit the model."""
    if kwargs or len(inputs) != 1 or not isinstance(inputs[0], Mapping):
        return inputs, kwargs
    batch = dict(inputs[0])
    try:
        inspect.signature(model.forward).bind(**batch)
    except TypeError:
        return inputs, kwargs
    return (), batch


def batch_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as the positional and keyword arguments of a call."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def device_of(model: nn.Module, inputs: Any = ()) -> torch.device:
    """Return the first device of parameters, buffers and inputs that is not the CPU, or the CPU."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


@contextlib.contextmanager
def restored(model: nn.Module, inputs: list[Tensor]) -> Iterator[None]:
    """Restore random state, training modes, buffers and `.grad` afterwards, also after an error.

    Training calls inside are not counted. Inside, transformers' checkpointing is not reentrant:
    reentrant backward ignores `autograd.grad`, and keeps the same bytes.
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, n, b, b.detach().clone()) for m in model.modules()
               for n, b in m._buffers.items() if b is not None]  # fmt: skip
    leaves = [t for t in (*model.parameters(), *inputs) if t.is_leaf]
    names = ("grad", "main_grad")
    grads = [(t, name, getattr(t, name)) for t in leaves for name in names if hasattr(t, name)]
    tensors = (*model.parameters(), *model.buffers(), *inputs)
    cuda = {t.device.index for t in tensors if t.is_cuda}
    noted = [m for m in model.modules() if isinstance(m, FusedLayer) or "_record" in vars(m)]
    with (
        torch.random.fork_rng(devices=sorted(cuda)),
        noted_apart(noted),
        attributes_as(list(_not_reentrant(model))),
    ):
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                buffer.data.copy_(value)  # .data: graphs that saved the buffer stay valid
            for t, name, grad in grads:
                if getattr(t, name, None) is not grad:
                    setattr(t, name, grad)


def _not_reentrant(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Yield replacements of the reentrant checkpoint functions that transformers has set."""
    name = "_gradient_checkpointing_func"
    for module in model.modules():
        run = vars(module).get(name)
        if isinstance(run, functools.partial) and run.keywords.get("use_reentrant", not run.args):
            options = {**run.keywords, "use_reentrant": False}
            yield module, name, functools.partial(run.func, *run.args, **options)


class _Watch:
    """Hooks that set the record's current layer and mark the trace."""

    def __init__(self, layers: list[nn.Module], record: SavedBytes, trace: AllocationTrace):
        self.calls = [0] * len(layers)
        self._layers, self._record, self._trace = layers, record, trace
        self._stack = [_OUTSIDE]  # (layer, number of its call) of the calls that are running
        self._pass, self._running = _FORWARD, _OUTSIDE
        self._exit = contextlib.ExitStack()  # removes the hooks
        self._marks = 0
        self._ready: list[tuple[int, int]] = []  # (span, bytes) of gradients that became ready

    def __enter__(self) -> _Watch:
        with self._exit:  # a scripted module takes no hooks
            for i, layer in enumerate(self._layers):
                self._attach(layer, functools.partial(self._before, i))
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.close()

    def _hold(self, handle: RemovableHandle) -> None:
        self._exit.callback(handle.remove)

    def _attach(self, layer: nn.Module, before: Callable[..., None]) -> None:
        compiled: Any = layer._compiled_call_impl
        if compiled is None:
            add = layer.register_forward_pre_hook
            self._hold(add(before, prepend=True, with_kwargs=True))
            self._hold(layer.register_forward_hook(self._after, always_call=True))
            return

        def call(*args: Any, **kwargs: Any) -> Any:  # hooks would become part of the graph
            before(layer, args, kwargs)
            output = None
            try:
                output = compiled(*args, **kwargs)
                return output
            finally:
                self._after(layer, args, output)

        self._exit.enter_context(attributes_as([(layer, "_compiled_call_impl", call)]))

    def backward(self, parameters: Iterable[Tensor]) -> None:
        """Backward begins; note when the gradients of `parameters` become ready."""
        self._pass = _BACKWARD
        self._mark(_OUTSIDE)

        def hook(nbytes: int, _: Tensor) -> None:
            self._ready.append((self._marks, nbytes))

        for p in parameters:
            self._hold(p.register_hook(functools.partial(hook, p.nbytes)))

    def ready(self) -> list[int]:
        """For each span, bytes of gradients that existed at its end."""
        totals = [0] * (self._marks + 1)
        for span, nbytes in self._ready:
            totals[span] += nbytes
        return list(itertools.accumulate(totals))

    def _mark(self, position: tuple[int, int]) -> None:
        self._running = position
        self._marks += 1
        self._trace.mark((self._pass, *position))

    def _before(self, layer: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._pass is not _FORWARD:  # a checkpoint runs the layer again in backward
            return
        self.calls[layer] += 1
        position = (layer, self.calls[layer])
        self._stack.append(position)
        inputs = list(tensors_in([args, kwargs]))
        self._record.layer = layer
        self._record.claim(inputs)
        for t in inputs:
            if t.grad_fn is not None:  # its hook runs after all of the layer's own nodes
                self._hold(t.register_hook(lambda _: self._leave(position)))
        self._mark(position)

    def _leave(self, position: tuple[int, int]) -> None:
        if self._running == position:
            self._mark(_OUTSIDE)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._pass is not _FORWARD or len(self._stack) == 1:
            return
        position = self._stack.pop()
        for t in tensors_in(output):
            if t.requires_grad:
                self._hold(t.register_hook(lambda _: self._mark(position)))
        self._record.layer = self._stack[-1][0]
        self._mark(self._stack[-1])


def choose_layers(model: nn.Module, patterns: Iterable[str] | None) -> dict[str, nn.Module]:
    """Return the modules to watch, by name; see `layers` of `memory_report`."""
    modules = dict(model.named_modules())
    opaque = {n: why for n, m in modules.items() if (why := _why_opaque(m)) is not None}
    if patterns is None:
        layers = _repeated(model, modules)
        chosen = {next((o for o in opaque if _is_within(name, o)), name) for name in layers}
    else:
        chosen = _matching(list(modules), patterns)
    outermost: list[str] = []
    for name in modules:  # parents come before their children
        if name in chosen and not any(_is_within(name, other) for other in outermost):
            outermost.append(name)
    for name in outermost:
        for other, why in opaque.items():
            if other != name and _is_within(name, other):
                raise ValueError(
                    f"{name!r} is inside {other!r}, {why}, which does not call its submodules; "
                    f"choose {other!r} to see its activations"
                )
    return {name: modules[name] for name in outermost}


def _why_opaque(module: nn.Module) -> str | None:
    """Return what `module` is, if hooks on its submodules do not run or change what it does."""
    if isinstance(module, FusedLayer):
        return "a fused layer"
    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
        return "a compiled module"  # by name: torch.compile's class is slow to import
    return None


def _repeated(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """Return transformer layers; without any, members of containers; else the children."""
    layers = {name for name, module in modules.items() if isinstance(module, _LAYERS)}
    if layers:
        return layers
    runs = {n for n, m in modules.items() if type(m).forward is not nn.Module.forward}
    parents = {name: modules[name.rpartition(".")[0]] for name in modules if name}
    contained = {name for name, parent in parents.items() if isinstance(parent, _CONTAINERS)}
    return runs & contained or runs & {name for name, _ in model.named_children()} or {""}


def _matching(names: list[str], patterns: Iterable[str]) -> set[str]:
    chosen: set[str] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        matches = {n for n in names if n == pattern or (n and fnmatch.fnmatchcase(n, pattern))}
        if not matches:
            shown = ", ".join(repr(n) for n in names if n) or "none"
            raise ValueError(f"no module matches {pattern!r}; modules: {shown}")
        chosen |= matches
    return chosen


def _is_within(name: str, other: str) -> bool:
    return name == other or not other or name.startswith(other + ".")

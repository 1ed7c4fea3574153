"""One forward and backward of a model, watched layer by layer, after which it is as before."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from fused_remat.execution.observe import OBSERVERS, BlockRun
from fused_remat.layers import FusedLayer
from fused_remat.report.allocations import AllocationTrace, Span
from fused_remat.report.saved import Saved, SavedRecord

_LAYERS = (FusedLayer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_CONTAINERS = (nn.ModuleList, nn.Sequential)
_FORWARD, _BACKWARD = "forward", "backward"
_OUTSIDE = (-1, 0)  # the place of what is in no layer


@dataclass(frozen=True)
class Step:
    """What was measured; layers are indices into those that were watched, -1 outside them.

    Attributes:
        saved, predicted: as `SavedRecord` has them.
        calls: by layer.
        peaks: by pass ("forward" or "backward") and layer.
        peak: of the whole step, above what was allocated before.
        spans: stretches of the step, in order; labels are None at first, then (pass, layer, how
            often the layer was called by then).
        ready: for each span, bytes of parameters whose gradients were there at its end.
    """

    saved: list[Saved]
    predicted: dict[int, dict[str, int]]
    calls: list[int]
    peaks: dict[tuple[str, int], int]
    peak: int
    spans: list[Span]
    ready: list[int]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors in nested lists, tuples, mappings and dataclasses.

    >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": [(torch.tensor(2),), "c"]})]
    [1, 2]
    """
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


def choose_layers(model: nn.Module, patterns: Iterable[str] | None) -> dict[str, nn.Module]:
    """The modules to watch by name; see `memory_report`.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    >>> list(choose_layers(model, None)), list(choose_layers(model, ["1.*"]))
    (['0', '1'], ['1.0', '1.1'])
    """
    modules = dict(model.named_modules())
    if patterns is None:
        chosen = _default_layers(model, modules)
    else:
        chosen = _matching(list(modules), patterns)
    outermost: list[str] = []
    for name in modules:  # parents come before their children
        if name in chosen and not any(_is_within(name, other) for other in outermost):
            outermost.append(name)
    for name in outermost:
        for other, module in modules.items():
            why = _why_opaque(module)
            if why is not None and other != name and _is_within(name, other):
                raise ValueError(
                    f"{name!r} is inside {other!r}, a {why}, whose submodules are not called; "
                    f"its activations are in the row of {other!r}"
                )
    return {name: modules[name] for name in outermost}


def _default_layers(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    opaque = [name for name, module in modules.items() if _why_opaque(module) is not None]
    found = _repeated(model, modules)
    return {next((o for o in opaque if _is_within(name, o)), name) for name in found}


def _why_opaque(module: nn.Module) -> str | None:
    """What `module` is, if hooks on its submodules would not be called, or change what it does."""
    if isinstance(module, FusedLayer):
        return "fused layer"
    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
        return "compiled module"  # torch.compile's class is slow to import
    return None


def _repeated(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    callable_ = {name for name, module in modules.items() if _has_forward(module)}
    found = {name for name, module in modules.items() if isinstance(module, _LAYERS)}
    if not found:
        found = callable_ & {
            name
            for name in modules
            if name and isinstance(modules[name.rpartition(".")[0]], _CONTAINERS)
        }
    return found or callable_ & {name for name, _ in model.named_children()} or {""}


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _matching(names: list[str], patterns: Iterable[str]) -> set[str]:
    if isinstance(patterns, str):
        patterns = [patterns]
    found: set[str] = set()
    for pattern in patterns:
        mine = {n for n in names if n == pattern or (n and fnmatch.fnmatchcase(n, pattern))}
        if not mine:
            shown = ", ".join(repr(n) for n in names if n) or "none"
            raise ValueError(f"no module matches {pattern!r}; modules: {shown}")
        found |= mine
    return found


def _is_within(name: str, other: str) -> bool:
    return name == other or not other or name.startswith(other + ".")


@contextlib.contextmanager
def restored(model: nn.Module, inputs: Iterable[Tensor], device: torch.device) -> Iterator[None]:
    """Random state, modes, buffers and `.grad` are afterwards as before, whatever happens inside.

    >>> norm, x = nn.BatchNorm1d(2), torch.ones(3, 2)
    >>> with restored(norm, [x], x.device):
    ...     _ = norm(x)
    >>> norm.running_mean
    tensor([0., 0.])
    """
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(m, n, b, b.detach().clone()) for m in model.modules()
               for n, b in m._buffers.items() if b is not None]  # fmt: skip
    leaves = [t for t in (*model.parameters(), *inputs) if t.is_leaf]
    grads = [(t, t.grad) for t in leaves]
    wide = [(t, t.main_grad) for t in leaves if hasattr(t, "main_grad")]
    cuda = {t.device.index for t in (*leaves, *inputs) if t.device.type == "cuda"}
    if device.type == "cuda" and device.index is not None:
        cuda.add(device.index)
    with torch.random.fork_rng(devices=sorted(cuda)):
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer
                buffer.data.copy_(value)  # .data: graphs that saved the buffer stay valid
            for t, grad in grads:
                if t.grad is not grad:
                    t.grad = grad
            for t, main_grad in wide:
                t.main_grad = main_grad


class _Watch:
    """Hooks on the chosen layers: tell a record who runs, and a trace when."""

    def __init__(self, layers: list[nn.Module], record: SavedRecord, trace: AllocationTrace):
        self.calls = [0] * len(layers)
        self._layers, self._record, self._trace = layers, record, trace
        self._stack = [_OUTSIDE]
        self._pass = _FORWARD
        self._running = _OUTSIDE
        self._handles: list[RemovableHandle] = []
        self._compiled: list[tuple[nn.Module, Any]] = []
        self._marks = 0
        self._arrived: list[tuple[int, int]] = []

    def __enter__(self) -> _Watch:
        try:
            for i, layer in enumerate(self._layers):
                self._attach(layer, self._before(i))
        except Exception:  # a scripted module takes no hooks
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for layer, compiled in self._compiled:
            layer._compiled_call_impl = compiled

    def _attach(self, layer: nn.Module, before: Callable[..., None]) -> None:
        compiled: Any = layer._compiled_call_impl
        if compiled is None:
            add = layer.register_forward_pre_hook
            self._handles.append(add(before, prepend=True, with_kwargs=True))
            self._handles.append(layer.register_forward_hook(self._after, always_call=True))
            return

        def call(*args: Any, **kwargs: Any) -> Any:  # hooks would become part of the graph
            before(layer, args, kwargs)
            output = None
            try:
                output = compiled(*args, **kwargs)
                return output
            finally:
                self._after(layer, args, output)

        self._compiled.append((layer, compiled))
        layer._compiled_call_impl = call

    def backward(self, parameters: Iterable[Tensor] = ()) -> None:
        """The forward is over; note when gradients of `parameters` come."""
        self._pass = _BACKWARD
        self._mark(_OUTSIDE)
        for p in parameters:
            self._handles.append(p.register_hook(self._arrives(p.nbytes)))

    def _arrives(self, nbytes: int) -> Callable[[Tensor], None]:
        return lambda _: self._arrived.append((self._marks, nbytes))

    def ready(self) -> list[int]:
        """By span, bytes of gradients that were there at its end."""
        totals = [0] * (self._marks + 1)
        for span, nbytes in self._arrived:
            totals[span] += nbytes
        return list(itertools.accumulate(totals))

    def _mark(self, place: tuple[int, int]) -> None:
        self._running = place
        self._marks += 1
        self._trace.mark((self._pass, *place))

    def _before(self, layer: int) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._pass is not _FORWARD:  # a checkpoint runs the layer again
                return
            self.calls[layer] += 1
            place = (layer, self.calls[layer])
            self._stack.append(place)
            given = list(tensors_in([args, kwargs]))
            self._record.layer = layer
            self._record.claim(given)
            for t in given:
                if t.grad_fn is not None:  # runs after all of the layer's own nodes
                    self._handles.append(t.register_hook(lambda _: self._left(place)))
            self._mark(place)

        return before

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._pass is not _FORWARD or len(self._stack) == 1:
            return
        place = self._stack.pop()
        for t in tensors_in(output):
            if t.requires_grad:
                self._handles.append(t.register_hook(lambda _: self._mark(place)))
        self._record.layer = self._stack[-1][0]
        self._mark(self._stack[-1])

    def _left(self, place: tuple[int, int]) -> None:
        if self._running == place:
            self._mark(_OUTSIDE)


def _peaks(spans: list[Span]) -> dict[tuple[str, int], int]:
    """For each pass and layer, the peak above what was held when one of its calls began."""
    peaks: dict[tuple[str, int], int] = {}
    place, base = None, 0
    for span in spans:
        if span.label != place:
            place, base = span.label, span.start
        which, layer = place[:2] if place is not None else (_FORWARD, -1)
        peaks[which, layer] = max(peaks.get((which, layer), 0), span.peak - base)
    return peaks


def _device(tensors: Iterable[Tensor]) -> torch.device:
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


def _detached(value: Any) -> Any:
    """An intermediate result as a leaf, so that backward ends there."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


#: Called with the index of the layer that runs, -1 outside, and what its block does.
OnBlock = Callable[[int, BlockRun], None]


def run_step(
    model: nn.Module,
    layers: list[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    accumulates: bool = False,
    on_block: OnBlock | None = None,
) -> Step:
    """Run `model(*args, **kwargs)` and the backward of its sum, watching `layers`.

    Args:
        loss: of the model's output, in place of the sum.
        accumulates: gradients are added to those of a step before, which are there from the start;
            else there are none before.

    >>> layer = nn.Linear(4, 4)
    >>> step = run_step(layer, [layer], (torch.randn(2, 4),), {})
    >>> [(saved.name, saved.nbytes) for saved in step.saved]
    [('AddmmBackward0.mat1', 32)]
    """
    with torch.inference_mode(False), torch.enable_grad():
        if any(t.grad_fn is not None for t in tensors_in([args, kwargs])):
            args, kwargs = tree_map(_detached, (args, kwargs))
        inputs = list(tensors_in([args, kwargs]))
        state = [*model.parameters(), *model.buffers()]
        targets = [t for t in (*model.parameters(), *inputs) if t.requires_grad]
        device = _device([*state, *inputs])
        record, trace = SavedRecord(state, inputs), AllocationTrace(device)
        with restored(model, inputs, device), contextlib.ExitStack() as stack:
            if accumulates:
                for t in targets:
                    t.grad = torch.zeros_like(t)
                    if isinstance(getattr(t, "main_grad", None), Tensor):
                        t.main_grad = torch.zeros_like(t.main_grad)  # type: ignore[attr-defined]
            stack.enter_context(trace)
            watch = stack.enter_context(_Watch(layers, record, trace))
            if on_block is not None:
                stack.enter_context(_telling(on_block, record))
            with record:
                output = model(*args, **kwargs)
                sums = losses_of(output, loss)
            del output
            saved = record.named(sums)
            # Gradients that are there from the start do not come; blocks refuse to add to those of
            # parameters with hooks.
            watch.backward(
                () if accumulates else [p for p in model.parameters() if p.requires_grad]
            )
            if sums and targets and accumulates:
                torch.autograd.backward(sums, inputs=targets)
            elif sums and targets:
                grads = torch.autograd.grad(sums, targets, allow_unused=True)
                del grads
        peak = max(span.peak for span in trace.spans)
        peaks = _peaks(trace.spans)
        return Step(saved, record.predicted, watch.calls, peaks, peak, trace.spans, watch.ready())


@contextlib.contextmanager
def _telling(on_block: OnBlock, record: SavedRecord) -> Iterator[None]:
    def observe(invocation: BlockRun) -> None:
        on_block(record.layer, invocation)

    OBSERVERS.append(observe)
    try:
        yield
    finally:
        OBSERVERS.remove(observe)


def losses_of(output: Any, loss: Callable[[Any], Tensor] | None) -> list[Tensor]:
    """What backward begins at: the loss, or the sums of the output.

    Raises: TypeError or ValueError if the loss is not one.
    """
    if loss is None:
        return sums_of(output)
    value = loss(output)
    if not isinstance(value, Tensor):
        raise TypeError(f"loss= returns a tensor, got {type(value).__name__}")
    if value.numel() != 1 or not value.requires_grad:
        shape = tuple(value.shape)
        grad = "a" if value.requires_grad else "no"
        raise ValueError(f"loss= returns a scalar, got one of shape {shape} with {grad} gradient")
    return [value]


def sums_of(output: Any) -> list[Tensor]:
    """Sums of the floating-point tensors that have a gradient."""
    found = [t for t in tensors_in(output) if t.is_floating_point()]
    if not found:
        raise TypeError(
            f"the model returned {type(output).__name__} without a floating-point tensor in it "
            "(searched: tensors, lists, tuples, mappings, dataclasses)"
        )
    return [t.sum() for t in found if t.requires_grad]

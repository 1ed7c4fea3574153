"""Measures a training step with every fused layer keeping its inputs alone: the base of a plan.

Predicts the memory of the optimizer's step as well.
"""

from __future__ import annotations

import dataclasses
import statistics
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fused_remat.autograd.function import is_block
from fused_remat.execution.observe import BlockRun
from fused_remat.layers import FusedLayer
from fused_remat.layers.converted import stages
from fused_remat.layers.fallback import attributes_as
from fused_remat.layers.record import Ran, record_of
from fused_remat.planner.calibration import Example, seconds_of
from fused_remat.planner.chain import Moment
from fused_remat.report.step import (
    Step,
    device_of,
    losses_of,
    restored,
    run_step,
    tensors_in,
    weights_of,
)


@dataclass(frozen=True)
class LayerExample:
    """A call of a fused layer."""

    layer: str  # qualified name
    kind: str  # of its block, or the layer's class
    names: tuple[str, ...]  # that the layer's policy accepts
    # The call to run on its own, or None if the layer did not run as a block. Calls with equal
    # tensors and graphs share one.
    example: Example | None
    follows: bool  # its first input is the output of the preceding call
    ran: Ran = "block"
    reason: str = ""  # why it was not a block
    kept: int = 0  # bytes of all calls if it is no block; of its first call


class MeasuredStep(NamedTuple):
    """One measured step."""

    # Of fused layers in order, without blocks whose activations an outer checkpoint drops, and
    # those that backward does not reach.
    calls: tuple[LayerExample, ...]
    moments: tuple[Moment, ...]  # in order of time
    kept: int  # bytes between forward and backward, in the entire model
    seconds: float  # of forward and backward
    resting: dict[str, int]  # bytes of the entire step, by what they hold


def measure_step(
    model: nn.Module,
    layers: dict[str, FusedLayer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Tensor] | None,
    accumulates: bool,
    timed: bool,
) -> MeasuredStep:
    """Run the step a few times to measure its calls, its memory and, if `timed`, its time."""
    modules: list[nn.Module] = list(layers.values())
    capture = _Capture(layers)
    # Not by the setter: policies of layers that were not traced yet are put back unchecked.
    # Policies of a plan are not the preset under which a stage runs again.
    plain = [(m, "__class__", m.stage_of) for m in stages(model)]
    plain += [(record_of(layer), "stage", "") for layer in layers.values()]
    with attributes_as([*[(layer, "_policy", "full") for layer in layers.values()], *plain]):
        first = run_step(model, modules, args, kwargs, loss, accumulates, capture)
        resting = _resting(model, [args, kwargs], accumulates, capture.examples.values())
        step = run_step(model, modules, args, kwargs, loss, accumulates)
        if first.calls != step.calls:
            changed = [n for n, a, b in zip(layers, first.calls, step.calls, strict=True) if a != b]
            raise ValueError(
                f"{', '.join(map(repr, changed))} was not called as often in one step as in the "
                "next; a plan needs layers that run in every step, so turn off layer dropping"
            )
        seconds = _time_step(model, args, kwargs, loss) if timed else 0.0
    calls, index = _kept_calls(capture, step, layers)
    kept = sum(saved.nbytes for saved in step.saved)
    return MeasuredStep(calls, tuple(_moments(step, index)), kept, seconds, resting)


def _time_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Tensor] | None,
) -> float:
    """Return the median seconds of a forward and backward."""
    inputs = list(tensors_in([args, kwargs]))
    targets = [t for t in (*model.parameters(), *inputs) if t.requires_grad and t.is_leaf]
    device = device_of(model, inputs)

    def run() -> None:
        sums = losses_of(model(*args, **kwargs), loss)
        if sums and targets:
            torch.autograd.grad(sums, targets, allow_unused=True)

    with torch.enable_grad(), restored(model, inputs):
        return statistics.median(seconds_of(run, device, rounds=3))


def predict_optimizer(optimizer: Optimizer) -> tuple[int, int]:
    """Predict the bytes of an optimizer's state after its first step, and the most a step adds.

    The second number does not include parameters, gradients and state. A copy of the optimizer
    steps on fake tensors of the same sizes; the optimizer itself is not touched.

    Raises: ValueError if no copy can be made from its parameter groups and it has no state yet.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            groups = [
                {**group, "params": [nn.Parameter(torch.empty_like(p)) for p in params]}
                for group in optimizer.param_groups
                if (params := [p for p in group["params"] if p.requires_grad])
            ]
            fake = type(optimizer)(groups)  # type: ignore[call-arg]
            for group in fake.param_groups:
                for p in group["params"]:
                    p.grad = torch.empty_like(p)
            fake.step()
            with LiveBytes() as live:
                fake.step()
        return max(state_bytes(optimizer), state_bytes(fake)), live.most
    except Exception as error:
        if state := state_bytes(optimizer):
            return state, 0
        raise ValueError(
            f"cannot predict the state of {type(optimizer).__name__} before its first step "
            f"({type(error).__name__}: {error}); call its step() once before planning"
        ) from error


def state_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of the tensors in an optimizer's current state."""
    storages = [
        t.untyped_storage() for t in tree_iter(dict(optimizer.state)) if isinstance(t, Tensor)
    ]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


class _Capture:
    """Collects the calls of fused layers while a step runs."""

    def __init__(self, layers: dict[str, FusedLayer]) -> None:
        self._layers = [*layers.items()]
        self.calls: dict[int, list[LayerExample]] = {}  # by the layer's index
        self.examples: dict[Any, Example] = {}
        self._last: StorageWeakRef | None = None

    def __call__(self, layer: int, run: BlockRun) -> None:
        if layer < 0:
            return
        x = run.tensors[0]
        assert x is not None
        # Leaves as they are: an activation function reads those that it captured.
        tensors = tuple(t if t is None or t.is_leaf else t.detach() for t in run.tensors)
        example = Example(run.call, tensors, run.functions)
        example = self.examples.setdefault(example.key, example)
        follows = is_block(x.grad_fn) and StorageWeakRef(x.untyped_storage()) == self._last
        self._last = StorageWeakRef(run.output.untyped_storage())
        name, module = self._layers[layer]
        # A layer that is traced at its first call has its names by now.
        names = module._example().names
        call = LayerExample(name, run.call.graph.kind, names, example, follows)
        self.calls.setdefault(layer, []).append(call)


def _kept_calls(
    capture: _Capture, step: Step, layers: dict[str, FusedLayer]
) -> tuple[tuple[LayerExample, ...], dict[tuple[int, int], int]]:
    """Return the calls that keep something for backward, and their indices by (layer, its call)."""
    calls: list[LayerExample] = []
    index: dict[tuple[int, int], int] = {}
    alone = {s.layer for s in step.saved if s.fused and s.name == "input" and s.by == {s.layer}}
    labels = [span.label for span in step.spans if span.label is not None and span.label[1] >= 0]
    reached = {(i, n) for which, i, n in labels if which == "backward"}
    skipped = False
    for layer, number in dict.fromkeys((i, n) for which, i, n in labels if which == "forward"):
        call = None
        blocks = capture.calls.get(layer, [])
        if len(blocks) == step.calls[layer] and layer in step.predicted:
            call = blocks[number - 1]
        elif not blocks:
            call = _other_call(layer, number, step, layers)
        if call is None or (layer, number) not in reached:
            # A checkpoint wraps it, another call keeps nothing, or the loss does not need it.
            skipped = True
            continue
        follows = call.follows and not skipped and layer in alone
        skipped = False
        index[layer, number] = len(calls)
        calls.append(dataclasses.replace(call, follows=follows))
    return tuple(calls), index


def _other_call(
    i: int, number: int, step: Step, layers: dict[str, FusedLayer]
) -> LayerExample | None:
    """Return a call of a layer that is no block, or None without a gradient.

    If there are layers inside, those count.
    """
    name, layer = [*layers.items()][i]
    ran, reason = step.ran[i]
    if ran is None or any(isinstance(m, FusedLayer) for m in layer.modules() if m is not layer):
        return None
    kept = sum(saved.nbytes for saved in step.saved if saved.layer == i) if number == 1 else 0
    return LayerExample(name, type(layer).__name__, (), None, False, ran, reason, kept)


def _moments(step: Step, index: dict[tuple[int, int], int]) -> Iterator[Moment]:
    """Yield the spans of a step as moments of its calls."""
    alive = 0
    for span, ready in zip(step.spans, step.ready, strict=True):
        which, layer, count = span.label or ("forward", -1, 0)
        call, backward = index.get((layer, count), -1), which == "backward"
        if backward and call >= 0:
            alive = call + 1
        yield Moment(call, backward, span.start, span.peak, alive, ready)
        if call >= 0:
            alive = call if backward else call + 1


def _resting(
    model: nn.Module, inputs: Any, accumulates: bool, examples: Iterable[Example]
) -> dict[str, int]:
    """Return the bytes on the device during the entire step; our own examples do not count."""
    device = device_of(model, inputs)
    counted: dict[int, int] = {}

    def new(tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages on the device that were not counted before."""
        storages = [t.untyped_storage() for t in tensors if t.device.type == device.type]
        more = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in counted}
        counted.update(more)
        return sum(more.values())

    trained = [p for p in model.parameters() if p.requires_grad and p.device.type == device.type]
    resting = {
        "buffers": new(model.buffers()),
        "parameters": new(weights_of(model)),
        "inputs": new(tensors_in(inputs)),
        "gradients": sum(_buffer(p).nbytes for p in trained) if accumulates else 0,
    }
    if device.type == "cuda":
        new(t for example in examples for t in example.tensors if t is not None)
        new(p.grad for p in model.parameters() if p.grad is not None)
        new(_buffer(p) for p in model.parameters())
        held = torch.cuda.memory_allocated(device)
        resting["others"] = max(0, held - sum(counted.values()))
    return {name: nbytes for name, nbytes in resting.items() if nbytes}


def _buffer(p: Tensor) -> Tensor:
    """Return a tensor like the buffer that a parameter's gradient is added to."""
    main_grad = getattr(p, "main_grad", None)
    return main_grad if isinstance(main_grad, Tensor) else p


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that operators returned, and the most at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        arguments = {t.untyped_storage()._cdata for t in tensors}
        for storage in {t.untyped_storage() for t in tree_iter(result) if isinstance(t, Tensor)}:
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self._known and key not in arguments:
                self._known.add(key)
                self.now += nbytes
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, key, nbytes)
        return result

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes

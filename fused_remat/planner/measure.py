"""A step of a model, measured with every fused layer keeping its inputs alone: a plan's base."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fused_remat.autograd.function import is_block
from fused_remat.execution.observe import BlockRun
from fused_remat.layers import FusedLayer
from fused_remat.planner.calibration import Example
from fused_remat.planner.chain import Moment
from fused_remat.report.step import Step, losses_of, run_step, tensors_in
from fused_remat.report.step import restored as restored_after

_ROUNDS = 3


@dataclass(frozen=True)
class MeasuredCall:
    """A call of a fused layer.

    Attributes:
        layer, kind: the layer's qualified name, the kind of its block.
        names: that the layer's policy takes.
        example: to run it alone; calls with equal tensors and graphs share one.
        follows: whether its first input is the output of the call before.
    """

    layer: str
    kind: str
    names: tuple[str, ...]
    example: Example
    follows: bool


@dataclass(frozen=True)
class MeasuredStep:
    """What one step was seen to do.

    Attributes:
        calls: of fused layers, in order; those whose activations an outer checkpoint drops, or that
            backward does not come to, are not among them.
        moments: in order of time.
        kept: bytes kept between forward and backward, in all of the model.
        seconds: of forward and backward.
        resting: bytes that are there all the time, by what they are.
    """

    calls: tuple[MeasuredCall, ...]
    moments: tuple[Moment, ...]
    kept: int
    seconds: float
    resting: dict[str, int]


class _Capture:
    """Collects the calls of layers while a step runs."""

    def __init__(self, layers: dict[str, FusedLayer]) -> None:
        self._layers = [(name, layer._example().names) for name, layer in layers.items()]
        self.found: list[tuple[int, MeasuredCall]] = []  # with the layer's index
        self._examples: dict[Any, Example] = {}
        self._last: StorageWeakRef | None = None

    def examples(self) -> list[Example]:
        return list(self._examples.values())

    def __call__(self, layer: int, invocation: BlockRun) -> None:
        if layer < 0:
            return
        call, tensors = invocation.call, invocation.tensors
        x = tensors[0]
        assert x is not None
        given = tuple(None if t is None else t.detach() for t in tensors)
        example = Example(call, given, invocation.functions)
        example = self._examples.setdefault(example.key, example)
        follows = is_block(x.grad_fn) and StorageWeakRef(x.untyped_storage()) == self._last
        self._last = StorageWeakRef(invocation.output.untyped_storage())
        measured = MeasuredCall(
            self._layers[layer][0], call.graph.kind, self._layers[layer][1], example, follows
        )
        self.found.append((layer, measured))


def device_of(model: nn.Module, inputs: Any = ()) -> torch.device:
    """The first device that is not the CPU, of parameters, buffers and inputs."""
    tensors = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
    return next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))


@contextlib.contextmanager
def base_policies(layers: dict[str, FusedLayer]) -> Iterator[None]:
    """Every layer keeps its inputs alone, for the time of the block."""
    before = {name: layer.policy for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.policy = "full"
        yield
    finally:
        for name, layer in layers.items():
            layer.policy = before[name]


def measure_step(
    model: nn.Module,
    layers: dict[str, FusedLayer],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Tensor] | None,
    accumulates: bool,
    timed: bool,
) -> MeasuredStep:
    """Run the step a few times: to see its calls, its memory and, if `timed`, its time."""
    modules: list[nn.Module] = list(layers.values())
    capture = _Capture(layers)
    with base_policies(layers):
        first = run_step(model, modules, args, kwargs, loss, accumulates, capture)
        resting = _resting(model, [args, kwargs], accumulates, capture.examples())
        step = run_step(model, modules, args, kwargs, loss, accumulates)
        if first.calls != step.calls:
            changed = [n for n, a, b in zip(layers, first.calls, step.calls, strict=True) if a != b]
            raise ValueError(
                f"{', '.join(map(repr, changed))} was not called as often in one step as in the "
                "next: a plan is for layers that run in every step (turn off what drops them)"
            )
        seconds = time_step(model, args, kwargs, loss) if timed else 0.0
    calls, index = _kept_calls(capture, step)
    kept = sum(saved.nbytes for saved in step.saved)
    return MeasuredStep(calls, tuple(_moments(step, index)), kept, seconds, resting)


def _kept_calls(
    capture: _Capture, step: Step
) -> tuple[tuple[MeasuredCall, ...], dict[tuple[int, int], int]]:
    """Those whose activations autograd holds; where each is, by (layer, count of its calls)."""
    calls: list[MeasuredCall] = []
    index: dict[tuple[int, int], int] = {}
    count: dict[int, int] = {}
    alone = {s.layer for s in step.saved if s.fused and s.name == "input" and s.by == {s.layer}}
    labels = (span.label for span in step.spans if span.label is not None)
    reached = {tuple(place) for which, *place in labels if which == "backward"}
    times = Counter(layer for layer, _ in capture.found)
    skipped = False
    for layer, call in capture.found:
        count[layer] = count.get(layer, 0) + 1
        held = layer in step.predicted and times[layer] == step.calls[layer]
        if not held or (layer, count[layer]) not in reached:
            # A checkpoint is around it, other calls keep nothing, or the loss does not need it.
            skipped = True
            continue
        follows = call.follows and not skipped and layer in alone
        skipped = False
        index[layer, count[layer]] = len(calls)
        calls.append(dataclasses.replace(call, follows=follows))
    return tuple(calls), index


def _moments(step: Step, index: dict[tuple[int, int], int]) -> Iterator[Moment]:
    """The spans of a step, by call."""
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
    model: nn.Module, inputs: Any, accumulates: bool, examples: list[Example]
) -> dict[str, int]:
    """What is on the device all the time; of what else a CUDA device holds, not our examples."""
    device = device_of(model, inputs)
    counted: dict[int, int] = {}

    def new(tensors: Iterable[Tensor]) -> int:
        """Bytes of storages on the device that were not counted yet."""
        storages = [t.untyped_storage() for t in tensors if t.device.type == device.type]
        found = {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in counted}
        counted.update(found)
        return sum(found.values())

    trained = [p for p in model.parameters() if p.requires_grad and p.device.type == device.type]
    resting = {
        "parameters": new(model.parameters()),
        "buffers": new(model.buffers()),
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
    """A tensor like the one that the gradient of a parameter is added to."""
    main_grad = getattr(p, "main_grad", None)
    return main_grad if isinstance(main_grad, Tensor) else p


def time_step(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Tensor] | None = None,
    rounds: int = _ROUNDS,
) -> float:
    """Seconds of a forward and backward as the model is: the median of a few, after one."""
    device = device_of(model, [args, kwargs])
    inputs = list(tensors_in([args, kwargs]))
    targets = [t for t in (*model.parameters(), *inputs) if t.requires_grad and t.is_leaf]

    def once() -> float:
        _synchronize(device)
        begin = time.perf_counter()
        output = model(*args, **kwargs)
        sums = losses_of(output, loss)
        if sums and targets:
            torch.autograd.grad(sums, targets, allow_unused=True)
        _synchronize(device)
        return time.perf_counter() - begin

    with torch.enable_grad(), restored_after(model, inputs, device):
        return statistics.median([once() for _ in range(rounds + 1)][1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""One recording of a layer's forward, with hooks on submodule calls and autocast."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.tracing.isolation import forward_only, run_with, unchanged
from fused_remat.tracing.recorder import Recorder, hollow
from fused_remat.tracing.state import shared_by
from fused_remat.tracing.values import Sample, Untraceable, leaves, map_tree

_ACTIVE = threading.local()
_CALL = nn.Module.__call__
_ENTER, _EXIT, _ENABLED = (
    torch.autocast.__enter__, torch.autocast.__exit__, torch.is_autocast_enabled
)  # fmt: skip
_patch = threading.Lock()


def record(
    layer: nn.Module, forward: Callable[..., Any], sample: Sample, autocast: bool
) -> tuple[Recorder, list[int | None], Any]:
    """Record `forward`, a method of `layer`, on a sample.

    `autocast`: whether autocast seems to be on, so that code that tests for it is noticed.

    Returns: the recorder, the numbers of the arguments, and the result with `Ref`s.
    """
    given = leaves(sample.arguments)
    device = next(leaf.device for leaf in given if isinstance(leaf, Tensor))
    recorder = Recorder(layer, sample.named, device, autocast)
    numbers: list[int | None] = []
    for i, (leaf, is_active) in enumerate(zip(given, sample.active, strict=True)):
        number = recorder.numbers.get(id(leaf)) if isinstance(leaf, Tensor) else None
        if number is None and isinstance(leaf, Tensor):
            number = recorder.new(leaf)
        numbers.append(number)
        if number is not None and i != sample.bounds:
            recorder.roots[number] = frozenset(("argument",))
        if number is not None and is_active:
            recorder.live.add(number)

    def watched(**arguments: Any) -> Any:
        tensors = {name: recorder.values[i] for i, name in recorder.sources.items()}
        with unchanged([*map(vars, layer.modules()), arguments], shared_by(layer), tensors):
            return forward(**arguments)

    with _recording(recorder), forward_only():
        result = run_with(layer, watched, sample.named, sample.arguments)
    if recorder.foreign:
        raise Untraceable(recorder.foreign)
    if type(map_tree(result, lambda leaf: leaf)) is not type(result):
        raise Untraceable(f"it returns {type(result).__name__}")
    encoded = recorder.encoded(result)
    for number in recorder.live:
        recorder.values[number] = hollow(recorder.values[number])
    recorder.views.clear()
    return recorder, numbers, encoded


@contextlib.contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    patches = (
        (nn.Module, "__call__", _CALL, _call),
        (torch, "is_autocast_enabled", _ENABLED, _is_enabled),
        (torch.autocast, "__enter__", _ENTER, _enter), (torch.autocast, "__exit__", _EXIT, _exit),
    )  # fmt: skip
    with _patch:
        _ACTIVE.recorder = recorder
        for owner, name, _, new in patches:
            setattr(owner, name, new)
        try:
            with recorder:
                yield
        finally:
            _ACTIVE.recorder = None
            recorder.results.clear()  # whose callbacks hold the recorder
            for owner, name, old, _ in patches:
                setattr(owner, name, old)


def _active() -> Recorder | None:
    """Return the recorder of this thread, if it is recording."""
    return getattr(_ACTIVE, "recorder", None)


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    recorder = _active()
    if recorder is None or module not in recorder.paths or module is recorder.layer:
        return _CALL(module, *args, **kwargs)
    return recorder.call(module, _CALL, args, kwargs)


def _enter(self: torch.autocast) -> Any:
    recorder = _active()
    if recorder is None:
        return _ENTER(self)
    if self.device == recorder.device.type:
        recorder.trouble("it switches autocast")
    return self


def _exit(self: torch.autocast, *raised: Any) -> Any:
    return _EXIT(self, *raised) if _active() is None else False


def _is_enabled(*device: str) -> bool:
    recorder = _active()
    return _ENABLED(*device) if recorder is None else recorder.autocast

"""Runs of a layer that are recorded: calls of submodules, functions and autocast in them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.layers.fallback import attributes_as
from fused_remat.tracing.experts import dense_run
from fused_remat.tracing.isolation import run_unchanged
from fused_remat.tracing.recorder import SWITCHES, Recorder, hollow
from fused_remat.tracing.results import described
from fused_remat.tracing.sizes import MATH, Loop, traced
from fused_remat.tracing.values import Sample, Untraceable, leaves, map_tree

#: One recording at a time: it replaces names of PyTorch and of the layer's own Python modules.
_lock = threading.RLock()


def _length(value: Any) -> int:
    """Return the length of a value, with the formula of a tensor's."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)


_MISSING = object()
_CALL = nn.Module.__call__
_ENTER, _EXIT, _ENABLED = (
    torch.autocast.__enter__, torch.autocast.__exit__, torch.is_autocast_enabled
)  # fmt: skip


def record(
    layer: nn.Module, forward: Callable[..., Any], sample: Sample, autocast: bool
) -> Recorder:
    """Return the recording of a call; `autocast`: whether autocast seems on."""
    recorder = Recorder(layer, sample, autocast)
    with _lock, _recording(recorder):
        result = run_unchanged(layer, forward, sample.named, sample.arguments)
    if recorder.foreign:
        raise Untraceable(recorder.foreign)
    if type(map_tree(result, lambda leaf: leaf)) is not type(result):
        raise Untraceable(f"it returns {type(result).__name__}")
    recorder.result = recorder.encoded(map_tree(result, described))
    for number in recorder.live:
        recorder.values[number] = hollow(recorder.values[number])
    recorder.views.clear()
    return recorder


@contextlib.contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    """Record also calls of submodules, and uses of autocast, in this thread; one at a time."""
    thread = threading.get_ident()

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = module in recorder.paths and module is not recorder.layer
        if thread != threading.get_ident() or not inner:
            return _CALL(module, *args, **kwargs)
        run = dense_run(module, len(args)) or functools.partial(_CALL, module)
        return recorder.call(recorder.paths[module], run, args, kwargs)

    def noted(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors = any(isinstance(leaf, Tensor) for leaf in leaves((args, kwargs)))
            if thread != threading.get_ident() or not tensors:
                return function(*args, **kwargs)
            return recorder.call(recorder.stack[-1].path, function, args, kwargs, function)

        return run

    def enter(self: torch.autocast) -> Any:
        nonlocal thread
        if thread != threading.get_ident():
            return _ENTER(self)
        if self.device == recorder.device.type:
            thread = 0  # to enter it reads the real state, which it restores
            _ENTER(self)
            if _ENABLED(self.device):
                recorder.trouble(SWITCHES)
            _EXIT(self, None, None, None)
            thread = threading.get_ident()
            recorder.uncast.append(recorder.stack[-1])
        return self

    def leave(self: torch.autocast, *raised: Any) -> Any:
        if thread != threading.get_ident():
            return _EXIT(self, *raised)
        if self.device == recorder.device.type:
            recorder.uncast.pop()
        return False

    def is_enabled(*device: str) -> bool:
        return (
            _ENABLED(*device)
            if thread != threading.get_ident()
            else recorder.autocast and not recorder.uncast
        )

    patches = (
        (nn.Module, "__call__", call), (torch, "is_autocast_enabled", is_enabled),
        (torch.autocast, "__enter__", enter), (torch.autocast, "__exit__", leave),
    )  # fmt: skip
    stand_ins = _stand_ins(recorder, noted)
    try:
        for space, name, _, new in stand_ins:
            space[name] = new
        with attributes_as(patches), recorder:
            yield
    finally:
        for space, name, value, _ in stand_ins:
            space[name] = value
            if value is _MISSING:
                del space[name]
        thread = 0  # for modules that were imported inside, and hold one of the functions
        recorder.results.clear()  # whose callbacks hold the recorder


def _stand_ins(
    recorder: Recorder, noted: Callable[[Any], Any]
) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Return the globals, name, value and stand-in of each name that a recording replaces.

    They are those of the Python modules of the layer's classes, which `sys.modules` may not have.
    """
    kinds = {kind for module in recorder.paths for kind in type(module).__mro__}
    kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
    functions = [
        inspect.unwrap(f) for k in kinds for f in vars(k).values() if inspect.isfunction(f)
    ]
    spaces = {id(f.__globals__): f.__globals__ for f in functions if inspect.isfunction(f)}
    names, builtins = {kind.__module__ for kind in kinds}, {"range": Loop, "len": _length}

    def stand_in(space: dict[str, Any], name: str, value: Any) -> Any:
        if value is _MISSING:
            return builtins[name]
        if value is math:
            return MATH
        if type(value) is types.BuiltinFunctionType and value.__module__ == "math":
            return traced(f"math.{value.__name__}", value)
        is_own = inspect.isfunction(value) and value.__module__ == space["__name__"]
        return noted(value) if is_own else None

    return [
        (space, name, value, new)
        for space in spaces.values()
        if space.get("__name__") in names
        for name, value in {**dict.fromkeys(builtins, _MISSING), **space}.items()
        if (new := stand_in(space, name, value)) is not None
    ]

"""The choice of implementations of operations, and its reasons.

A table of operations belongs to a backend. Where that has no faster implementation the table holds
the operation itself, else a function that chooses once for each key.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.steps import cpu_choice, experts_cpu  # noqa: F401
from fused_remat.steps.linear import cpu_has_native
from fused_remat.steps.operations import (
    FAULTS,
    OPERATIONS,
    Description,
    Fault,
    Function,
    Operations,
    always,
    warn,
)

# Larger chunks read the weights fewer times, and have larger transients.
_CPU_TOKENS = 512  # of 4 bytes an element
_DEVICE_TOKENS = 16384
#: Elements of its widest activation up to which a chunk has more tokens: of blocks of cheap steps
#: alone, and of others. Joining small chunks takes as long as computing cheap steps; on devices,
#: narrow blocks would launch small kernels, and sum the weights' gradients in many parts.
CPU_ELEMENTS, DEVICE_ELEMENTS = (1 << 21, 0), (1 << 27, 1 << 27)
#: Times as many tokens that a chunk of experts has at most: each is sent only some of them.
CPU_EXPERTS = 4


def chunk_tokens(device: torch.device, dtype: torch.dtype) -> int:
    """Return about how many tokens of this dtype to compute at a time (bounds the transients)."""
    if device.type != "cpu":
        return _DEVICE_TOKENS
    return _CPU_TOKENS * (2 if dtype.itemsize == 2 and cpu_has_native(dtype) else 1)


@dataclass(frozen=True)
class Backend:
    """An entry of `BACKENDS`."""

    # why it cannot compute in a dtype on a device, or None if it can
    unsupported_reason: Callable[[torch.device, torch.dtype], str | None] = lambda *_: None
    forget: Callable[[], None] = lambda: None  # called when a choice may differ
    # what programs of passes depend on in addition to tensors; None where none may run
    state: Callable[[torch.device], tuple[Any, ...] | None] = lambda _: None
    stream: Callable[[], Any] = lambda: None  # on which programs launch


@functools.cache
def _triton() -> Backend | str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from fused_remat.triton import launch
    except (ImportError, AttributeError) as error:
        return f"the installed Triton is too old or broken: {error}"
    return Backend(launch.unsupported_reason, launch.forget, launch.state, launch.stream)


#: Name -> the backend, whose implementations it registers, or why it is not available. A new
#: backend is a new entry: `BACKENDS["mine"] = Backend`, and its `operations.faster`.
BACKENDS: dict[str, Callable[[], Backend | str]] = {
    "eager": lambda: Backend(state=lambda _: ()),
    "triton": _triton,
}

#: Device type -> name that "auto" tries first; otherwise "eager" runs.
DEFAULTS: dict[str, str] = {"cuda": "triton"}

#: The tables in use, by backend.
TABLES: dict[str, Operations] = {}


@dataclass(frozen=True)
class Chosen:
    """An implementation for a key."""

    run: Function
    key: Any
    description: Description
    refused: str  # why the backend's own does not run, or ""

    def reason(self, *args: Any, **kwargs: Any) -> str:
        """Return what runs, for these arguments if any, and why nothing faster does."""
        text = self.description
        return (text if isinstance(text, str) else text(self.key, *args, **kwargs)) + self.refused


def choose(function: Function, backend: str, key: Any) -> Chosen:
    """Return the implementation of an operation that a backend runs for a key."""
    operation, refused = OPERATIONS[function], ""
    other = operation.faster.get(backend)
    if other is not None and other.available():
        reason = FAULTS.get((function, backend, key)) or other.unsupported_reason(key)
        if reason is None:
            return Chosen(other.run, key, other.description, "")
        refused = f"; not {other.name or backend}: {reason}" if reason else ""
    return Chosen(function, key, operation.description, refused)


def _serve(name: str, function: Function) -> Function:
    """Return the entry of a backend's table for an operation."""
    operation = OPERATIONS[function]
    if name not in operation.faster or not operation.faster[name].available():
        return function
    key_of, other = operation.key, operation.faster[name]
    run, unconditional = other.run, other.unsupported_reason is always
    chosen = functools.lru_cache(maxsize=4096)(lambda key: choose(function, name, key).run)

    def serve(*args: Any, **kwargs: Any) -> Any:
        try:
            if unconditional and not FAULTS:
                return run(*args, **kwargs)
            return chosen(key_of(*args, **kwargs))(*args, **kwargs)
        except Fault as fault:
            reason = str(fault)
        key = key_of(*args, **kwargs)
        FAULTS[function, name, key] = reason
        chosen.cache_clear()
        warn(f"{function.__name__} runs {choose(function, name, key).reason()}")
        return chosen(key)(*args, **kwargs)

    return serve


def _table(name: str) -> Operations:
    if name not in TABLES:
        TABLES[name] = Operations(name, functools.partial(_serve, name))
    return TABLES[name]


def forget() -> None:
    """Drop all choices, as is necessary after a backend, or what it chooses by, was replaced."""
    FAULTS.clear()
    cpu_choice.forget()
    for name in TABLES:
        backend = BACKENDS[name]() if name in BACKENDS else ""
        if isinstance(backend, Backend):
            backend.forget()
    TABLES.clear()
    _ops_for.cache_clear()


def has_faster(ops: Operations, function: Function, key: Any) -> bool:
    """Return whether an implementation of the backend's own runs."""
    return choose(function, ops.name, key).run is not function


def check_name(name: str) -> str:
    """Return `name`; raise ValueError unless it is "auto" or a registered backend."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; valid: auto, {', '.join(BACKENDS)}")
    return name


def ops_for(name: str, x: Tensor, dtype: torch.dtype | None = None) -> Operations:
    """Return the operations for tensors like `x`, with products in `dtype` or that of `x`.

    "auto" is the default of the device. Where a backend cannot run, eager does, with one warning,
    except for a dtype that "auto" leaves to eager (float64), and tensor subclasses (fake ones).

    Raises: ValueError if there is no such backend.
    """
    return _ops_for(name, x.device, dtype or x.dtype, type(x) in (Tensor, nn.Parameter))


def backend_of(ops: Operations) -> Backend:
    """Return the backend whose operations `ops` are."""
    backend = BACKENDS[ops.name]()
    assert isinstance(backend, Backend)
    return backend


def unsupported_reason(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a backend cannot compute in `dtype` on a device; None if it can."""
    backend = BACKENDS[name]()
    return backend if isinstance(backend, str) else backend.unsupported_reason(device, dtype)


@functools.cache
def _ops_for(name: str, device: torch.device, dtype: torch.dtype, plain: bool) -> Operations:
    chosen = DEFAULTS.get(device.type, "eager") if check_name(name) == "auto" else name
    if not plain:  # no memory that a kernel could be given
        return _table("eager")
    reason = unsupported_reason(chosen, device, dtype)
    if reason is None:
        return _table(chosen)
    if name != "auto" or dtype != torch.float64:
        warn(f"'eager' runs instead of backend {chosen!r} for {dtype} on {device}: {reason}")
    return _table("eager")

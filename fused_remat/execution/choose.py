"""Which implementation of an operation serves, and why: decided here and nowhere else.

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

from fused_remat.steps import cpu_choice
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


def chunk_tokens(device: torch.device, dtype: torch.dtype) -> int:
    """About how many tokens of this dtype to work on at a time (bounds the transients)."""
    if device.type != "cpu":
        return _DEVICE_TOKENS
    return _CPU_TOKENS * (2 if dtype.itemsize == 2 and cpu_has_native(dtype) else 1)


@dataclass(frozen=True)
class Backend:
    """A row of `BACKENDS`."""

    # why it cannot compute in a dtype on a device, or None if it can
    unsupported_reason: Callable[[torch.device, torch.dtype], str | None] = lambda device, dtype: (
        None
    )
    # about how many tokens it works on at a time, given device and dtype
    chunk_tokens: Callable[[torch.device, torch.dtype], int] = chunk_tokens
    forget: Callable[[], None] = lambda: None  # called when a choice may differ


@functools.cache
def _triton() -> Backend | str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from fused_remat.triton import launch
    except (ImportError, AttributeError) as error:
        return f"the installed Triton is too old or broken: {error}"
    return Backend(launch.unsupported_reason, forget=launch.forget)


#: Rows: name -> the backend, whose implementations it registers, or why there is none. A new
#: backend is a new row: `BACKENDS["mine"] = Backend`, and its `operations.faster`.
BACKENDS: dict[str, Callable[[], Backend | str]] = {"eager": Backend, "triton": _triton}

#: Device type -> name that "auto" tries first; every other device, and what it refuses, is eager's.
DEFAULTS: dict[str, str] = {"cuda": "triton"}

#: The tables that have been asked for, by backend.
TABLES: dict[str, Operations] = {}


@dataclass(frozen=True)
class Chosen:
    """An implementation for a key."""

    run: Function  # the function that serves
    key: Any  # key, description: for what, and what it runs
    description: Description
    refused: str  # why the backend's own does not, or ""

    def reason(self, *args: Any, **kwargs: Any) -> str:
        """What runs, and why nothing faster does; arguments, where there are any, say more."""
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
    """What a backend's table holds for an operation."""
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
        said = choose(function, name, key).reason()
        warn(f"{function.__name__} runs {said}")
        return chosen(key)(*args, **kwargs)

    return serve


def _table(name: str) -> Operations:
    if name not in TABLES:
        row = BACKENDS[name]()
        assert isinstance(row, Backend)
        serve = functools.partial(_serve, name)
        TABLES[name] = Operations(name, row.chunk_tokens, serve)
    return TABLES[name]


def forget() -> None:
    """Choose anew from now on; for who replaces a backend, or what it chooses by."""
    FAULTS.clear()
    cpu_choice.forget()
    for name in TABLES:
        row = BACKENDS[name]() if name in BACKENDS else ""
        if isinstance(row, Backend):
            row.forget()
    TABLES.clear()
    _ops_for.cache_clear()


def has_faster(ops: Operations, function: Function, key: Any) -> bool:
    """Whether an implementation of the backend's own serves."""
    return ops[function] is not function and choose(function, ops.name, key).run is not function


def check_name(name: str) -> str:
    """Return `name`; raise ValueError unless it is "auto" or a registered backend."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; valid: auto, {', '.join(BACKENDS)}")
    return name


def ops_for(name: str, x: Tensor, dtype: torch.dtype | None = None) -> Operations:
    """What computes on tensors like `x`, products in `dtype` if not in that of `x`.

    "auto" is the default of the device. Where a backend cannot serve, eager does; one warning says
    so, except for a dtype that "auto" leaves to eager (float64), and tensor subclasses (fake ones).

    Raises: ValueError if there is no such backend.
    """
    return _ops_for(name, x.device, dtype or x.dtype, type(x) in (Tensor, nn.Parameter))


def unsupported_reason(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a backend cannot compute in `dtype` on a device; None if it can."""
    backend = BACKENDS[name]()
    return backend if isinstance(backend, str) else backend.unsupported_reason(device, dtype)


@functools.cache
def _ops_for(name: str, device: torch.device, dtype: torch.dtype, plain: bool) -> Operations:
    asked = DEFAULTS.get(device.type, "eager") if check_name(name) == "auto" else name
    if not plain:  # no memory that a kernel could be given
        return _table("eager")
    reason = unsupported_reason(asked, device, dtype)
    if reason is None:
        return _table(asked)
    if name != "auto" or dtype != torch.float64:
        warn(f"'eager' runs instead of backend {asked!r} for {dtype} on {device}: {reason}")
    return _table("eager")

"""Backends by name, and which one computes on a tensor."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fused_remat.backends.base import Backend, FusedRematWarning
from fused_remat.backends.eager import EagerBackend

_EAGER: Backend = EagerBackend()


@functools.cache
def _triton() -> Backend | str:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from fused_remat.backends.triton.backend import TritonBackend
    except (ImportError, AttributeError) as error:
        return f"this Triton is too old or broken: {error}"
    return TritonBackend()


#: Rows: name -> the backend, or why there is none. A new backend is a new row.
BACKENDS: dict[str, Callable[[], Backend | str]] = {"eager": lambda: _EAGER, "triton": _triton}

#: Device type -> name that "auto" tries first; every other device, and what it refuses, is eager's.
DEFAULTS: dict[str, str] = {"cuda": "triton"}


def check_name(name: str) -> str:
    """`name`, if it is "auto" or a registered backend.

    Raises:
        ValueError: it is not; the message lists the valid ones.

    >>> check_name("eager")
    'eager'
    """
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; valid: auto, {', '.join(BACKENDS)}")
    return name


def get_backend(name: str, x: Tensor, dtype: torch.dtype | None = None) -> Backend:
    """The backend that computes on tensors like `x`, products in `dtype` if not in that of `x`.

    "auto" is the default of the device. Where a backend cannot serve, eager does; one warning says
    so, except for a dtype that "auto" leaves to eager (float64), and tensor subclasses (fake ones).

    Raises:
        ValueError: no such backend.

    >>> import torch
    >>> get_backend("auto", torch.ones(2)).name
    'eager'
    """
    return _backend_for(name, x.device, dtype or x.dtype, type(x) in (Tensor, nn.Parameter))


def why_not_default(x: Tensor, dtype: torch.dtype | None = None) -> str | None:
    """Why "auto" does not mean the default backend of the device of `x`; None if it does."""
    backend = BACKENDS[DEFAULTS.get(x.device.type, "eager")]()
    return backend if isinstance(backend, str) else backend.why_not(x.device, dtype or x.dtype)


@functools.cache
def _backend_for(name: str, device: torch.device, dtype: torch.dtype, plain: bool) -> Backend:
    asked = DEFAULTS.get(device.type, "eager") if check_name(name) == "auto" else name
    if not plain:  # no memory that a kernel could be given
        return _EAGER
    backend = BACKENDS[asked]()
    reason = backend if isinstance(backend, str) else backend.why_not(device, dtype)
    if not isinstance(backend, str) and reason is None:
        return backend
    if name != "auto" or dtype != torch.float64:
        warnings.warn(
            f"fused_remat: backend {asked!r} cannot serve here, 'eager' does: {reason}",
            FusedRematWarning,
            stacklevel=2,
        )
    return _EAGER

"""Backends by name, and which one "auto" means for a device."""

from __future__ import annotations

import torch

from fused_remat.backends.base import Backend
from fused_remat.backends.eager import EagerBackend

#: Rows: name -> backend. A new backend is a new row.
BACKENDS: dict[str, Backend] = {"eager": EagerBackend()}

#: Device type -> name for "auto"; other devices use "eager".
DEFAULTS: dict[str, str] = {}


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


def get_backend(name: str, device: torch.device) -> Backend:
    """The backend `name`; "auto" is the default of the device.

    >>> get_backend("auto", torch.device("cpu")).name
    'eager'
    """
    check_name(name)
    return BACKENDS[DEFAULTS.get(device.type, "eager") if name == "auto" else name]

"""The check that backward reads tensors of the shapes, dtypes and device that forward read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_unchanged(
    names: Sequence[str],
    shapes: Sequence[torch.Size | None],
    dtypes: Sequence[torch.dtype | None],
    tensors: Sequence[Tensor | None],
    dy: Tensor,
) -> None:
    """Raise RuntimeError if a tensor has another shape, dtype or device than in forward.

    Autograd detects changes in place, but not `p.data = ...`, which is how a module is moved and
    cast. `shapes` and `dtypes` are those of forward, whose device is that of `dy`; `tensors`, which
    may be longer, are None where backward does not read them.
    """
    # This runs in every backward, so devices are compared in the cheapest way.
    is_cpu, index = dy.is_cpu, dy.get_device()
    for i, (t, shape, dtype) in enumerate(zip(tensors, shapes, dtypes)):  # noqa: B905
        if t is not None and (
            t.dtype is not dtype
            or t.shape != shape
            or (not t.is_cpu if is_cpu else t.get_device() != index)
        ):
            only_device = t.dtype is dtype and t.shape == shape
            # A scalar may be on another device, and a tensor that a user's function captures.
            if not (only_device and (t.dim() == 0 or names[i].startswith("activation."))):
                raise changed(names[i], (tuple(shape or ()), dtype, dy.device), t)


def changed(
    name: str, was: tuple[tuple[int, ...], torch.dtype | None, torch.device], now: Tensor
) -> RuntimeError:
    """Return the error for a tensor that had another shape, dtype or device in forward."""
    shape, dtype, device = was
    return RuntimeError(
        f"fused_remat: backward reads {name!r} again, which was {dtype} of shape {shape} on "
        f"{device} in forward, and is {now.dtype} of shape {tuple(now.shape)} on {now.device} now: "
        "do not move, cast or resize tensors between forward and backward"
    )

"""Warnings of layers: once for each model and message, at the user's line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from torch import nn

from fused_remat.autograd.accumulate import sharded_by
from fused_remat.layers.record import record_of
from fused_remat.steps.operations import FusedRematWarning, user_stacklevel

_LEAF = (
    "; under DeepSpeed ZeRO-3, deepspeed.utils.set_z3_leaf_modules(model, [type(layer)]) before "
    "deepspeed.initialize makes it gather the entire layer"
)


def warn(layer: nn.Module, message: str, category: type[Warning] = FusedRematWarning) -> None:
    """Warn, at the user's line, that `layer` does `message`.

    Each message is shown once for the layers of a class that were converted together.
    """
    record, name = record_of(layer), type(layer).__name__
    key = f"{name} {re.sub(r'[0-9][^ ]*', '', message)}"  # numbers differ from layer to layer
    if key in record.warned:
        return
    record.warned.add(key)
    # ZeRO-3 gathers by hooks on the modules inside a layer, unless that is a leaf module.
    is_leaf = getattr(layer, "_z3_leaf", False)
    hint = _LEAF if not is_leaf and sharded_by(layer) == "ZeRO-3" else ""
    who = f"{record.path} ({name})" if record.path else name
    text = f"fused_remat: {who} {message}{hint}"
    warnings.warn(text, category, stacklevel=user_stacklevel())


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return names as text, the first few of many."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def warn_compiled(layer: str, reason: str, keeps: str = "") -> None:
    """Warn while compiling. What PyTorch's forward keeps is then the compiler's choice."""
    what = keeps or "runs PyTorch's own forward and saves no memory"
    text = f"fused_remat: {layer}, compiled, {what}: {reason}"
    warnings.warn(text, FusedRematWarning, stacklevel=2)


# Not traced by the compiler, but called.
warn_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]

"""Where a compiled graph breaks; imported while compiling only, since it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="fused_remat: an activation function of the caller's own, a quantized weight, "
    "router logits as a result, or a tensor-parallel layer"
)
def eagerly(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `fn(*args, **kwargs)`, run in eager mode."""
    return fn(*args, **kwargs)

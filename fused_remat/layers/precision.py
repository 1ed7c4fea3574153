"""Dtypes of a layer under `torch.autocast`: those of the stock layer.

In the stock layer autocast acts on every operator. Products take autocast's dtype and sums promote.
Norms compute in float32, which they also return on CUDA; on CPU they return the dtype of their
input. float64 is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_remat.execution.executor import autocast_on
from fused_remat.steps.linear import LOW

#: What autocast converts, on CPU and CUDA.
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")
#: What the names of norms in blocks begin with.
_NORMS = ("norm", "post", "q_norm", "k_norm")
Params = Mapping[str, "Tensor | None"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of one call.

    Attributes:
        stream: of the residual stream and of the result; the input is converted to it.
        compute: of everything else; None for the dtype of the stream.
        autocast: to what autocast converts where the user's own function runs; None if it is off.
    """

    stream: torch.dtype
    compute: torch.dtype | None = None
    autocast: torch.dtype | None = None


def low_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on the device of `x`; None if it is off."""
    return torch.get_autocast_dtype(x.device.type) if autocast_on(x) else None


def unsupported_autocast_reason(
    x: Tensor, name: str, params: Params, low: torch.dtype, path_of: Callable[[str], str] = str
) -> str | None:
    """Return why the fused path does not support these dtypes under autocast to `low`, or None.

    The stock layer raises for the same dtypes, except on other devices. Messages call the input
    `name`, and a parameter `path_of` its name.
    """
    kind = x.device.type
    if kind not in _DEVICES or low not in LOW:
        return (
            f"autocast to {low} on {kind} is on; the fused path supports autocast to 16 bits on "
            f"{' and '.join(_DEVICES)}"
        )
    given = {key: p.dtype for key, p in params.items() if p is not None}
    if x.dtype == torch.float64:
        others = [key for key, dtype in given.items() if dtype != x.dtype]
        if others:
            other = path_of(others[0])
            return f"{name} is {x.dtype}, which autocast does not convert, but {other} is not"
        return None
    for key, dtype in given.items():
        if dtype not in CASTABLE:
            return f"autocast does not convert {path_of(key)} of {dtype}, and {name} is {x.dtype}"
    norms = {dtype for key, dtype in given.items() if key.startswith(_NORMS)}
    if kind == "cpu" and norms and norms != {torch.float32} and not norms == {x.dtype} == {low}:
        shown = ", ".join(sorted(map(str, norms)))
        return f"the norms' parameters are {shown}, and autocast on CPU converts none"
    return None


def precision_of(x: Tensor, params: Params, low: torch.dtype, norm_first: bool) -> Precision:
    """Return the dtypes of a call for which `unsupported_autocast_reason` returned None."""
    if x.dtype == torch.float64:
        return Precision(x.dtype, autocast=low)
    # On CUDA a post-norm layer's last norm makes float32 of anything; else sums promote.
    keeps = x.dtype == low and (norm_first or x.device.type == "cpu")
    stream = low if keeps else torch.float32
    plain = stream == low and all(p is None or p.dtype == low for p in params.values())
    return Precision(stream, None if plain else low, low)

"""What a layer computes in which dtype under `torch.autocast`: as the stock layer would.

The stock layer leaves that to autocast operator by operator: products take autocast's dtype, sums
promote, and norms are computed in float32, which on CUDA they also return, but on CPU not: there
they return the dtype of their input. float64 is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_remat.execution.executor import autocast_on

#: What autocast converts, on CPU and CUDA.
CASTABLE = (torch.float32, torch.bfloat16, torch.float16)
_LOW = (torch.bfloat16, torch.float16)
_DEVICES = ("cpu", "cuda")
#: What the names of norms in blocks begin with.
_NORMS = ("norm", "post", "q_norm", "k_norm")
Params = Mapping[str, "Tensor | None"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of one call.

    Attributes:
        stream: of the residual stream and of the result; src is converted to it.
        compute: of all else, None for the stream's.
        autocast: to what autocast converts where the caller's own function runs; None if it is off.
    """

    stream: torch.dtype
    compute: torch.dtype | None = None
    autocast: torch.dtype | None = None


def low_dtype(src: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of `src`; None if it is off.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     low_dtype(torch.zeros(1))
    torch.bfloat16
    """
    return torch.get_autocast_dtype(src.device.type) if autocast_on(src) else None


def casts(x: Tensor, other: Tensor) -> bool:
    """Whether autocast makes both operands of a product of one dtype.

    >>> casts(torch.zeros(1), torch.zeros(1).half()), casts(torch.zeros(1), torch.zeros(1).double())
    (True, False)
    """
    return x.dtype in CASTABLE and other.dtype in CASTABLE


def why_not_autocast(src: Tensor, params: Params, low: torch.dtype) -> str | None:
    """Why the fused path cannot take these dtypes under autocast to `low`.

    Those that it does not take are those that the stock layer raises for, and other devices.

    >>> weights = {"fc1.weight": torch.zeros(3, 3).double()}
    >>> why_not_autocast(torch.zeros(2, 3), weights, torch.bfloat16)
    'autocast leaves fc1.weight torch.float64, beside src of torch.float32'
    """
    kind = src.device.type
    if kind not in _DEVICES or low not in _LOW:
        return f"autocast to {low} on {kind} is on, not to 16 bits on {' or '.join(_DEVICES)}"
    given = {name: p.dtype for name, p in params.items() if p is not None}
    if src.dtype == torch.float64:
        others = [name for name, dtype in given.items() if dtype != src.dtype]
        if others:
            return f"src is {src.dtype}, which autocast leaves alone, but {others[0]} is not"
        return None
    norms = {dtype for name, dtype in given.items() if name.startswith(_NORMS)}
    for name, dtype in given.items():
        if dtype not in CASTABLE:
            return f"autocast leaves {name} {dtype}, beside src of {src.dtype}"
    if kind == "cpu" and norms and norms != {torch.float32} and not norms == {src.dtype} == {low}:
        shown = ", ".join(sorted(map(str, norms)))
        return f"the norms' parameters are {shown}, and autocast converts none on CPU"
    return None


def precision_of(src: Tensor, params: Params, low: torch.dtype, norm_first: bool) -> Precision:
    """The dtypes of a call that `why_not` has nothing against.

    >>> precision_of(torch.zeros(2, 3), {}, torch.bfloat16, True).compute
    torch.bfloat16
    """
    if src.dtype == torch.float64:
        return Precision(src.dtype, autocast=low)
    # On CUDA a post-norm layer's last norm makes float32 of anything; else sums promote.
    keeps = src.dtype == low and (norm_first or src.device.type == "cpu")
    stream = low if keeps else torch.float32
    plain = stream == low and all(p is None or p.dtype == low for p in params.values())
    return Precision(stream, None if plain else low, low)

"""What the tests of kernels share: poisoned outputs, and the error against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.random import DropoutMask
from fused_remat.triton.launch import target_of

TARGET = target_of(torch.device("cpu"))
# Rounding to storage once or twice on the way: float32 has 2**-24, float16 2**-11 of error each.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3}


def poisoned(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """A matrix of NaN inside a larger one of NaN; `check_margin` sees what is written beside it."""
    whole = torch.full((rows + 2, width + 16), torch.nan, dtype=dtype)
    return whole[1 : rows + 1, 8 : width + 8]


def check_margin(x: Tensor) -> None:
    """Every element of `x` was written, and none around it."""
    assert not x.isnan().any(), "an element was not written"
    whole = x._base
    assert whole is not None
    assert int(whole.isnan().sum()) == whole.numel() - x.numel(), "written outside"


def check_error(found: Tensor, exact: Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    """Relative L2 error against float64, within rounding."""
    error = (found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30)
    assert error <= factor * TOLERANCE[dtype], f"relative error {error:.2e}"


def keep_of(rows: int, width: int, p: float, row0: int = 2**32 - 3) -> DropoutMask:
    """Dropout of one site, in rows about 2**32."""
    key = random.site_keys(torch.tensor(-7))[random.MLP]
    return DropoutMask(key, row0, rows, width, p, torch.float32)


def wide(keep: DropoutMask | None) -> DropoutMask | None:
    """The same multiplier in float64, for the exact result."""
    if keep is None:
        return None
    return DropoutMask(keep.site_key, keep.row0, keep.rows, keep.width, keep.p, torch.float64)

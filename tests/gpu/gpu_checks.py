"""What the tests on a GPU share: sizes, random and poisoned matrices, the error against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.random import DropoutMask

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
#: Relative L2 error allowed. A rounding to bfloat16 is off by 1.6e-3 in the mean square; a result
#: takes at most six, its own included, of independent values: 3.9e-3. float16 has three bits more.
#: float32: sums of up to 64K terms in another order; tf32, which is not wanted, is off by 3e-4.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5}
#: Of 16 bits; Triton's interpreter takes no bfloat16.
BF16 = torch.bfloat16 if ON_GPU else torch.float16


def target():
    """What kernels are launched on."""
    from fused_remat.triton.launch import target_of

    return target_of(DEVICE)


def sized(*full: int, tiny: tuple[int, ...] = (40, 24, 32)) -> tuple[int, ...]:
    """The sizes, but small where there is no GPU and kernels are interpreted."""
    return full if ON_GPU else tiny[: len(full)]


def normal(dtype: torch.dtype, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    """Random numbers."""
    x = torch.empty(shape, dtype=torch.float32, device=DEVICE)
    return x.normal_(shift, scale).to(dtype)


def misaligned(x: Tensor) -> Tensor:
    """The same matrix, rows an odd number of elements apart: nothing for TMA or wide loads."""
    wide = torch.empty(
        (x.shape[0], x.shape[1] + 1 + x.shape[1] % 2), dtype=x.dtype, device=x.device
    )
    return wide[:, : x.shape[1]].copy_(x)


def poisoned(rows: int, width: int, dtype: torch.dtype, odd: bool = False) -> Tensor:
    """A matrix of NaN inside a larger one of NaN; `check_written` sees what is written beside it.

    `odd`: as `misaligned`.
    """
    pad = 17 + width % 2 if odd else 16 + -width % 8
    whole = torch.full((rows + 2, width + pad), torch.nan, dtype=dtype, device=DEVICE)
    return whole[1 : rows + 1, 8 : width + 8]


def check_written(x: Tensor) -> None:
    """Every element of `x` was written, and none around it."""
    assert not x.isnan().any(), "an element was not written"
    whole = x._base
    assert whole is not None
    assert int(whole.isnan().sum()) == whole.numel() - x.numel(), "written outside"


def error_of(found: Tensor, exact: Tensor) -> float:
    """Relative L2; NaN if either has one."""
    exact = exact.double()
    error: float = ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    return error


def check_error(found: Tensor, exact: Tensor, factor: float = 1.0, what: str = "") -> None:
    """Within `TOLERANCE` of the found tensor's dtype."""
    error = error_of(found, exact)
    assert error <= factor * TOLERANCE[found.dtype], f"{what} relative error {error:.2e}"


def keep_of(rows: int, width: int, p: float, row0: int = 2**32 - 3) -> DropoutMask:
    """Dropout of one site, in rows about 2**32."""
    key = random.site_keys(torch.tensor(-7, device=DEVICE))[random.MLP]
    return DropoutMask(key, row0, rows, width, p, torch.float32)


def multiplier(keep: DropoutMask | None) -> Tensor | float:
    """The site's multiplier in float64; 1 for no site."""
    if keep is None:
        return 1.0
    key, rows = keep.site_key, (keep.row0, keep.rows)
    return random.keep_scale(key, *rows, keep.width, keep.p, torch.float64)


def wide(keep: DropoutMask | None) -> DropoutMask | None:
    """The same site in float64, for the exact result."""
    if keep is None:
        return None
    return DropoutMask(keep.site_key, keep.row0, keep.rows, keep.width, keep.p, torch.float64)


def double(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """In float64."""
    return tuple(None if t is None else t.double() for t in tensors)

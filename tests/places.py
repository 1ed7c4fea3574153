"""Where kernels run in this process, and what the tests of kernels share.

The place is "gpu" where there is one; "interpreter" with TRITON_INTERPRET=1, on CPU tensors, in
float32 and float16, on small sizes; "compiled" with FUSED_REMAT_COMPILED=80, 86, 89 or 90: what is
compiled for that architecture, executed on CPU tensors (`ptx`); else "aten": an operation's own
body, without kernels. The same cases run at every place: a kernel and the operation that it
implements have one contract.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from fused_remat import random
from fused_remat.execution.choose import choose, ops_for
from fused_remat.random import DropoutMask
from fused_remat.steps.operations import OPERATIONS

T = TypeVar("T")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: The architecture whose compiled kernels are executed; 0: none.
EXECUTED = int(os.environ.get("FUSED_REMAT_COMPILED", 0))
ON_GPU = torch.cuda.is_available() and not INTERPRETED and not EXECUTED
COMPILED = ON_GPU or EXECUTED > 0
PLACE = "gpu" if ON_GPU else "compiled" if EXECUTED else "interpreter" if INTERPRETED else "aten"
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
#: Of 16 bits; Triton's interpreter takes no bfloat16.
BF16 = torch.float16 if INTERPRETED else torch.bfloat16
#: Relative L2 error allowed. A rounding to bfloat16 is off by 1.6e-3 in the mean square; a result
#: takes at most six, its own included, of independent values: 3.9e-3. float16 has three bits more.
#: float32: sums of up to 64K terms in another order; tf32, which is not allowed, is off by 3e-4.
#: Small matrices have no mean square: one element is off by one rounding, or by two; their sums
#: are short. ATen rounds to 16 bits after every operation.
TOLERANCE = {
    "gpu": {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-5},
    "interpreter": {torch.float16: 1.5e-3, torch.float32: 2e-6},
    "aten": {torch.bfloat16: 8e-3, torch.float16: 1.5e-3, torch.float32: 2e-6},
}["gpu" if COMPILED else PLACE]
#: What the fixture `routes` takes: settings of the tables, or these themselves.
ROUTES = {
    "interpreter": ["one kernel", "as on Hopper"], "compiled": ["tables", "kernels alone"],
}.get(PLACE, ["tables"])  # fmt: skip
#: For `parametrize`: short names of dtypes and shapes.
ids: dict[str, Any] = {"ids": lambda value: str(value).removeprefix("torch.").replace(" ", "")}


def target() -> Any:
    from fused_remat.triton.launch import target_of

    return target_of(DEVICE)


def at(gpu: T, small: T, executed: T | None = None) -> T:
    """`gpu` on a GPU, else `small`; `executed` where compiled kernels are executed."""
    return gpu if ON_GPU else executed if EXECUTED and executed is not None else small


def compiled(gpu: T, other: T) -> T:
    """`gpu` where kernels are compiled, on a GPU or not, else `other`: of dtypes and tolerances."""
    return gpu if COMPILED else other


def sized(
    *gpu: int, tiny: tuple[int, ...] = (40, 24, 32), executed: tuple[int, ...] = (136, 200, 72)
) -> tuple[int, ...]:
    """Return the sizes, but small where there is no GPU."""
    return at(gpu, tiny, executed)[: len(gpu)]


# --- operations


def run(function: Callable[..., T], *args: Any, odd: bool = False, **options: Any) -> T:
    """Run an operation as PLACE does: by a kernel, which `choose` must find, or by its body.

    Outputs of kernels are views of larger matrices, all of it NaN before; afterwards every element
    of them is written and nothing around them. Rows are `odd` elements apart, or wide loads'.
    """
    if PLACE == "aten":
        return function(*args, **options)
    chosen = choose(function, "triton", OPERATIONS[function].key(*args, **options))
    assert chosen.run is not function, chosen.refused
    made: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _poisoned_empty(torch.empty, made, odd))
        result = served(function, *args, **options)
    for x in made:
        check_written(x)
    return result


def _poisoned_empty(
    empty: Callable[..., Tensor], made: list[Tensor], odd: bool
) -> Callable[..., Tensor]:
    def poisoned_empty(*shape: Any, **options: Any) -> Tensor:
        x = empty(*shape, **options)
        ours = sys._getframe(1).f_globals["__name__"].startswith("fused_remat.")
        if not ours or not x.is_floating_point() or x.dim() > 2:
            return x
        if x.dim() == 2 and x.shape[1] > 1:
            made.append(poisoned(*x.shape, x.dtype, odd))
        else:  # statistics are columns, which kernels index
            whole = torch.full((x.numel() + 32,), torch.nan, dtype=x.dtype, device=x.device)
            made.append(whole[16:-16].view(x.shape))
        return made[-1]

    return poisoned_empty


def served(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Run an operation by whatever supports it: there are dtypes that no kernel has."""
    if PLACE != "aten":
        function = ops_for("triton", torch.empty(1, device=DEVICE))[function]
    return function(*args, **options)


# --- inputs and outputs


def normal(dtype: torch.dtype, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
    x = torch.empty(shape, dtype=torch.float32, device=DEVICE)
    return x.normal_(shift, scale).to(dtype)


def misaligned(x: Tensor) -> Tensor:
    """Return the same matrix, rows an odd number of elements apart, which TMA does not load."""
    wide = torch.empty(
        (x.shape[0], x.shape[1] + 1 + x.shape[1] % 2), dtype=x.dtype, device=x.device
    )
    return wide[:, : x.shape[1]].copy_(x)


def far_apart(rows: int, width: int, offset: int = 0) -> Tensor:
    """Return a random float16 matrix, rows 2**30 elements apart: the third needs 64 bits."""
    storage = torch.empty((rows - 1) * 2**30 + 4096, dtype=torch.float16, device=DEVICE)
    return storage.as_strided((rows, width), (2**30, 1), offset).copy_(
        normal(torch.float16, rows, width)
    )


def poisoned(rows: int, width: int, dtype: torch.dtype, odd: bool = False) -> Tensor:
    """Return a matrix of NaN inside a larger one, so that `check_written` sees writes around it.

    `odd`: as `misaligned`.
    """
    pad = 17 + width % 2 if odd else 16 + -width % 8
    whole = torch.full((rows + 2, width + pad), torch.nan, dtype=dtype, device=DEVICE)
    return whole[1 : rows + 1, 8 : width + 8]


def nan(*shape: int) -> Tensor:
    return torch.full(shape, torch.nan, device=DEVICE)


def check_written(x: Tensor) -> None:
    """Every element of `x` was written, and none around it."""
    assert not x.isnan().any(), "an element was not written"
    whole = x._base
    assert whole is not None
    assert int(whole.isnan().sum()) == whole.numel() - x.numel(), "written outside"


# --- dropout


def mask_of(rows: int, width: int, p: float, row0: int = 2**32 - 3) -> DropoutMask | None:
    """Dropout of one site, in rows about 2**32; None for p = 0."""
    if not p:
        return None
    key = random.site_keys(torch.tensor(-7, device=DEVICE))[random.MLP]
    return DropoutMask(key, row0, rows, width, p, torch.float32)


def wide(mask: DropoutMask | None) -> DropoutMask | None:
    """Return the same site in float64, for the exact result."""
    if mask is None:
        return None
    return dataclasses.replace(mask, dtype=torch.float64, _tensor=None)


def double(*tensors: Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else t.double() for t in tensors)


# --- errors


def error_of(found: Tensor, exact: Tensor) -> float:
    """Relative L2; NaN if either has one."""
    exact = exact.double()
    error: float = ((found.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()
    return error


def check_error(
    found: Tensor,
    exact: Tensor,
    factor: float = 1.0,
    what: str = "",
    dtype: torch.dtype | None = None,
) -> None:
    """Within `factor` times `TOLERANCE`, of the found tensor's dtype or of `dtype`."""
    error = error_of(found, exact)
    allowed = factor * TOLERANCE[dtype or found.dtype]
    assert error <= allowed, f"{what} relative error {error:.2e}, allowed {allowed:.2e}"


def check_all(found: Any, exact: Any, factor: float = 1.0, float32: float | None = None) -> None:
    """`check_error` of each, or with the factor `float32`; None is where None is due."""
    for i, (mine, true) in enumerate(zip(found, exact, strict=True)):
        assert (mine is None) == (true is None), i
        if mine is not None:
            here = float32 if float32 is not None and mine.dtype == torch.float32 else factor
            check_error(mine, true, here, str(i))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)

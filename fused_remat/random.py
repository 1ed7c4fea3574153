"""The random numbers of dropout: the same bits in every backend.

Masks are never stored. Whether the element (row, col) of a dropout site survives is a function of
(seed, site, row, col) only:

    site_key = mix64(seed + GOLDEN64 * (site + 1))                        64-bit, wrapping
    row_key  = mix64(site_key + GOLDEN64 * (row + 1))                     64-bit, wrapping
    k0, k1   = low and high 32 bits of row_key
    x = ((col * GOLDEN32) ^ k0) * (k1 | 1)                                32-bit, wrapping
    x = (x ^ (x >> 16)) * MUL32                                           logical shift
    the element survives  iff  (x & 0x7fffffff) < round((1 - p) * 2**31)

`mix64` is SplitMix64's finalizer (Steele, Lea, Flood 2014). Rows have 64 bits, so a tensor may hold
more than 2**32 elements; columns are below 2**31. At a site of tokens, row = b * S + s, whatever
the memory layout, and col is the channel; in attention, row = (b * H + h) * S_q + q, and col is the
key. `tests/graph/test_random.py` has test vectors.

The seed is an int64 tensor on the device, so that drawing it never waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Dropout sites of a transformer block. The numbers must not change; add a new site at the end.
ATTENTION, RESIDUAL1, MLP, RESIDUAL2, CROSS_ATTENTION, CROSS_RESIDUAL = range(6)
#: For how many sites keys are computed at once.
NUM_SITES = 8
#: The first site of the inputs of low-rank updates, one site each.
LORA = 8

GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B9
MUL32 = 0x7FEB352D
MIX64_MUL1 = 0xBF58476D1CE4E5B9
MIX64_MUL2 = 0x94D049BB133111EB

# Elements that are hashed at a time on a CPU: temporaries stay in cache.
_CACHED = 1 << 19
# Up to this many elements on a CPU, numpy is faster, since its calls cost less.
_SMALL = 1 << 14


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


_GOLDEN64_S = _signed(GOLDEN64, 64)
_GOLDEN32_S = _signed(GOLDEN32, 32)
_MUL1_S = _signed(MIX64_MUL1, 64)
_MUL2_S = _signed(MIX64_MUL2, 64)
_GOLDEN64_U, _MUL1_U, _MUL2_U = np.uint64(GOLDEN64), np.uint64(MIX64_MUL1), np.uint64(MIX64_MUL2)
_SHIFTS = tuple(map(np.uint64, (30, 27, 31)))
_GOLDEN32_U, _MUL32_U, _MASK31 = np.uint32(GOLDEN32), np.uint32(MUL32), np.uint32(0x7FFFFFFF)
_ONE32, _SIXTEEN = np.uint32(1), np.uint32(16)


def draw_seed(device: torch.device) -> Tensor:
    """Draw an int64 seed () from torch's default generator of `device`, without waiting for it."""
    seed = torch.empty((), dtype=torch.int64, device=device)
    if torch.compiler.is_compiling():  # Dynamo supports the operator, not the method
        return torch.ops.aten.random_.default(seed)  # type: ignore[no-any-return]
    return seed.random_()


def threshold(p: float) -> int:
    """Return the limit: an element survives if its 31-bit hash is below it."""
    return min(round((1.0 - p) * 2**31), 2**31 - 1)


def scale(p: float) -> float:
    """Return the factor of survivors: 1 / (1 - p); 0 at p = 1, where none survives."""
    return 0.0 if p >= 1.0 else 1.0 / (1.0 - p)


def _mix64(z: Tensor) -> Tensor:
    # torch's >> is an arithmetic shift: mask the bits that a logical shift would clear.
    z = (z ^ ((z >> 30).bitwise_and_((1 << 34) - 1))).mul_(_MUL1_S)
    z = z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MUL2_S)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def _is_small(key: Tensor, elements: int) -> bool:
    return elements <= _SMALL and type(key) is Tensor and key.is_cpu


def site_keys(seed: Tensor, first: int = 0) -> tuple[Tensor, ...]:
    """Compute the keys of the NUM_SITES sites from `first` on; keys and `seed` are int64 ().

    >>> site_keys(torch.tensor(0))[ATTENTION].item()
    -2152535657050944081
    """
    if _is_small(seed, 1):
        keys: tuple[Tensor, ...] = torch.ops.fused_remat.small_site_keys(seed, first).unbind()
        return keys
    sites = torch.arange(first + 1, first + NUM_SITES + 1, device=seed.device)
    return _mix64(sites.mul_(_GOLDEN64_S).add_(seed)).unbind()


def keep_scale(
    site_key: Tensor,
    row0: int,
    rows: int,
    width: int,
    p: float,
    dtype: torch.dtype,
    heads: int = 1,
    head_stride: int = 0,
    col0: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the dropout mask of rows x columns: `scale(p)` where an element survives, else 0.

    Rows are `row0 + h * head_stride + i` for h < `heads` and i < `rows`, in this order; columns are
    `col0` to `col0 + width`. A contiguous tensor `out` in `dtype`, of as many elements, receives
    the result.

    Shapes: site_key () int64; returns (heads * rows, width) in `dtype`, float32 or float64, on the
        device of the key.
    Source: the definition at the top of this module.

    >>> key = site_keys(torch.tensor(0))[MLP]
    >>> keep_scale(key, 0, 2, 4, 0.5, torch.float32)
    tensor([[2., 0., 2., 0.],
            [0., 0., 0., 0.]])
    """
    if _is_small(site_key, heads * rows * width):
        rows_of, columns_of = (row0, rows, heads, head_stride), (col0, width)
        mask: Tensor = torch.ops.fused_remat.small_keep_scale(
            site_key, rows_of, columns_of, p, dtype
        )
        return mask if out is None else out.view(mask.shape).copy_(mask)
    device, total = site_key.device, heads * rows
    if dtype == torch.float32 and out is not None:
        hashed = out.view(torch.int32).view(total, width)
    else:
        hashed = torch.empty((total, width), dtype=torch.int32, device=device)
    steps = torch.arange(row0 + 1, row0 + rows + 1, device=device)
    if heads > 1:
        steps = torch.arange(heads, device=device).mul_(head_stride)[:, None] + steps
    row_keys = _mix64(steps.view(-1).mul_(_GOLDEN64_S).add_(site_key))
    columns = torch.arange(col0, col0 + width, dtype=torch.int32, device=device)
    one = int(np.float32(scale(p)).view(np.int32)) if dtype == torch.float32 else 1  # its bits
    _survivors(row_keys, columns.mul_(_GOLDEN32_S), p, one, hashed)
    if dtype == torch.float32:
        return hashed.view(torch.float32) if out is None else out.view(total, width)
    wide = hashed.to(dtype).mul_(scale(p))
    return wide if out is None else out.view(total, width).copy_(wide)


@dataclass(eq=False, slots=True)
class DropoutMask:
    """The dropout mask of one site, as the arguments of `keep_scale`, which makes the tensor.

    >>> DropoutMask(site_keys(torch.tensor(0))[MLP], 0, 1, 4, 0.5, torch.float32).tensor()
    tensor([[2., 0., 2., 0.]])
    """

    site_key: Tensor
    row0: int
    rows: int
    width: int
    p: float
    dtype: torch.dtype
    _tensor: Tensor | None = None

    def of_rows(self, first: int, rows: int) -> DropoutMask:
        """Return the mask of `rows` rows, from row `first` of this mask on."""
        return DropoutMask(self.site_key, self.row0 + first, rows, self.width, self.p, self.dtype)

    def tensor(self, keep: bool = True) -> Tensor:
        """Return the mask (rows, width): 0, or `scale(p)`.

        It is computed once and kept by this object, unless `keep` is False: then the caller may
        write over it.
        """
        mask = self._tensor
        if mask is None:
            key, dtype = self.site_key, self.dtype
            mask = keep_scale(key, self.row0, self.rows, self.width, self.p, dtype)
        self._tensor = mask if keep else None
        return mask


def _survivors(row_keys: Tensor, columns: Tensor, p: float, one: int, hashed: Tensor) -> None:
    """Fill `hashed` (int32) with `one` for survivors, else 0."""
    total, width = hashed.shape
    k0 = row_keys.to(torch.int32)[:, None]
    k1 = (row_keys >> 32).to(torch.int32).bitwise_or_(1)[:, None]
    step = _CACHED // max(width, 1) if hashed.device.type == "cpu" else total
    step = max(1, min(step, total))
    shifted = torch.empty((step, width), dtype=torch.int32, device=hashed.device)
    for start in range(0, total, step):
        rows = slice(start, start + step)
        x = torch.bitwise_xor(columns, k0[rows], out=hashed[rows]).mul_(k1[rows])
        y = torch.bitwise_right_shift(x, 16, out=shifted[: x.shape[0]]).bitwise_and_(0xFFFF)
        x.bitwise_xor_(y).mul_(MUL32).bitwise_and_(0x7FFFFFFF)
        x.lt_(threshold(p)).mul_(one)  # in place: 1 or 0, no bool tensor


def _site_keys_numpy(seed: Tensor, first: int) -> Tensor:
    """Compute `site_keys`, to the bit, as one tensor."""
    keys = _mix64_numpy(seed.numpy().view(np.uint64) + _site_steps(first))
    return torch.from_numpy(keys.view(np.int64))


def _mix64_numpy(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> _SHIFTS[0])) * _MUL1_U
    z = (z ^ (z >> _SHIFTS[1])) * _MUL2_U
    mixed: np.ndarray = z ^ (z >> _SHIFTS[2])
    return mixed


def _keep_scale_numpy(
    site_key: Tensor,
    rows: tuple[int, int, int, int],
    columns: tuple[int, int],
    p: float,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `keep_scale` in numpy: the same bits."""
    row_keys = _mix64_numpy(_row_steps(*rows) + site_key.numpy().view(np.uint64))
    halves = row_keys.astype("<u8", copy=False).view("<u4").reshape(-1, 2)  # low, high
    x = _columns(*columns) ^ halves[:, :1]
    x *= halves[:, 1:] | _ONE32
    x ^= x >> _SIXTEEN
    x *= _MUL32_U
    x &= _MASK31
    limit, factor = _limits(p, dtype)
    return torch.from_numpy((x < limit) * factor)


#: Functions of the operators that `cpu_operator` defines, by their qualified names.
CPU_KERNELS: dict[str, Callable[..., Tensor]] = {}


def cpu_operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator of the namespace fused_remat, once in a process.

    A program of a pass calls `kernel` itself (`execution/program.py`). `fake` makes results without
    values, of the same shapes.
    """
    name, _, rest = schema.partition("(")
    CPU_KERNELS[f"fused_remat::{name}"] = kernel
    if not hasattr(torch.ops.fused_remat, name):
        torch.library.define(f"fused_remat::{name}", f"({rest}")
        torch.library.impl(f"fused_remat::{name}", "cpu", kernel)
        torch.library.register_fake(f"fused_remat::{name}", fake)


cpu_operator(
    "small_site_keys(Tensor seed, int first) -> Tensor",
    _site_keys_numpy,
    lambda seed, first: seed.new_empty(NUM_SITES),
)
cpu_operator(
    "small_keep_scale(Tensor key, int[] rows, int[] columns, float p, ScalarType dtype) -> Tensor",
    _keep_scale_numpy,
    lambda key, rows, columns, p, dtype: key.new_empty(rows[1] * rows[2], columns[1], dtype=dtype),
)


# What depends on sizes only is cached for small calls: at most _SMALL elements each.


@functools.lru_cache(maxsize=256)
def _site_steps(first: int) -> np.ndarray:
    return np.arange(first + 1, first + NUM_SITES + 1, dtype=np.uint64) * _GOLDEN64_U


@functools.lru_cache(maxsize=256)
def _row_steps(row0: int, rows: int, heads: int, head_stride: int) -> np.ndarray:
    steps = np.arange(row0 + 1, row0 + rows + 1, dtype=np.int64)
    if heads > 1:
        steps = np.add.outer(np.arange(heads) * head_stride, steps).reshape(-1)
    return steps.view(np.uint64) * _GOLDEN64_U


@functools.lru_cache(maxsize=256)
def _columns(col0: int, width: int) -> np.ndarray:
    return np.arange(col0, col0 + width, dtype=np.uint32) * _GOLDEN32_U


@functools.lru_cache(maxsize=256)
def _limits(p: float, dtype: torch.dtype) -> tuple[np.uint32, np.floating]:
    factor = np.float32(scale(p)) if dtype == torch.float32 else np.float64(scale(p))
    return np.uint32(threshold(p)), factor

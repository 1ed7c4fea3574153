"""A kernel launch as data: built from tensors, run, or compiled ahead of time as it would run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from fused_remat.random import DropoutMask, scale, threshold

#: Whether Triton interprets kernels, on CPU tensors; it decides at import (TRITON_INTERPRET=1).
INTERPRETED: bool = triton.knobs.runtime.interpret


@dataclass(frozen=True)
class Target:
    """What kernels are launched on.

    Attributes:
        kind: "cuda", "hip" or "interpreter".
        arch: compute capability times ten: 90 for Hopper; 0 for "hip".
        sms: multiprocessors; persistent kernels launch about as many programs.
    """

    kind: str
    arch: int
    sms: int

    @property
    def has_tma(self) -> bool:
        """Whether tensor descriptors are hardware's."""
        return self.arch >= 90


@functools.cache
def _device_target(index: int) -> Target:
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Target("hip", 0, found.multi_processor_count)
    return Target("cuda", 10 * found.major + found.minor, found.multi_processor_count)


def target_of(device: torch.device) -> Target:
    """The target that tensors on `device` are computed on; three "multiprocessors" if interpreted.

    Raises:
        RuntimeError: no kernel can run there.
    """
    if device.type == "cuda" and not INTERPRETED:
        return _device_target(torch.cuda.current_device() if device.index is None else device.index)
    if INTERPRETED:
        return Target("interpreter", 90, 3)
    raise RuntimeError(f"Triton kernels run on CUDA devices, or interpreted; got {device}")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: the jit function.
        grid: programs, up to three axes.
        args: what it takes before its constexpr arguments, in order: tensors, tensor descriptors,
            numbers; None where the call has none.
        constants: its constexpr arguments by name.
        num_warps, num_stages: how it is compiled.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def run(self) -> None:
        """Launch it on the device of its tensors, on the current stream."""
        if 0 in self.grid:
            return
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self.run()
            return
        self.kernel[self.grid](
            *self.args, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
        )


def rows_in_place(x: Tensor) -> Tensor:
    """`x` (M, N), if the elements of a row lie side by side, as kernels want them; else a copy.

    Rows may lie anywhere: slices, and what is expanded over tokens, are read as they are.
    """
    return x if x.stride(1) == 1 else x.contiguous()


def in_place(x: Tensor | None) -> Tensor | None:
    """A vector (N,), if its elements lie side by side, as kernels want them; else a copy."""
    return x if x is None or x.stride(0) == 1 else x.contiguous()


def stride_of(x: Tensor | None) -> int:
    """Elements from one row to the next; 0 for None."""
    return 0 if x is None else x.stride(0)


def dropout_of(mask: DropoutMask | None) -> tuple[Tensor | None, int, int, float]:
    """The site's key, the first row, threshold and scale, as kernels take them."""
    if mask is None:
        return None, 0, 0, 0.0
    return mask.site_key, mask.row0, threshold(mask.p), scale(mask.p)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up.

    >>> cdiv(7, 4)
    2
    """
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The least power of two that is at least `n`.

    >>> power_of_2(5), power_of_2(8)
    (8, 8)
    """
    return 1 << max(n - 1, 0).bit_length()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels cannot compute in `dtype` on a device, or None if they can."""
    if dtype not in _DTYPES:
        return f"no kernels for {dtype}"
    if INTERPRETED:
        if device.type != "cpu":
            return f"Triton interprets (TRITON_INTERPRET=1), and the tensors are on {device}"
        if dtype == torch.bfloat16:
            return "Triton's interpreter multiplies the bits of bfloat16, not the numbers"
        return None
    if device.type != "cuda":
        return f"kernels run on CUDA devices, the tensors are on {device}"
    target = target_of(device)
    if target.kind == "cuda" and target.arch < 80:
        return f"kernels are for compute capability 8.0 and up, this is {target.arch / 10}"
    return None

"""A kernel launch as data: it can be run, or compiled ahead of time with the same arguments."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.backends.driver import GPUDriver

from fused_remat.kernels.pointwise import Matrix
from fused_remat.random import DropoutMask, scale, threshold
from fused_remat.steps.operations import Fault

#: Whether Triton interprets kernels, on CPU tensors. It reads TRITON_INTERPRET=1 at import.
INTERPRETED: bool = triton.knobs.runtime.interpret


class Target(NamedTuple):
    """The hardware that kernels are launched on."""

    kind: str  # "cuda", "hip" or "interpreter"
    arch: int  # ten times the compute capability, such as 90 for Hopper; 0 for "hip"
    sms: int  # multiprocessors; a persistent kernel launches about as many programs

    @property
    def has_tma(self) -> bool:
        """Whether the hardware has tensor descriptors."""
        return self.arch >= 90


@functools.cache
def _device_target(index: int) -> Target:
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        return Target("hip", 0, found.multi_processor_count)
    return Target("cuda", 10 * found.major + found.minor, found.multi_processor_count)


def _driven(device: torch.device) -> Target | None:
    """Return the target of Triton's active driver, if it launches on tensors of `device`'s type."""
    driver = getattr(triton.runtime.driver, "_active", None)
    if driver is None or isinstance(driver, GPUDriver):  # of torch.cuda's devices
        return None
    return _driver_target(driver, driver.get_current_device(), device.type)


@functools.lru_cache(maxsize=16)
def _driver_target(driver: Any, index: int, kind: str) -> Target | None:
    gpu = driver.get_current_target()
    if gpu.backend != "cuda" or driver.get_active_torch_device().type != kind:
        return None
    found = driver.utils.get_device_properties(index)
    return Target("cuda", int(gpu.arch), found["multiprocessor_count"])


def target_of(device: torch.device) -> Target:
    """Return the target of tensors on `device`. The interpreter's has three multiprocessors.

    Raises: RuntimeError if kernels cannot run there.
    """
    if device.type == "cuda" and not INTERPRETED:
        return _device_target(torch.cuda.current_device() if device.index is None else device.index)
    if INTERPRETED:
        return Target("interpreter", 90, 3)
    if (driven := _driven(device)) is not None:
        return driven
    raise RuntimeError(
        f"Triton kernels run on CUDA devices, or anywhere with TRITON_INTERPRET=1; got {device}"
    )


@dataclass(frozen=True)
class Launch:
    """One launch of a jit function on up to three axes of programs.

    `args` come before the constexpr arguments, in order: tensors, tensor descriptors, numbers, and
    groups of these; None for an argument that the call does not have.
    """

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]  # the constexpr arguments by name, some in a group
    num_warps: int = 4
    num_stages: int = 3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    fixed: bool = True  # it follows from the arguments of its builder alone

    @property
    def constants(self) -> dict[str, Any]:
        """Every constexpr argument by name, those in groups too."""
        return _ungrouped(self.keywords)

    def run(self) -> None:
        """Launch on the device of the tensors, on its current stream."""
        if 0 in self.grid:
            return
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self.run()
            return
        self._run(warmup=False)

    def _run(self, warmup: bool) -> Any:
        return self.kernel.run(
            *self.args, grid=self.grid, warmup=warmup, **self.keywords, num_warps=self.num_warps,
            num_stages=self.num_stages,
        )  # fmt: skip

    def compiled(self) -> Any:
        """Triton's compiled kernel, loaded on the current device; nothing is launched.

        Raises: Fault if it cannot be compiled or loaded.
        """
        given = [getattr(x, "base", x) for x in tree_leaves(self.args)]
        dtypes = tuple([x.dtype for x in given if isinstance(x, Tensor)])
        how = repr(self.constants), self.num_warps, self.num_stages
        key = self.kernel, dtypes, *how, self.device
        if key in FAILED:
            raise Fault(FAILED[key])
        try:
            made = self._run(warmup=True)
            made = made.result() if hasattr(made, "result") else made  # compiled in a thread
            launcher = made.run  # loads it
            if isinstance(launcher, functools.partial):  # an earlier attempt failed
                launcher()
            return made
        except Exception as error:
            if not _survivable(error):
                raise
            name, said = self.kernel.__name__, " ".join(str(error).split()) or type(error).__name__
            cuda = self.device.type == "cuda"
            device = torch.cuda.get_device_name(self.device) if cuda else self.device
            FAILED[key] = f"kernel {name} on {device}: {said[-300:]}"
            raise Fault(FAILED[key]) from error


#: What could not be compiled or loaded, and why: it is not tried again for other sizes.
FAILED: dict[tuple[Any, ...], str] = {}
#: What a driver says of a kernel that it does not load. Any other of its errors may be that of an
#: earlier launch, after which the device cannot be used.
_NOT_LOADED = ("kernel image", "PTX", "ptx", "unsupported toolchain", "not found", "invalid source")


def _survivable(error: Exception) -> bool:
    """Return whether an error concerns the compilation or loading of this kernel alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | torch.AcceleratorError):
        return False
    said = str(error)
    from_driver = "Triton Error" in said or "CUDA error" in said
    return not from_driver or any(words in said for words in _NOT_LOADED)


def _ungrouped(named: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in named.items():
        found |= _ungrouped(value._asdict()) if hasattr(value, "_asdict") else {name: value}
    return found


def scratch(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialised tensor that only the launches of one description use."""
    made: Any = like.new_empty(shape, dtype=dtype)
    made.is_scratch = True
    return made  # type: ignore[no-any-return]


def contiguous_rows(x: Tensor) -> Tensor:
    """Return x (..., N) with contiguous rows, any distance apart: itself or a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def vector(x: Tensor | None) -> Tensor | None:
    """Return x (N,) as a contiguous vector: itself or a copy."""
    return None if x is None else contiguous_rows(x)


def matrix(x: Tensor | None) -> Matrix | None:
    """Return x (M, N), whose rows are contiguous, as kernels take it."""
    return None if x is None else Matrix(x, x.stride(0))


def operand(x: Tensor | None) -> Matrix | None:
    """Return x (M, N) as kernels read it, with contiguous rows."""
    return None if x is None else matrix(contiguous_rows(x))


def dropout_of(mask: DropoutMask | None) -> tuple[Tensor | None, int, int, float]:
    """Return the site's key, first row, threshold and scale as kernels take them."""
    if mask is None:
        return None, 0, 0, 0.0
    return mask.site_key, mask.row0, threshold(mask.p), scale(mask.p)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Return the least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why kernels cannot compute in `dtype` on a device, or None if they can."""
    if dtype not in _DTYPES:
        return f"there are no kernels for {dtype}"
    if INTERPRETED:
        if device.type != "cpu":
            return f"Triton's interpreter (TRITON_INTERPRET=1) needs CPU tensors, not {device}"
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes bfloat16 products wrongly"
        return None
    if device.type != "cuda" and _driven(device) is None:
        return f"kernels run on CUDA devices, and the tensors are on {device}"
    target = target_of(device)
    if target.kind == "cuda" and target.arch < 80:
        return f"kernels need compute capability 8.0, and this GPU has {target.arch / 10}"
    return None

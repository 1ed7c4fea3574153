"""Triton's driver interface over the executor: kernels compiled for a GPU run on CPU tensors.

    with installed(90) as driver:
        kernel[grid](x, y, n, BLOCK=128)  # CPU tensors
    driver.launches  # what ran, and what each launch did

The path is the real one: Triton specializes arguments, compiles and caches; what it would hand to
ptxas is executed. A binary is the PTX itself.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as triton_driver

from .execute import How, Outcome, Program, TensorMap, execute

#: Architecture -> multiprocessors and bytes of shared memory that a block may have.
GPUS = {80: (108, 166912), 86: (84, 101376), 89: (128, 101376), 90: (132, 232448)}
#: Where Triton keeps what it compiled; by source, version and options.
CACHE = Path(__file__).parents[2] / "build" / "ptx"


@dataclass
class Launched:
    """A launch that was executed."""

    kernel: str
    grid: tuple[int, int, int]
    outcome: Outcome

    @property
    def counts(self) -> Counter[str]:
        """Sectors, bank passes and multiply-adds, and the "warp instructions" of all opcodes."""
        return self.outcome.counts + Counter({"warp instructions": self.outcome.opcodes.total()})


@dataclass(eq=False)
class Driver:
    """A GPU of an architecture that is not there; what Triton asks of a driver.

    Attributes:
        arch: ten times the compute capability.
        sms: its multiprocessors.
        how: how kernels are executed, and what is reported.
        launches: those executed, in order.
        before: is called before each launch: with the program, the grid, the arguments.
        strict: whether what is reported raises.
    """

    arch: int
    sms: int
    how: How = field(default_factory=How)
    launches: list[Launched] = field(default_factory=list)
    before: Callable[[Program, Sequence[int], Sequence[Any]], None] | None = None
    strict: bool = True

    @property
    def utils(self) -> Driver:
        return self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        """Kernels are cached by device: each architecture is one."""
        return self.arch

    def set_current_device(self, device: int) -> None:
        assert device == self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, Any]:
        shared = GPUS[self.arch][1]
        return {"max_shared_mem": shared, "multiprocessor_count": self.sms, "warpSize": 32}

    def load_binary(
        self, name: str, ptx: bytes, shared: int, device: int
    ) -> tuple[str, tuple[str, int], int, int, int]:
        """Module, function, registers, spills and the most threads of a block."""
        return name, (ptx.decode(), shared), 0, 0, 1024

    def launcher_cls(self, src: Any, metadata: Any) -> Callable[..., None]:
        signature = tuple(src.signature.values())
        maps = getattr(metadata, "tensordesc_meta", None) or ()

        def launch(gx, gy, gz, stream, function, packed, launch_metadata, enter, leave, *args):
            grid, given = (gx, gy, gz), list(_flat(signature, args, iter(maps)))
            program = _program(*function)
            if self.before is not None:
                self.before(program, grid, given)
            outcome = execute(program, grid, given, self.how)
            self.launches.append(Launched(metadata.name, grid, outcome))
            if self.strict:
                outcome.check()

        return launch


@functools.lru_cache(128)
def _program(ptx: str, shared: int) -> Program:
    """Thousands of objects each: those of the last kernels stay."""
    return Program(ptx, shared)


def _flat(signature: Sequence[Any], args: Sequence[Any], maps: Iterator[Any]) -> Iterator[Any]:
    """The parameters of the compiled kernel: groups in order, tensor descriptors in their parts."""
    for kind, value in zip(signature, args, strict=True):
        if isinstance(kind, tuple):
            yield from _flat(kind, value, maps)
        elif kind == "constexpr":
            continue
        elif kind.startswith("tensordesc"):
            meta = next(maps, None)
            if meta is None:
                nan = value.padding == "nan"
                yield from (value.base, *value.shape, *value.strides, nan, value.round_f32_to_tf32)
            else:
                if value.padding != "zero":
                    raise NotImplementedError(f"a tensor map whose padding is {value.padding}")
                yield TensorMap(
                    value.base, tuple(value.shape), tuple(value.strides),
                    tuple(meta["block_size"]), meta["swizzle"], meta["elem_size"],
                )  # fmt: skip
            yield from (*value.shape, *value.strides)
        else:
            yield value


def _stages(backend=None, stages=None, options=None, language=None, capability=None):
    """Triton's hook, without ptxas. Without arguments: the key of this stage in the cache."""
    if stages is None:
        return "executed on a CPU", "executed on a CPU"
    stages["cubin"] = lambda ptx, metadata: ptx.encode()
    return None


@contextlib.contextmanager
def installed(arch: int, sms: int = 0, **how: Any) -> Iterator[Driver]:
    """Kernels are compiled for `arch`, and executed here, until the end.

    `sms`: multiprocessors; few have persistent kernels loop. 0: as many as a typical GPU has.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    from fused_remat.triton import launch

    made, was = Driver(arch, sms or GPUS[arch][0], How(**how)), triton_driver._active
    at_once, launch.AT_ONCE = launch.AT_ONCE, True
    with triton.knobs.runtime.scope(), triton.knobs.cache.scope():
        triton.knobs.runtime.add_stages_inspection_hook = _stages
        triton.knobs.cache.dir = str(CACHE)
        triton_driver.set_active(made)
        try:
            yield made
        finally:
            triton_driver._active, launch.AT_ONCE = was, at_once

"""Peers run on CPU tensors as they are: what asks for a CUDA device is told of the driver's."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.autotuner import Autotuner, Config

import tests.ptx.driver
from bench.counts.inductor import compiles_for, properties
from bench.counts.tally import counts_of
from fused_remat.execution import choose
from fused_remat.steps import cross_entropy, linear, timing
from tests.ptx.driver import Driver, Launched

#: What asks whether a tensor is on a CUDA device: to count multiprocessors, or to refuse others.
_ASKING = (
    ("liger_kernel.ops.rms_norm", "rms_norm_backward"),
    ("liger_kernel.ops.layer_norm", "layer_norm_backward"),
    ("liger_kernel.ops.fused_linear_cross_entropy", "_can_use_mm_out"),
    ("liger_kernel.ops.fused_linear_cross_entropy", "fused_linear_cross_entropy_forward"),
    ("liger_kernel.ops.mlp", "LigerMLPFunction"),
    ("flash_swiglu_mlp.ops", "_FlashSwiGLUFunction"),
)


def requested(launches: list[Launched]) -> tuple[int, int]:
    """What configurations are chosen by: the sectors requested, then the instructions."""
    total = sum(map(counts_of, launches), Counter())
    return total["load sectors"] + total["store sectors"], total["warp instructions"]


def _largest(tuner: Any, driver: Driver) -> Any:
    """The largest tile, with the most stages, that fits the shared memory."""
    most = driver.get_device_properties(driver.arch)["max_shared_mem"]

    def size(config: Config) -> tuple[int, ...]:
        tile = config.kwargs
        area = tile.get("BLOCK_M", 1) * tile.get("BLOCK_N", 1)
        return area, config.num_warps, config.num_stages, tile.get("BLOCK_K", 1)

    def prune(self: Any, kwargs: dict[str, Any]) -> list[Config]:
        for config in sorted(tuner(self, kwargs), key=size, reverse=True):
            given = {**self.nargs, **kwargs, **config.all_kwargs(), "grid": (1,)}
            given.pop("warmup", None)
            if config.pre_hook is not None:
                config.pre_hook(given)
            if self.fn.warmup(**given).metadata.shared <= most:
                return [config]
        raise ValueError("no configuration fits the shared memory")

    return prune


def _tuned_again(run: Any) -> Any:
    """Triton remembers what it chose by sizes, whatever the architecture."""

    def afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.cache.clear()
        return run(self, *args, **kwargs)

    return afresh


def _as_on_cuda(module: Any, name: str) -> Any:
    """A function or a class, to which a tensor on the CPU is on a CUDA device."""
    source = textwrap.dedent(inspect.getsource(getattr(module, name)))
    changed = source
    for asks, told in (
        (".is_cuda", ".is_cpu"), ('.device.type == "cuda"', ".is_cpu"),
        ('.device.type != "cuda"', ".is_cuda"),
    ):  # fmt: skip
        changed = changed.replace(asks, told)
    assert changed != source, f"{module.__name__}.{name} asks for no device"
    made: dict[str, Any] = {}
    exec(compile(changed, module.__file__, "exec"), vars(module), made)
    return made[name]


def _wide_mm(a: Tensor, b: Tensor, dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    """A product that is not rounded, which ATen has on a GPU only."""
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


def _unseen(*given: Any, execute: Any = tests.ptx.driver.execute) -> Any:
    """`execute`, whose own operations are nobody's."""
    with _disable_current_modes():
        return execute(*given)


@contextlib.contextmanager
def peers(driver: Driver, share: int = 1) -> Iterator[None]:
    """Within, Triton kernels of other packages, and Inductor's, are compiled for the driver.

    It has one in `share` of the architecture's multiprocessors. What ours and PyTorch's do
    otherwise on a CPU is as on a GPU: sizes of pieces, products of 16 bits.
    """
    capability = divmod(driver.arch, 10)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_properties", lambda device=None: properties(driver)),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (Autotuner, "run", _tuned_again(Autotuner.run)),
            (Autotuner, "prune_configs", _largest(Autotuner.prune_configs, driver)),
            (tests.ptx.driver, "execute", _unseen),
            (driver, "strict", False),  # warps that hold the same load what another one overwrites
            (driver, "sms", driver.sms // share),
            (linear, "cpu_has_native", lambda dtype: True),
            (timing, "prefers", lambda *asked: False),
            (choose, "cpu_has_native", lambda dtype: False),
            (cross_entropy, "product", _as_on_cuda(cross_entropy, "product")),
            (choose, "_CPU_TOKENS", choose._DEVICE_TOKENS),
            (cross_entropy, "_CPU_LOGITS", cross_entropy._DEVICE_LOGITS),
            (Autotuner, "_bench", lambda self, *args, **kwargs: [0.0]),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for name in ("mm.dtype", "mm.dtype_out"):
            library.impl(name, _wide_mm, "CPU")
        for where, name in _ASKING:
            if importlib.util.find_spec(where.split(".")[0]) is None:
                continue
            module = importlib.import_module(where)
            made = _as_on_cuda(module, name)
            package = importlib.import_module(where.rpartition(".")[0])
            for owner in (module, package):
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, made))
        stack.enter_context(compiles_for(driver, requested))
        yield

"""`torch.compile` of functions of CPU tensors, as it compiles for CUDA: the driver executes that.

Dynamo and AOTAutograd see CPU tensors. Before Inductor is given a graph, the fake tensors of its
nodes are moved to a CUDA device, so that it decides and writes what it would for that GPU; of what
it writes, only allocations and device guards are changed back.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from tests.ptx.driver import Driver, Launched

_DEVICE = torch.device("cuda", 0)
#: How launches of one configuration compare with those of another.
Cost = Callable[[list[Launched]], Any]


def _moved(value: Any) -> Any:
    """A fake tensor, in place, or a CPU device on the CUDA device; else the value itself."""
    if isinstance(value, FakeTensor):
        value.fake_device = _DEVICE
    elif isinstance(value, torch.device) and value.type == "cpu":
        return _DEVICE
    return value


def _inner(graph: Any, inputs: Any, *, compile_: Callable[..., Any], **options: Any) -> Any:
    for module in graph.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            pytree.tree_map(_moved, node.meta.get("val"))
            node.args, node.kwargs = pytree.tree_map(_moved, (node.args, node.kwargs))
        module.recompile()
    pytree.tree_map(_moved, inputs)
    return compile_(graph, inputs, **options)


def _interface(driver: Driver, cpu: type) -> type:
    """What Inductor asks of a CUDA device, answered by the driver."""

    class Interface(cpu):  # type: ignore[misc, valid-type]
        class Worker:
            get_device_properties = staticmethod(lambda device=None: properties(driver))
            current_device = staticmethod(lambda: 0)

        get_compute_capability = staticmethod(lambda device=None: driver.arch)
        exchange_device = maybe_exchange_device = staticmethod(lambda device: device)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

    return Interface


def properties(driver: Driver) -> SimpleNamespace:
    """As `torch.cuda.get_device_properties` has them."""
    known = driver.get_device_properties(driver.arch)
    return SimpleNamespace(
        name="executed", major=driver.arch // 10, minor=driver.arch % 10, warp_size=32,
        multi_processor_count=known["multiprocessor_count"], max_threads_per_block=1024,
        regs_per_multiprocessor=1 << 16, max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=known["max_shared_mem"], total_memory=80 << 30,
        L2_cache_size=40 << 20, gcnArchName="",
    )  # fmt: skip


def _tuned(driver: Driver, cost: Cost) -> Callable[..., None]:
    """Of the configurations that Inductor would time, the one of the least cost."""

    def tune(self: Any, *args: Any, **kwargs: Any) -> None:
        def of(launcher: Any) -> Any:
            given, named = self.maybe_clone_args(set(), *args, **kwargs)
            before = len(driver.launches)
            launcher(*given, **named, stream=0)
            made = driver.launches[before:]
            del driver.launches[before:]
            return cost(made)

        with _disable_current_modes():  # what is tried is not counted
            self.launchers = [min(self.launchers, key=of)]

    return tune


def _forget() -> None:
    """What was compiled, and what torch remembers of Triton."""
    torch._dynamo.reset()
    for function in vars(torch.utils._triton).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


@contextlib.contextmanager
def compiles_for(driver: Driver, cost: Cost) -> Iterator[None]:
    """Within, `torch.compile` compiles for the driver's architecture."""
    from torch._dynamo import device_interface
    from torch._inductor import compile_fx, config
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.codegen import common
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    flex, attention = (  # by name: functions hide the modules
        importlib.import_module(f"torch.{room}.flex_attention")
        for room in ("_higher_order_ops", "nn.attention")
    )
    device_interface.get_interface_for_device("cpu")  # fills the tables that are changed here
    common.init_backend_registration()
    common.get_device_op_overrides("cuda")
    interface = _interface(driver, device_interface.CpuInterface)
    inner = functools.partial(_inner, compile_=compile_fx.compile_fx_inner)
    compile_ = functools.partial(compile_fx.compile_fx, inner_compile=inner)
    write = PyCodeCache.write

    def on_cpu(text: str, *args: Any, **kwargs: Any) -> Any:
        for cuda, cpu in {"empty_strided_cuda(": "empty_strided_cpu(", "'cuda:0'": "'cpu'"}.items():
            text = text.replace(cuda, cpu)
        return write(text, *args, **kwargs)

    def permuted(*given: Any, permute: Any = flex._permute_strides) -> Any:
        """A fake tensor holds nothing to copy, and there is no CUDA to copy it."""
        with mock.patch.object(FakeTensor, "copy_", lambda self, other: self, create=True):
            return permute(*given)

    settings = {
        "compile_threads": 1, "assert_indirect_indexing": False, "fx_graph_cache": False,
        "force_disable_caches": True,
        # As for a batch of which only some rows are executed: rows are never too few.
        "triton.mix_order_reduction_non_strict_mode": True,
    }  # fmt: skip
    interfaces = {"cuda": interface, "cuda:0": interface}
    _forget()
    with (
        mock.patch.dict(device_interface.device_interfaces, interfaces),
        mock.patch.dict(common.device_op_overrides_dict, {"cuda": CpuDeviceOpOverrides()}),
        mock.patch.object(flex, "_permute_strides", permuted),
        mock.patch.object(attention, "_validate_device", lambda *heads: None),
        mock.patch.object(compile_fx, "compile_fx", compile_),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        mock.patch.object(PyCodeCache, "write", on_cpu),
        mock.patch.object(CachingAutotuner, "autotune_to_one_config", _tuned(driver, cost)),
        config.patch(settings),
    ):
        try:
            yield
        finally:
            _forget()

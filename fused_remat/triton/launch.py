"""Kernel launches as data, and their cache.

A `Launch` can be run, or compiled ahead of time with the same arguments. A builder describes
launches from the shapes, strides, dtypes and alignments of tensors, which of these are the same,
numbers and specs. What is launched for these a second time, `run` freezes: from then on it only
inserts the tensors, and neither the builder nor `JITFunction.run` runs again. (Freezing takes as
long as some launches, and sizes that vary from step to step may never return.) The key has all that
Triton specializes a kernel by, so the frozen kernel is the one that Triton would take.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from triton.backends.driver import GPUDriver
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.spec import AttentionSpec, NormSpec
from fused_remat.steps.operations import RECORDERS, Fault

#: Whether Triton interprets kernels, on CPU tensors. It reads TRITON_INTERPRET=1 at import.
INTERPRETED: bool = triton.knobs.runtime.interpret


class Target(NamedTuple):
    """The hardware that kernels are launched on."""

    kind: str  # "cuda", "hip" or "interpreter"
    arch: int  # ten times the compute capability, such as 90 for Hopper; 0 for "hip"
    sms: int  # multiprocessors; a persistent kernel launches about as many programs

    @property
    def has_tma(self) -> bool:
        """True if the hardware has tensor descriptors."""
        return self.arch >= 90


@functools.cache
def _device_target(index: int) -> Target:
    gpu, is_hip = torch.cuda.get_device_properties(index), torch.version.hip is not None
    arch = 0 if is_hip else 10 * gpu.major + gpu.minor
    return Target("hip" if is_hip else "cuda", arch, gpu.multi_processor_count)


def _driven(device: torch.device) -> Target | None:
    """Return the target of Triton's active driver, if it launches on tensors of `device`'s type."""
    driver = getattr(triton.runtime.driver, "_active", None)
    if driver is None or isinstance(driver, GPUDriver):  # of torch.cuda's devices
        return None
    gpu = driver.get_current_target()
    if gpu.backend != "cuda" or driver.get_active_torch_device().type != device.type:
        return None
    properties = driver.utils.get_device_properties(driver.get_current_device())
    return Target("cuda", int(gpu.arch), properties["multiprocessor_count"])


def target_of(device: torch.device) -> Target:
    """Return the target of tensors on `device`. The interpreter's has three multiprocessors.

    Raises: RuntimeError if kernels cannot run there.
    """
    if INTERPRETED:
        return Target("interpreter", 90, 3)
    if device.type == "cuda":
        return _device_target(torch.cuda.current_device() if device.index is None else device.index)
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
        flat: dict[str, Any] = {}
        for name, value in self.keywords.items():
            flat |= value._asdict() if hasattr(value, "_asdict") else {name: value}
        return flat

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
        """Return Triton's compiled kernel, loaded on the current device; nothing is launched.

        Raises: Fault if it cannot be compiled or loaded.
        """
        args = [getattr(x, "base", x) for x in tree_leaves(self.args)]
        dtypes = tuple([x.dtype for x in args if isinstance(x, Tensor)])
        options = repr(self.constants), self.num_warps, self.num_stages
        key = self.kernel, dtypes, *options, self.device
        if key in FAILED:
            raise Fault(FAILED[key])
        try:
            kernel = self._run(warmup=True)
            kernel = kernel.result() if hasattr(kernel, "result") else kernel  # of a thread
            launcher = kernel.run  # loads it
            if isinstance(launcher, functools.partial):  # an earlier attempt failed
                launcher()
            return kernel
        except Exception as error:
            if not _survivable(error):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            cuda = self.device.type == "cuda"
            device = torch.cuda.get_device_name(self.device) if cuda else self.device
            FAILED[key] = f"kernel {self.kernel.__name__} on {device}: {message[-300:]}"
            raise Fault(FAILED[key]) from error


#: What could not be compiled or loaded, and why: it is not tried again for other sizes.
FAILED: dict[tuple[Any, ...], str] = {}
#: Words in a driver's error for a kernel that it does not load. Another error may be that of an
#: earlier launch, after which the device cannot be used.
_NOT_LOADED = ("kernel image", "PTX", "ptx", "unsupported toolchain", "not found", "invalid source")


def _survivable(error: Exception) -> bool:
    """Return whether an error concerns the compilation or loading of this kernel alone."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | torch.AcceleratorError):
        return False
    message = str(error)
    from_driver = "Triton Error" in message or "CUDA error" in message
    return not from_driver or any(words in message for words in _NOT_LOADED)


#: Versions of Triton whose launchers are called here: as `CompiledKernel.run(*grid, stream,
#: function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args)`.
VERSIONS = ((3, 6), (3, 7))
# On ROCm, kernels are also specialized by the size of a tensor's storage, which no key has.
_KNOWN = (
    tuple(map(int, triton.__version__.split(".")[:2])) in VERSIONS and torch.version.hip is None
)
#: Among the arguments of a builder: the target of its tensors.
TARGET: Any = object()
#: By builder, device and arguments; None for what was launched once.
PLANS: dict[tuple[Any, ...], _Plan | None] = {}
AT_ONCE = False  # whether launches are frozen the first time, for tests
_MOST = 1 << 14
_RUNTIME, _DRIVER = triton.knobs.runtime, triton.runtime.driver
_PLAIN = frozenset({int, float, bool, str, type(TARGET), torch.dtype, torch.device})
_SPECS = frozenset({NormSpec, AttentionSpec})


def forget() -> None:
    """Describe and compile everything again from now on."""
    PLANS.clear()
    FAILED.clear()


def run(describe: Callable[..., Launch | Iterable[Launch]], *args: Any) -> None:
    """Launch all that `describe(*args)` describes, on the current stream.

    Raises: Fault if one of the kernels cannot be compiled or loaded; then none is launched.
    """
    key: list[Any] = [describe, _RUNTIME.add_stages_inspection_hook, _RUNTIME.debug]
    seen: dict[int, int] = {}
    tensors: list[Tensor] = []
    held: list[Any] = []
    plan = known = None
    if _read(args, key, seen, tensors, held) and not INTERPRETED:
        driver, device = _DRIVER.active, tensors[0].device
        index = driver.get_current_device()
        if device.type == "cuda" and device.index != index:
            with torch.cuda.device(device):
                run(describe, *args)
            return
        key += (device, driver, index)
        known = tuple(key)
        plan = PLANS.get(known)
    if plan is None or not plan.applies():
        on = next(x.device for x in args if isinstance(x, Tensor))
        built = describe(*[target_of(on) if x is TARGET else x for x in args])
        built = [built] if isinstance(built, Launch) else built
        launches = [launch for launch in built if 0 not in launch.grid]
        if plan is None and not INTERPRETED:
            kernels = [launch.compiled() for launch in launches]
            if known is not None:
                is_new = known not in PLANS and not AT_ONCE
                if len(PLANS) >= _MOST:
                    PLANS.clear()
                plan = None if is_new else _freeze(launches, kernels, tensors, held)
                PLANS[known] = plan
        if plan is None or not plan.applies():
            _note(describe, None, (), 0, tensors)
            for launch in launches:
                launch.run()
            return
    assert plan.go is not None
    stream = driver.get_current_stream(index)
    if not (RECORDERS and _note(describe, plan.go, plan.hooks, stream, tensors)):
        plan.go(stream, *tensors)


def _note(
    describe: Any, go: Any, hooks: Sequence[Any], stream: int, tensors: Sequence[Tensor]
) -> bool:
    """Give a launch to what records the pass of this thread; return whether it launched."""
    recorder = RECORDERS.get(threading.get_ident())
    if recorder is None:
        return False
    name = describe.__name__.strip("_")
    if name in ("forward", "backward"):
        name = f"{describe.__module__.rpartition('.')[2]}_{name}"
    recorder.launch(name, go, hooks, stream, *tensors)
    return True


def state(device: torch.device) -> tuple[Any, ...] | None:
    """Return what frozen launches depend on in addition to tensors; None if hooks observe them.

    None also if another device than `device` is current.
    """
    if INTERPRETED or not _hooks_are_empty():
        return None
    driver = _DRIVER.active
    index = driver.get_current_device()
    if device.type == "cuda" and device.index != index:
        return None
    precision = torch.backends.cuda.matmul.fp32_precision
    return driver, index, _RUNTIME.add_stages_inspection_hook, _RUNTIME.debug, precision


def stream() -> int:
    """Return the current stream of the current device."""
    driver = _DRIVER.active
    return driver.get_current_stream(driver.get_current_device())  # type: ignore[no-any-return]


def _hooks_are_empty() -> bool:
    """Return whether no hooks, such as a profiler's, observe launches."""
    try:
        return not (_RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls)
    except AttributeError:  # set to something else
        return False


def _read(
    values: Any, key: list[Any], seen: dict[int, int], tensors: list[Tensor], held: list[Any]
) -> bool:
    """Add to the key all that launches depend on; return False for something unknown."""
    add = key.append
    for value in values:
        kind: Any = type(value)
        if kind is Tensor or kind is nn.Parameter:
            mark = id(value)
            if mark in seen:
                add((seen[mark],))
            else:
                seen[mark] = len(tensors)
                tensors.append(value)
                add((value.dtype, value.shape, value.stride(), value.data_ptr() & 15))
        elif value is None or kind in _PLAIN:
            add(value)
        elif kind in _SPECS:
            held.append(value)
            add(id(value))
        else:
            parts_of = _parts_of(kind)
            if parts_of is None:
                return False
            parts = parts_of(value)
            add(len(parts))
            if not _read(parts, key, seen, tensors, held):
                return False
    return True


@functools.cache
def _parts_of(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """Return the parts of a tuple, a call or a mask; None if it is none of those."""
    if issubclass(kind, tuple):
        return tuple
    names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    names = names or [name for name in getattr(kind, "__slots__", ()) if name[0] != "_"]
    if issubclass(kind, Tensor) or not names:
        return None
    return attrgetter(*names) if len(names) > 1 else lambda x: (getattr(x, names[0]),)


@dataclass(frozen=True)
class _Plan:
    go: Callable[..., None] | None  # of a stream and tensors; None: not freezable
    hooks: tuple[Any, ...]  # of the kernels, which Triton calls before each run; usually empty
    held: list[Any]  # the specs that the key names by identity

    def applies(self) -> bool:
        """Return whether no hooks must run, as in `JITFunction.run`."""
        return self.go is not None and not any(self.hooks) and _hooks_are_empty()


def _freeze(
    launches: Sequence[Launch], kernels: Sequence[Any], tensors: Sequence[Tensor], held: list[Any]
) -> _Plan:
    hooks = tuple([launch.kernel.pre_run_hooks for launch in launches])
    plain = all(type(kernel) is CompiledKernel for kernel in kernels)
    if not (_KNOWN and plain and all(launch.fixed for launch in launches)):
        return _Plan(None, hooks, held)
    places = _Places(tensors)
    calls = []
    for launch, kernel in zip(launches, kernels, strict=True):
        names, parameters = launch.kernel.arg_names, launch.kernel.signature.parameters
        rest = names[len(launch.args) :]
        constants = [launch.keywords.get(n, parameters[n].default) for n in rest]
        x, y, z = (*launch.grid, 1, 1)[:3]
        head = map(places.constant, (kernel.run, kernel.function, kernel.packed_metadata))
        start, function, packed = head
        try:
            args = "".join([f", {places.source(value)}" for value in (*launch.args, *constants)])
        except LookupError:
            return _Plan(None, hooks, held)
        start_args = f"{x}, {y}, {z}, stream, {function}, {packed}, None, None, None"
        calls.append(f" {start}({start_args}{args})")
    given = "".join([f", t{n}" for n in range(len(tensors))])
    lines = [f"def go(stream{given}):", *places.scratch, *calls, " return"]
    exec("\n".join(lines), places.names)
    return _Plan(places.names["go"], hooks, held)


class _Places:
    """Arguments of launches as source text, in which `t0` to `tn` are the tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        #: What the text refers to, and lines that allocate what only the launches use.
        self.names: dict[str, Any] = {"__name__": __name__, "described": _described}
        self.scratch: list[str] = []

    def constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def source(self, value: Any) -> str:
        """Return the text of a value; raise LookupError for a copy of a tensor."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, TensorDescriptor):
            rest = {name: part for name, part in vars(value).items() if name != "base"}
            return f"described({self.constant(rest)}, {self.source(value.base)})"
        leaves = tree_leaves(value) if isinstance(value, tuple) else ()
        if any(isinstance(leaf, Tensor | TensorDescriptor) for leaf in leaves):
            return f"({''.join([f'{self.source(part)}, ' for part in value])})"
        return self.constant(value)

    def _tensor(self, x: Tensor) -> str:
        same = [n for n, t in enumerate(self.tensors) if t is x]
        if same:
            return f"t{same[0]}"
        if hasattr(x, "is_scratch"):
            shape, dtype = map(self.constant, (x.shape, x.dtype))
            name = f"t{len(self.tensors)}"
            self.scratch.append(f" {name} = t0.new_empty({shape}, dtype={dtype})")
            self.tensors.append(x)
            return name
        storage = x.untyped_storage()._cdata
        near = [n for n, t in enumerate(self.tensors) if t.untyped_storage()._cdata == storage]
        if len(near) != 1:  # of several, one may be elsewhere another time
            raise LookupError
        base = self.tensors[near[0]]
        apart = x.storage_offset() * x.itemsize - base.storage_offset() * base.itemsize
        if apart == 0:  # a kernel takes its address, and the strides are numbers
            return f"t{near[0]}"
        if x.dtype != base.dtype:
            raise LookupError
        where = f"t{near[0]}.storage_offset() + {apart // x.itemsize}"
        shape, stride = map(self.constant, (x.shape, x.stride()))
        return f"t{near[0]}.as_strided({shape}, {stride}, {where})"


def _described(fields: dict[str, Any], base: Tensor) -> TensorDescriptor:
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.__dict__ = {**fields, "base": base}
    return descriptor


def scratch(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialized tensor that only the launches of one description use."""
    tensor = like.new_empty(shape, dtype=dtype)
    tensor.is_scratch = True  # type: ignore[attr-defined]
    return tensor


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why kernels cannot compute in `dtype` on a device, or None if they can."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
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

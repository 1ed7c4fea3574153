"""Frozen launches: described and compiled once, then handed to their launchers.

A builder describes launches (`launch.Launch`) from tensors, numbers and specs, and from nothing
else: from the tensors' shapes, strides, dtypes, the alignment of their addresses, and which of them
are the same. `run` remembers by these what is launched. From then on it only puts the tensors into
their places: neither the builder nor `JITFunction.run` runs again. The key has all that Triton
specialises a kernel by, and more, so the frozen kernel is the one that Triton would take.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
import triton
from torch import Tensor, nn
from triton.compiler import CompiledKernel
from triton.tools.tensor_descriptor import TensorDescriptor

from fused_remat.spec import AttentionSpec, NormSpec
from fused_remat.triton.launch import INTERPRETED, Launch

#: Versions of Triton whose launchers are called here: as `CompiledKernel.run(*grid, stream,
#: function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args)`.
VERSIONS = ((3, 6), (3, 7))
_KNOWN = tuple(map(int, triton.__version__.split(".")[:2])) in VERSIONS
#: By builder, place and arguments: what launches, or None if that cannot be frozen; and the specs
#: that the key names by identity.
PLANS: dict[tuple[Any, ...], tuple[_Plan | None, Any]] = {}
_MOST_PLANS = 1 << 14
_RUNTIME, _DRIVER = triton.knobs.runtime, triton.runtime.driver
_PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})
_SPECS = frozenset({NormSpec, AttentionSpec})
_TENSORS = frozenset({Tensor, nn.Parameter})
_SAME = object()  # before the number of a tensor that stood earlier


def run(describe: Callable[..., Launch | Iterable[Launch]], *args: Any) -> None:
    """Launch all that `describe(*args)` describes, on the current stream.

    Raises: Fault if one of the kernels cannot be compiled or loaded; then none is launched.
    """
    key: list[Any] = [describe, _RUNTIME.add_stages_inspection_hook]
    tensors: list[Tensor] = []
    held: list[Any] = []
    frozen = known = None
    if not INTERPRETED and _read(args, key, tensors, held):
        driver, device = _DRIVER.active, tensors[0].device
        index = driver.get_current_device()
        if device.type == "cuda" and device.index != index:
            with torch.cuda.device(device):
                run(describe, *args)
            return
        key += (device, index)
        known = tuple(key)
        frozen = PLANS.get(known)
        if frozen is not None and frozen[0] is not None and not _hooked(frozen[0]):
            frozen[0].go(tensors, driver.get_current_stream(index))
            return
    described = describe(*args)
    launches = [described] if isinstance(described, Launch) else list(described)
    launches = [launch for launch in launches if 0 not in launch.grid]
    if not INTERPRETED and frozen is None:
        kernels = [launch.compiled() for launch in launches]
        if known is not None:
            if len(PLANS) >= _MOST_PLANS:
                PLANS.clear()
            PLANS[known] = _freeze(launches, kernels, tensors), held
            run(describe, *args)
            return
    for launch in launches:
        launch.run()


def _read(values: Iterable[Any], key: list[Any], tensors: list[Tensor], held: list[Any]) -> bool:
    """Add to the key all that launches depend on; False if there is something unknown."""
    for value in values:
        kind = type(value)
        if kind in _PLAIN:
            key.append(value)
        elif kind in _TENSORS:
            for n, other in enumerate(tensors):
                if other is value:
                    key += (_SAME, n)
                    break
            else:
                tensors.append(value)
                key += (value.dtype, value.shape, value.stride(), value.data_ptr() & 15)
        elif kind in _SPECS:
            held.append(value)
            key.append(id(value))
        elif isinstance(value, tuple):
            key.append(len(value))
            if not _read(value, key, tensors, held):
                return False
        else:
            parts = _parts_of(kind)
            key.append(kind)
            if parts is None or not _read(parts(value), key, tensors, held):
                return False
    return True


@functools.cache
def _parts_of(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """The parts of a call or a mask; None if it is not one of those."""
    names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    names = names or [name for name in getattr(kind, "__slots__", ()) if name[0] != "_"]
    if issubclass(kind, Tensor) or not names:
        return None
    return attrgetter(*names) if len(names) > 1 else lambda x: (getattr(x, names[0]),)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Frozen launches.

    Attributes:
        go: launches on the tensors of a call, in the order of its arguments, on a stream.
        hooks: of the kernels, which Triton calls before each run; usually empty.
    """

    go: Callable[[list[Tensor], int], None]
    hooks: tuple[Any, ...]


def _hooked(plan: _Plan) -> bool:
    """Whether a profiler, say, is to be told of launches, as `JITFunction.run` does."""
    return (
        any(plan.hooks)
        or getattr(_RUNTIME.launch_enter_hook, "calls", True)
        or getattr(_RUNTIME.launch_exit_hook, "calls", True)
    )  # type: ignore[return-value]


def _freeze(
    launches: Sequence[Launch], kernels: Sequence[Any], tensors: Sequence[Tensor]
) -> _Plan | None:
    """The launches as a function of the tensors, or None if they cannot be frozen."""
    plain = all(type(kernel) is CompiledKernel for kernel in kernels)
    if not (_KNOWN and plain and all(launch.fixed for launch in launches)):
        return None
    places = _Places(tensors)
    calls = []
    for launch, kernel in zip(launches, kernels, strict=True):
        given, names = launch.args, launch.kernel.arg_names
        constants = launch.kernel.signature.parameters
        rest = [launch.keywords.get(n, constants[n].default) for n in names[len(given) :]]
        first = [*(*launch.grid, 1, 1)[:3]]
        head = map(places.constant, (kernel.run, kernel.function, kernel.packed_metadata))
        start, function, packed = head
        try:
            args = "".join([f", {places.source(value)}" for value in (*given, *rest)])
        except LookupError:
            return None
        calls.append(
            f" {start}({first[0]}, {first[1]}, {first[2]}, stream, {function}, {packed}, "
            f"None, None, None{args})"
        )
    lines = ["def go(t, stream):", *places.scratch, *calls, " return"]
    exec("\n".join(lines), places.names)
    return _Plan(places.names["go"], tuple([launch.kernel.pre_run_hooks for launch in launches]))


class _Places:
    """Arguments of launches as source text, in which `t` holds the tensors.

    Attributes:
        names: what the text refers to.
        scratch: lines that allocate what only the launches use.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)
        self.names: dict[str, Any] = {"described": _described, "empty": torch.empty}
        self.scratch: list[str] = []

    def constant(self, value: Any) -> str:
        if value is None or type(value) in (int, bool):
            return repr(value)
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def source(self, value: Any) -> str:
        """Raises: LookupError for a tensor that is neither given nor scratch, such as a copy."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, TensorDescriptor):
            rest = {name: part for name, part in vars(value).items() if name != "base"}
            return f"described({self.constant(rest)}, {self.source(value.base)})"
        if isinstance(value, tuple):
            return f"({''.join([f'{self.source(part)}, ' for part in value])})"
        return self.constant(value)

    def _tensor(self, x: Tensor) -> str:
        same = [n for n, t in enumerate(self.tensors) if t is x]
        if same:
            return f"t[{same[0]}]"
        if hasattr(x, "is_scratch"):
            how = map(self.constant, (x.shape, x.dtype, x.device))
            self.scratch.append(" t.append(empty({}, dtype={}, device={}))".format(*how))
            self.tensors.append(x)
            return f"t[{len(self.tensors) - 1}]"
        storage = x.untyped_storage()._cdata
        near = [n for n, t in enumerate(self.tensors) if t.untyped_storage()._cdata == storage]
        if len(near) != 1:  # of several, one may be elsewhere another time
            raise LookupError
        base = self.tensors[near[0]]
        apart = x.storage_offset() * x.itemsize - base.storage_offset() * base.itemsize
        if apart == 0:  # a kernel takes its address, and the strides are numbers
            return f"t[{near[0]}]"
        if x.dtype != base.dtype:
            raise LookupError
        where = f"t[{near[0]}].storage_offset() + {apart // x.itemsize}"
        shape, stride = map(self.constant, (x.shape, x.stride()))
        return f"t[{near[0]}].as_strided({shape}, {stride}, {where})"


def _described(fields: dict[str, Any], base: Tensor) -> TensorDescriptor:
    """A descriptor like one that was checked when it was made."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    vars(made).update(fields, base=base)
    return made

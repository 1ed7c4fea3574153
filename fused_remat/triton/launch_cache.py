"""Frozen launches: described and compiled once, then handed to their launchers.

A builder describes launches (`launch.Launch`) from tensors, numbers and specs, and from nothing
else: from the tensors' shapes, strides, dtypes, the alignment of their addresses, and which of them
are the same. What is launched for these a second time, `run` remembers: from then on it only puts
the tensors into their places, and neither the builder nor `JITFunction.run` runs again. (Freezing
takes as long as some launches, and sizes that vary from step to step may never return.) The key has
all that Triton specialises a kernel by, so the frozen kernel is the one that Triton would take.
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
from fused_remat.triton.launch import FAILED, INTERPRETED, Launch, target_of

#: Versions of Triton whose launchers are called here: as `CompiledKernel.run(*grid, stream,
#: function, packed_metadata, launch_metadata, enter_hook, exit_hook, *args)`.
VERSIONS = ((3, 6), (3, 7))
# On ROCm, kernels are also specialised by the size of a tensor's storage, which no key has.
_KNOWN = (
    tuple(map(int, triton.__version__.split(".")[:2])) in VERSIONS and torch.version.hip is None
)
#: Among the arguments of a builder: the target of its tensors.
TARGET: Any = object()
#: By builder, place and arguments.
PLANS: dict[tuple[Any, ...], _Plan] = {}
#: What was launched once; and whether launches are frozen at once, as tests of them are.
SEEN: set[tuple[Any, ...]] = set()
AT_ONCE = False
_MOST = 1 << 14  # of each
_RUNTIME, _DRIVER = triton.knobs.runtime, triton.runtime.driver
_PLAIN = frozenset({int, float, bool, str, type(TARGET), torch.dtype, torch.device})
_SPECS = frozenset({NormSpec, AttentionSpec})


def forget() -> None:
    """Describe and compile anew from now on."""
    PLANS.clear()
    SEEN.clear()
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
        if plan is not None and plan.go is not None and not _hooked(plan):
            plan.go(tensors, driver.get_current_stream(index))
            return
    on = next(x.device for x in args if isinstance(x, Tensor))
    described = describe(*[target_of(on) if x is TARGET else x for x in args])
    launches = [described] if isinstance(described, Launch) else list(described)
    launches = [launch for launch in launches if 0 not in launch.grid]
    if not INTERPRETED and plan is None:
        kernels = [launch.compiled() for launch in launches]
        if known is not None and known not in SEEN and not AT_ONCE:
            if len(SEEN) >= _MOST:
                SEEN.clear()
            SEEN.add(known)
        elif known is not None:
            SEEN.discard(known)
            if len(PLANS) >= _MOST:
                PLANS.clear()
            PLANS[known] = plan = _freeze(launches, kernels, tensors, held)
            if plan.go is not None and not _hooked(plan):
                plan.go(tensors, driver.get_current_stream(index))
                return
    for launch in launches:
        launch.run()


def _read(
    values: Iterable[Any],
    key: list[Any],
    seen: dict[int, int],
    tensors: list[Tensor],
    held: list[Any],
) -> bool:
    """Add to the key all that launches depend on; False if there is something unknown."""
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


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Frozen launches."""

    go: Callable[[list[Tensor], int], None] | None  # of tensors and stream; None: not freezable
    hooks: tuple[Any, ...]  # of the kernels, which Triton calls before each run; usually empty
    held: list[Any]  # the specs that the key names by identity


def _hooked(plan: _Plan) -> bool:
    """Whether a profiler, say, is to be told of launches, as `JITFunction.run` does."""
    try:
        told = _RUNTIME.launch_enter_hook.calls or _RUNTIME.launch_exit_hook.calls
    except AttributeError:  # set to something else
        return True
    return bool(told) or any(plan.hooks)


def _freeze(
    launches: Sequence[Launch], kernels: Sequence[Any], tensors: Sequence[Tensor], held: list[Any]
) -> _Plan:
    """Return the launches as a function of the tensors."""
    hooks = tuple([launch.kernel.pre_run_hooks for launch in launches])
    plain = all(type(kernel) is CompiledKernel for kernel in kernels)
    if not (_KNOWN and plain and all(launch.fixed for launch in launches)):
        return _Plan(None, hooks, held)
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
            return _Plan(None, hooks, held)
        calls.append(
            f" {start}({first[0]}, {first[1]}, {first[2]}, stream, {function}, {packed}, "
            f"None, None, None{args})"
        )
    lines = ["def go(t, stream):", *places.scratch, *calls, " return"]
    exec("\n".join(lines), places.names)
    return _Plan(places.names["go"], hooks, held)


class _Places:
    """Arguments of launches as source text, in which `t` holds the tensors."""

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
        if isinstance(value, tuple) and _has_tensors(value):
            return f"({''.join([f'{self.source(part)}, ' for part in value])})"
        return self.constant(value)

    def _tensor(self, x: Tensor) -> str:
        same = [n for n, t in enumerate(self.tensors) if t is x]
        if same:
            return f"t[{same[0]}]"
        if hasattr(x, "is_scratch"):
            how = map(self.constant, (x.shape, x.dtype))
            self.scratch.append(" t.append(t[0].new_empty({}, dtype={}))".format(*how))
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


def _has_tensors(values: tuple[Any, ...]) -> bool:
    return any(
        _has_tensors(x) if isinstance(x, tuple) else isinstance(x, Tensor | TensorDescriptor)
        for x in values
    )


def _described(fields: dict[str, Any], base: Tensor) -> TensorDescriptor:
    """Return a descriptor like one that was checked when it was made."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.__dict__ = {**fields, "base": base}
    return made

"""The state that a layer's code depends on other than tensors, as values that can be compared."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import itertools
import types
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from fused_remat.layers.converted import ConvertedLayer
from fused_remat.layers.eligibility import (
    RECORDERS,
    REPLACED,
    ROUTER_LOGITS,
    Unsupported,
    check_unpacked,
    is_recording,
    qualified,
    recorded,
)
from fused_remat.layers.expert_stacks import class_of
from fused_remat.layers.packed import reader_of
from fused_remat.tracing.values import attributes

_NUMBERS = (int, float, bool, str, type(None))
PLAIN = {
    *_NUMBERS, bytes, complex, torch.dtype, torch.device, types.BuiltinFunctionType, types.CodeType,
}  # fmt: skip
#: Modules of a device mesh, or of a state of FSDP.
MACHINERY = ("torch.distributed.", "torch._", "torch.utils.")
_CONTAINERS = (tuple, list, set, frozenset, deque, dict)
#: Names of the attributes that objects of a class consist of.
FIELDS: dict[type, tuple[str, ...]] = {
    types.FunctionType: ("__module__", "__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    types.CellType: ("cell_contents",),
    types.MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
}
#: Classes of objects that a function may hold, and cannot change.
_CONSTANT = (type, Tensor, types.FunctionType, types.BuiltinFunctionType, *_NUMBERS)
#: Attributes that every module has.
MODULE = frozenset(nn.Module().__dict__)


def state_of(
    layer: nn.Module, excluded: Collection[str], seen: dict[int, Any] | None = None
) -> tuple[Any, ...]:
    """Return all that a trace depends on other than the arguments: classes, flags, numbers, shapes.

    `excluded`: names of attributes to ignore. `seen` is filled as by `exact`.

    Raises: Unsupported for a submodule with hooks, which a block would not call, or with packed
        parameters, which it would not read.
    """
    state, modules, ids = list[Any](), [*layer.named_modules()], dict[int, int]()
    seen = {} if seen is None else seen
    seen |= {id(module): (path, module) for path, module in modules}
    for path, module in modules:  # first, since what a hook holds takes long to compare
        check_hooks(vars(module), path)
    for path, module in modules:
        own = module.__dict__
        kind = module.stock if isinstance(module, ConvertedLayer) else class_of(module)
        if "training" not in own:
            raise Unsupported(f"{path or 'it'} is {qualified(kind)}, which has compiled code")
        read = reader_of(module)
        if read is None:
            check_unpacked(module, path)
        else:
            read(module, path)  # which may raise; a trace is known by the formats, too
        forward = own.get("forward", kind.forward)
        state += [path, weakref.ref(kind), exact(forward, seen), own["training"]]
        state += [values.get(name) for values, name in outside(kind)[1]]
        for name, value in own.items():
            if name not in MODULE and name not in excluded:
                state += [name, exact(value, seen)]
        for tensors in (own["_parameters"], own["_buffers"]):
            for n, t in tensors.items():  # with the index of one that is the same
                same = ids.setdefault(id(t), len(ids))
                state.append((n, None if t is None else (t.shape, t.dtype, same)))
    return tuple(state)


def check_hooks(own: Mapping[str, Any], path: str) -> None:
    forward = own.get("forward")
    while isinstance(forward, functools.partial):
        forward = forward.func
    known = (*_CONSTANT, nn.Module, types.MethodType)
    if not all(isinstance(value, known) for value in _held_by(forward)):
        raise Unsupported(f"{path}.{REPLACED}" if path else f"its {REPLACED}")
    if path and "_hf_hook" in own:  # of accelerate, which may move weights
        raise Unsupported(f"{path}.{REPLACED}")
    before = [hook for hook in own["_forward_pre_hooks"].values() if not _only_caches(hook)]
    if path and (before or own["_backward_hooks"] or own["_backward_pre_hooks"]):
        raise Unsupported(f"{path} has hooks")
    for hook in own["_forward_hooks"].values():
        if _only_caches(hook):
            continue
        if getattr(hook, "__module__", None) == RECORDERS:
            requested = recorded(hook)
            if requested not in ("", ROUTER_LOGITS) and (path or requested != "hidden_states"):
                raise Unsupported(f"the call requests {requested}, which a block does not compute")
        elif path:
            raise Unsupported(f"{path} has hooks")


def records_of(layer: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the submodules whose router logits transformers records now, and which result."""
    found = []
    for path, module in layer.named_modules() if is_recording() else ():
        for hook in module._forward_hooks.values():
            if getattr(hook, "__module__", None) == RECORDERS and recorded(hook) == ROUTER_LOGITS:
                index: int = inspect.getclosurevars(hook).nonlocals["index"]
                found.append((path, index))
    return tuple(found)


def record(router: nn.Module, x: Tensor, logits: Tensor) -> None:
    """Call the recorders of a router as if it had been called with `x`."""
    for hook in router._forward_hooks.values():
        if getattr(hook, "__module__", None) == RECORDERS and recorded(hook) == ROUTER_LOGITS:
            index: int = inspect.getclosurevars(hook).nonlocals["index"]
            hook(router, (x,), (*[None] * index, logits))


def _only_caches(hook: Any) -> bool:
    """Return whether a hook is bitsandbytes', by which stacks are dequantized once per forward."""
    return getattr(hook, "__module__", None) == "bitsandbytes.nn.parametrize"


def exact(value: Any, seen: dict[int, Any]) -> Any:
    """Return a key that equals another value's only if code cannot distinguish the two values.

    `seen`: by its id, each object that the value consists of, and what stands for it in the key.
    """
    kind = type(value)
    if kind in PLAIN or isinstance(value, enum.Enum):
        return kind, value if value == value else str(value)
    if isinstance(value, type):
        return weakref.ref(value)
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, (numpy.generic, int, float, str)):  # of a class of its own
        return weakref.ref(kind), repr(value)
    if isinstance(value, numpy.ndarray):
        held = repr(value) if value.dtype == object else value.tobytes()
        return value.shape, str(value.dtype), held
    if kind is types.FunctionType and not (
        value.__closure__ or value.__defaults__ or value.__kwdefaults__
    ):
        return value
    is_container = isinstance(value, _CONTAINERS)
    if not is_container and kind.__module__.startswith(MACHINERY):
        return kind  # it does not decide what is computed
    if isinstance(value, nn.Module):  # outside of the layer
        numbers = {n: v for n, v in vars(value).items() if type(v) in PLAIN}
        return _Identity(value), *numbers.items()
    parts = parts_of(value)
    if isinstance(value, (set, frozenset)):
        parts.sort(key=repr)
    if is_container or parts or _is_stateless(kind):
        return weakref.ref(kind), *[exact(part, seen) for part in parts]
    return _Identity(value)


def parts_of(value: Any) -> list[Any]:
    """Return the objects that a value consists of: items, attributes, or what a function holds."""
    if isinstance(value, types.CellType):
        try:
            return [value.cell_contents]
        except ValueError:  # of a name that has no value yet
            return []
    for kind, names in FIELDS.items():
        if isinstance(value, kind):
            return [getattr(value, name) for name in names]
    if isinstance(value, _CONTAINERS) and not isinstance(value, dict):
        return [*value]
    pairs = value if isinstance(value, dict) else attributes(value)
    return [*itertools.chain(*pairs.items())]


def _is_stateless(kind: type) -> bool:
    """Return whether objects of a class without attributes are functions that differ in nothing.

    They are those of a class of Python that can be called, without slots.
    """
    bases = kind.__mro__[:-1]
    is_python = all(base.__flags__ & _HEAP and "__slots__" not in vars(base) for base in bases)
    return is_python and bool(kind.__dictoffset__) and any("__call__" in vars(b) for b in bases)


#: Flag of classes that are not a part of Python itself.
_HEAP = 1 << 9


class _Identity:
    """A key that equals that of the same object only, held weakly if the object permits."""

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        try:
            self.value: Any = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value() is other.value() is not None

    def __hash__(self) -> int:
        return self.id


def may_change(value: Any) -> bool:
    """Return whether a value is an iterator, or a function that holds objects it may change."""
    return hasattr(value, "__next__") or not all(isinstance(v, _CONSTANT) for v in _held_by(value))


def _held_by(function: Any) -> list[Any]:
    """Return the contents of a function's closure and defaults, and a container that it is of."""
    cells, defaults = (getattr(function, n, None) or () for n in ("__closure__", "__defaults__"))
    own = getattr(function, "__self__", None)
    held = [*itertools.chain(*map(parts_of, cells)), *defaults]
    return [*held, own] if isinstance(own, (list, dict, set, deque)) else held


#: By class: the names that its functions read outside of any layer, each with its owner (a class,
#: or the globals of a module); and those of them that were numbers, each with its namespace.
_OUTSIDE: weakref.WeakKeyDictionary[type, tuple[list[tuple[Any, str]], list[tuple[Any, str]]]]
_OUTSIDE = weakref.WeakKeyDictionary()


def outside(kind: type) -> tuple[list[tuple[Any, str]], list[tuple[Any, str]]]:
    if kind not in _OUTSIDE:
        pairs, seen = list[tuple[Any, str]](), set[types.FunctionType]()
        own = [k for k in kind.__mro__ if not k.__module__.startswith(("torch.", "builtins"))]
        todo: list[tuple[Any, str, str]]
        todo = [(k, name, k.__module__) for k in own for name in vars(k)]
        while todo:
            owner, name, package = todo.pop()
            value = get(owner, name)
            if isinstance(value, types.FunctionType):
                if value.__module__ == package and value not in seen:
                    seen.add(value)
                    steps = dis.get_instructions(value)
                    read = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
                    todo += [(value.__globals__, n, package) for n in read]
            elif not name.startswith("__"):
                pairs.append((owner, name))
        numbers = [(o, n) for o, n in pairs if type(get(o, n)) in _NUMBERS]
        spaces = [(o if isinstance(o, dict) else vars(o), n) for o, n in numbers]
        _OUTSIDE[kind] = pairs, spaces
    return _OUTSIDE[kind]


def get(owner: Any, name: str) -> Any:
    return (owner if isinstance(owner, dict) else vars(owner)).get(name)


def shared_by(layer: nn.Module) -> list[tuple[Any, str]]:
    kinds = {type(module) for module in layer.modules()}
    return [pair for kind in kinds for pair in outside(kind)[0]]

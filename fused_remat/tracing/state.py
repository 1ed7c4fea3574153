"""What a layer's code depends on besides tensors: objects to tell apart, classes and modules."""

from __future__ import annotations

import dis
import enum
import functools
import itertools
import types
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from fused_remat.tracing.values import attributes

_PLAIN = {
    int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device,
    types.BuiltinFunctionType,
}  # fmt: skip


#: Of a device mesh, or of a state of FSDP.
_MACHINERY = ("torch.distributed.", "torch._", "torch.utils.")


def exact(value: Any, seen: dict[int, Any]) -> Any:
    """A value to tell apart by: equal to that of another one only where code cannot tell the two.

    `seen`: by id, what stands for objects that were met before.

    >>> exact([1, {"eps": 1e-5}], {}) == exact([1, {"eps": 1e-6}], {})
    False
    >>> exact(lambda x: x, {}) == exact(lambda x: x + 1, {})
    False
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, enum.Enum):
        return value if value == value else str(value)
    if isinstance(value, type):
        return weakref.ref(value)
    if id(value) in seen:
        return seen[id(value)]
    seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        return value.shape, value.dtype, value.requires_grad
    if isinstance(value, (numpy.generic, int, float, str)):  # of a class of its own
        return weakref.ref(kind), repr(value)
    if isinstance(value, numpy.ndarray):
        held = repr(value) if value.dtype == object else value.tobytes()
        return value.shape, str(value.dtype), held
    parts: Any = None
    if isinstance(value, (tuple, list, set, frozenset, deque)):
        parts = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    elif isinstance(value, dict):
        parts = itertools.chain(*value.items())
    elif isinstance(value, types.MethodType):
        parts = value.__func__, value.__self__
    elif isinstance(value, functools.partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, types.FunctionType):
        if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
            return value
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = value.__module__, value.__defaults__, value.__kwdefaults__, *cells
        return value.__code__, *[exact(part, seen) for part in parts]
    elif kind.__module__.startswith(_MACHINERY):
        return kind  # it does not decide what is computed
    elif isinstance(value, nn.Module):  # outside of the layer
        numbers = {n: v for n, v in vars(value).items() if type(v) in _PLAIN}
        return _Itself(value), *numbers.items()
    elif own := attributes(value):
        parts = itertools.chain(*own.items())
    if parts is not None:
        return weakref.ref(kind), *[exact(part, seen) for part in parts]
    return _Itself(value)


class _Itself:
    """Equal for the same object only, which it does not hold if it need not."""

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        try:
            self.value: Any = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value() is other.value() is not None

    def __hash__(self) -> int:
        return self.id


def held_by(function: Any) -> list[Any]:
    """What a function holds, as closures, defaults and the methods of lists do."""
    cells, given = (getattr(function, n, None) or () for n in ("__closure__", "__defaults__"))
    own = getattr(function, "__self__", None)
    holder = [own] if isinstance(own, (list, dict, set, deque)) else []
    return [*[cell.cell_contents for cell in cells], *given, *holder]


def is_mutable(value: Any) -> bool:
    """Whether a value is neither a number, nor a class, a function or a tensor."""
    plain = (type, Tensor, types.FunctionType, types.BuiltinFunctionType, *_NUMBERS)
    return not isinstance(value, plain)


#: By class: what its functions read that no layer holds, as an owner (a class, or the globals of a
#: module) and a name.
_OUTSIDE: weakref.WeakKeyDictionary[type, list[tuple[Any, str]]] = weakref.WeakKeyDictionary()
_NUMBERS = (int, float, bool, str, type(None))


def outside(kind: type) -> list[tuple[Any, str]]:
    """Attributes of a class, and the globals of its module that functions of the module read."""
    if kind not in _OUTSIDE:
        found, seen = list[tuple[Any, str]](), set[types.FunctionType]()
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
                found.append((owner, name))
        _OUTSIDE[kind] = found
    return _OUTSIDE[kind]


def get(owner: Any, name: str) -> Any:
    """The value that a class, or a dict, has by a name."""
    return (owner if isinstance(owner, dict) else vars(owner)).get(name)


#: By class, those of `outside` that were numbers, as a namespace and a name.
_NUMBERED: weakref.WeakKeyDictionary[type, list[tuple[Mapping[str, Any], str]]]
_NUMBERED = weakref.WeakKeyDictionary()


def numbers_of(kind: type) -> list[Any]:
    """Numbers that a class's functions read from it and from their module."""
    found = _NUMBERED.get(kind)
    if found is None:
        pairs = [(o, n) for o, n in outside(kind) if type(get(o, n)) in _NUMBERS]
        found = [(o if isinstance(o, dict) else vars(o), n) for o, n in pairs]
        _NUMBERED[kind] = found
    return [values.get(name) for values, name in found]


def shared_by(layer: nn.Module) -> list[tuple[Any, str]]:
    """What the classes of a layer's modules read that no layer holds (`outside`)."""
    return [pair for kind in {type(module) for module in layer.modules()} for pair in outside(kind)]

"""Cheap tests of whether a layer and a call's arguments are those for which a trace is known."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, compress, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any

import numpy
from torch import Tensor, nn

from fused_remat.layers.converted import ConvertedLayer
from fused_remat.tracing.state import MACHINERY, MODULE, PLAIN, check_hooks, exact, outside

_HOOKS = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
_CHILDREN, _TENSORS = itemgetter("_modules"), itemgetter("_parameters", "_buffers")
_FIELDS = attrgetter("__code__", "__module__", "__defaults__", "__kwdefaults__")
_CONTENTS, _FORWARD = attrgetter("cell_contents"), attrgetter("forward")
_VALUES, _flat = methodcaller("values"), chain.from_iterable
_LISTS, _DICTS = (list, set, deque), (dict, OrderedDict, defaultdict)
#: Names that every module has, and that `state_of` does not read as attributes.
_UNREAD = MODULE - {"training", "_is_full_backward_hook"}
#: Classes whose subclasses may iterate and compare as they like.
_BUILT_IN = (
    int, float, str, tuple, list, set, frozenset, deque, dict, numpy.ndarray, functools.partial,
)  # fmt: skip
#: Largest number of objects that are watched.
_MOST = 1 << 12


class Watch:
    """What `state_of` reads of a layer, and what its objects hold, to be compared by identity.

    Parameters and buffers are compared by class, shape and dtype. The layer, its modules and its
    tensors are held weakly.

    Raises: TypeError for an object that may change where this does not look.
    """

    def __init__(self, layer: nn.Module, excluded: Collection[str]) -> None:
        #: By the signature of a call: its trace, and names and values of tensors that decide.
        self.calls: dict[Any, tuple[Any, ...]] = {}
        inner = dict(layer.named_modules())
        self._paths, modules = [*inner], [*inner.values()]
        kinds = {m.stock if isinstance(m, ConvertedLayer) else type(m) for m in modules}
        pairs = [pair for kind in kinds for pair in outside(kind)[1]]
        self._kinds: list[Any] = [*kinds]
        self._outside = [*{(id(s), name): (s.get, name) for s, name in pairs}.values()]
        self._objects, self._functions, self._cells = list[Any](), list[Any](), list[Any]()
        self._lists, self._dicts = list[Any](), list[Any]()
        unread, seen = _UNREAD.union(excluded), set(map(id, modules))
        own = [*map(vars, modules)]
        todo = [v for values in own for name, v in values.items() if name not in unread]
        todo += map(_FORWARD, kinds)
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            if len(seen) == _MOST:
                raise TypeError("the layer holds too many objects")
            seen.add(id(value))
            if isinstance(value, nn.Module):  # outside of the layer
                modules.append(value)
            else:
                todo += self._parts(value)
        self._modules = [*map(weakref.ref, modules)]
        now, self._equal = self._read(modules)
        read = [name not in unread for values in map(vars, modules) for name in values]
        read += repeat(True, len(now) - len(read))
        held = [i for i, v in enumerate(now) if read[i] and isinstance(v, (nn.Module, Tensor))]
        self._weak = [(i, weakref.ref(now[i]), _key(now[i])) for i in held]
        for i in held:
            read[i] = False
        self._selected, self._saved = read, [*compress(now, read)]

    def is_current(self, layer: nn.Module) -> bool:
        """Return whether `state_of` would make the same of the layer as when this was made.

        Raises: Unsupported, as `state_of` does for hooks.
        """
        modules = [ref() for ref in self._modules]
        if modules[0] is not layer or None in modules:
            return False
        own = [*map(vars, modules[: len(self._paths)])]
        if any(_flat(map(_HOOKS, own))):
            for path, values in zip(self._paths, own, strict=True):
                check_hooks(values, path)
        now, equal = self._read(modules)
        if equal != self._equal or not all(map(is_, compress(now, self._selected), self._saved)):
            return False
        weak = [(now[i], ref(), key) for i, ref, key in self._weak]
        return all(v is t is not None and _key(v) == key for v, t, key in weak)

    def _read(self, modules: list[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """Return the objects that are compared by identity, and what is compared by value."""
        own = [*map(vars, modules)]
        inner = own[: len(self._paths)]
        children, tensors = [*map(_CHILDREN, inner)], [*_flat(map(_TENSORS, inner))]
        own += map(object.__getattribute__, self._objects, repeat("__dict__"))
        now = [
            *_flat(map(_VALUES, own)),
            *_flat(map(_VALUES, children)),
            *_flat(map(_VALUES, self._dicts)),
            *_flat(self._lists),
            *map(type, modules),
            *map(type, self._objects),
            *_flat(map(_FIELDS, self._functions)),
            *map(_CONTENTS, self._cells),
            *map(_FORWARD, self._kinds),
            *[get(name) for get, name in self._outside],
        ]
        named = [*own, *children, *tensors]
        sizes, names = [*map(len, named), *map(len, self._lists)], [*_flat(named)]
        shapes = [t is None or (type(t), t.shape, t.dtype) for t in _flat(map(_VALUES, tensors))]
        return now, (sizes, names, shapes)

    def _parts(self, value: Any) -> Iterable[Any]:
        """Return what `exact` reads of a value, and note how to read it again."""
        kind = type(value)
        if kind in PLAIN or isinstance(value, (enum.Enum, type, Tensor, numpy.generic)):
            return ()
        if kind in _LISTS:
            self._lists.append(value)
            return value
        if kind in _DICTS:
            self._lists.append(value)
            self._dicts.append(value)
            return chain(*value.items())
        if kind is frozenset or (isinstance(value, tuple) and kind.__iter__ is tuple.__iter__):
            return value
        if kind is types.MethodType:
            return value.__func__, value.__self__
        if kind is functools.partial:
            return value.func, value.args, value.keywords
        if kind is types.FunctionType:
            self._functions.append(value)
            self._cells += value.__closure__ or ()
            return *_FIELDS(value), *[cell.cell_contents for cell in value.__closure__ or ()]
        if kind.__module__.startswith(MACHINERY) and not isinstance(value, _BUILT_IN):
            return ()
        own = getattr(value, "__dict__", None)
        has_slots = any(vars(k).get("__slots__") for k in kind.__mro__)
        if isinstance(value, _BUILT_IN) or has_slots or not (own is None or type(own) is dict):
            raise TypeError(f"{kind} may change where a watch does not look")
        if own is None:
            return ()
        self._objects.append(value)
        return chain(*own.items())


def _key(value: Any) -> Any:
    """Return what `exact` reads of a tensor; None of a module."""
    return (value.shape, value.dtype, value.requires_grad) if isinstance(value, Tensor) else None


def signed(arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return the signature of a call's arguments, and their leaves.

    Calls of one signature have the same structure, tensors of the same classes, shapes, dtypes and
    devices, the same other values, and the same leaves that are the first floating-point tensor.
    """
    found: list[Any] = []
    leaves: list[Any] = []
    for name, value in arguments.items():
        found.append(name)
        _sign(value, found, leaves)
    x = first_float(leaves)
    return (*found, *[leaf is x for leaf in leaves]), leaves


def first_float(leaves: Iterable[Any]) -> Any:
    return next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)


def _sign(tree: Any, found: list[Any], leaves: list[Any]) -> None:
    kind = type(tree)
    found.append(kind)
    if isinstance(tree, Tensor):
        leaves.append(tree)
        found += tree.is_nested or tree.shape, tree.dtype, tree.device
    elif isinstance(tree, (tuple, list, dict, slice)):
        parts = (tree.start, tree.stop, tree.step) if isinstance(tree, slice) else tree
        if isinstance(tree, dict):
            found += tree
            parts = tree.values()
        found.append(len(parts))
        for part in parts:
            _sign(part, found, leaves)
    else:
        leaves.append(tree)
        found.append(tree if kind in PLAIN else exact(tree, {}))

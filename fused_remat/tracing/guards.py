"""Cheap tests of whether a layer and a call's arguments are those for which a trace is known."""

from __future__ import annotations

import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy
from torch import Tensor, nn

from fused_remat.layers.converted import ConvertedLayer
from fused_remat.layers.record import NOTES
from fused_remat.tracing.state import (
    FIELDS,
    MACHINERY,
    MODULE,
    PLAIN,
    check_hooks,
    exact,
    outside,
    state_of,
)

_HOOKS = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)
#: Attributes of modules that do not decide what is computed, other than hooks.
_UNREAD = MODULE.union(NOTES) - {"training", "_modules", "_parameters", "_buffers"}
_FORWARD, _flat = attrgetter("forward"), chain.from_iterable
_entries = functools.cache(itemgetter)  # watches share the functions, which stay in the cache
_DICTS, _LISTS = (dict, OrderedDict, defaultdict), (list, set, deque, frozenset)
#: By class, a function that returns what an object holds.
_READERS: dict[type, Any] = {
    **dict.fromkeys(_DICTS, dict.values),
    **dict.fromkeys(_LISTS, iter),
    **{kind: attrgetter(*names, "__class__") for kind, names in FIELDS.items()},
    types.FunctionType: attrgetter("__code__", "__defaults__", "__kwdefaults__"),  # may be set
}
#: Classes whose subclasses may iterate and compare as they like.
_BUILT_IN = (
    int, float, str, tuple, dict, *_LISTS, numpy.ndarray, numpy.generic, functools.partial,
)  # fmt: skip
#: Largest number of objects that are watched.
_MOST = 1 << 12


class Watch:
    """What `state_of` reads of a layer, and what its objects hold, to be compared by identity.

    Parameters and buffers are compared by class, shape and dtype. A watch belongs to the notes of
    its layer, which alone it holds weakly: what the layer held is freed by the next call.

    Raises: TypeError for an object that may change where this does not look.
    """

    def __init__(self, layer: nn.Module) -> None:
        #: By the signature of a call: its trace, and names and values of tensors that decide.
        self.calls: dict[Any, tuple[Any, ...]] = {}
        seen = dict[int, Any]()
        state_of(layer, NOTES, seen)
        self._layer, modules = weakref.ref(layer), [*layer.modules()]
        self._paths, self._inner = [path for path, _ in layer.named_modules()], modules[1:]
        tables: list[Any] = [t for m in modules for t in (m._parameters, m._buffers)]
        self._tables: list[Any] = [*filter(None, tables)]
        self._empty = [table for table in tables if not table]
        self._tensors = list[Tensor]()
        #: Objects whose class and dictionary are compared; dictionaries whose keys are; all whose
        #: sizes are; and by the function that returns what objects hold, these.
        self._objects, self._dicts, self._sized = list[Any](), list[Any](), [*self._tables]
        self._held = defaultdict[Any, list[Any]](list)
        root, *names = [[n for n in vars(module) if n not in _UNREAD] for module in modules]
        self._own = _entries(*root)
        for module, read in zip(self._inner, names, strict=True):
            self._held[_entries(*read)].append(vars(module))
        self._kinds = {m.stock if isinstance(m, ConvertedLayer) else type(m) for m in modules}
        pairs = [pair for kind in self._kinds for pair in outside(kind)[1]]
        self._outside = [*{(id(s), name): (s.get, name) for s, name in pairs}.values()]
        if len(seen) > _MOST:
            raise TypeError("the layer holds too many objects")
        objects = [value for _, value in seen.values()][len(modules) :]
        for value in [*[module._modules for module in modules], *objects]:
            self._watch(value)
        own = [*map(vars, modules)]
        self._saved, self._equal = self._by_identity(layer, own), self._by_value(own)

    def is_current(self, layer: nn.Module) -> bool:
        """Return whether `state_of` would make the same of the layer as when this was made.

        Raises: Unsupported, as `state_of` does for hooks.
        """
        if self._layer() is not layer:
            return False
        own = [vars(layer), *map(vars, self._inner)]
        if any(_flat(map(_HOOKS, own))):
            for path, values in zip(self._paths, own, strict=True):
                check_hooks(values, path)
        try:
            if any(self._empty):
                return False
            equal, now = self._by_value(own), self._by_identity(layer, own)
            return equal == self._equal and all(map(is_, now, self._saved))
        except (AttributeError, KeyError, ValueError, RuntimeError):  # of what is gone or changing
            return False

    def _watch(self, value: Any) -> None:
        """Note how to read what an object holds."""
        kind = type(value)
        if isinstance(value, Tensor):
            self._tensors.append(value)
        elif kind in (*_DICTS, *_LISTS) and not value:
            self._empty.append(value)
        elif kind in _READERS:
            self._held[_READERS[kind]].append(value)
            self._sized += [value] if kind in (*_DICTS, *_LISTS) else []
            self._dicts += [value] if kind in _DICTS else []
        elif issubclass(kind, numpy.number) or getattr(kind, "__iter__", 0) is tuple.__iter__:
            return
        elif isinstance(value, _BUILT_IN) or any(vars(k).get("__slots__") for k in kind.__mro__):
            raise TypeError(f"{kind} may change where a watch does not look")
        elif hasattr(value, "__dict__") and not kind.__module__.startswith(MACHINERY):
            own = object.__getattribute__(value, "__dict__")
            if type(own) is not dict or own is not vars(value):
                raise TypeError(f"{kind} has attributes of its own kind")
            self._objects.append(value)
            self._watch(own)

    def _by_identity(self, layer: nn.Module, own: list[Any]) -> list[Any]:
        now = [type(layer), *self._own(own[0]), *own[1:], *map(vars, self._objects)]
        now += map(type, chain(self._inner, self._objects))
        now += map(_FORWARD, self._kinds)
        now += [get(name) for get, name in self._outside]
        for read, objects in self._held.items():
            now += _flat(map(read, objects))
        return now

    def _by_value(self, own: list[Any]) -> tuple[Any, ...]:
        params = [*_flat(map(dict.values, self._tables))]
        ids = [id(t) for t in params if t is not None]
        return (
            [*map(len, own), *map(len, self._sized)],
            [*_flat(self._tables), *_flat(self._dicts)],
            [None if t is None else (type(t), t.shape, t.dtype) for t in params],
            [*map(ids.index, ids)] if len({*ids}) < len(ids) else [],  # which are tied
            [(t.shape, t.dtype, t.requires_grad) for t in self._tensors],
        )


def signed(arguments: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Any], Any]:
    """Return the signature of a call's arguments, their leaves, and the first float tensor.

    Calls of one signature have the same structure, tensors of the same classes, shapes, dtypes and
    devices, the same other values, and the same leaves that are the first floating-point tensor.
    """
    found: list[Any] = [*arguments]
    leaves, todo = list[Any](), [*arguments.values()][::-1]
    while todo:
        tree = todo.pop()
        kind = type(tree)
        found.append(kind)
        if isinstance(tree, Tensor):
            leaves.append(tree)
            found += (tree.is_nested or tree.shape, tree.dtype, tree.device)
        elif kind in PLAIN:
            leaves.append(tree)
            found.append(tree)
        elif isinstance(tree, (tuple, list)):
            found.append(len(tree))
            todo += [*tree][::-1]
        elif isinstance(tree, dict):
            found += (len(tree), *tree)
            todo += [*tree.values()][::-1]
        elif isinstance(tree, slice):
            todo += (tree.step, tree.stop, tree.start)
        else:
            leaves.append(tree)
            found.append(exact(tree, {}))
    x = next((t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()), None)
    return (*found, *[leaf is x for leaf in leaves]), leaves, x

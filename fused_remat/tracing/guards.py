"""Cheap tests of whether a layer and a call's arguments are those for which a trace is known."""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy
from torch import Tensor, nn

from fused_remat.layers.converted import ConvertedLayer
from fused_remat.layers.record import NOTES
from fused_remat.tracing.state import (
    MACHINERY,
    MODULE,
    PLAIN,
    check_hooks,
    exact,
    outside,
    parts_of,
)

#: Each module's hooks, submodules, parameters and buffers.
_HELD = itemgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_modules", "_parameters", "_buffers",
)  # fmt: skip
_FIELDS = attrgetter("__code__", "__defaults__", "__kwdefaults__")
_CONTENTS, _FORWARD = attrgetter("cell_contents"), attrgetter("forward")
_SHAPE, _KEY = attrgetter("shape", "dtype"), attrgetter("shape", "dtype", "requires_grad")
_GONE, _flat = object(), chain.from_iterable
_LISTS, _DICTS = (list, set, deque), (dict, OrderedDict, defaultdict)
_FIXED = (frozenset, types.MethodType, functools.partial)
#: Classes whose subclasses may iterate and compare as they like.
_BUILT_IN = (
    int, float, str, tuple, list, set, frozenset, deque, dict, numpy.ndarray, numpy.generic,
    functools.partial,
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
        self._layer = weakref.ref(layer)
        unread = MODULE.union(NOTES) - {"training"}
        (root, _), *inner = layer.named_modules()
        self._paths, self._modules = [root, *dict(inner)], [module for _, module in inner]
        modules = [layer, *self._modules]
        names = [[n for n in vars(m) if n not in unread] for m in modules]
        #: Keys of the layer's attributes; dictionaries, and by entry one of them, and its key.
        self._own, self._sized = names[0], list[Any]()
        self._holders, self._keys = list[Any](), list[Any](self._own)
        for module, keys in zip(modules[1:], names[1:], strict=True):
            self._hold(vars(module), keys)
        for module in modules:
            self._hold(module._modules, module._modules)
        kinds = {m.stock if isinstance(m, ConvertedLayer) else type(m) for m in modules}
        pairs = [pair for kind in kinds for pair in outside(kind)[1]]
        self._kinds: list[Any] = [*kinds]
        self._outside = [*{(id(s), name): (s.get, name) for s, name in pairs}.values()]
        self._objects, self._functions, self._cells = list[Any](), list[Any](), list[Any]()
        self._lists, self._dicts, self._tensors = list[Any](), list[Any](), list[Any]()
        todo = [vars(m)[name] for m, own in zip(modules, names, strict=True) for name in own]
        todo += map(_FORWARD, kinds)
        seen = set(map(id, modules))
        while todo:
            value = todo.pop()
            if id(value) in seen:
                continue
            if len(seen) == _MOST:
                raise TypeError("the layer holds too many objects")
            seen.add(id(value))
            todo += self._parts(value)
        now, self._equal = self._read(layer)
        self._saved = [*now]

    def is_current(self, layer: nn.Module) -> bool:
        """Return whether `state_of` would make the same of the layer as when this was made.

        Raises: Unsupported, as `state_of` does for hooks.
        """
        if self._layer() is not layer:
            return False
        try:
            now, equal = self._read(layer)
            return equal == self._equal and all(map(is_, now, self._saved))
        except (AttributeError, KeyError, ValueError, RuntimeError):  # of what is gone or changing
            return False

    def _hold(self, held: Mapping[Any, Any], keys: Collection[Any]) -> None:
        self._sized.append(held)
        self._holders += repeat(held, len(keys))
        self._keys += keys

    def _read(self, layer: nn.Module) -> tuple[Iterable[Any], tuple[Any, ...]]:
        """Return what is compared by identity, and what is compared by value."""
        own = [vars(layer), *map(vars, self._modules)]
        *hooks, children, params, buffers = zip(*map(_HELD, own), strict=True)
        if any(_flat(hooks)):
            for path, values in zip(self._paths, own, strict=True):
                check_hooks(values, path)
        tables = [*filter(None, params + buffers)]
        tensors = [*_flat(map(dict.values, tables))]
        holders = chain(repeat(own[0], len(self._own)), self._holders)
        now = chain(
            map(dict.get, holders, self._keys, repeat(_GONE)),
            children,
            own[1:],
            map(object.__getattribute__, self._objects, repeat("__dict__")),
            _flat(self._lists),
            map(type, chain((layer,), self._modules, self._objects, tensors)),
            _flat(map(_FIELDS, self._functions)),
            map(_CONTENTS, self._cells),
            map(_FORWARD, self._kinds),
            [get(name) for get, name in self._outside],
        )
        sizes = [len(own[0]), *map(len, self._sized), *map(len, self._lists)]
        names = [*_flat(tables), *_flat(self._dicts)]
        shapes, ids = [_SHAPE(t) for t in tensors if t is not None], list(map(id, tensors))
        tied = [*map(ids.index, ids)] if len({*ids}) < len(ids) else ()
        return now, (sizes, names, shapes, tied, [*map(_KEY, self._tensors)])

    def _parts(self, value: Any) -> Iterable[Any]:
        """Return what `exact` reads of a value, and note how to read it again."""
        kind = type(value)
        if kind in PLAIN or isinstance(value, (enum.Enum, type, numpy.number)):
            return ()
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return ()
        if kind is types.FunctionType:
            self._functions.append(value)
            self._cells += value.__closure__ or ()
        elif kind in _LISTS:
            self._lists.append(value)
        elif kind in _DICTS:
            self._hold(value, value)
            self._dicts.append(value)
        elif isinstance(value, nn.Module):  # outside of the layer
            self._objects.append(value)
            self._hold(vars(value), vars(value))
            return ()
        elif not (kind in _FIXED or getattr(kind, "__iter__", None) is tuple.__iter__):
            if kind.__module__.startswith(MACHINERY) and not isinstance(value, _BUILT_IN):
                return ()
            own = getattr(value, "__dict__", None)
            if isinstance(value, _BUILT_IN) or any(vars(k).get("__slots__") for k in kind.__mro__):
                raise TypeError(f"{kind} may change where a watch does not look")
            if own is None:
                return ()
            if type(own) is not dict or own is not object.__getattribute__(value, "__dict__"):
                raise TypeError(f"{kind} has attributes of its own kind")
            self._objects.append(value)
            self._hold(own, own)
        return parts_of(value)


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

"""Objects that a layer makes and returns next to its result."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from fused_remat.tracing.state import PLAIN


@dataclasses.dataclass(frozen=True)
class Returned:
    """An object that a layer makes: its class, its constants, and the names of its other fields.

    A block does not compute these. They are those of an object that the layer's own forward makes,
    which runs when one is read.
    """

    kind: type
    constants: tuple[tuple[str, Any], ...]
    others: tuple[str, ...]
    made: weakref.ref[Any] = dataclasses.field(compare=False)  # alive if something else holds it

    def like(self, own: Callable[[str], Any] | None) -> Any:
        """Return an object whose other fields are those of the object that `own` returns.

        `own` takes the name of the first field that is read.
        """
        new: Any = object.__new__(_class_with(self.kind, self.others))
        vars(new).update(self.constants, _fused_remat_own=own)
        return new


def described(leaf: Any) -> Any:
    """Return a leaf of a layer's result; an object of a dataclass as `Returned`."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, (type, nn.Module)):
        return leaf
    try:
        own, made = vars(leaf), weakref.ref(leaf)
    except TypeError:  # it has slots
        return leaf
    constants = {name: value for name, value in own.items() if type(value) in PLAIN}
    others = [name for name in own if name not in constants]
    return Returned(type(leaf), (*constants.items(),), (*others,), made)


class _Field(NamedTuple):
    """A field of a class that replaces `kind`, which computes those of `names` when one is read."""

    name: str
    names: tuple[str, ...]
    kind: type

    def __get__(self, new: Any, _: type) -> Any:
        if new is None:  # of the class itself
            return self
        held = vars(new)
        own = held["_fused_remat_own"](f"{self.kind.__name__}.{self.name}")
        held.update({name: getattr(own, name) for name in self.names if name not in held})
        held["_fused_remat_own"] = None  # which holds the call's arguments
        return held[self.name]


@functools.cache
def _class_with(kind: type, names: tuple[str, ...]) -> type:
    """Return a class whose objects look like those of `kind`, with a `_Field` for each name."""
    own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    fields = {name: _Field(name, names, kind) for name in names}
    return type(kind.__name__, (kind,), {**own, **fields, "__class__": property(lambda _: kind)})

"""What a recording is made of: operations on numbered values, and numbers that follow a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Sizes = Mapping[str, int]
#: What is added to whole numbers on which a layer should not depend: no size of a call explains it.
SHIFT = 1009


class Unreadable(Exception):
    """The operations of a layer cannot be read as a block. The text is the reason."""


class SideEffect(Unreadable):
    """Forward changes more than its result: a second one would not be the same."""


class Mismatch(Unreadable):
    """The two recordings differ in what no size and no dtype explains."""


@dataclass(frozen=True)
class Ref:
    """A recorded value, by its number."""

    index: int


@dataclass(frozen=True)
class Size:
    """A number that follows from the sizes of a call: factor * product of `names` + offset."""

    factor: int
    names: tuple[str, ...]
    offset: int = 0

    def of(self, sizes: Sizes) -> int:
        n = self.factor
        for name in self.names:
            n *= sizes[name]
        return n + self.offset


class _StreamDtype:
    """The dtype of the residual stream."""

    def __repr__(self) -> str:
        return "the stream's dtype"


STREAM = _StreamDtype()


class Limit(NamedTuple):
    """An attribute of `torch.finfo` of the residual stream's dtype."""

    name: str
    sign: float


_LEAVES = {Ref, Size, Tensor, nn.Parameter, int, float, bool, str, type(None)}


@dataclass(frozen=True)
class Unkept:
    """An object among a layer's results: its class, its numbers, and the names of what it holds
    besides, which a block does not make."""

    kind: type
    numbers: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]

    def make(self) -> Any:
        """An object of the class that raises RuntimeError where it is asked for the others."""
        kind: Any = _unkept(self.kind, self.names) if self.names else self.kind
        made = kind.__new__(kind)
        made.__dict__.update(self.numbers)
        return made


@functools.lru_cache
def _unkept(kind: type, names: tuple[str, ...]) -> type:
    def refused(name: str) -> property:
        def get(_: Any) -> Any:
            raise RuntimeError(f"fused_remat: a block does not make {kind.__name__}.{name}")

        return property(get)

    return type(kind.__name__, (kind,), {name: refused(name) for name in names})


def map_tree(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """`tree` with every leaf of its tuples, lists, dicts and slices replaced by `leaf` of it."""
    if type(tree) in _LEAVES:
        return leaf(tree)
    if isinstance(tree, tuple) and not isinstance(tree, Limit):
        parts = [map_tree(part, leaf) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [map_tree(part, leaf) for part in tree]
    if isinstance(tree, dict):
        return {key: map_tree(value, leaf) for key, value in tree.items()}
    if isinstance(tree, slice):
        return slice(*[map_tree(n, leaf) for n in (tree.start, tree.stop, tree.step)])
    return leaf(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    found: list[Any] = []
    map_tree(tree, found.append)
    return found


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, also those of slots."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__[:-1]:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if not name.startswith("__") and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def refs(tree: Any) -> list[int]:
    """The numbers of the values in a tree."""
    return [leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)]


@dataclass(eq=False)
class Op:
    """One operation.

    Attributes:
        name: of the function; of an opaque submodule, one that no function has.
        run: called with the arguments, it returns a result with the outputs as its leaves. It
            changes no argument. That of an opaque submodule takes the submodule first.
        args, kwargs: with `Ref`s in the places of tensors.
        outs: the numbers of the tensors among the result's leaves; None for other leaves.
        p: of dropout: the probability, if it is active.
        random: whether it draws random numbers.
        path: of an opaque submodule, its path.
        inside: the path of the submodule that runs it.
        info: of a norm, its `NormSpec`; of an activation, its name; of an opaque submodule, why it
            was not read.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[int | None]
    inside: str
    p: float | None = None
    random: bool = False
    path: str | None = None
    info: Any = None


@dataclass(eq=False)
class Span:
    """A submodule's call: what ran inside of it, its arguments and its result."""

    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: list[int | None] = field(default_factory=list)
    inner: list[Op | Span] = field(default_factory=list)
    trouble: str = ""

    def ops(self) -> Iterator[Op]:
        for part in self.inner:
            if isinstance(part, Span):
                yield from part.ops()
            else:
                yield part


#: They read the shape of their first argument, not its values.
SHAPES = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor", "randint_like",
)  # fmt: skip


@dataclass(eq=False)
class Recording:
    """Two recordings of a layer, joined.

    Attributes:
        values: of the first recording, by number.
        shapes: of every value, with `Size`s; None where the two recordings do not agree.
        dtypes: of every value; `STREAM` for the residual stream's.
        ops: all operations, in order; an opaque submodule is one.
        producers: by number of a value, the operation that makes it.
        sources: parameters, buffers and attributes of the layer by number.
        inputs: the numbers of the tensors among the leaves of the arguments; None for others.
        live: the values that depend on the activations among the arguments.
        result: the layer's result, with `Ref`s.
        sizes: of the first recording.
        exact: the dtype in which its operations are tried.
        fixed: names of the layer's tensors whose values decide what it runs.
    """

    values: list[Tensor]
    shapes: list[tuple[Any, ...] | None]
    dtypes: list[Any]
    ops: list[Op]
    producers: dict[int, Op]
    sources: dict[int, str]
    inputs: list[int | None]
    live: set[int]
    result: Any
    sizes: Sizes
    exact: torch.dtype
    fixed: set[str]


class Sample(NamedTuple):
    """What a layer is recorded with: sizes, the layer's tensors, and the arguments of a call.

    Attributes:
        dtype: the residual stream's.
        active: for each leaf of the arguments, whether it is an activation.
        bounds: the place among these leaves of the bounds of packed sequences, if there are any.
    """

    sizes: Sizes
    dtype: torch.dtype
    named: Mapping[str, Tensor]
    given: Mapping[str, Any]
    active: list[bool]
    bounds: int | None = None

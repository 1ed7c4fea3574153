"""The data of a recording: operations on numbered values, and numbers by the sizes of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_remat.tracing.sizes import Size, Sizes

#: Offset added to integers that a layer should not depend on; no size of a call explains it.
SHIFT = 1009

# Names of operations, without leading and trailing underscores (`Op.kind`).
ADD = {"add", "radd", "iadd"}
MULTIPLY = {"mul", "rmul", "multiply", "imul"}
MATMUL = {"matmul", "bmm", "mm"}
#: Operations that read the shape of their first argument, not its values.
SHAPES = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor", "randint_like",
)  # fmt: skip
#: Operations that move elements or cast them.
MOVES = {
    "view", "reshape", "view_as", "reshape_as", "transpose", "permute", "t", "contiguous", "to",
    "float", "double", "half", "bfloat16", "type", "type_as", "expand", "expand_as", "squeeze",
    "unsqueeze", "flatten", "unflatten", "getitem", "get", "chunk", "split", "split_with_sizes",
    "tensor_split",
    "unbind", "select", "narrow", "cat", "concat", "concatenate", "stack", "movedim", "moveaxis",
    "swapaxes", "swapdims", "repeat", "repeat_interleave", "clone", "copy", "setitem", "roll",
    "flip", "pad", "index_select", "view_as_complex", "view_as_real", "dropout", "table",
}  # fmt: skip
#: Operations whose result is a polynomial of their inputs or a quotient of two: what holds for
#: random values holds for all values.
ALGEBRA = MOVES | ADD | MULTIPLY | MATMUL | {
    "sub", "subtract", "rsub", "isub", "div", "truediv", "rtruediv", "itruediv", "true_divide",
    "neg", "rmatmul", "linear", "addmm", "baddbmm", "einsum", "sum", "mean", "cumsum", "square",
    "addcmul", "lerp", "masked_fill", "where", "outer", "complex", "real", "imag", "tril", "triu",
    "norm", *SHAPES,
}  # fmt: skip


class Untraceable(Exception):
    """A reason why the operations of a layer cannot be traced as a block."""

    conditions: Mapping[str, bool] = {}  # on sizes, with their outcomes in the call


class SideEffect(Untraceable):
    """A forward that changes more than its result, so that a second one would differ."""


class Mismatch(Untraceable):
    """A difference between the two recordings that no size and no dtype explains."""


class Opaque(RuntimeError):
    """An operation that cannot be traced; the submodule at `path` has to be replayed."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


@dataclass(frozen=True)
class Ref:
    """A recorded value, by its number."""

    index: int


@dataclass(frozen=True)
class Limit:
    """An attribute of `torch.finfo` of the residual stream's dtype."""

    name: str
    sign: float


#: The dtype of the residual stream.
STREAM = object()
_LEAVES = {Ref, Size, Tensor, nn.Parameter, int, float, bool, str, type(None)}


def map_tree(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return `tree` with `leaf` applied to each leaf of its tuples, lists, dicts and slices."""
    if type(tree) in _LEAVES:
        return leaf(tree)
    if isinstance(tree, tuple):
        parts = tuple([map_tree(part, leaf) for part in tree])
        return type(tree)(*parts) if hasattr(tree, "_fields") else parts
    if isinstance(tree, list):
        return [map_tree(part, leaf) for part in tree]
    if isinstance(tree, dict):
        return {key: map_tree(value, leaf) for key, value in tree.items()}
    if isinstance(tree, slice):
        return slice(*[map_tree(n, leaf) for n in (tree.start, tree.stop, tree.step)])
    return leaf(tree)


def leaves(tree: Any) -> list[Any]:
    result: list[Any] = []
    map_tree(tree, result.append)
    return result


def refs(tree: Any) -> list[int]:
    return [leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)]


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including those in slots."""
    result = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__[:-1]:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if not name.startswith("__") and hasattr(value, name):
                result[name] = getattr(value, name)
    return result


@dataclass(eq=False)
class Op:
    """A recorded operation, whose arguments have a `Ref` for each tensor."""

    name: str  # of the function; of an opaque submodule, one that no function has
    run: Callable[..., Any]  # changes no argument; that of an opaque submodule takes it first
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[int | None]  # by leaf of the result; None for those that are no tensors
    inside: str  # the path of the submodule that runs it
    p: float | None = None  # of dropout
    random: bool = False
    path: str | None = None  # of an opaque submodule, or of that which calls an opaque function
    info: Any = None  # a norm's spec, an activation's name, or why a submodule is opaque
    function: str = ""  # the name of an opaque function

    @property
    def kind(self) -> str:
        return self.name.strip("_")

    @property
    def module(self) -> str | None:
        """The path of the submodule that `run` takes first."""
        return None if self.function else self.path

    @property
    def reads(self) -> list[int]:
        return refs((self.args, self.kwargs))

    @property
    def writes(self) -> list[int]:
        return [n for n in self.outs if n is not None]

    @functools.cached_property
    def is_flat(self) -> bool:
        """Whether each argument is a value, or a constant of every call."""
        rest = leaves([a for a in (*self.args, self.kwargs) if not isinstance(a, Ref)])
        return not any(leaf is STREAM or isinstance(leaf, Ref | Size | Limit) for leaf in rest)


def ops_for(
    needed: Iterable[int], producers: Mapping[int, Op], known: Iterable[int] = ()
) -> tuple[set[Op], set[int]]:
    """Return the operations that compute values other than `known`, and those without any."""
    ops, roots, seen, todo = set[Op](), set[int](), {*known}, [*needed]
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        op = producers.get(number)
        if op is None:
            roots.add(number)
        elif op not in ops:
            ops.add(op)
            todo += op.reads
    return ops, roots


@dataclass(eq=False)
class Span:
    """A call of a submodule, or of a function in it: the operations in it, and what it takes."""

    path: str  # of the submodule
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: list[int | None] = field(default_factory=list)
    inner: list[Op | Span] = field(default_factory=list)
    trouble: str = ""
    random: bool = False  # whether an operation in it draws random numbers
    function: Callable[..., Any] | None = None  # if it is a call of one
    fixed: str = ""  # why it cannot become one operation


@dataclass(eq=False)
class Recording:
    """Two recordings of a layer, joined."""

    values: list[Tensor]  # of the first recording, by number
    shapes: list[tuple[Any, ...] | None]  # with `Size`s; None where the recordings do not agree
    dtypes: list[Any]  # `STREAM` for the residual stream's
    ops: list[Op]
    producers: dict[int, Op]  # by the number of a value
    sources: dict[int, str]  # parameters, buffers and attributes of the layer, by number
    inputs: list[int | None]  # by leaf of the arguments; None for those that are no tensors
    live: set[int]  # values that depend on the activations among the arguments
    result: Any  # with `Ref`s
    sizes: Sizes  # of the first recording
    exact: torch.dtype  # in which operations are tried
    fixed: set[str]  # names of the layer's tensors whose values decide what it runs
    outs: dict[str, list[int | None]]  # the results of submodules by path, of their last calls


class Sample(NamedTuple):
    """Sizes, tensors of the layer, and arguments of a call, with which a layer is recorded."""

    sizes: Sizes
    dtype: torch.dtype  # of the residual stream
    named: Mapping[str, Tensor]  # the layer's tensors
    arguments: Mapping[str, Any]
    active: list[bool]  # whether each leaf of the arguments is an activation
    bounds: int | None = None  # index of the leaf that holds the bounds of packed sequences
    shapes: Sequence[Sequence[Any]] = ()  # of the arguments by leaf, with `Size`s
    others: Sequence[Sizes] = ()  # choices of sizes at which formulas are found

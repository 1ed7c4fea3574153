"""Graphs as text: a program that was compiled or saved names a block by its graph's recipe.

    block_graph(BlockSpec(kind='encoder_prenorm', branches=(BranchSpec(op=..., ), ...)))

A recipe is a call of a `block` with plain numbers, dtypes, `part`s (dataclasses of them) and
other graphs, and holds everything: reading it in another process makes the same graph. It is read
as data, never evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fused_remat import spec
from fused_remat.graph.graph import Graph

Part = TypeVar("Part", bound=type)

#: What a recipe may call, by name.
_CALLABLES: dict[str, Callable[..., Any]] = {}
#: How often each name was defined: a notebook's cell may be run again.
_DEFINITIONS: dict[str, int] = {}


def part(cls: Part) -> Part:
    """A dataclass of plain numbers that recipes may contain."""
    _register(cls)
    return cls


def block(build: Callable[..., Graph]) -> Callable[..., Graph]:
    """A function whose graph a recipe can name; equal arguments, one graph.

    Its arguments are plain numbers, strings, dtypes, tuples of them, `part`s and graphs.

    Raises: ValueError if another module has a builder of that name.

    >>> from fused_remat.graph.build import norm_graph
    >>> norm_graph(spec.NormSpec(kind="rms_norm")).text
    "norm_graph(NormSpec(kind='rms_norm'))"
    """
    name = build.__name__

    @functools.lru_cache(maxsize=1024)
    @functools.wraps(build)
    def cached(*args: Any, **kwargs: Any) -> Graph:
        text = _call(name, args, kwargs)  # built from what it says: plain numbers, not numpy's
        plain, named = _arguments(ast.parse(text, mode="eval").body)
        return dataclasses.replace(build(*plain, **named), text=text)

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Graph:
        if torch.compiler.is_compiling():
            return _graph_by(name, operator.index(definition), _call(name, args, kwargs))
        return cached(*args, **kwargs)

    definition = _register(cached)
    return built


def _register(made: Callable[..., Any]) -> int:
    """Let recipes call `made`; returns which definition of its name it is."""
    name = made.__name__
    known = _CALLABLES.setdefault(name, made)
    if known.__module__ != made.__module__:
        raise ValueError(f"a builder or part named {name!r} is already in {known.__module__}")
    _CALLABLES[name] = made
    _DEFINITIONS[name] = _DEFINITIONS.get(name, 0) + 1
    _read.cache_clear()  # of what an earlier definition made
    return _DEFINITIONS[name]


# Dynamo traces what writes a recipe, and takes the numbers as constants with guards: hence
# `operator.index` and `__float__`, which give it a number where it holds a symbol.


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = [_written(arg) for arg in args]
    given += [f"{key}={_written(arg)}" for key, arg in kwargs.items()]
    return f"{name}({', '.join(given)})"


def _written(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return str(operator.index(value))
    if isinstance(value, float):
        return repr(value.__float__())
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, tuple):
        return "(" + "".join([_written(v) + ", " for v in value]) + ")"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Graph) and value.text:
        return value.text
    if hasattr(value, "item"):  # numpy's numbers, and tensors of one element
        return _written(value.item())
    if not dataclasses.is_dataclass(value) or isinstance(value, Graph):
        raise TypeError(f"a recipe holds plain numbers and parts, got {type(value).__name__}")
    cls, names = type(value), [field.name for field in dataclasses.fields(value)]
    given = {name: getattr(value, name) for name in names}
    # A default is the class's attribute; a field without one has none.
    named = {name: now for name, now in given.items() if now != getattr(cls, name, ...)}
    return _call(cls.__name__, (), named)


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> Graph:
    graph = _value(ast.parse(text, mode="eval").body)
    if not isinstance(graph, Graph):
        raise ValueError(f"not the recipe of a graph: {text}")
    return graph


def graph_of(text: str) -> Graph:
    """The graph that a recipe names.

    Raises: ValueError for a text that is no recipe, or names a builder that was not imported.

    >>> from fused_remat.graph.build import norm_graph
    >>> graph_of("norm_graph(NormSpec(eps=1e-06))") is norm_graph(spec.NormSpec(eps=1e-6))
    True
    """
    return _read(text)


def _graph_by(name: str, definition: int, text: str) -> Graph:
    """`graph_of`, for a builder that must be the last of its name."""
    if _DEFINITIONS[name] != definition:
        raise RuntimeError(
            f"the builder {name!r} was defined again, and what is compiled names it: give each "
            "definition a name of its own"
        )
    return graph_of(text)


for _called in (graph_of, _graph_by):  # not traced by Dynamo, but called
    vars(_called)["_dynamo_marked_constant"] = True

for _spec in (
    spec.NormSpec, spec.RotarySpec, spec.AttentionSpec, spec.MLPSpec, spec.BranchSpec,
    spec.LoraSpec, spec.ParallelSpec, spec.BlockSpec,
):  # fmt: skip
    part(_spec)

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_NAMES: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
_NAMES |= {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES}


def _arguments(call: ast.expr) -> tuple[list[Any], dict[str, Any]]:
    assert isinstance(call, ast.Call)
    named = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    return list(map(_value, call.args)), named


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Tuple(elts=elements):
            return tuple(map(_value, elements))
        case ast.Call(func=ast.Name(id=name)):
            if name not in _CALLABLES:
                raise ValueError(
                    f"no builder or part {name!r}: import its module; a text of an earlier "
                    "version of fused_remat is compiled again"
                )
            args, kwargs = _arguments(node)
            return _CALLABLES[name](*args, **kwargs)
    raise ValueError(f"not a recipe: {ast.unparse(node)}")

"""Graphs as text, by which a compiled or saved program refers to the graph of a block.

    block_graph(BlockSpec(kind='encoder_prenorm', branches=(BranchSpec(op=..., ), ...)))

The text is the call that built the graph. Reading it in another process builds the same graph. It
is parsed as data and never evaluated.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fused_remat import moe_spec, spec
from fused_remat.graph.graph import Graph

Class = TypeVar("Class", bound=type)

#: What a text may call, by name; and how often each name was defined (a notebook reruns cells).
_CALLABLES: dict[str, Callable[..., Any]] = {}
_DEFINITIONS: dict[str, int] = {}


def block(build: Callable[..., Graph]) -> Callable[..., Graph]:
    """Mark a function that builds a graph, so that a text can name the graph.

    Equal arguments give the same graph. Arguments are plain numbers, strings, dtypes, tuples of
    these, dataclasses marked by `register_dataclass`, and graphs.

    Raises: ValueError if a function of another module has the same name.

    >>> from fused_remat.graph.build import norm_graph
    >>> norm_graph(spec.NormSpec(kind="rms_norm")).text
    "norm_graph(NormSpec(kind='rms_norm'))"
    """
    name = build.__name__

    @functools.lru_cache(maxsize=1024)
    @functools.wraps(build)
    def cached(*args: Any, **kwargs: Any) -> Graph:
        if any(isinstance(arg, Graph) and not arg.text for arg in args):
            return build(*args, **kwargs)  # without a text, as the graph that it is made of
        text = _call(name, args, kwargs)  # built from the text: plain numbers, not numpy's
        plain, named = _arguments(ast.parse(text, mode="eval").body)
        return dataclasses.replace(build(*plain, **named), text=text)

    @functools.wraps(build)
    def built(*args: Any, **kwargs: Any) -> Graph:
        if torch.compiler.is_compiling():
            return _graph_by(name, operator.index(definition), _call(name, args, kwargs))
        return cached(*args, **kwargs)

    definition = _register(cached)
    return built


def register_dataclass(cls: Class) -> Class:
    """Let texts contain instances of a dataclass whose fields are plain data."""
    _register(cls)
    return cls


def _register(made: Callable[..., Any]) -> int:
    """Let texts call `made`; return the number of definitions of its name."""
    name = made.__name__
    known = _CALLABLES.setdefault(name, made)
    if known.__module__ != made.__module__:
        raise ValueError(f"{name!r} is already in {known.__module__}: choose another name")
    _CALLABLES[name] = made
    _DEFINITIONS[name] = _DEFINITIONS.get(name, 0) + 1
    _read.cache_clear()  # graphs of an earlier definition
    return _DEFINITIONS[name]


def graph_of(text: str) -> Graph:
    """Return the graph that a text names.

    Raises: ValueError for a text that names no graph, or a function that was not imported.
    """
    return _read(text)


@functools.lru_cache(maxsize=1024)
def _read(text: str) -> Graph:
    graph = _value(ast.parse(text, mode="eval").body)
    if not isinstance(graph, Graph):
        raise ValueError(f"not the text of a graph: {text}")
    return graph


def _graph_by(name: str, definition: int, text: str) -> Graph:
    """Return `graph_of(text)`; raise RuntimeError if `name` has another definition by now."""
    if _DEFINITIONS[name] != definition:
        raise RuntimeError(
            f"{name!r} was defined again, and compiled code refers to it by name: give each "
            "definition a name of its own"
        )
    return graph_of(text)


for _called in (graph_of, _graph_by):  # Dynamo calls them without tracing
    vars(_called)["_dynamo_marked_constant"] = True

for _spec in (*vars(spec).values(), *vars(moe_spec).values()):
    if dataclasses.is_dataclass(_spec) and isinstance(_spec, type):
        register_dataclass(_spec)


# Dynamo traces the writing of a text, and takes its numbers as constants with guards. Hence
# `operator.index` and `__float__`: they give it a number where it holds a symbol.


def _call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    given = [_written(arg) for arg in args]
    given += [f"{key}={_written(arg)}" for key, arg in kwargs.items()]
    return f"{name}({', '.join(given)})"


def _written(value: Any) -> str:
    if value is None or isinstance(value, (bool, str)):
        return repr(value)
    if isinstance(value, int):
        return str(operator.index(value))
    if isinstance(value, float):
        return repr(value.__float__())
    if isinstance(value, tuple):
        return "(" + "".join([_written(v) + ", " for v in value]) + ")"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Graph) and value.text:
        return value.text
    if hasattr(value, "item"):  # numpy's numbers, and tensors of one element
        return _written(value.item())
    if not dataclasses.is_dataclass(value) or isinstance(value, Graph):
        raise TypeError(
            f"arguments of a graph are plain numbers or registered dataclasses, got {type(value)}"
        )
    cls, names = type(value), [field.name for field in dataclasses.fields(value)]
    given = {name: getattr(value, name) for name in names}
    # A field's default is the class's attribute; a field without one has none.
    named = {name: now for name, now in given.items() if now != getattr(cls, name, ...)}
    return _call(cls.__name__, (), named)


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
                    f"no graph function or dataclass {name!r}: import the module that defines it; "
                    "if an earlier version of fused_remat wrote the text, compile again"
                )
            args, kwargs = _arguments(node)
            return _CALLABLES[name](*args, **kwargs)
    raise ValueError(f"not the text of a graph: {ast.unparse(node)}")

"""The source of a pass program: a function of Python without branches, generated from its calls.

Each line is a call of ATen, by its fastest form, or of a frozen kernel launch. A comment begins the
lines of a step, and `del` follows a tensor's last use.
"""

from __future__ import annotations

import functools
import itertools
import keyword
import linecache
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat.execution.calls import Call, Direct, Recorder, Value, Yield, identifier

_numbers = itertools.count(1)
_T = torch.ops.aten.t.default
#: Methods that take sizes one by one.
_OF_SIZES = ("view", "expand", "permute", "sum")
_OWN = ("stream", "grads")  # names of a program that are no tensors
#: Modules with ATen's functions, the fastest first.
_MODULES = (torch, getattr(torch._C, "_nn", torch))


@dataclass(frozen=True)
class Source:
    """The text of a program, and what its names stand for."""

    title: str
    text: str
    names: Mapping[str, Any]

    @functools.cached_property
    def direct(self) -> list[Direct]:
        """Functions that the program calls itself."""
        return [value for value in self.names.values() if isinstance(value, Direct)]

    def function(self, replace: Callable[[Direct], Callable[..., Any]] | None = None) -> Any:
        """Return the compiled function; `replace` gives another function for a direct one."""
        file = f"<fused_remat {self.title} {next(_numbers)}>"
        names = dict(self.names)
        for name, value in self.names.items():
            if isinstance(value, Direct):
                names[name] = value.run if replace is None else replace(value)
        exec(compile(self.text, file, "exec"), names)
        function = names[self.title]
        linecache.cache[file] = len(self.text), None, self.text.splitlines(True), file
        weakref.finalize(function, linecache.cache.pop, file, None)
        return function


def source_of(recorder: Recorder, result: Any) -> Source:
    """Return the program of a recorded pass that returns `result`, with values for tensors."""
    writer = _Writer(recorder, result)
    return Source(recorder.title, writer.text, writer.names)


class _Writer:
    def __init__(self, recorder: Recorder, result: Any) -> None:
        given = [line.values for line in recorder.lines if isinstance(line, Yield)]
        results = set(_values([result, given]))
        lines = _without_duplicates(recorder.lines, results)
        self.lines = _inline_views(_without_unused_views(lines, results), results)
        self.inputs = [value for value in recorder.inputs if value is not None]
        self.names: dict[str, Any] = {}  # in the program's namespace
        self.locals = {*_OWN, recorder.title, *[value.name for value in self.inputs]}
        arguments = [f"_{i}" if v is None else v.name for i, v in enumerate(recorder.inputs)]
        body = list(self._body(result))
        launches = any(isinstance(x, Direct) and x.launches for x in self.names.values())
        head = f"def {recorder.title}({', '.join(arguments + ['stream'] * launches)}):"
        end = f"{'yield' if given else 'return'} {self._text(result)}"
        self.text = "\n    ".join([head, *body, end]) + "\n"

    def _body(self, result: Any) -> Iterator[str]:
        """Yield the lines, and name the values."""
        last: dict[Value, int] = {}
        for i, line in enumerate(self.lines):
            last.update(dict.fromkeys(_roots(_parts(line)), i))
        last.update(dict.fromkeys(_roots([result, self.inputs]), len(self.lines)))
        dies: dict[int, list[Value]] = {}
        for value, i in last.items():
            dies.setdefault(i, []).append(value)
        live = {value.name: value for value in self.inputs}
        comment = ""
        for i, line in enumerate(self.lines):
            if isinstance(line, str):
                comment = f"# {line}"
                continue
            if comment:
                yield comment
                comment = ""
            for value in _named(line):
                self._name(value, live)
            gone = [v.name for v in dies.get(i, ()) if live.get(v.name) is v]
            for name in gone:
                del live[name]
            free = f"; del {', '.join(gone)}" if gone else ""
            if isinstance(line, Yield):  # autograd adds to what nothing else refers to
                yield f"grads = [{self._text(line.values)}]{free}; yield grads.pop()"
            else:
                yield self._line(line) + free

    def _name(self, value: Value, live: dict[str, Value]) -> None:
        base = value.name or identifier(value.hint) or "t"
        name, n = base, 2
        while {name} & {*live, *self.names, *keyword.kwlist, *_OWN}:
            name, n = f"{base}{n}", n + 1
        value.name, live[name] = name, value
        self.locals.add(name)

    def _line(self, line: Call) -> str:
        text, results = self._call(line), line.results
        if not isinstance(results, list):
            return text if results is None else f"{results.name} = {text}"
        named = list(_named(line))
        if named == results[:1]:
            return f"{named[0].name} = {text}[0]"
        names = ["_" if value is None else value.name for value in results]  # no tensor
        return f"{', '.join(names)}{',' * (len(names) == 1)} = {text}"

    def _text(self, x: Any) -> str:
        """Return an expression for an argument or a result."""
        if isinstance(x, Value):
            return x.name if x.inline is None else self._call(x.inline)
        if isinstance(x, Mapping):
            return "{" + ", ".join([f"{k!r}: {self._text(v)}" for k, v in x.items()]) + "}"
        if isinstance(x, list):
            return "[" + ", ".join(map(self._text, x)) + "]"
        if isinstance(x, tuple):
            return f"({', '.join(map(self._text, x))}{',' * (len(x) == 1)})"
        if x is None or type(x) in (int, bool, str) or (type(x) is float and math.isfinite(x)):
            return repr(x)
        return self._constant(x, identifier(str(x).removeprefix("torch.")))

    def _constant(self, value: Any, name: str) -> str:
        """Return the name of a value in the namespace of the program."""
        for known, other in self.names.items():
            if other is value or (type(other) is type(value) and other == value):
                return known
        name = base = name.lstrip("_0123456789") or "constant"
        for n in itertools.count(2):
            if name not in self.names and name not in self.locals and not keyword.iskeyword(name):
                break
            name = f"{base}{n}"
        self.names[name] = value
        return name

    def _call(self, call: Call) -> str:
        """Return a call in its fastest form, which is the first of method, function, operator."""
        if call.kind == "direct":
            given = ["stream"] * call.target.launches + [*map(self._text, call.args)]
            return f"{self._constant(call.target, call.target.name)}({', '.join(given)})"
        schema, name = call.target._schema, call.target._schema.name.removeprefix("aten::")
        if call.kind == "empty":
            assert call.single is not None
            return self._empty(call.single)
        args: Sequence[Any]
        args, kwargs = _without_defaults(call)
        operator = getattr(call.target, "_op", call.target)  # without a frame of Python
        takes_dtype = any(a.name == "out_dtype" for a in schema.arguments)  # no method does
        if not schema.name.startswith("aten::") or takes_dtype:
            return self._function(operator, name.replace("::", "_"), args, kwargs)
        if name == "slice" and len(args) in (3, 4) and args[1] >= 0 and (args[2] or 0) >= 0:
            assert call.single is not None
            return self._slice(args[0], args[1], args[2] or 0, call.single.layout[0][args[1]])
        if name == "_to_copy" and [*kwargs] == ["dtype"]:
            return f"{self._text(args[0])}.to({self._text(kwargs['dtype'])}, copy=True)"
        if linear := self._linear(name, args, kwargs):
            return linear
        is_method = args and isinstance(args[0], Value) and schema.arguments[0].name == "self"
        if is_method and hasattr(Tensor, name) and "out" not in kwargs:
            first, *args = args
            sizes = args[0] if len(args) == 1 and name in _OF_SIZES else None
            if isinstance(sizes, tuple) and (name != "sum" or len(sizes) == 1):
                args = sizes  # one by one, which is faster
            return f"{self._text(first)}.{name}({self._arguments(args, kwargs)})"
        for module in _MODULES:
            if type(function := getattr(module, name, None)) is BuiltinFunctionType:
                return self._function(function, name, args, kwargs)
        return self._function(operator, name, args, kwargs)

    def _linear(self, name: str, args: Sequence[Any], kwargs: Any) -> str:
        """Return a product with a transposed weight as one call, which makes the same two."""
        weight = args[-1].inline if args and isinstance(args[-1], Value) else None
        if name not in ("addmm", "mm") or kwargs or weight is None or weight.target is not _T:
            return ""
        x, bias = (args[1], args[:1]) if name == "addmm" else (args[0], ())
        if bias and len(bias[0].layout[0]) > 1:
            return ""
        return self._function(F.linear, "linear", (x, weight.args[0], *bias), {})

    def _function(self, function: Any, name: str, args: Sequence[Any], kwargs: Any) -> str:
        return f"{self._constant(function, name)}({self._arguments(args, kwargs)})"

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        named = [f"{name}={self._text(value)}" for name, value in kwargs.items()]
        return ", ".join([*map(self._text, args), *named])

    def _empty(self, value: Value) -> str:
        shape, stride, dtype, device, _ = value.layout
        kwargs = {"dtype": dtype} | ({} if device.type == "cpu" else {"device": device})
        return self._function(torch.empty_strided, "empty_strided", (shape, stride), kwargs)

    def _slice(self, x: Value, dim: int, start: int, length: int) -> str:
        """Return a slice, of the first dimensions by an index, which is faster than `narrow`."""
        if dim > 1:
            return f"{self._text(x)}.narrow({dim}, {start}, {length})"
        return f"{self._text(x)}[{':, ' * dim}{start or ''}:{start + length}]"


def _without_defaults(call: Call) -> tuple[list[Any], dict[str, Any]]:
    declared, args, kwargs = call.target._schema.arguments, [*call.args], dict(call.kwargs)
    for a in declared:
        if a.name in kwargs and a.has_default_value() and _equal(kwargs[a.name], a.default_value):
            del kwargs[a.name]
    while args and (a := declared[len(args) - 1]).has_default_value():
        if not _equal(args[-1], a.default_value):
            break
        args.pop()
    return args, kwargs


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


def _without_duplicates(lines: Sequence[Any], results: set[Value]) -> list[Any]:
    """Drop views that are equal to what they view, or to earlier ones."""
    kept, views = list[Any](), dict[Any, Any]()
    for line in lines:
        if isinstance(line, Call):
            line.args, line.kwargs = _resolved(line.args), _resolved(line.kwargs)
        if not (isinstance(line, Call) and line.kind == "view"):
            kept.append(line)
            continue
        made = list(_values(line.results))
        same = [line.args[0]] if [line.args[0].layout] == [v.layout for v in made] else None
        same = same or views.setdefault((line.target, repr(line.args)), made)
        if same is made or not results.isdisjoint(made):
            kept.append(line)
            continue
        for value, other in zip(made, same, strict=True):
            value.same_as = other
            other.name, other.hint = other.name or value.name, other.hint or value.hint
    return kept


def _resolved(x: Any) -> Any:
    if isinstance(x, Value):
        return x if x.same_as is None else x.same_as
    if isinstance(x, dict):
        return {name: _resolved(part) for name, part in x.items()}
    return type(x)(map(_resolved, x)) if isinstance(x, (list, tuple)) else x


def _without_unused_views(lines: list[Any], results: set[Value]) -> list[Any]:
    used, kept = set(results), []
    for line in reversed(lines):
        is_idle = isinstance(line, Call) and line.kind in ("view", "empty")
        if is_idle and used.isdisjoint(_values(line.results)):
            continue
        used.update(_values(_reads(line)))
        kept.append(line)
    return kept[::-1]


def _inline_views(lines: list[Any], results: set[Value]) -> list[Any]:
    """Count the uses of values, and write a view that is used once where it is used."""
    for value in [*results, *_values([_reads(line) for line in lines])]:
        value.uses += 1
    kept = []
    for line in lines:
        made = line.single if isinstance(line, Call) and line.kind == "view" else None
        if made is not None and made.uses == 1 and made not in results:
            made.inline = line
        else:
            kept.append(line)
    return kept


def _reads(line: Any) -> Any:
    if isinstance(line, Call):
        return [line.args, line.kwargs]
    return line.values if isinstance(line, Yield) else ()


def _named(line: Any) -> list[Value]:
    """Return the results that need a name: not those after the first if only that is used."""
    values = list(_values(line.results)) if isinstance(line, Call) else []
    return values if any(value.uses for value in values[1:]) else values[:1]


def _parts(line: Any) -> Any:
    return [_reads(line), line.results if isinstance(line, Call) else ()]


def _values(x: Any) -> Iterator[Value]:
    """Yield the values within arguments or results."""
    if isinstance(x, Value):
        yield x
    elif isinstance(x, (list, tuple, Mapping)):
        for part in x.values() if isinstance(x, Mapping) else x:
            yield from _values(part)


def _roots(x: Any) -> Iterator[Value]:
    """Yield the values within `x`, and instead of a view those that it is made of."""
    for value in _values(x):
        if value.inline is None:
            yield value
        else:
            yield from _roots(_reads(value.inline))

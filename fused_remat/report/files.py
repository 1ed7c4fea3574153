"""Frozen dataclasses as JSON: `dataclasses.asdict` writes them, and type hints read them back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")


def to_json(record: Any, path: str | Path | None = None, **more: Any) -> str:
    """Return a dataclass and the entries `more` as JSON, written to `path` if there is one."""
    text = json.dumps(dataclasses.asdict(record) | more, indent=1)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    return text


def from_json(kind: type[Record], text: str) -> Record:
    """Return the record of the dataclass `kind` that `to_json` wrote.

    Other entries of the text are ignored.

    Raises: ValueError if the text is not JSON, or lacks a field of this version.
    """
    try:
        record: Record = _value(kind, json.loads(text))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{text!r:.60} is not the JSON text of a {kind.__name__} of this version: {error}"
        ) from error
    return record


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _value(kind: Any, data: Any) -> Any:
    """Build a value of the type `kind` from plain data."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return kind(**{name: _value(hint, data[name]) for name, hint in _hints(kind).items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        kinds = itertools.repeat(arguments[0]) if arguments[-1] is ... else iter(arguments)
        return tuple(map(_value, kinds, data))
    if origin in (types.UnionType, typing.Union):
        first = next(argument for argument in arguments if argument is not types.NoneType)
        return None if data is None else _value(first, data)
    return data

"""A pass as the straight line of its calls of PyTorch, recorded once and then repeated.

Which calls a pass makes, and with which numbers, follows from the execution and from the dtypes and
strides of its tensors, unless a step looks at values. Most of a small block's time is that of
Python, so after a few passes of a kind one is recorded, and later ones repeat its calls on their
own tensors: the same calls in the same order, so the same bits. A tensor is freed after its last
use.

A pass is not recorded if it does what cannot be repeated: it reads a tensor's values in Python
(`item`, `bool`, `tolist`), makes a tensor with NumPy, or changes the grad mode.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Given = Sequence[Tensor | None]
#: How often a pass runs before it is recorded, which takes longer than a pass.
FEW = 8
#: How many calls a recorded pass has at most, and how many kinds are recorded of an execution.
_MOST_CALLS, _MOST_KINDS = 4000, 16
#: How many executions have records at a time, at about 100 KB each.
_MOST_RECORDED = 256
_recorded: weakref.WeakSet[Recordings] = weakref.WeakSet()
#: Whether anything is recorded. Without it, a debugger sees every pass go through the steps.
ON = os.environ.get("FUSED_REMAT_RECORD", "1").lower() not in ("", "0", "false", "no", "off")
#: What may be asked of a tensor besides its attributes: nothing that depends on values.
_METADATA = frozenset((
    "__get__", "__len__", "dim", "element_size", "get_device", "is_contiguous", "is_floating_point",
    "is_inference", "ndimension", "nelement", "numel", "promote_types", "size", "storage_offset",
    "stride",
))  # fmt: skip
_CONSTANTS = (
    bool, complex, float, int, str, slice, type(None), type(Ellipsis), torch.device, torch.dtype,
    torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
_dtype = operator.attrgetter("dtype")
_names_in = re.compile(r"\bt\d+\b").findall


class Unrepeatable(Exception):
    """A pass does what its record could not repeat."""


class Recordings:
    """What is recorded of an execution's passes.

    Attributes:
        passes: by kind, what repeats a pass, or how often it has run.
        off: whether a pass could not be recorded: none is any more.
    """

    def __init__(self) -> None:
        self.passes: dict[Any, Callable[[Given], Any] | int] = {}
        self.off = False

    def find(
        self, name: str, given: Given, steps: Callable[[], Any]
    ) -> Callable[[Given], Any] | None:
        """What repeats the pass `steps` on the tensors `given`, which it reads; None if nothing."""
        there = [t for t in given if t is not None]
        try:
            kind = (name, *map(type, given), *map(_dtype, there), *map(Tensor.stride, there))
        except RuntimeError:  # of a layout that has no strides
            return None
        found = self.passes.get(kind, 0)
        if not isinstance(found, int):
            return found
        if found < FEW:
            if found or len(self.passes) < _MOST_KINDS:
                self.passes[kind] = found + 1
            return None
        if not ON or _is_watched() or len(_recorded) >= _MOST_RECORDED:
            return None
        if len({*map(id, there)}) < len(there):  # one tensor given twice; later there may be two
            return None
        return functools.partial(self._record, kind, steps)

    def _record(self, kind: Any, steps: Callable[[], Any], given: Given) -> Any:
        recorder = _Recorder(given)
        with recorder:
            made = steps()
        found = recorder.function(made)
        if found is None:
            self.off = True
        else:
            self.passes[kind] = found
            _recorded.add(self)
        return made


def _is_watched() -> bool:
    """Whether a mode looks at the calls, and may change them."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


class _Recorder(TorchFunctionMode):
    """Writes the calls of one pass down as Python, line by line. It holds no tensor."""

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.numbers = itertools.count()
        self.globals: dict[str, Any] = {}
        self.lines: list[tuple[str, str]] = []  # what is assigned, and a call
        self.failed, self.grad = False, torch.is_grad_enabled()
        self.given = [self._name(t) for t in given]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self.failed:
            try:
                self._note(func, args, kwargs or {}, made)
            except Unrepeatable:
                self.failed = True
        return made

    def function(self, made: Any) -> Callable[[Given], Any] | None:
        """What repeats the pass that returned `made`; None if nothing can."""
        try:
            result = self._text(made)
        except Unrepeatable:
            self.failed = True
        if self.failed:
            return None
        last = {name: i for i, line in enumerate(self.lines) for name in _names_in(" ".join(line))}
        keep, body = {*_names_in(result), *self.given}, []
        for i, (target, call) in enumerate(self.lines):
            body.append(f"{target} = {call}" if target else call)
            dead = {n for n in _names_in(f"{target} {call}") if last[n] == i and n not in keep}
            body += [f"del {', '.join(sorted(dead))}"] if dead else []
        lines = [f"def run(given):\n {', '.join(self.given)}, = given", *body, f"return {result}"]
        exec(compile("\n ".join(lines), "<recorded pass>", "exec"), self.globals)
        found: Callable[[Given], Any] = self.globals["run"]
        return found

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        name = getattr(func, "__name__", "")
        if not _has_tensor(made) and made is not None:
            if name in _METADATA:
                return
            raise Unrepeatable
        if torch.is_grad_enabled() != self.grad or len(self.lines) == _MOST_CALLS:
            raise Unrepeatable
        given = [self._text(arg) for arg in args]
        given += [f"{key}={self._text(arg)}" for key, arg in kwargs.items()]
        target = "" if made is None else self._target(made)
        self.lines.append((target, f"{self._constant(func)}({', '.join(given)})"))

    def _target(self, made: Any) -> str:
        if isinstance(made, (tuple, list)):
            return f"({', '.join([self._target(one) for one in made])},)"
        if made is not None and not isinstance(made, Tensor):
            raise Unrepeatable
        return self._name(made)

    def _name(self, t: Tensor | None) -> str:
        """The name of a tensor, which is new if it was not met before."""
        if t is None:
            return "_"
        ref, name = self.names.get(id(t), (None, ""))
        if ref is None or ref() is not t:
            name = f"t{next(self.numbers)}"
            self.names[id(t)] = weakref.ref(t), name
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, Tensor):
            ref, name = self.names.get(id(value), (None, ""))
            if ref is None or ref() is not value:
                raise Unrepeatable  # nobody knows how it was made
            return name
        if type(value) is tuple:
            return f"({''.join([self._text(one) + ', ' for one in value])})"
        if type(value) is list:
            return f"[{', '.join([self._text(one) for one in value])}]"
        bounds = (value.start, value.stop, value.step) if type(value) is slice else ()
        if type(value) not in _CONSTANTS or _has_tensor(bounds):
            raise Unrepeatable
        return repr(value) if type(value) in (bool, int, type(None)) else self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{id(value)}"
        self.globals[name] = value  # which keeps it, and its id
        return name


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, (tuple, list)) and any(map(_has_tensor, value))
    )

"""The calls of a pass, recorded while its steps run: a pass program is written from them."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat.execution.observe import TRACERS
from fused_remat.graph.schedule import Step
from fused_remat.random import CPU_KERNELS, DropoutMask
from fused_remat.steps.chunk import Chunk
from fused_remat.steps.operations import RECORDERS, unrecorded

#: Operators that allocate without computing, all by the layout of their result.
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
#: Calls that are no part of a pass: of profiler ranges, and of no tensors.
_IGNORED = ("profiler::", "aten::promote_types", "mkldnn::_is_mkldnn_")
#: Names of variables that name nothing.
_VAGUE = frozenset(("self", "x", "t", "made", "result", "value", "out"))
#: End of the reason for a launch that runs the first or second time.
NOT_FROZEN = " is not frozen yet"
#: Functions that read a tensor's values without an operator.
_READS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))


class UnrepeatableError(Exception):
    """A pass does what a program cannot repeat, such as reading a tensor's values in Python."""


class Value:
    """A tensor of a pass, which is not held."""

    __slots__ = ("hint", "inline", "layout", "name", "ref", "same_as", "storage", "uses")

    def __init__(self, t: Tensor, name: str, storage: Any = None) -> None:
        self.ref, self.name, self.hint = weakref.ref(t), name, ""
        self.layout = tuple(t.shape), t.stride(), t.dtype, t.device, t.storage_offset()
        self.storage = object() if storage is None else storage  # equal for tensors that share one
        # For the program: the view to write instead, what it is equal to, and its uses.
        self.inline: Call | None = None
        self.same_as: Value | None = None
        self.uses = 0

    def __repr__(self) -> str:
        return f"<{id(self)}>"


class Call:
    """A call of an operator, of a kernel launcher or of a NumPy function.

    `args` and `kwargs` have a `Value` for each tensor, `results` one for each new tensor.
    """

    def __init__(
        self, target: Any, kind: str, args: Any, kwargs: Mapping[str, Any], results: Any
    ) -> None:
        self.target, self.kind = target, kind  # "call", "view", "empty" or "direct"
        self.args, self.kwargs, self.results = args, dict(kwargs), results

    @property
    def single(self) -> Value | None:
        """The result, if the call has one rather than a tuple or none."""
        return self.results if isinstance(self.results, Value) else None


@dataclass(frozen=True)
class Direct:
    """A function that a program calls itself: a kernel launcher, or one of NumPy."""

    run: Callable[..., Any]
    name: str
    launches: bool = False  # its first argument is a stream
    hooks: tuple[Any, ...] = field(default=(), compare=False)  # of its kernels


class Yield:
    """Gradients that backward gives to autograd before it goes on; a line of a pass."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = values


class Recorder(TorchDispatchMode):
    """A mode that records the calls of one pass in this thread, and holds none of its tensors.

    It may be entered several times, for a pass that is interrupted.
    """

    def __init__(self, given: Sequence[Tensor | None], names: Sequence[str], title: str) -> None:
        super().__init__()
        self.title = title  # "forward" or "backward"
        self.lines: list[Call | Yield | str] = []  # a string is a comment
        self.values: dict[int, Value] = {}
        self.failed, self.is_paused, self.grad = "", False, torch.is_grad_enabled()
        self.inputs: list[Value | None] = []
        taken = {""}
        for t, name in zip(given, names, strict=True):
            unique, n = "" if t is None else (base := identifier(name)), 1
            while t is not None and unique in taken:
                unique, n = f"{base}_{n + 1}", n + 1
            taken.add(unique)
            self.inputs.append(None if t is None else self._new(t, unique))
        self._reads = _Reads(self)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import the compiler, for seconds

    def __enter__(self) -> Recorder:
        RECORDERS[threading.get_ident()] = self
        TRACERS.append(self._trace)
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)
        TRACERS.remove(self._trace)
        del RECORDERS[threading.get_ident()]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        kernel = CPU_KERNELS.get(func._schema.name)
        if kernel is not None:
            return self.direct(
                Direct(kernel, kernel.__name__.strip("_").removesuffix("_numpy")), *args
            )
        made = self._decomposed(func, args, kwargs or {})
        if made is not NotImplemented:
            return made
        made = func(*args, **(kwargs or {}))
        if not self.failed and not func._schema.name.startswith(_IGNORED):
            try:
                self._note(func, args, kwargs or {}, made)
            except UnrepeatableError as error:
                self.failed = str(error)
        return made

    def _decomposed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a composite operator, which arrives undivided below autograd, as its parts."""
        super().__enter__()
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def direct(self, function: Direct, *args: Any) -> Any:
        """Run a function whose own calls are not recorded, and record it."""
        with unrecorded():
            made = function.run(*args)
        try:
            given = [self.encoded(a) for a in (args[1:] if function.launches else args)]
            result = self._new(made, "") if isinstance(made, Tensor) else None
            self.lines.append(Call(function, "direct", given, {}, result))
        except UnrepeatableError as error:
            self.failed = self.failed or str(error)
        return made

    def encoded(self, x: Any) -> Any:
        """Return `x` with a `Value` for each tensor."""
        if isinstance(x, Tensor):
            value = self._known(x)
            if value is None:
                raise UnrepeatableError(f"a tensor of shape {tuple(x.shape)} of unknown origin")
            value.hint = value.hint or value.name or _local_name(x)
            return value
        if isinstance(x, (list, tuple)):
            return tuple([self.encoded(part) for part in x])
        return {n: self.encoded(part) for n, part in x.items()} if isinstance(x, dict) else x

    def calls(self, result: Any) -> list[Any]:
        """Return what is computed, from what, and a result, without views and allocations.

        Equal lists mean equal results: a tensor is the number of its memory and its layout.
        """
        numbers: dict[int, int] = {}

        def plain(x: Any) -> Any:
            if isinstance(x, Value):
                return numbers.setdefault(id(x.storage), len(numbers)), x.layout
            if isinstance(x, (list, tuple, dict)):
                return tuple([plain(part) for part in (x.items() if isinstance(x, dict) else x)])
            return type(x), repr(x)

        for value in self.inputs:
            plain(value)
        found = []
        for line in self.lines:
            if isinstance(line, Yield):
                found.append(plain(line.values))
            elif isinstance(line, Call) and line.kind in ("call", "direct"):
                given = line.args if line.kind == "direct" else _by_schema(line)
                target = line.target.run if line.kind == "direct" else line.target
                found.append((target, plain(given), plain(line.results)))
        return found if result is None else [*found, plain(result)]

    def _known(self, t: Tensor) -> Value | None:
        value = self.values.get(id(t))
        return value if value is not None and value.ref() is t else None

    def _new(self, t: Tensor, name: str, storage: Any = None) -> Value:
        value = self.values[id(t)] = Value(t, name, storage)
        return value

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        if torch.is_grad_enabled() != self.grad:
            raise UnrepeatableError("a change of the grad mode")
        schema, several = func._schema, isinstance(made, (tuple, list))
        name, given = schema.name.removeprefix("aten::"), (self.encoded(args), self.encoded(kwargs))
        aliases = [r.alias_info for r in schema.returns]
        is_view = bool(aliases) and all(a is not None and not a.is_write for a in aliases)
        is_view = is_view and all(_shares(t, args[0]) for t in (made if several else (made,)))
        kind = "empty" if name in _EMPTY else "view" if is_view else "call"
        storage = given[0][0].storage if is_view else None
        results: list[Value | None] = []
        for t in made if several else (made,):
            if isinstance(t, Tensor):
                results.append(None if self._known(t) else self._new(t, "", storage))
            elif t is None or (several and isinstance(t, int)):
                results.append(None)
            else:
                raise UnrepeatableError(f"the value of {schema.name}")
        made = (results if any(results) else None) if several else results[0]
        self.lines.append(Call(func, kind, *given, made))

    def launch(self, name: str, run: Any, hooks: Sequence[Any], *args: Any) -> None:
        """Launch `run(*args)`; None for what is not frozen yet, which is launched elsewhere."""
        if run is None:
            self.failed = self.failed or f"{name}{NOT_FROZEN}"
        else:
            self.direct(Direct(run, name, True, tuple(hooks)), *args)

    def _trace(self, step: Step, chunk: Chunk) -> None:
        """Name what has been computed, and begin the lines of a step."""
        if RECORDERS.get(threading.get_ident()) is not self:
            return
        for name, t in chunk.owner.tensors.items():  # casts of parameters
            self.name(t, f"{name}_{str(None if t is None else t.dtype).removeprefix('torch.')}")
        for name, x in dict[str, Any](chunk).items():
            if isinstance(x, DropoutMask):
                self.name(x.site_key, f"{name}_key")
                x = x._tensor
            self.name(x, name)
        grads = {name: grad for name, (grad, _) in chunk.grads.items()} | chunk.owner.param_grads
        for name, grad in grads.items():
            self.name(grad, f"d_{name}")
        kinds = {"compute": "rebuild ", "backward": "backward of "}
        assert step.node is not None
        self.lines.append((kinds[step.kind] if self.title == "backward" else "") + step.node.label)

    def name(self, t: Any, name: str) -> None:
        """Name a tensor of the pass, unless it has a name."""
        value = None if t is None else self._known(t)
        if value is not None and not value.name:
            value.name = identifier(name)


class _Reads(TorchFunctionMode):
    """Notices a pass that reads a tensor's values in Python."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS and not self.recorder.is_paused:
            self.recorder.failed = self.recorder.failed or "a read of a tensor's values"
        return func(*args, **(kwargs or {}))


def identifier(name: str) -> str:
    """Return a name as a Python identifier."""
    return re.sub(r"\W", "_", name)


def _by_schema(call: Call) -> list[Any]:
    """Return a call's arguments in the order of its schema, with defaults."""
    declared = call.target._schema.arguments
    given = dict(zip([a.name for a in declared], call.args, strict=False)) | call.kwargs
    return [given.get(a.name, a.default_value) for a in declared]


def _shares(t: Any, base: Any) -> bool:
    """Return whether a result is a view: it has the memory of the first argument."""
    tensors = isinstance(t, Tensor) and isinstance(base, Tensor)
    return tensors and t.untyped_storage()._cdata == base.untyped_storage()._cdata


def _local_name(t: Tensor) -> str:
    """Return the name of a variable of a step that holds `t`, or ""."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_back is not None:
        room = str(frame.f_globals.get("__name__", ""))
        if room.startswith("fused_remat.execution.executor"):
            return ""
        if room.startswith("fused_remat.") and room != __name__:
            variables = frame.f_locals
            found = [n for n, value in variables.items() if value is t and n not in _VAGUE]
            if isinstance(variables, dict):  # a copy, which the frame would hold until it ends
                variables.clear()
            if found:
                return found[0]
        frame = frame.f_back
    return ""

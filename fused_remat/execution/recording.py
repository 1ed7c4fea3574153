"""A pass as the straight line of its operators, recorded once and then repeated.

Which operators a pass calls, and with which numbers, follows from the execution and from the dtypes
and strides of its tensors, unless a step looks at values. Most of a small block's time is that of
Python, so after a few passes of a kind one is recorded as a graph of TorchScript, whose interpreter
calls the same operators in the same order, so with the same bits, on the tensors of later passes. A
tensor is freed after its last use.

A pass is not recorded if it does what cannot be repeated: it reads a tensor's values in Python
(`item`, `bool`, `tolist`), makes a tensor with NumPy, or changes the grad mode.
"""

from __future__ import annotations

import functools
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat.random import cpu_operator

Given = Sequence[Tensor | None]
#: How often a pass runs before it is recorded, which takes longer than a pass.
FEW = 8
#: How many kinds of passes are recorded of an execution at most.
_MOST_KINDS = 16
#: How many operators all records of a process have at most, at about 5 KB each.
_MOST_CALLS = 24_000
#: Whether anything is recorded. Without it, a debugger sees every pass go through the steps.
ON = os.environ.get("FUSED_REMAT_RECORD", "1").lower() not in ("", "0", "false", "no", "off")
_dtype = operator.attrgetter("dtype")


class Recordings:
    """Records of an execution's passes."""

    all_calls = 0  # operators in all records of the process

    def __init__(self) -> None:
        # By kind, the function that repeats a pass, or how often the pass has run.
        self.passes: dict[Any, Callable[[Given], Any] | int] = {}
        self.calls = 0  # operators in these records
        self.off = False  # set once a pass could not be recorded: none is from then on

    def __del__(self) -> None:
        type(self).all_calls -= self.calls  # as the interpreter ends, the module has no names left

    def find(
        self, name: str, given: Given, steps: Callable[[], Any]
    ) -> Callable[[Given], Any] | None:
        """Return a function that repeats the pass `steps` on the tensors `given`, or None."""
        there = [t for t in given if t is not None]
        try:
            kind = (name, *map(type, given), *map(_dtype, there), *map(Tensor.stride, there))
        except RuntimeError:  # of a layout that has no strides
            return None
        found = self.passes.get(kind, 0)
        if not isinstance(found, int):  # whose calls no function mode would see
            return None if torch._C._len_torch_function_stack() else found
        if found < FEW:
            if found or len(self.passes) < _MOST_KINDS:
                self.passes[kind] = found + 1
            return None
        if not ON or Recordings.all_calls >= _MOST_CALLS:
            return None
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            return None  # a mode sees the calls, and may change them
        if len({*map(id, there)}) < len(there):  # one tensor for two inputs; later there may be two
            return None
        return functools.partial(self._record, kind, steps)

    def _record(self, kind: Any, steps: Callable[[], Any], given: Given) -> Any:
        recorder = _Recorder(given)
        with recorder:
            made = steps()
        found, calls = recorder.function(made), recorder.calls
        if found is None:
            self.off, self.passes, calls = True, {}, -self.calls
        elif isinstance(self.passes.get(kind, 0), int):  # no other thread has recorded it since
            self.passes[kind] = found
        else:
            calls = 0
        self.calls += calls
        Recordings.all_calls += calls
        return made


_TENSOR = torch._C.TensorType.get()
_RESULTS = torch._C.ListType(torch._C.OptionalType(_TENSOR))
_MEMORY_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1}  # as TorchScript has them
# TorchScript has no `Tensor.view` that takes a dtype.
cpu_operator("view_of_dtype(Tensor(a) x, ScalarType dtype) -> Tensor(a)", Tensor.view, Tensor.view)


class _Recorder(TorchDispatchMode):
    """A mode that writes down the operators of one pass as a graph. It holds no tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import the compiler, for seconds

    def __init__(self, given: Given) -> None:
        super().__init__()
        self.graph: Any = torch._C.Graph()
        self.values: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self.calls, self.failed, self.grad = 0, False, torch.is_grad_enabled()
        for t in given:
            value = self.graph.addInput()
            if t is None:
                value.setType(torch._C.NoneType.get())
            self._name(t, value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if not self.failed:
            try:
                self._note(func._schema, args, kwargs or {}, made)
            except Exception:  # whatever has no place in a graph, and of private functions
                self.failed = True
        return made

    def function(self, made: Any) -> Callable[[Given], Any] | None:
        """Return a function that repeats the pass whose result is `made`, or None."""
        is_list = isinstance(made, list)
        if self.failed:
            return None
        try:
            self.graph.registerOutput(
                self._value(made if is_list else [made[0], *made[1]], _RESULTS)
            )
            torch._C._jit_pass_constant_pooling(self.graph)  # type: ignore[attr-defined]
            run = torch._C._create_function_from_graph("recorded_pass", self.graph)
        except Exception:  # as above
            return None
        return functools.partial(_repeat, run, is_list)

    def _note(self, schema: Any, args: Any, kwargs: dict[str, Any], made: Any) -> None:
        if schema.name == "aten::promote_types":  # which reads no tensor
            return
        self.calls += 1
        if torch.is_grad_enabled() != self.grad or self.calls > _MOST_CALLS:
            raise NotImplementedError
        arguments, returns = schema.arguments, schema.returns
        named = dict(zip([a.name for a in arguments], args, strict=False)) | kwargs
        given = [named.get(a.name, a.default_value) for a in arguments]
        values = [self._value(arg, a.type) for arg, a in zip(given, arguments, strict=True)]
        is_view = schema.name == "aten::view" and schema.overload_name == "dtype"
        name = "fused_remat::view_of_dtype" if is_view else schema.name
        node = self._add(name, values, len(returns))
        # With a number instead of a tensor it is another overload, which computes the same.
        has_number = any(
            a.type == _TENSOR and isinstance(arg, (int, float))
            for arg, a in zip(given, arguments, strict=True)
        )
        found = node.schema()
        if found != str(schema) and (found == "(no schema)" or not (is_view or has_number)):
            raise NotImplementedError
        if isinstance(made, list) and len(returns) == 1:
            node.outputsAt(0).setType(returns[0].type)
            node = self._add("prim::ListUnpack", [node.outputsAt(0)], len(made))
        several = isinstance(made, (tuple, list))
        for t, value in zip(made if several else [made], node.outputs(), strict=False):
            self._name(t, value)

    def _add(self, name: str, values: Sequence[Any], outputs: int) -> Any:
        return self.graph.insertNode(self.graph.create(name, values, outputs))

    def _name(self, t: Any, value: Any) -> None:
        """Let `value` stand for a tensor in the graph."""
        if isinstance(t, Tensor):
            self.values[id(t)] = weakref.ref(t), value
        elif t is not None:
            raise NotImplementedError

    def _value(self, arg: Any, kind: Any) -> Any:
        """Return the graph's value for an argument of a type."""
        if isinstance(arg, Tensor):
            ref, value = self.values.get(id(arg), (None, None))
            if ref is None or ref() is not arg:
                raise NotImplementedError  # nobody knows how it was made
            return value
        if isinstance(arg, (tuple, list)) and any(t is None or isinstance(t, Tensor) for t in arg):
            node = self._add("prim::ListConstruct", [self._value(t, _TENSOR) for t in arg], 1)
            node.outputsAt(0).setType(kind)
            return node.outputsAt(0)
        if isinstance(arg, torch.memory_format):
            arg = _MEMORY_FORMATS[arg]
        return self.graph.insertConstant(list(arg) if isinstance(arg, tuple) else arg)


def _repeat(run: Callable[..., Any], is_list: bool, given: Given) -> Any:
    optimizes = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)  # in this thread: the operators as they are
    try:
        with torch._C._AutoDispatchBelowAutograd():  # whose kernels would find nothing to do
            made = run(*given)
    finally:
        torch._C._set_graph_executor_optimize(optimizes)
    return made if is_list else (made[0], made[1:])

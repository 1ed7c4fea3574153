"""`torch.compile` of one way alone: compiled when it is built, and never again."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor

from bench.measure.case import Forward, Subject


class CompiledAgainError(RuntimeError):
    """A graph was to be compiled after the way was built: its settings would be others."""


class Compiled:
    """A forward compiled whole, with its backward, for the subject's input.

    Its code object is its own, so that Dynamo's cache of it, and the limit of that cache, are too.
    It compiles in the constructor, under the memory budget; a call that would have to compile
    again raises CompiledAgainError instead.

    Args:
        budget: `torch._functorch.config.activation_memory_budget`; None leaves it.
    """

    def __init__(self, forward: Forward, subject: Subject, budget: float | None = None) -> None:
        compiler = torch._dynamo.lookup_backend(subject.compiler)
        self._built = False

        def once(graph: Any, inputs: list[Tensor]) -> Any:
            if self._built:
                raise CompiledAgainError("the call does not fit what was compiled")
            return compiler(graph, inputs)

        def call(x: Tensor) -> Tensor:
            return forward(x)

        own = types.FunctionType(
            call.__code__.replace(), call.__globals__, "call", None, call.__closure__
        )
        self._call = torch.compile(own, backend=once, fullgraph=True, dynamic=False)
        settings: dict[str, Any] = {} if budget is None else {"activation_memory_budget": budget}
        with torch._functorch.config.patch(settings):
            self(subject.x).backward(subject.dy)
        self._built = True

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._call(x)
        return y

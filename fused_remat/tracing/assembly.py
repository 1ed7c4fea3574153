"""The operations of a recording in a row, where what cannot be traced is one opaque operation."""

from __future__ import annotations

import enum
import types
from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch import nn

from fused_remat.layers.eligibility import parameters_of
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.tracing.functions import norm_function
from fused_remat.tracing.recorder import Recorder, call_replica
from fused_remat.tracing.sizes import Size
from fused_remat.tracing.values import (
    EXACT,
    STREAM,
    Limit,
    Op,
    Recording,
    Ref,
    Span,
    Untraceable,
    leaves,
    refs,
)

#: Values that are the same in all calls; another object may differ, or hold other tensors.
_VALUES = (
    int, float, complex, str, bytes, type(None), type(...), type, enum.Enum, torch.dtype,
    torch.device, torch.layout, torch.memory_format, numpy.generic, types.BuiltinFunctionType,
    types.FunctionType, Ref, Size, Limit,
)  # fmt: skip


class Assembly:
    """The parts from which a recording of a layer is assembled."""

    def __init__(
        self,
        layer: nn.Module,
        recorder: Recorder,
        known: Mapping[str, Any],  # the `known_function` of each submodule by path
        opaque: Mapping[str, str],  # paths of submodules that become one operation, and why
    ) -> None:
        self.layer, self.recorder, self.known, self.opaque = layer, recorder, known, opaque

    def recording(self) -> Recording:
        """Return the recording, or raise Untraceable if the layer's own operations have trouble."""
        recorder, ops = self.recorder, self._ops(self.recorder.root)
        producers, inputs = {n: op for op in ops for n in op.writes}, recorder.inputs
        used = {*producers, *recorder.sources, *(n for n in inputs if n is not None)}
        values = [*recorder.values]
        shapes = [recorder.metas.shape(n, t) if n in used else None for n, t in enumerate(values)]
        dtypes = [STREAM if t.dtype == EXACT else t.dtype for t in values]
        live = {n for n in recorder.live if n in producers or n in inputs}
        return Recording(
            values, shapes, dtypes, ops, producers, recorder.sources, inputs, live,
            recorder.result, recorder.sample.sizes, {*recorder.fixed},
        )  # fmt: skip

    def _ops(self, span: Span) -> list[Op]:
        if span.trouble:
            raise Untraceable(span.trouble)
        ops = list[Op]()
        for part in span.inner:
            if isinstance(part, Op):
                _check_values((part.args, part.kwargs))
                ops.append(part)
            else:
                ops += self._call(part)
        return ops

    def _call(self, span: Span) -> list[Op]:
        """Return the operations of a call of a submodule or function; one if it is opaque."""
        known = None if span.function else self.known[span.path]
        if (
            known is not None
            and len(span.args) == 1
            and not span.kwargs
            and span.outs[:1] != [None]
        ):
            return [self._known(span, known)]
        try:
            if span.path in self.opaque and not span.function:
                raise Untraceable(self.opaque[span.path])
            return self._ops(span)
        except Untraceable as reason:
            return [self._opaque(span, str(reason))]

    def _known(self, span: Span, known: Any) -> Op:
        numbers = {name: n for n, name in self.recorder.sources.items()}
        params = parameters_of(self.layer.get_submodule(span.path), recurse=False)
        own = [Ref(numbers[f"{span.path}.{n}"]) for n in params]
        is_act = isinstance(known, str)
        name, run = ("act", ACTIVATIONS[known].fwd) if is_act else ("norm", norm_function(known))
        return Op(name, run, (*span.args, *own), {}, [*span.outs], span.path, info=known)

    def _opaque(self, span: Span, reason: str) -> Op:
        try:
            _check_values((span.args, span.kwargs))
        except Untraceable:
            raise Untraceable(f"{span.path}: {reason}") from None
        path, args, kwargs, run = span.path, span.args, span.kwargs, span.function
        given, name, function = {*refs((args, kwargs))}, f"module {path}", ""
        if run is not None:
            reads, writes = _values_in(span)
            if span.fixed or reads - writes - given:
                raise Untraceable(reason)
            function = f"{path}.{run.__name__}".lstrip(".")
            name = f"function {function}"
        else:
            args, kwargs, run = (self.recorder.tensors_of(path), args, kwargs), {}, call_replica
        outs = [n if n not in given else None for n in span.outs]
        return Op(
            name, run, args, kwargs, outs, path, path=path, info=reason, random=span.random,
            function=function,
        )  # fmt: skip


def _check_values(tree: Any) -> None:
    for leaf in leaves(tree):
        if leaf is not STREAM and not isinstance(leaf, _VALUES):
            raise Untraceable(f"it passes on an object ({type(leaf).__name__})")


def _values_in(span: Span) -> tuple[set[int], set[int]]:
    """Return the values that operations in a call read, and those that they compute."""
    reads, writes = set[int](), set[int]()
    for part in span.inner:
        more = (part.reads, part.writes) if isinstance(part, Op) else _values_in(part)
        reads.update(more[0])
        writes.update(more[1])
    return reads, writes

"""The trace of a layer's first call of a kind: two recordings, their block, and its proof."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fused_remat.tracing.block import TracedBlock
from fused_remat.tracing.call import Trace
from fused_remat.tracing.isolation import renumbered, replica
from fused_remat.tracing.join import Join
from fused_remat.tracing.prove import difference
from fused_remat.tracing.recorder import Recorded, hollow, record
from fused_remat.tracing.samples import INDICES, Arguments, constants, vary
from fused_remat.tracing.submodules import known_function
from fused_remat.tracing.tracer import Tracer
from fused_remat.tracing.values import SHIFT, Opaque, Recording, SideEffect, Untraceable

#: Sizes of the two recordings and of the two proofs, of different remainders by small numbers.
_SIZES = ({"B": 3, "S": 7, "M": 5}, {"B": 2, "S": 10, "M": 12})
_PROOFS = ({"B": 3, "S": 13, "M": 6}, {"B": 2, "S": 17, "M": 9})
#: Sizes of the two proofs of a layer that is traced at the call's own length.
_LONG_PROOFS = ({"B": 2}, {"B": 2})
#: Dtypes of the first recording and of the proofs, of the second recording, and of its parameters.
#: The last two are for layers that ATen cannot run in float64 (experts as one grouped product), and
#: for those that convert some parameters themselves.
_DTYPES = (
    (torch.float64, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
)
_MOST_REPLAYED = 24
#: First words of the reason of a layer that raises at the sizes of the recordings.
CANNOT_RUN = "its forward cannot run at another"


def trace_call(
    layer: nn.Module, forward: Callable[..., Any], call: Arguments, free: bool = False
) -> Trace:
    """Return the proved block of a call of `forward`, a function of a layer's class.

    The layer does not change: a replica of it runs. `free`: whether the block must not depend on
    integers among the arguments, nor on the layer's index in the model. Where dimensions of
    the arguments have the same size, each meaning of them is tried until the layer runs.

    Raises: Untraceable with the reason, if there is no such block.
    """
    try:
        return _trace_one(layer, forward, call, free)
    except _CannotRun:
        for other in call.others():
            with contextlib.suppress(Untraceable):
                return _trace_one(layer, forward, other, free)
        raise


class _CannotRun(Untraceable):
    """An error of the layer in a recording; `at_once` if in the first, in any dtype."""

    def __init__(self, call: Arguments, error: Exception, at_once: bool) -> None:
        sizes = "batch size or length" if "S" in call.sizes else "batch size"
        super().__init__(f"{CANNOT_RUN} {sizes} ({type(error).__name__})")
        self.at_once = at_once


def _trace_one(layer: nn.Module, forward: Callable[..., Any], call: Arguments, free: bool) -> Trace:
    """Return the block of a call whose dimensions are those of `call.dims`."""
    reasons, fixed = list[Untraceable](), set[str | int]((*constants(layer), *call.whole))
    for varies in (True, False) if fixed else (True,):
        for dtypes in _DTYPES if call.sizes else ():
            try:
                copy = replica(layer, deep=True)
                if varies:
                    vary(copy)
                method = types.MethodType(forward, copy)
                trace = _trace(copy, method, call, *dtypes, free, varies)
                if varies and not fixed.isdisjoint(trace.fixed):  # the block of other values
                    break
                if not varies:
                    trace.fixed |= fixed
                return trace
            except (torch.OutOfMemoryError, SideEffect):
                raise
            except Untraceable as reason:
                reason.__cause__ = reason.__context__ = None  # whose frames hold the recordings
                reasons.append(reason.with_traceback(None))
                if not isinstance(reason, _CannotRun) or reason.at_once:
                    break
            except Exception as error:  # of the layer's own code, at another size
                text = f"its block raises {type(error).__name__} in a trial: {error}"
                reasons.append(Untraceable(text))
                break
    # A later trial that fails for another reason tells more than one that cannot run.
    reasons.sort(key=lambda reason: not isinstance(reason, _CannotRun))
    last = reasons[-1] if reasons else Untraceable("its input has no tokens")
    try:
        raise last
    finally:
        del last, reasons  # whose traceback holds this frame, and the callers'


def _trace(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: Arguments,
    exact: torch.dtype,
    other: torch.dtype,
    params: torch.dtype,
    free: bool,
    varies: bool,
) -> Trace:
    """Return the block of a call, recorded and proved in the dtype `exact`, recorded in `other`."""
    shift, indices = SHIFT * free, INDICES if free else ()
    sample = functools.partial(call.sample, layer, varies=varies)
    own = call.leaves[call.x].dtype

    def second(dtype: torch.dtype, params: torch.dtype) -> Recorded:
        values = sample(_SIZES[1], dtype, 1, recorded=True, shift=shift, params=params)
        with renumbered(layer, indices):
            recorded = record(layer, forward, values, autocast=True)
        recorded.recorder.values[:] = map(hollow, recorded.recorder.values)  # nothing reads them
        return recorded

    at_once = exact == torch.float32
    try:
        one = record(layer, forward, sample(_SIZES[0], exact, 0, recorded=True), autocast=False)
        at_once = False
        others = [second(other, params)]
    except (Untraceable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the layer raises at these sizes
        raise _CannotRun(call, error, at_once) from error
    if own.itemsize < 4 and own != other:  # for which the layer may have operations of their own
        with contextlib.suppress(RuntimeError):  # parameters of several dtypes
            others.append(second(own, own))
    opaque = dict[str, str]()
    known = {path: known_function(m, own) for path, m in layer.named_modules() if path}
    live = [one.recorder.values[n] for n in one.recorder.live]
    narrow = exact == torch.float64 and any(t.dtype == torch.float32 for t in live)
    while True:
        try:
            joined = [Join(layer, one, two, known, opaque).joined for two in others]
            trace = _unproved(layer, joined[0], call, narrow)
            for other_join in joined[1:]:
                other_join()
            fused = functools.partial(trace.proved.run, layer)
            for i, sizes in enumerate(_PROOFS if "S" in call.sizes else _LONG_PROOFS):
                # With the same parameters: they are as large as the layer's.
                given = sample(sizes, exact, i + 2, shift=i * shift, named=one.sample.named)
                with renumbered(layer, indices if i else ()):
                    text = difference(layer, forward, fused, given, trace.narrow)
                if text is not None:
                    raise Untraceable(f"the traced block does not compute the same: {text}")
            return trace
        except Opaque as reason:
            path = reason.path.rpartition(".")[0] if reason.path in opaque else reason.path
            while path in opaque:
                path = path.rpartition(".")[0]
            if not path or len(opaque) >= _MOST_REPLAYED:
                raise Untraceable(str(reason)) from None
            opaque[path] = reason.reason if path == reason.path else str(reason)


def _unproved(
    layer: nn.Module, joined: Callable[[], Recording], call: Arguments, narrow: bool
) -> Trace:
    """Return the block of two recordings, also without dropout and adapters' dtypes."""

    def block_of(drops: bool, mixes_dtypes: bool) -> TracedBlock:
        recording = joined()
        indices = (call.x, call.memory, call.bounds)
        x, memory, bounds = (None if i is None else recording.inputs[i] for i in indices)
        assert x is not None
        tokens = recording.sizes.get("S", call.tokens)
        tracer = Tracer(
            recording, layer, x, memory, bounds, tokens, call.leaves[call.x].dtype, call.names,
            drops, mixes_dtypes,
        )  # fmt: skip
        return tracer.trace(f"read_{type(layer).__name__}")

    trace = Trace(block_of(True, True), call, narrow)
    if trace.block.draws:
        trace.plain = trace.proved = Trace(block_of(False, True), call, narrow)
    if trace.block.mixes_dtypes:
        trace.proved = Trace(block_of(False, False), call, narrow)
    return trace

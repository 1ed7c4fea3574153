"""The trace of a layer's first call of a kind: a recording, its block, and the proof."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_remat.execution.prepare import chunks_of
from fused_remat.layers.converted import INDICES
from fused_remat.layers.eligibility import needs_grad
from fused_remat.layers.fallback import generator_states, run_with, set_generator_states
from fused_remat.tracing.assembly import Assembly
from fused_remat.tracing.call import Trace
from fused_remat.tracing.functions import known_function
from fused_remat.tracing.isolation import Trial, renumbered, replica
from fused_remat.tracing.recorder import Recorder
from fused_remat.tracing.recording import record
from fused_remat.tracing.samples import Arguments, constants, vary
from fused_remat.tracing.sizes import WITHOUT_DATA, Space, choose, evaluated, moved
from fused_remat.tracing.tracer import Tracer
from fused_remat.tracing.values import (
    EXACT,
    SHIFT,
    Opaque,
    Recording,
    Sample,
    SideEffect,
    Span,
    Untraceable,
    leaves,
)

#: Sizes of the proof of a layer that is traced at the call's own length.
_LONG_PROOF = {"B": 2}
#: Most branches by conditions on sizes that are tried until one is that of the call.
_MOST_BRANCHES = 6
#: Tokens of a chunk in a proof, at most a sequence, so that groups and tiles are proved too.
_CHUNK = 12
_MOST_REPLAYED = 24
#: Most other meanings of a call's dimensions that are tried.
_MOST_OTHERS = 8
#: First words of the reason of a layer that raises at the sizes of the recordings.
CANNOT_RUN = "its forward cannot run at another"


def trace_call(
    layer: nn.Module, forward: Callable[..., Any], call: Arguments, free: bool = False
) -> Trace:
    """Return the proved block of a call of `forward`, or raise Untraceable with the reason.

    `forward` is a function of the layer's class, and runs on a replica. `free`: whether the block
    must not depend on integers among the arguments, nor on the layer's index in the model.
    """
    try:
        return _trace_one(layer, forward, call, free)
    except _CannotRun:
        for other in itertools.islice(call.others(), _MOST_OTHERS):
            with contextlib.suppress(Untraceable):
                return _trace_one(layer, forward, other, free)
        raise


class _CannotRun(Untraceable):
    """An error of the layer in a recording, in which a dimension may have the wrong meaning."""


def _trace_one(layer: nn.Module, forward: Callable[..., Any], call: Arguments, free: bool) -> Trace:
    fixed = set[str | int]((*constants(layer), *call.whole))
    for varies in (True, False) if fixed else (True,):
        copy, conditions = replica(layer, deep=True), dict[str, bool]()
        if varies:
            vary(copy)
        try:
            run = types.MethodType(forward, copy)
            trace = _trace(copy, run, call, free, varies, conditions)
            if not varies or fixed.isdisjoint(trace.fixed):  # else it is the block of other values
                trace.fixed |= set() if varies else fixed
                return trace
        except (torch.OutOfMemoryError, SideEffect):
            raise
        except Exception as error:
            text = f"its block raises {type(error).__name__} in a trial: {error}"
            if isinstance(error, _Raised):
                text = f"its forward raises at other sizes: {error}"
            reason = error if isinstance(error, Untraceable) else Untraceable(text)
            reason.conditions = conditions
            reason.__cause__ = reason.__context__ = None  # whose frames hold the recordings
            last = reason.with_traceback(None)
    try:
        raise last
    finally:
        del last, reason  # whose traceback holds this frame, and the callers'


def _trace(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: Arguments,
    free: bool,
    varies: bool,
    conditions: dict[str, bool],  # on sizes, with their outcomes in the call, once they are known
) -> Trace:
    """Return the block of a call, recorded and proved in float64."""
    sample = functools.partial(call.sample, layer, varies=varies)
    own, indices = call.leaves[call.x].dtype, INDICES if free else ()
    try:
        recorder, space = _recorded(layer, forward, call, sample, conditions)
        if own.itemsize < 4:  # for which the layer may have operations of their own
            with contextlib.suppress(RuntimeError):  # parameters of several dtypes
                values = sample(recorder.sample.sizes, own, 0, recorded=True)
                _note_others(recorder.root, record(layer, forward, values).root)
    except (Untraceable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the layer raises at these sizes
        what = "batch size or length" if "S" in call.sizes else "batch size"
        raise _CannotRun(f"{CANNOT_RUN} {what} in float64 ({type(error).__name__})") from error
    formulas = [size for size in space.known.values() if size is not None and size.formula]
    known = {path: known_function(m, own) for path, m in layer.named_modules() if path}
    opaque, first = dict[str, str](), recorder.sample
    # Of the same parameters, which are as large as the layer's.
    sizes = choose(call.sizes, space.conditions, formulas, [first.sizes]) or _LONG_PROOF
    shift = SHIFT * free
    given = sample(sizes, EXACT, 1, shift=shift, named=first.named, scale=SCALE)
    while True:
        try:
            trace = _unproved(layer, Assembly(layer, recorder, known, opaque).recording, call)
            trace.conditions = space.conditions
            tokens = given.sizes.get("S", call.tokens)
            with renumbered(layer, indices), chunks_of(min(_CHUNK, tokens)):
                text = difference(layer, forward, trace.proved.run, given, LIMITS)
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


def _recorded(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: Arguments,
    sample: Callable[..., Sample],
    conditions: dict[str, bool],
) -> tuple[Recorder, Space]:
    """Return a recording of the branches that the call takes, and the formulas of its sizes."""
    for _ in range(_MOST_BRANCHES):
        sizes = choose(call.sizes, conditions, (), ())
        if sizes is None:
            break
        for choices in WITHOUT_DATA:
            others = [moved(choice, conditions) for choice in choices]
            recorder = record(layer, forward, sample(sizes, EXACT, 0, recorded=True, others=others))
            space = recorder.space
            if not space.lost:
                break
        numbers = {*space.plain, *(size.text for size in space.counts)}
        numbers = {f"{text} == {evaluated(text, call.sizes)}" for text in numbers}
        space.conditions |= {text: bool(evaluated(text, sizes)) for text in numbers}
        conditions.update({t: bool(evaluated(t, call.sizes)) for t in space.conditions})
        if all(conditions[text] == outcome for text, outcome in space.conditions.items()):
            space.conditions |= conditions  # also those by which two sizes are equal
            return recorder, space
    raise Untraceable(f"no small call takes its branches by {' and '.join(conditions)}")


def _note_others(one: Span, two: Span) -> None:
    """Note as trouble where a recording in another dtype has other operations."""
    parts = [*zip(one.inner, two.inner, strict=False)]
    if len(one.inner) != len(two.inner) or any(a.label != b.label for a, b in parts):
        one.trouble = one.trouble or "its operations depend on the dtype"
    for a, b in parts:
        if isinstance(a, Span) and isinstance(b, Span):
            _note_others(a, b)


def _unproved(layer: nn.Module, recording: Callable[[], Recording], call: Arguments) -> Trace:
    """Return the block of a recording, also without dropout and adapters' dtypes."""

    def trace_of(drops: bool, mixes_dtypes: bool) -> Trace:
        block = Tracer(recording(), layer, call, drops, mixes_dtypes).trace()
        return Trace(block, call)

    trace = trace_of(True, True)
    if trace.block.draws:
        trace.plain = trace.proved = trace_of(False, True)
    if trace.block.mixes_dtypes:
        trace.proved = trace_of(False, False)
    return trace


class Limits(NamedTuple):
    """Relative differences that are rounding errors."""

    output: float
    gradient: float
    #: Of a gradient to the largest one, if it is zero but for rounding, as that of keys' bias.
    zero: float


#: Of a proof.
LIMITS = Limits(1e-6, 5e-6, 1e-9)
#: Of a call of the layer itself, by dtype; it shows wrong steps, not wrong digits. Of the models of
#: `tests/tracing` gradients differed by 4.9e-6 in float32, 1.2e-2 in float16 (M2M100) and 0.19 in
#: bfloat16 (T5) at most.
_OWN = {
    torch.float64: Limits(1e-6, 1e-4, 1e-6), torch.float32: Limits(1e-4, 1e-3, 1e-3),
    torch.float16: Limits(1e-2, 1e-1, 1e-2), torch.bfloat16: Limits(4e-2, 3e-1, 4e-2),
}  # fmt: skip
#: Of 16 bits where experts are chosen: rounding may choose others.
_UNSURE = Limits(0.4, math.inf, math.inf)
#: Scale of every other token of a proof: where activations are smaller, a norm's eps counts more.
SCALE = 0.4
#: Elements up to which gradients are compared; larger ones by products with so many vectors.
_SMALL, _VECTORS = 4096, 8


def why_different(
    trace: Trace,
    layer: nn.Module,
    forward: Callable[..., Any],
    call: Arguments,
    most: int,
    widens: bool,
    gradients: bool,
) -> str | None:
    """Return how a block and its layer differ in at most so many sequences of a call, or None.

    Both run without dropout. If it `widens` 16 bits, they do in float32, since under autocast they
    round differently. `gradients`: whether these are compared, too.
    """
    copy = replica(layer, deep=True)
    forward = types.MethodType(forward, copy)
    if not trace.holds({**call.sizes, "B": most}):  # so few take another branch
        most = call.batch
    while True:
        sample = call.own(layer, most, widens)
        limits = _OWN.get(sample.dtype, _OWN[torch.bfloat16])
        if sample.dtype.itemsize == 2 and trace.graph.unsure:
            limits = _UNSURE
        try:
            text = difference(copy, forward, trace.plain.run, sample, limits, gradients)
        except torch.OutOfMemoryError:
            raise
        except _Raised as error:  # as the layer's own forward then does
            if most < call.batch:  # which part of an argument is a sequence's is not known
                most = call.batch
                continue
            text = f"it raises {error}" if widens else None
        except Exception as error:  # parameters of several dtypes
            return f"the block cannot run where the layer can: {error}"
        where = f"on a batch of shape {tuple(call.leaves[trace.x].shape)}"
        return text and f"the block differs from the layer {where}: {text}"


class _Raised(RuntimeError):
    """An error of a layer's own forward or backward."""


def difference(
    layer: nn.Module,
    forward: Callable[..., Any],
    fused: Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Any]], Any],
    sample: Sample,
    limits: Limits,
    gradients: bool = True,
) -> str | None:
    """Return where `fused(layer, named, arguments)` differs from `forward`, its method, or None.

    `gradients`: whether gradients are compared, too.
    """
    device = next(t.device for t in leaves(sample.arguments) if isinstance(t, Tensor))
    states = generator_states(device)
    try:
        with Trial(sample.dtype == EXACT):
            run = functools.partial(run_with, layer, forward)
            expected, grads = _results(run, sample.named, sample.arguments, gradients)
    except Exception as error:
        raise _Raised(f"{type(error).__name__}: {error}") from error
    set_generator_states(states, device)  # drop path draws before the block
    run = functools.partial(fused, layer)
    actual, found = _results(run, sample.named, sample.arguments, gradients)
    if len(actual) != len(expected):
        return f"the layer has {len(expected)} results, its block {len(actual)}"
    for a, b in zip(actual, expected, strict=True):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor) and b.is_floating_point()):
            continue  # such as scores, which a model of transformers drops
        kinds = [f"{t.dtype} {tuple(t.shape)}" for t in (a, b)]
        if kinds[0] != kinds[1]:
            return "the output is {} in the block and {} in the layer".format(*kinds)
        if not (distance := _distance(a, b, 0.0)) <= limits.output:
            return f"the output differs by {distance:.1e}"
    largest = max((float(g.norm()) for g in grads.values() if g is not None), default=0.0)
    for name, grad in grads.items():
        mine = found[name]
        if grad is None and mine is not None:
            return f"the gradient of {name} is zero, not None"
        distance = _distance(mine, grad, limits.zero * largest)
        if not distance <= limits.gradient:
            return f"the gradient of {name} differs by {distance:.1e}"
    return None


def _distance(a: Tensor | None, b: Tensor | None, zero: float) -> float:
    """Return the relative distance of two tensors, 0 if none is larger than `zero`."""
    norms = [0.0 if t is None else float(t.norm()) for t in (a, b)]
    if sum(norms) <= zero:
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    return float((a - b).norm()) / (norms[1] or 1.0)


def _results(
    run: Callable[..., Any],
    named: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
    gradients: bool,
) -> tuple[list[Any], dict[str, Tensor | None]]:
    """Return the results of a run, and sketches of gradients, which are freed one by one."""
    with torch.set_grad_enabled(gradients):
        results = leaves(run(named, arguments))
    if not gradients:
        return results, {}
    out = next(filter(needs_grad, results), None)
    tensors = {**{f"argument {i}": t for i, t in enumerate(leaves(arguments))}, **named}
    inputs = {name: t for name, t in tensors.items() if needs_grad(t)}
    if out is None:
        return results, dict.fromkeys(inputs)
    generator = torch.Generator(out.device).manual_seed(1)
    dy = torch.randn(out.shape, generator=generator, dtype=out.dtype, device=out.device)
    sketches: dict[int, Tensor] = {}

    def note(t: Tensor) -> None:
        if t.grad is not None:
            sketches[id(t)], t.grad = _sketch(t.grad), None

    handles = [t.register_post_accumulate_grad_hook(note) for t in {*inputs.values()}]
    try:
        torch.autograd.backward(out, dy, inputs=[*inputs.values()])
    finally:
        for handle in handles:
            handle.remove()
    grads = {name: sketches.get(id(t)) for name, t in inputs.items()}
    return [t.detach() if isinstance(t, Tensor) else t for t in results], grads


def _sketch(grad: Tensor) -> Tensor:
    """Return products of a large gradient with random vectors.

    Their distance is that of the gradients times a number that is below a tenth once in 10^7.
    """
    if grad.numel() <= _SMALL:
        return grad.clone()
    columns = next(n for n in itertools.accumulate(grad.shape[::-1], operator.mul) if n >= 64)
    vectors = torch.randn(columns, _VECTORS, generator=torch.Generator().manual_seed(3))
    products: Tensor = grad.reshape(-1, columns) @ (vectors / _VECTORS**0.5).to(grad)
    return products

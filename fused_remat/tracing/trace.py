"""The trace of a layer's first call of a kind: two recordings, their block, and the proof."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_remat.execution.prepare import chunks_of
from fused_remat.layers.converted import INDICES
from fused_remat.layers.eligibility import needs_grad
from fused_remat.layers.fallback import generator_states, run_with, set_generator_states
from fused_remat.steps.routing import Routing
from fused_remat.tracing.call import Trace
from fused_remat.tracing.functions import known_function
from fused_remat.tracing.isolation import Trial, renumbered, replica
from fused_remat.tracing.join import Join
from fused_remat.tracing.quantized import Formats, unquantized
from fused_remat.tracing.recorder import Recorder, hollow
from fused_remat.tracing.recording import record
from fused_remat.tracing.samples import Arguments, constants, vary
from fused_remat.tracing.sizes import WITHOUT_DATA, Sizes, Space, choose, evaluated, moved
from fused_remat.tracing.tracer import Tracer
from fused_remat.tracing.values import (
    SHIFT,
    Opaque,
    Recording,
    Sample,
    SideEffect,
    Untraceable,
    leaves,
)

#: Most branches by conditions on sizes that are tried until one is that of the call.
_MOST_BRANCHES = 6
#: Dtypes of the first recording and of the proof, of the second recording, and of its parameters.
#: The last two are for layers with kernels that do not take float64, and for those that convert
#: some parameters themselves.
_DTYPES = (
    (torch.float64, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
)
#: Tokens of a chunk in a proof, at most a sequence, so that groups and tiles are proved too.
_CHUNK = 12
_MOST_REPLAYED = 24
#: Most other meanings of a call's dimensions that are tried.
_MOST_OTHERS = 8
#: First words of the reason of a layer that raises at the sizes of the recordings.
CANNOT_RUN = "its forward cannot run at another"


def trace_call(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: Arguments,
    free: bool = False,
    formats: Formats | None = None,
) -> Trace:
    """Return the proved block of a call of `forward`, or raise Untraceable with the reason.

    `forward` is a function of the layer's class, and runs on a replica. `free`: whether the block
    must not depend on integers among the arguments, nor on the layer's index in the model.
    `formats`: those of quantized weights, in place of which plain layers are traced.
    """
    formats = formats or {}
    layer = unquantized(layer, formats, call.leaves[call.x])
    try:
        return _trace_one(layer, forward, call, free, formats)
    except _CannotRun:
        for other in itertools.islice(call.others(), _MOST_OTHERS):
            with contextlib.suppress(Untraceable):
                return _trace_one(layer, forward, other, free, formats)
        raise


class _CannotRun(Untraceable):
    """An error of the layer in a recording."""


def _trace_one(
    layer: nn.Module, forward: Callable[..., Any], call: Arguments, free: bool, formats: Formats
) -> Trace:
    reasons, fixed = list[Untraceable](), set[str | int]((*constants(layer), *call.whole))
    for varies in (True, False) if fixed else (True,):
        for dtypes in _DTYPES:
            try:
                copy, conditions = replica(layer, deep=True), dict[str, bool]()
                if varies:
                    vary(copy)
                run = types.MethodType(forward, copy)
                trace = _trace(copy, run, call, dtypes, free, varies, conditions, formats)
                if varies and not fixed.isdisjoint(trace.fixed):  # the block of other values
                    break
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
                reasons.append(reason.with_traceback(None))
                if not isinstance(reason, _CannotRun):
                    break
    # A later trial that fails for another reason explains more than one that cannot run.
    last = sorted(reasons, key=lambda reason: not isinstance(reason, _CannotRun))[-1]
    try:
        raise last
    finally:
        del last, reason, reasons  # whose traceback holds this frame, and the callers'


def _trace(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: Arguments,
    dtypes: tuple[torch.dtype, ...],
    free: bool,
    varies: bool,
    conditions: dict[str, bool],  # on sizes, with their outcomes in the call, once they are known
    formats: Formats,
) -> Trace:
    """Return the block of a call, recorded in two of the dtypes, and proved in the first."""
    exact, other, params = dtypes
    shift, indices = SHIFT * free, INDICES if free else ()
    sample = functools.partial(call.sample, layer, varies=varies)
    own = call.leaves[call.x].dtype

    def other_sizes(*recorders: Recorder) -> Sizes:
        earlier = [recorder.sample.sizes for recorder in recorders]
        return choose(call.sizes, space.conditions, formulas, earlier) or earlier[0]

    def second(dtype: torch.dtype, params: torch.dtype) -> Recorder:
        values = sample(other_sizes(one), dtype, 1, recorded=True, shift=shift, params=params)
        with renumbered(layer, indices):
            recorder = record(layer, forward, values, autocast=True)
        recorder.values[:] = map(hollow, recorder.values)  # nothing reads them
        return recorder

    try:
        one, space = _first(layer, forward, call, sample, exact, conditions)
        formulas = [size for size in space.known.values() if size is not None and size.formula]
        formulas += space.counts
        others = [second(other, params)]
    except (Untraceable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the layer raises at these sizes
        what = "batch size or length" if "S" in call.sizes else "batch size"
        raise _CannotRun(f"{CANNOT_RUN} {what} ({type(error).__name__})") from error
    if own.itemsize < 4 and own != other:  # for which the layer may have operations of their own
        with contextlib.suppress(RuntimeError):  # parameters of several dtypes
            others.append(second(own, own))
    narrow = any(one.values[n].dtype == torch.float32 for n in one.live)
    literal = SINGLE if exact == torch.float32 else NARROW if narrow else EXACT
    opaque = dict[str, str]()
    known = {path: known_function(m, path, own) for path, m in layer.named_modules() if path}
    sizes, named = other_sizes(one, others[0]), one.sample.named  # a copy of these takes memory
    given = sample(sizes, exact, 2, shift=shift, named=named, scale=SCALE)
    while True:
        try:
            joined = [Join(layer, one, two, known, opaque).joined for two in others]
            trace = _unproved(layer, joined[0], call, formats)
            for other_join in joined[1:]:
                other_join()
            trace.conditions = {**space.conditions, **_unvaried(space, [one, *others])}
            tokens = given.sizes.get("S", call.tokens)
            with renumbered(layer, indices), chunks_of(min(_CHUNK, tokens)):
                text = _disproof(layer, forward, trace.proved, given, literal)
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


def _first(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: Arguments,
    sample: Callable[..., Sample],
    exact: torch.dtype,
    conditions: dict[str, bool],
) -> tuple[Recorder, Space]:
    """Return a recording of the branches that the call takes, and the formulas of its sizes."""
    for _ in range(_MOST_BRANCHES):
        sizes = choose(call.sizes, conditions, (), ())
        if sizes is None:
            break
        for choices in WITHOUT_DATA:
            others = [moved(choice, conditions) for choice in choices]
            values = sample(sizes, exact, 0, recorded=True, others=others)
            recorder = record(layer, forward, values, autocast=False)
            space: Any = recorder.space
            if not space.lost:
                break
        numbers = {f"{text} == {evaluated(text, call.sizes)}" for text in space.plain}
        space.conditions |= {text: bool(evaluated(text, sizes)) for text in numbers}
        conditions.update({t: bool(evaluated(t, call.sizes)) for t in space.conditions})
        if all(conditions[text] == outcome for text, outcome in space.conditions.items()):
            space.conditions |= conditions  # also those by which two sizes are equal
            return recorder, space
    raise Untraceable(f"no small call takes its branches by {' and '.join(conditions)}")


def _unvaried(space: Space, recorders: list[Recorder]) -> dict[str, bool]:
    """Return the conditions that loops have as many steps as in all of the recordings."""
    steps = [(c.text, {c.of(r.sample.sizes) for r in recorders}) for c in space.counts]
    return {f"{text} == {n}": True for text, (n, *more) in steps if not more}


def _unproved(
    layer: nn.Module, joined: Callable[[], Recording], call: Arguments, formats: Formats
) -> Trace:
    """Return the block of two recordings, also without dropout, adapters' dtypes and formats."""

    def trace_of(drops: bool, mixes_dtypes: bool) -> Trace:
        own = formats if mixes_dtypes else {}
        block = Tracer(joined(), layer, call, drops, mixes_dtypes, own).trace()
        return Trace(block, call)

    trace = trace_of(True, True)
    if trace.block.draws:
        if trace.objects:  # which would be of another forward, with other random numbers
            raise Untraceable(f"it draws random numbers, and returns {trace.objects[0]}")
        trace.plain = trace.proved = trace_of(False, True)
    if trace.block.mixes_dtypes or formats:
        trace.proved = trace_of(False, False)
    return trace


def _disproof(
    layer: nn.Module, forward: Callable[..., Any], trace: Trace, given: Sample, literal: Limits
) -> str | None:
    """Return how a block and its layer differ in a sample, or None.

    In float64 what they compute in float32 is float64, too. Where code insists on float32 and
    raises an error, they run as they are, within the limits `literal`, as in any other dtype.
    """
    if given.dtype == torch.float64:
        with contextlib.suppress(RuntimeError):
            exact = functools.partial(Trial, exact=True)
            return difference(layer, forward, trace, given, EXACT, exact)
    mode = functools.partial(Trial, exact=False)
    return difference(layer, forward, trace, given, literal, mode)


class Limits(NamedTuple):
    """Relative differences that are rounding errors."""

    output: float
    gradient: float
    #: Of a gradient to the largest one, if it is zero but for rounding, as that of keys' bias.
    zero: float


#: Of a proof in float64; of one in float32, where a layer cannot run in float64; and of gradients
#: where it insists on float32 for some values: at most 2.4e-5 was measured, for the linear
#: attention of OLMo hybrid.
EXACT, SINGLE, NARROW = (
    Limits(1e-6, 5e-6, 1e-9), Limits(2e-5, 1e-4, 2e-8), Limits(1e-6, 5e-5, 1e-6),
)  # fmt: skip
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
    widens: bool,
    entire: bool,
) -> str | None:
    """Return how a block and its layer differ in a call, or None.

    Without dropout, both compute the result of the `entire` batch; or the result and all gradients
    of at most two sequences and half of the batch, so that a first step does not take double
    the time. If it `widens` 16 bits, in float32, since under autocast they round differently.
    """
    copy, most = replica(layer, deep=True), max(1, min(2, call.batch // 2))
    most = call.batch if entire else most
    forward = types.MethodType(forward, copy)
    if not trace.holds({**call.sizes, "B": most}):  # so few take another branch
        most = call.batch
    while True:
        sample = call.own(layer, most, widens)
        products = [spec.compute or sample.dtype for spec in trace.block.formats.values()]
        narrow = min((sample.dtype, *products), key=lambda dtype: dtype.itemsize)
        limits = _OWN.get(narrow, _OWN[torch.bfloat16])
        chooses = trace.graph.unsure or any(isinstance(n, Routing) for n in trace.graph.nodes)
        if sample.dtype.itemsize == 2 and chooses:
            limits = _UNSURE
        try:
            mode = functools.partial(Trial, exact=False)
            text = difference(copy, forward, trace.plain, sample, limits, mode, not entire)
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
    trace: Trace,
    sample: Sample,
    limits: Limits,
    mode: Callable[[], Any],
    gradients: bool = True,
) -> str | None:
    """Return where a block of the layer differs from `forward`, or None.

    `mode`: makes the context in which both run. `gradients`: whether these are compared, too.
    """
    device = next(t.device for t in leaves(sample.arguments) if isinstance(t, Tensor))
    states = generator_states(device)
    try:
        with mode():
            run = functools.partial(run_with, layer, forward)
            expected, grads = _results(run, trace, sample, gradients)
    except Exception as error:
        raise _Raised(f"{type(error).__name__}: {error}") from error
    set_generator_states(states, device)  # drop path draws before the block
    run = functools.partial(trace.run, layer, mode=mode)
    actual, found = _results(run, trace, sample, gradients)
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
    norms = [0.0 if t is None else float(t.detach().norm()) for t in (a, b)]
    if sum(norms) <= zero:
        return 0.0
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    return float((a - b).norm()) / (norms[1] or 1.0)


def _results(
    run: Callable[..., Any], trace: Trace, sample: Sample, gradients: bool
) -> tuple[list[Any], dict[str, Tensor | None]]:
    """Return the results of a run, and sketches of gradients, which are freed one by one."""
    named, arguments = sample.named, sample.arguments
    with torch.set_grad_enabled(gradients):
        results = leaves(run(named, arguments))
    if not gradients:
        return results, {}
    outs = [out for i, out in enumerate(results) if i in trace.outs and needs_grad(out)]
    tensors = {**{f"argument {i}": t for i, t in enumerate(leaves(arguments))}, **named}
    inputs = {name: t for name, t in tensors.items() if needs_grad(t)}
    if not outs:
        return results, dict.fromkeys(inputs)
    generator = torch.Generator(outs[0].device).manual_seed(1)
    dys = [
        torch.randn(out.shape, generator=generator, dtype=out.dtype, device=out.device)
        for out in outs
    ]
    sketches: dict[int, Tensor] = {}

    def note(t: Tensor) -> None:
        if t.grad is not None:
            sketches[id(t)], t.grad = _sketch(t.grad), None

    handles = [t.register_post_accumulate_grad_hook(note) for t in {*inputs.values()}]
    try:
        torch.autograd.backward(outs, dys, inputs=[*inputs.values()])
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

"""The trace of a layer's first call of a kind: two recordings, their block, and its proof."""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.execution.prepare import chunks_of
from fused_remat.layers.converted import INDICES
from fused_remat.layers.eligibility import needs_grad
from fused_remat.layers.fallback import generator_states, run_with, set_generator_states
from fused_remat.tracing.call import Trace
from fused_remat.tracing.isolation import WithoutDropout, renumbered, replica
from fused_remat.tracing.join import Join, known_function
from fused_remat.tracing.recorder import Recorder, hollow, record
from fused_remat.tracing.samples import Arguments, constants, vary
from fused_remat.tracing.sizes import WITHOUT_DATA, Size, Sizes, Space, choose, evaluated
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

#: Sizes of the two proofs of a layer that is traced at the call's own length.
_LONG_PROOFS = ({"B": 2}, {"B": 2})
#: Most branches by conditions on sizes that are tried until one is that of the call.
_MOST_BRANCHES = 6
#: Dtypes of the first recording and of the proofs, of the second recording, and of its parameters.
#: The last two are for layers that ATen cannot run in float64 (experts as one grouped product), and
#: for those that convert some parameters themselves.
_DTYPES = (
    (torch.float64, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
)
#: Tokens of a chunk in proofs, at most a sequence, so that groups and tiles are proved too.
_CHUNK = 12
_MOST_REPLAYED = 24
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
        for other in call.others():  # dimensions of the same size may have another meaning
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
    reasons, fixed = list[Untraceable](), set[str | int]((*constants(layer), *call.whole))
    for varies in (True, False) if fixed else (True,):
        for dtypes in _DTYPES:
            try:
                copy = replica(layer, deep=True)
                if varies:
                    vary(copy)
                trace = _trace(copy, types.MethodType(forward, copy), call, dtypes, free, varies)
                if varies and not fixed.isdisjoint(trace.fixed):  # the block of other values
                    break
                trace.fixed |= set() if varies else fixed
                return trace
            except (torch.OutOfMemoryError, SideEffect):
                raise
            except Exception as error:
                text = f"its block raises {type(error).__name__} in a trial: {error}"
                reason = error if isinstance(error, Untraceable) else Untraceable(text)
                reason.__cause__ = reason.__context__ = None  # whose frames hold the recordings
                reasons.append(reason.with_traceback(None))
                if not isinstance(reason, _CannotRun) or reason.at_once:
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
) -> Trace:
    """Return the block of a call, recorded in two of the dtypes, and proved in the first."""
    exact, other, params = dtypes
    shift, indices = SHIFT * free, INDICES if free else ()
    sample = functools.partial(call.sample, layer, varies=varies)
    own = call.leaves[call.x].dtype

    def second(dtype: torch.dtype, params: torch.dtype) -> Recorder:
        first = one.sample.sizes
        sizes = choose(call.sizes, space.conditions, formulas, [first]) or first
        values = sample(sizes, dtype, 1, recorded=True, shift=shift, params=params)
        with renumbered(layer, indices):
            recorder = record(layer, forward, values, autocast=True)
        recorder.values[:] = map(hollow, recorder.values)  # nothing reads them
        return recorder

    at_once = exact == torch.float32
    try:
        one, space = _first(layer, forward, call, sample, exact)
        formulas = [size for size in space.known.values() if size is not None and size.formula]
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
    narrow = exact == torch.float64 and any(one.values[n].dtype == torch.float32 for n in one.live)
    while True:
        try:
            joined = [Join(layer, one, two, known, opaque).joined for two in others]
            trace = _unproved(layer, joined[0], call, narrow)
            for other_join in joined[1:]:
                other_join()
            trace.conditions = space.conditions
            tensors = one.sample.named.items()
            chosen = [r.sample.sizes for r in (one, others[0])]
            for i, sizes in enumerate(_proofs(call, space.conditions, formulas, chosen)):
                # With the same parameters, which are as large as the layer's; and their gradients
                # once, unless they are small.
                named = {n: t.detach() if i and t.numel() > _SMALL else t for n, t in tensors}
                given = sample(sizes, exact, i + 2, shift=i * shift, named=named)
                tokens = given.sizes.get("S", call.tokens)
                with renumbered(layer, indices if i else ()), chunks_of(min(_CHUNK, tokens)):
                    text = difference(layer, forward, trace.proved.run, given, trace.narrow)
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
) -> tuple[Recorder, Space]:
    """Return a recording of the branches that the call takes, and the formulas of its sizes."""
    conditions: dict[str, bool] = {}
    for _ in range(_MOST_BRANCHES):
        sizes = choose(call.sizes, conditions, (), ())
        if sizes is None:
            break
        found = list[tuple[Recorder, Space]]()
        for others in WITHOUT_DATA:
            values = sample(sizes, exact, 0, recorded=True, others=others)
            recorder = record(layer, forward, values, autocast=False)
            assert recorder.space is not None
            found.append((recorder, recorder.space))
            if not recorder.space.lost:
                break
        recorder, space = next((pair for pair in found if not pair[1].lost), found[0])
        conditions |= {text: bool(evaluated(text, call.sizes)) for text in space.conditions}
        if all(conditions[text] == outcome for text, outcome in space.conditions.items()):
            return recorder, space
    raise Untraceable(f"no small call takes its branches by {' and '.join(conditions)}")


def _proofs(
    call: Arguments, conditions: Mapping[str, bool], formulas: list[Size], earlier: list[Sizes]
) -> list[Sizes]:
    """Return two choices of sizes other than the earlier ones."""
    if "S" not in call.sizes:
        return [*_LONG_PROOFS]
    for _ in range(2):
        sizes = choose(call.sizes, conditions, formulas, earlier)
        earlier = [*earlier, *([] if sizes is None else [sizes])]
    return earlier[-2:]


def _unproved(
    layer: nn.Module, joined: Callable[[], Recording], call: Arguments, narrow: bool
) -> Trace:
    """Return the block of two recordings, also without dropout and adapters' dtypes."""

    def trace_of(drops: bool, mixes_dtypes: bool) -> Trace:
        block = Tracer(joined(), layer, call, drops, mixes_dtypes).trace()
        return Trace(block, call, narrow)

    trace = trace_of(True, True)
    if trace.block.draws:
        trace.plain = trace.proved = trace_of(False, True)
    if trace.block.mixes_dtypes:
        trace.proved = trace_of(False, False)
    return trace


#: Limits of relative differences: of the result, and of gradients.
OUTPUT, GRADIENT = 1e-6, 5e-6
#: Factor of these limits where a layer cannot run in float64, for float32's rounding.
FLOAT32 = 20.0
#: Factor of the limit of gradients where a layer computes some values in float32 whatever its
#: input's dtype: at most 4.8 was measured, for the linear attention of OLMo hybrid.
NARROW = 10.0
#: Gradients that are smaller than this part of the largest one are rounding errors of zero, such as
#: those of the keys' bias; the second where some values are in float32.
SMALL = 1e-9, 1e-6
#: Elements up to which gradients are compared; larger ones by products with so many vectors.
_SMALL, _VECTORS = 4096, 8
_OUTPUT = "the output"


def difference(
    layer: nn.Module,
    forward: Callable[..., Any],
    fused: Callable[[nn.Module, Mapping[str, Tensor], Mapping[str, Any]], Any],
    sample: Sample,
    narrow: bool = False,
) -> str | None:
    """Return where `fused(layer, named, arguments)` differs from `forward`, its method, or None.

    `narrow`: whether the layer computes in float32 whatever its input's dtype.
    """
    slack = 1.0 if sample.dtype == torch.float64 else FLOAT32
    limits = OUTPUT * slack, GRADIENT * max(slack, NARROW * narrow)
    device = next(t.device for t in leaves(sample.arguments) if isinstance(t, Tensor))
    states = generator_states(device)
    with WithoutDropout():
        run = functools.partial(run_with, layer, forward)
        expected = _results(run, sample.named, sample.arguments)
    set_generator_states(states, device)  # drop path draws before the block
    actual = _results(functools.partial(fused, layer), sample.named, sample.arguments)
    grads = [g for name, g in expected.items() if name != _OUTPUT]
    largest = max((float(g.norm()) for g in grads if g is not None), default=0.0)
    for name, b in expected.items():
        a, is_output = actual[name], name == _OUTPUT
        text = name if is_output else f"the gradient of {name}"
        if a is not None and b is None:
            return f"{text} is zero, not None"
        norms = [0.0 if g is None else float(g.norm()) for g in (a, b)]
        if not is_output and sum(norms) <= SMALL[narrow] * largest * slack:
            continue
        distance = math.inf
        if a is not None and b is not None and a.shape == b.shape:
            distance = float((a - b).norm()) / (norms[1] or 1.0)
        if not distance <= limits[not is_output]:
            return f"{text} differs by {distance:.1e}"
    return None


def _results(
    run: Callable[..., Any], named: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> dict[str, Tensor | None]:
    """Return the result of `run(named, arguments)`, and sketches of gradients, freed one by one."""
    with torch.enable_grad():
        result = [t for t in leaves(run(named, arguments)) if needs_grad(t)]
    if not result:
        return {_OUTPUT: None}
    out = result[0]
    generator = torch.Generator(out.device).manual_seed(1)
    dy = torch.randn(out.shape, generator=generator, dtype=out.dtype, device=out.device)
    tensors = {**{f"argument {i}": t for i, t in enumerate(leaves(arguments))}, **named}
    inputs = {name: t for name, t in tensors.items() if needs_grad(t)}
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
    return {_OUTPUT: out.detach(), **{name: sketches.get(id(t)) for name, t in inputs.items()}}


def _sketch(grad: Tensor) -> Tensor:
    """Return products of a large gradient with random vectors.

    Their distance is that of the gradients times a number that is below a tenth once in 10^7.
    """
    if grad.numel() <= _SMALL:
        return grad.clone()
    matrix, generator = grad.reshape(len(grad), -1), torch.Generator().manual_seed(3)
    vectors = torch.randn(matrix.shape[1], _VECTORS, generator=generator) / _VECTORS**0.5
    products: Tensor = matrix @ vectors.to(grad)
    return products

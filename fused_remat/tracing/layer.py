"""Layers of any class whose forward is traced as a block at their first call."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fused_remat.autograd.accumulate import Accumulation, sharded_by
from fused_remat.execution.executor import autocast_off
from fused_remat.execution.observe import unobserved
from fused_remat.graph.graph import Graph
from fused_remat.graph.precision import mixed_precision
from fused_remat.layers.converted import CACHES, INDICES, LENGTH, ConvertedLayer, class_of
from fused_remat.layers.eligibility import (
    REPLACED,
    Precision,
    Reason,
    Unsupported,
    check_global_hooks,
    check_input,
    is_readable,
    is_recording,
    low_dtype,
    parameters_of,
    precision_of,
    qualified,
    unrecorded_outputs,
)
from fused_remat.layers.fallback import is_contained
from fused_remat.layers.read import BlockInputs
from fused_remat.layers.record import NOTES, record_of
from fused_remat.policies import Policy, kept_names
from fused_remat.steps.norm import Norm
from fused_remat.steps.residual import Add
from fused_remat.tracing.call import Trace, own_result
from fused_remat.tracing.guards import Watch, signed
from fused_remat.tracing.isolation import check_effects, replica
from fused_remat.tracing.quantized import Formats, packed_weights, unquantized
from fused_remat.tracing.samples import Arguments, Dims
from fused_remat.tracing.sizes import meets
from fused_remat.tracing.state import records_of, state_of
from fused_remat.tracing.trace import CANNOT_RUN, trace_call, why_different
from fused_remat.tracing.values import SideEffect, Untraceable

#: Traces, or reasons where there is none, by the state of a layer and the arguments of a call; each
#: with the dimensions of these, the names of tensors whose values decide, these values, and its
#: number.
KNOWN: dict[
    Any, list[tuple[Dims, tuple[str | int, ...], tuple[Any, ...], int, Trace | Reason]]
] = {}
_made = [0]  # the number of the last entry of `KNOWN`
#: Largest number of entries of `KNOWN`; of traces of one layer, which runs its own forward then.
_MOST, _MOST_TRACES = 4096, 24
#: Number of elements up to which tensors whose values decide are compared at every call.
_SMALL = 4096
#: Largest number of signatures of calls of a layer whose trace is noted.
_MOST_CALLS = 64
#: Number of errors in tracing a layer after which it is not traced again.
_MOST_ERRORS = 3
#: Number of calls in a row between which a layer may change before it is watched no more.
_PATIENCE = 8
_DIMS = (*range(65),)
#: Attributes of a layer that belong to this library or to transformers.
_OWN = (*NOTES, "_policy", "_backend", "_accumulate_into", "_is_hf_initialized")
#: Stand-in for the block of a layer that was not called yet: nothing can be kept by name.
_UNTRACED = Graph("untraced", (Add(name="output", x="input"),), ())
_tracing = threading.RLock()
#: Sizes of a call for any of which a layer is traced, the first dimension's first; then for a batch
#: of one alone, and at last for this length of the input alone.
SIZES = (("B", "S", "M"), ("S", "B", "M"), ("1", "S", "M"), ("B", "M"))


@dataclass
class _Notes:
    """Notes on one layer."""

    #: By name, a tensor whose values decide, its version, and a key of its values.
    values: dict[str, Any]
    traces: int = 0
    #: The last trace that it uses, of its own or others, once it is traced no more: a checkpoint
    #: around it repeats its own forward although another layer was traced since.
    last: float = math.inf
    errors: int = 0
    by_values: bool = False  # whether the values of tensors may decide which trace applies
    watch: Watch | None = None
    patience: int = _PATIENCE  # number of watches to make, of which none was of use


class TracedLayer(ConvertedLayer):
    """A layer of a class without a table entry; mixed in by `traced_class`."""

    _breaks_graphs = True
    #: Trace of the layer's last call, or the reason why there is none; None before a call.
    last_trace: Trace | Reason | None = None

    @property
    def policy(self) -> str | Policy:
        """The activations kept for backward; names are checked once the layer was traced."""
        return self._policy

    @policy.setter
    def policy(self, policy: str | Policy) -> None:
        if isinstance(self.last_trace, Trace) or not isinstance(policy, Policy):
            kept_names(policy, self._example())
        self._policy = policy

    def _example(self) -> Graph:
        return self.last_trace.graph if isinstance(self.last_trace, Trace) else _UNTRACED

    def _heads(self) -> dict[str, int]:
        return {}

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        if not self.positional:
            self.last_trace = Reason("its forward does not take its arguments by name")
            return None
        return super()._named(args, kwargs)

    def _block(self, **given: Any) -> BlockInputs | Reason:
        if given.get("output_attentions"):
            return Reason("the call requests attention weights, which a block does not compute")
        try:
            check_global_hooks()
            trace = self._trace(given)
            if isinstance(trace, Reason) and trace.quiet:
                return trace
            vars(self)["last_trace"] = trace
        except (Untraceable, Unsupported) as reason:
            self.last_trace = trace = Reason(str(reason))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as one of an attribute's own code: training continues
            if getattr(error, "callers", False):
                raise
            self.last_trace = trace = Reason(f"tracing it raised {type(error).__name__}: {error}")
            self._notes_of().errors += 1
            if self._notes_of().errors == _MOST_ERRORS:
                record_of(self).failure = trace.text
        if isinstance(trace, Reason):
            return trace
        try:
            if trace.objects and sharded_by(self) is not None:
                return Reason(f"it returns {trace.objects[0]}, and its parameters may be sharded")
            rerun = own_result(self, given) if trace.objects else None
            tensors, functions, result = trace.bind(self, {}, given, rerun=rerun)
        except Untraceable as reason:
            self.last_trace = Reason(str(reason))
            return self.last_trace
        except Exception as error:
            if not is_contained(self, error):
                raise
            return self._block_failed(error)
        for name, t in tensors.items():
            if t is not None and not is_readable(t):
                return Reason(f"{name} is {qualified(type(t))}")
        precision = self._precision(trace, tensors)
        if precision is not None and precision.compute is not None:
            try:
                mixed_precision(trace.graph, precision.compute)
            except NotImplementedError as error:
                return Reason(str(error))
        return BlockInputs(
            trace.graph, tensors, functions=functions, precision=precision, finish=result
        )

    def _accumulation(self, graph: Graph, compiling: bool) -> Accumulation:
        trace = self.last_trace
        if isinstance(trace, Trace) and self._accumulate_into == "main_grad":
            sources = trace.block.sources
            read = {sources.get(n) for op in trace.block.before for n in op.reads}
            for name, p in parameters_of(self).items():
                if name in read and p.requires_grad:
                    self._refuse_to_accumulate(f"{name} is read before the block, under autograd")
        return super()._accumulation(graph, compiling)

    def _why_kept(self, reason: Reason, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
        if reason.text == f"its {REPLACED}" and "forward" in vars(self):
            return "a hook around it may move its weights", "add hooks before convert"
        return super()._why_kept(reason, arguments)

    def _precision(self, trace: Trace, tensors: Mapping[str, Tensor | None]) -> Precision | None:
        x: Any = tensors["input"]
        low = low_dtype(x)
        weights = {n: t for n, t in tensors.items() if t is not None and t.is_floating_point()}
        ends_low = not isinstance(trace.graph.nodes[-1], Norm)
        return None if low is None else precision_of(x, weights, low, ends_low)

    def _trace(self, given: Mapping[str, Any]) -> Trace | Reason:
        """Return the trace for a call: the one of an earlier call like it, or `_new_trace`."""
        signature, flat, x = signed(given)
        records = records_of(self) if is_recording() else ()
        if x is not None:
            check_input(x, "an argument", _DIMS)
            signature = *signature, low_dtype(x), records
        watch = self._watched()
        trace: Trace | Reason
        calls = {} if watch is None else watch.calls
        known = calls.get(signature) or calls.get((signature, _made[0]))
        if known is not None:
            trace, names, values = known
            if not names or self._values_of(names, flat) == values:
                return trace
        for leaf in flat:
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                check_input(leaf, "an argument", _DIMS)
        if x is not None and not x.numel():
            return Reason("its input is empty", quiet=True)
        made, names = _made[0], ()
        trace = self._new_trace(given, records)
        if isinstance(trace, Trace):
            names = (*trace.fixed,)
        else:
            signature = signature, made  # a later trace of any layer may apply
        if watch is not None and not (isinstance(trace, Reason) and self._notes_of().by_values):
            if len(watch.calls) >= _MOST_CALLS:
                watch.calls = {}
            watch.calls[signature] = trace, names, self._values_of(names, flat)
        return trace

    def _watched(self) -> Watch | None:
        """Return the watch of the layer as it is, with what is known of calls; or None."""
        if "_is_replica" in vars(self):  # of nn.DataParallel: for one call
            return None
        notes = self._notes_of()
        watch = notes.watch
        if watch is not None and watch.is_current(self):
            notes.patience = _PATIENCE
            return watch
        notes.watch = None
        if notes.patience and self.last_trace is not None:
            notes.patience -= 1
            with contextlib.suppress(Exception):  # of an attribute's own code, too
                notes.watch = Watch(self)
        return notes.watch

    def _new_trace(self, given: Mapping[str, Any], records: Any) -> Trace | Reason:
        """Return the trace for a call; the layer is traced if the call is the first of its kind.

        The trace is for any length, integer arguments and index in the model, if the layer computes
        the same for all; else for those of this call.
        """
        reasons, states = list[Reason](), dict[bool, Any]()
        for vary in SIZES:
            call = Arguments(given, vary, records)
            if vary[0] == "1" and call.batch > 1:
                continue
            for free in (True, False) if call.sizes else ():
                if free not in states:
                    states[free] = state_of(self, (*_OWN, *(INDICES if free else ())))
                trace = self._trace_for(call, states[free], free)
                trace = self._compared(trace, call) if isinstance(trace, Trace) else trace
                if isinstance(trace, Trace):
                    return trace
                if vary[0] == "B":  # the batch second is a guess, whose reason means nothing
                    reasons.append(trace)
        effects = [r for r in reasons if r.once]  # decide how the layer runs
        trials = [r for r in reasons if not r.text.startswith(CANNOT_RUN)]
        return [*effects, *trials, *reasons][0]

    def _trace_for(self, call: Arguments, state: Any, free: bool) -> Trace | Reason:
        x = call.leaves[call.x]
        formats = {name: own.spec for name, own in packed_weights(self, x).items()}
        key: tuple[Any, ...] = (
            state,
            call.key(free),
            *((x.dtype, *formats.items()) if formats else ()),
        )
        trace = self._known(call, key)
        if trace is None and call.is_too_long:
            key = *key, "too long"
            trace = self._known(call, key)
        if trace is not None:
            return trace
        if self._notes_of().traces == _MOST_TRACES:
            self._notes_of().last = min(self._notes_of().last, _made[0] + 1)
            return Reason(
                f"it was traced {_MOST_TRACES} times, and its attributes, arguments or "
                "buffers have changed again; keep them the same between calls",
                once=isinstance(self.last_trace, Reason) and self.last_trace.once,
            )
        self._notes_of().traces += 1
        with _tracing:
            trace = self._first_trace(call, free, formats)
            entries = KNOWN.setdefault(key, [])
            names, dims = {n for d, ns, *_ in entries if d == call.dims for n in ns}, call.dims
            if isinstance(trace, Trace):
                names, dims = trace.fixed, trace.dims
            values = self._values_of(names, call.leaves)
            self._notes_of().by_values |= bool(names)
            _made[0] += 1
            entries.append((dims, (*names,), values, _made[0], trace))
            del entries[:-_MOST]
            if len(KNOWN) > _MOST:
                del KNOWN[next(iter(KNOWN))]
        return trace

    def _known(self, call: Arguments, key: tuple[Any, ...]) -> Trace | Reason | None:
        """Return the trace of an earlier call whose dimensions may be those of this one."""
        reason, values_of = None, functools.cache(lambda names: self._values_of(names, call.leaves))
        for dims, names, values, number, trace in [*KNOWN.get(key, ())]:
            is_same, is_old = dims == call.dims, number < self._notes_of().last
            self._notes_of().by_values |= bool(names)
            if is_old and (is_same or call.fits(dims)) and values_of(names) == values:
                if not isinstance(trace, Trace):
                    applies = is_same and meets(call.sizes, dict(trace.conditions))
                    reason = trace if applies else reason
                elif trace.holds(call.sizes):
                    return trace
        return reason

    def _compared(self, trace: Trace, call: Arguments) -> Trace | Reason:
        """Return the trace unless the block is not equal to the layer.

        In the first call of a dtype the result and all gradients are compared; in the first of each
        sizes the result, since C code and other Python modules may branch on a size unseen.
        """
        x = call.leaves[call.x]
        kind = x.dtype, low_dtype(x)
        numbers = (n.bit_length() for n in call.leaves if type(n) is int)
        sizes = *kind, call.batch, call.tokens, *call.sizes.values(), *numbers
        for key in (kind, sizes):
            with _tracing:
                if key not in trace.compared:
                    if len(trace.compared) > _MOST:
                        trace.compared.clear()
                    entire, run = key is sizes, (trace, self, self.stock.forward, call)
                    # A library's products of quantized weights may insist on their dtype.
                    widens = bool(kind[1]) and not trace.block.formats
                    with _apart(x):
                        text = why_different(*run, widens, entire)
                    if call.batch == 1:  # the first comparison is of the entire batch
                        trace.compared[sizes] = None
                    trace.compared[key] = None if text is None else Reason(text)
                reason = trace.compared[key]
            if reason is not None:
                return reason
        return trace

    def _values_of(self, names: Iterable[str | int], given: Sequence[Any]) -> tuple[Any, ...]:
        """Return keys of the values of the layer's tensors of these names, and of arguments."""
        keys: list[Any] = []
        for name in names:
            if isinstance(name, int):
                keys.append((name, _key(given[name])))
                continue
            t = attrgetter(name)(self)
            noted = self._notes_of().values.get(name)
            version = t._version, t.data_ptr()
            small = t.device.type == "cpu" and t.numel() <= _SMALL  # `.data` has no version
            if noted is None or small or noted[0] is not t or noted[1] != version:
                noted = t, version, (name, _key(t))
                self._notes_of().values[name] = noted
            keys.append(noted[2])
        return tuple(keys)

    def _replicate_for_data_parallel(self) -> Any:
        self._notes_of()  # which replicas share
        return super()._replicate_for_data_parallel()

    def _notes_of(self) -> _Notes:
        own = vars(self)
        notes: _Notes = own.get("_trace_notes") or own.setdefault("_trace_notes", _Notes({}))
        return notes

    def _first_trace(self, call: Arguments, free: bool, formats: Formats) -> Trace | Reason:
        try:
            # With gradients also in a checkpoint's first run.
            with _apart(call.leaves[call.x]), torch.enable_grad():
                if not call.is_too_long:
                    return trace_call(self, self.stock.forward, call, free, formats)
                copy = unquantized(self, formats, call.leaves[call.x])
                check_effects(copy, self.stock.forward, call.given)
                return Reason(
                    f"a trace at its {call.tokens} tokens takes more memory than a step at batch "
                    f"size {call.batch}; it is traced at a larger one"
                )
        except Untraceable as reason:
            tested = (*reason.conditions.items(),)
            return Reason(str(reason), once=isinstance(reason, SideEffect), conditions=tested)


#: Functions that return the class that stands in for a layer with a table entry, or None.
ROWS: list[Callable[[nn.Module], type[ConvertedLayer] | None]] = []


def traced_class(stock: type[nn.Module]) -> type[TracedLayer]:
    return class_of(stock, TracedLayer, _class_for=staticmethod(traced_class))


def converted_class(layer: nn.Module) -> type[ConvertedLayer]:
    """Return the class that `convert` gives a layer: by its table entry, else one that traces."""
    classes = [find(layer) for find in ROWS]
    return next(filter(None, classes), None) or traced_class(type(layer))


def description_if_converted(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> str:
    """Return how a stock layer would run a call after `convert`."""
    converted = replica(layer, deep=True)
    converted.__class__ = converted_class(layer)
    named = converted._named(args, kwargs)
    call = Reason("its arguments do not fit forward")
    if named is not None:
        given = {n: v for n, v in named.items() if n not in CACHES and not hasattr(v, LENGTH)}
        call = converted._block(**given)
    if isinstance(call, Reason):
        return f"convert runs it under checkpointing: {call.text}"
    trace = converted.last_trace if isinstance(converted, TracedLayer) else None
    replayed = trace.block.replayed if isinstance(trace, Trace) else ()
    parts = [f"{name}, which is replayed ({why})" for name, why in replayed]
    steps = ", ".join([node.name for node in call.graph.nodes])
    return f"convert makes it a block: {'; '.join([steps, *parts])}"


@contextlib.contextmanager
def _apart(x: Tensor) -> Iterator[None]:
    """Run code so that random state, autocast, observers and hooks of a step do not notice it."""
    # Detached: a node that held its own result would never be freed.
    same = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)
    modes = _disable_current_modes()  # of a selective checkpoint
    compiles = "torch._dynamo" in sys.modules  # functions of the layer's own
    eager = torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()
    devices = [x.device] if x.is_cuda else []
    with (
        unrecorded_outputs(),
        eager,
        unobserved(),
        modes,
        same,
        autocast_off(x),
        torch.random.fork_rng(devices),
    ):
        yield


def _key(t: Tensor) -> Any:
    return tuple(t.shape), hash(t.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())

"""Layers of any class whose forward is a block that is read at their first call."""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fused_remat.autograd import run_block
from fused_remat.autograd.accumulate import Accumulation
from fused_remat.execution.executor import autocast_off
from fused_remat.execution.observe import unobserved
from fused_remat.graph.graph import Graph
from fused_remat.layers.containment import is_contained, is_unexpected
from fused_remat.layers.converted import CACHES, LENGTH, ConvertedLayer, class_of
from fused_remat.layers.eligibility import (
    RECORDERS,
    Reason,
    Unsupported,
    check_global_hooks,
    check_input,
    check_unpacked,
    is_readable,
    parameters_of,
    qualified,
    recorded,
)
from fused_remat.layers.fused_layer import is_traced
from fused_remat.layers.precision import Precision, low_dtype, precision_of
from fused_remat.layers.read import TracedInputs
from fused_remat.policies import Policy, kept_names
from fused_remat.steps.norm import Norm
from fused_remat.steps.residual import Add
from fused_remat.tracing.apart import NOTES, check_effects
from fused_remat.tracing.call import CANNOT_RUN, Known, attribute, read_call
from fused_remat.tracing.record import without_dropout
from fused_remat.tracing.samples import INDICES, Arguments, Dims
from fused_remat.tracing.state import exact, numbers_of
from fused_remat.tracing.values import SideEffect, Unreadable, leaves, map_tree, refs

#: By how much a block may differ from the layer on the first batch, relative, by dtype.
_FIRST = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

#: What was read, by the state of a layer and the arguments of a call, and by what the dimensions of
#: these are; a reason where nothing was. With the names of tensors whose values decide, and by
#: those values.
KNOWN: dict[
    Any, dict[Dims, tuple[tuple[str | int, ...], dict[tuple[Any, ...], Known | Reason]]]
] = {}
#: How many entries `KNOWN` has at most; how often one layer is read, and then left as it is.
_MOST, _MOST_READINGS = 4096, 24
#: Tensors of as many elements are looked at in every call, where their values decide.
_SMALL = 4096
#: Attributes of a layer that are this library's; those that every module has.
_OWN = (*NOTES, "_policy", "_backend", "_accumulate_into", "_is_hf_initialized")
_MODULE = frozenset((*nn.Module().__dict__, *_OWN))
#: Stands for the block of a layer that was not called yet: there is nothing to keep by name.
_UNREAD = Graph("unread", (Add(name="output", x="input"),), ())
_reading = threading.RLock()
#: The sizes of a call for any of which a layer is read, the first dimension's first; at last for
#: this length alone.
SIZES = (("B", "S", "M"), ("S", "B", "M"), ("B",))


class ReadLayer(ConvertedLayer):
    """Mixed in before a layer class by `read_class`."""

    _owner = "its own"
    _notes_names = NOTES
    #: What the last call of the layer was read as.
    _last: Known | Reason | None = None

    @property
    def policy(self) -> str | Policy:
        """What the layer keeps for backward; names are checked when the layer has been read."""
        return self._policy

    @policy.setter
    def policy(self, policy: str | Policy) -> None:
        if isinstance(self._last, Known) or not isinstance(policy, Policy):
            kept_names(policy, self._example())
        self._policy = policy

    @property
    def read_as(self) -> Known | Reason | None:
        """What the layer was read as at its last call, or why it is left; None before a call."""
        return self._last

    def _example(self) -> Graph:
        return self._last.graph if isinstance(self._last, Known) else _UNREAD

    def _heads(self) -> dict[str, int]:
        return {}

    def _layer_index(self) -> int:
        found = [getattr(m, name, None) for m in self.modules() for name in INDICES]
        return next((n for n in found if isinstance(n, int)), 0)

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        if not self.arguments:
            self._last = Reason("its forward does not take its arguments by name")
            return None
        return super()._named(args, kwargs)

    def _call(self, **given: Any) -> Any:
        if torch.compiler.is_compiling() and not is_traced():
            from fused_remat.autograd import graph_break

            return graph_break.eagerly(self._call, **given)
        return super()._call(**given)

    def _block(self, **given: Any) -> TracedInputs | Reason:
        if given.get("output_attentions"):
            return Reason("the call asks for attention weights, which a block does not make")
        try:
            check_global_hooks()
            active = [t for t in leaves(given) if isinstance(t, Tensor) and t.is_floating_point()]
            for leaf in active:
                check_input(leaf, "an argument", (*range(leaf.dim() + 1),))
            if active and not active[0].numel():
                return Reason("its input is empty", quiet=True)
            known = self._known(given)
        except (Unreadable, Unsupported) as reason:
            known = Reason(str(reason))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of an attribute's own code, say: training goes on as before
            known = Reason(f"tracing it raised {type(error).__name__}: {error}")
        self._last = known
        if isinstance(known, Reason):
            return known
        try:
            tensors, functions, result = known.bind(self, None, given)
        except Unreadable as reason:
            self._last = Reason(str(reason))
            return self._last
        except Exception as error:
            if not (is_contained(self) and is_unexpected(error)):
                raise
            return self._block_failed(error)
        for name, t in tensors.items():
            if t is not None and not is_readable(t):
                return Reason(f"{name} is {qualified(type(t))}")
        return TracedInputs(
            known.graph, tensors, functions, self._precision(known, tensors), result
        )

    def _accumulation(self, graph: Graph, compiling: bool) -> Accumulation:
        known = self._last
        if isinstance(known, Known) and self._accumulate_into == "main_grad":
            ops, sources = known.reading.before, known.reading.sources
            read = {sources.get(n) for op in ops for n in refs((op.args, op.kwargs))}
            for name, p in parameters_of(self).items():
                if name in read and p.requires_grad:
                    self._refuse_to_accumulate(f"{name} is read before the block, under autograd")
        return super()._accumulation(graph, compiling)

    def _precision(self, known: Known, tensors: Mapping[str, Tensor | None]) -> Precision | None:
        x = tensors["input"]
        assert x is not None
        low = low_dtype(x)
        if low is None:
            return None
        norm_last = isinstance(known.reading.graph.nodes[-1], Norm)
        weights = {n: t for n, t in tensors.items() if t is not None and t.is_floating_point()}
        return precision_of(x, weights, low, not norm_last)

    def _known(self, given: Mapping[str, Any]) -> Known | Reason:
        """What the layer is read as for a call; it is read if this is the first of its kind.

        It is read for any length and whatever its whole arguments and its place in the model, if it
        computes the same for all; else for those of this call.
        """
        reasons, states = list[Reason](), dict[bool, Any]()
        for vary in SIZES:
            call = Arguments(given, vary)
            for free in (True, False) if call.sizes else ():
                if free not in states:
                    states[free] = state_of(self, free)
                known = self._known_for(call, states[free], free)
                if isinstance(known, Known):
                    known = self._compared(known, call)
                if isinstance(known, Known):
                    return known
                if vary[0] == "B":  # the batch second is a guess, of which the reason tells nothing
                    reasons.append(known)
        return _that_matters(reasons)

    def _known_for(self, call: Arguments, state: Any, free: bool) -> Known | Reason:
        key: tuple[Any, ...] = state, call.key(free)
        known = self._found(call, KNOWN.get(key, {}))
        if known is None and call.is_too_long:
            key = *key, "too long"
            known = self._found(call, KNOWN.get(key, {}))
        if known is None:
            if self._notes_of().readings == _MOST_READINGS:
                return Reason(
                    f"it was traced {_MOST_READINGS} times, and its attributes, arguments or "
                    "buffers have changed again; keep them the same between calls",
                    once=isinstance(self._last, Reason) and self._last.once,
                )
            self._notes_of().readings += 1
            with _reading:
                known = self._read_first(call, free)
                dims = known.dims if isinstance(known, Known) else call.dims
                more = known.fixed if isinstance(known, Known) else ()
                by_dims = KNOWN.setdefault(key, {})
                names, found = by_dims.get(dims, ((), {}))
                if not set(names).issuperset(more):
                    names, found = tuple({*names, *more}), {}
                found[self._values_of(names, call)] = known
                by_dims[dims] = names, found
                for table in (KNOWN, by_dims):
                    if len(table) > _MOST:
                        del table[next(iter(table))]
        return known

    def _found(self, call: Arguments, by_dims: Mapping[Dims, Any]) -> Known | Reason | None:
        """Return what is known of a call, also by that of others with which its sizes agree."""
        reason = None
        for dims, (names, found) in [*by_dims.items()]:
            if dims == call.dims or call.fits(dims):
                known = found.get(self._values_of(names, call))
                if isinstance(known, Known):
                    return known
                reason = known if dims == call.dims else reason
        return reason

    def _compared(self, known: Known, call: Arguments) -> Known | Reason:
        """Return a block that was compared with this layer on batches as large and as small as this
        one, and in which the same sizes were equal; or why it is another.

        Others may take another branch of the layer's code.
        """
        checked, sizes = self._notes_of().checked, [call.batch, call.tokens]
        sizes += [call.sizes["M"]] if "M" in call.sizes else []
        numbers = [n.bit_length() for n in leaves(call.given) if type(n) is int]
        pairs = itertools.combinations(sizes, 2)
        same = [n for a, b in pairs for n in (a == b, a != b)]
        mine = (*sizes, math.prod(sizes[:2]), *(-n for n in sizes), max(numbers, default=0), *same)
        most, reason = checked.get(known, ((-math.inf,) * len(mine), None))
        if reason is None and any(a > b for a, b in zip(mine, most, strict=True)):
            text = self._why_different(known, call)
            reason = None if text is None else Reason(text)
            checked[known] = tuple(map(max, mine, most)), reason
        return reason or known

    def _values_of(self, names: Sequence[str | int], call: Arguments) -> tuple[Any, ...]:
        """The values of the layer's tensors of these names, and of arguments, to tell apart."""
        found: list[Any] = []
        for name in names:
            if isinstance(name, int):
                found.append((name, _values(leaves(call.given)[name])))
                continue
            t = attribute(self, name)
            kept = self._notes_of().values.get(name)
            version = t._version, t.data_ptr()
            small = t.device.type == "cpu" and t.numel() <= _SMALL  # `.data` has no version
            if kept is None or small or kept[0] is not t or kept[1] != version:
                kept = t, version, (name, _values(t))
                self._notes_of().values[name] = kept
            found.append(kept[2])
        return tuple(found)

    def _replicate_for_data_parallel(self) -> Any:
        """Return a replica, with the same notes."""
        self._notes_of()
        return super()._replicate_for_data_parallel()

    def _notes_of(self) -> _Notes:
        found: _Notes = self.__dict__.setdefault("_notes", _Notes({}, {}))
        return found

    def _read_first(self, call: Arguments, free: bool) -> Known | Reason:
        """The block of the first call of a kind, or why there is none."""
        x = leaves(call.given)[call.places[0]]
        try:
            with _apart(x), torch.enable_grad():  # also in a checkpoint's first run
                if not call.is_too_long:
                    return read_call(self, self.stock.forward, call, free)
                check_effects(self, self.stock.forward, call.given)
                return Reason(
                    f"a trace at its {call.tokens} tokens takes more memory than a step at batch "
                    f"size {call.batch}; it is traced at a larger one"
                )
        except Unreadable as reason:
            return Reason(str(reason), once=isinstance(reason, SideEffect))

    def _why_different(self, known: Known, call: Arguments) -> str | None:
        """By how much the block and the layer differ on real arguments, without dropout.

        Under autocast both compute in float32: in 16 bits they would round differently.
        """
        stock, x = self.stock.forward, leaves(call.given)[known.places[0]]
        autocast = low_dtype(x) is not None
        given = map_tree(dict(call.given), _widened) if autocast else call.given
        with torch.no_grad(), _apart(x):
            state = torch.random.get_rng_state()
            try:
                with without_dropout():
                    expected = leaves(stock(self, **given))
            except Exception as error:  # which the layer's own forward then raises
                return None if autocast else f"it raises {type(error).__name__}: {error}"
            torch.random.set_rng_state(state)
            try:
                tensors, functions, result = known.plain.bind(self, None, given, random=False)
                out = run_block(known.plain.graph, "full", tensors, functions=functions)
                mine = leaves(result(out))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # parameters of several dtypes
                return f"the block cannot run where the layer can: {error}"
        limit = _FIRST.get(x.dtype, 4e-2)
        if x.itemsize == 2 and known.graph.unsure:  # experts: rounding may choose others
            limit = 0.4
        if len(mine) != len(expected):
            return f"the layer has {len(expected)} results, its block {len(mine)}"
        for a, b in zip(mine, expected, strict=True):
            if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point():
                if a.dtype != b.dtype:
                    return f"the block's result is {a.dtype}, the layer's {b.dtype}"
                distance = math.inf
                if a.shape == b.shape:
                    distance = float((a.detach() - b.detach()).norm()) / (
                        float(b.detach().norm()) or 1.0
                    )
                if not distance <= limit:
                    return (
                        f"the block differs by {distance:.1e} from the layer on a batch of "
                        f"shape {tuple(x.shape)}"
                    )
        return None

    @staticmethod
    def _new(stock: type[nn.Module]) -> nn.Module:
        cls = read_class(stock)
        return cls.__new__(cls)


#: By the stock class.
READ: dict[type[nn.Module], type[ReadLayer]] = {}


def read_class(stock: type[nn.Module]) -> type[ReadLayer]:
    """The class that stands in for a layer class without a row, one object each."""
    return class_of(stock, ReadLayer, READ)


#: Functions that return the class that stands in for a layer without a trace, or None.
ROWS: list[Callable[[nn.Module], type[ConvertedLayer] | None]] = []


def converted_class(layer: nn.Module) -> type[ConvertedLayer]:
    """Return the class that `convert` gives a layer: by its row, else one that is traced."""
    found = [row(layer) for row in ROWS]
    return next(filter(None, found), None) or read_class(type(layer))


def would_read(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return what `convert` would make of a stock layer, for a call of it."""
    stock, own, converted = type(layer), layer.__dict__, converted_class(layer)
    before = {name: own.pop(name) for name in NOTES if name in own}
    layer.__class__ = converted
    assert isinstance(layer, ConvertedLayer)
    try:
        named = layer._named(args, kwargs)
        pairs = (named or {}).items()
        given = {n: v for n, v in pairs if n not in CACHES and not hasattr(v, LENGTH)}
        call = (
            Reason("its arguments do not fit forward") if named is None else layer._block(**given)
        )
        known = layer.read_as if isinstance(layer, ReadLayer) else None
    finally:
        layer.__class__ = stock  # type: ignore[assignment]
        for name in NOTES:
            own.pop(name, None)
        own.update(before)
    if isinstance(call, Reason):
        return f"convert runs it under checkpointing: {call.text}"
    found = known.reading.pieces if isinstance(known, Known) else ()
    pieces = [f"{name}, which is replayed ({why})" for name, why in found]
    steps = ", ".join([node.name for node in call.graph.nodes])
    return f"convert makes it a block: {'; '.join([steps, *pieces])}"


def _that_matters(reasons: Sequence[Reason]) -> Reason:
    """Return the reason that decides how the layer runs, or that of a trial that ran it."""
    effect = next((r for r in reasons if r.once), None)
    return effect or next((r for r in reasons if not r.text.startswith(CANNOT_RUN)), reasons[0])


@contextlib.contextmanager
def _apart(x: Tensor) -> Iterator[None]:
    """What runs inside is no part of the caller's step: its random state, autocast, observers,
    and its hooks on saved tensors, with which a checkpoint counts them."""
    # Detached: a node that held its own result would never be freed.
    same = torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t)
    modes = _disable_current_modes()  # of a selective checkpoint
    compiles = "torch._dynamo" in sys.modules  # functions of the layer's own
    eager = torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()
    devices = [x.device] if x.is_cuda else []
    with eager, unobserved(), modes, same, autocast_off(x), torch.random.fork_rng(devices):
        yield


def _widened(leaf: Any) -> Any:
    is_low = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.itemsize < 4
    return leaf.float() if is_low else leaf


@dataclass
class _Notes:
    """What is noted of one layer.

    Attributes:
        values: by name, a tensor of which the values were looked at, its version and the values.
        checked: by block, the largest batch and length at which it was compared with the layer,
            their product, the smallest ones, negative, and the bits of the largest whole number;
            and why it is not used.
        readings: how often the layer was read.
    """

    values: dict[str, Any]
    checked: dict[Known, tuple[tuple[float, ...], Reason | None]]
    readings: int = 0


def _values(t: Tensor) -> Any:
    return tuple(t.shape), hash(t.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())


def state_of(layer: nn.Module, free: bool) -> tuple[Any, ...]:
    """All that a reading depends on besides the arguments: classes, flags, numbers, shapes.

    `free`: without the layer's place in the model.

    Raises: Unsupported for a submodule with hooks, which a block would not call, or with packed
        parameters, which it would not read.
    """
    found, modules = list[Any](), [*layer.named_modules()]
    seen: dict[int, Any] = {id(module): path for path, module in modules}
    for path, module in modules:
        own = module.__dict__
        hooked = own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
        if path and hooked:
            raise Unsupported(f"{path} has hooks")
        for hook in own["_forward_hooks"].values():
            if getattr(hook, "__module__", None) == RECORDERS:
                asked = recorded(hook)
                if asked and (path or asked != "hidden_states"):
                    raise Unsupported(f"the call asks for {asked}, which a block does not make")
            elif path:
                raise Unsupported(f"{path} has hooks")
        kind = module.stock if isinstance(module, ConvertedLayer) else type(module)
        if "training" not in own:
            raise Unsupported(f"{path or 'it'} is {qualified(kind)}, which has compiled code")
        check_unpacked(module, path)
        forward = own.get("forward", kind.forward)
        found += [path, weakref.ref(kind), exact(forward, seen), own["training"]]
        found += numbers_of(kind)
        for name, value in own.items():
            if name not in _MODULE and not (free and name in INDICES):
                found += [name, exact(value, seen)]
        for tensors in (own["_parameters"], own["_buffers"]):
            found += [(n, None if t is None else (t.shape, t.dtype)) for n, t in tensors.items()]
    return tuple(found)

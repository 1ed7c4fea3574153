"""Layers of any class whose forward is a block that is read at their first call."""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.autograd import run_block
from fused_remat.execution.executor import autocast_off
from fused_remat.execution.observe import DECISIONS
from fused_remat.graph.graph import Graph
from fused_remat.layers.converted import CACHES, ConvertedLayer, class_of
from fused_remat.layers.eligibility import Reason, Unsupported, check_global_hooks
from fused_remat.layers.precision import Precision, low_dtype, precision_of
from fused_remat.layers.read import GraphCall
from fused_remat.policies import Policy, kept_names
from fused_remat.recognition.call import Known, read_call
from fused_remat.recognition.record import Unreadable, leaves, without_dropout
from fused_remat.recognition.samples import INDICES, Call
from fused_remat.steps.norm import Norm
from fused_remat.steps.residual import Add

#: What forward hooks of these modules do, a block need not.
_RECORDERS = "transformers.utils.output_capturing"
_PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    torch.dtype,
    types.FunctionType,
    types.BuiltinFunctionType,
)
#: By how much a block may differ from the layer on the first batch, relative, by dtype.
_FIRST = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

#: What was read, by the state of a layer and the arguments of a call; a reason where nothing was.
KNOWN: dict[Any, Known | Reason] = {}
_reading = threading.RLock()
#: Stands for the block of a layer that was not called yet: there is nothing to keep by name.
_UNREAD = Graph("unread", (Add(name="output", x="input"),), ())


#: The sizes of a call for any of which a layer is read, the first dimension's first; at last for
#: this length alone.
SIZES = (("B", "S", "M"), ("S", "B", "M"), ("B",))


class ReadLayer(ConvertedLayer):
    """Mixed in before a layer class by `read_class`."""

    _owner = "its own"
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
    def last(self) -> Known | Reason | None:
        """What the layer was read as at its last call, or why it is left; None before a call."""
        return self._last

    def _example(self) -> Graph:
        return self._last.graph if isinstance(self._last, Known) else _UNREAD

    def _heads(self) -> dict[str, int]:
        return {}

    def _layer_index(self) -> int:
        found = [getattr(m, "layer_idx", None) for m in self.modules()]
        return next((n for n in found if isinstance(n, int)), 0)

    def _call(self, **given: Any) -> Any:
        if torch.compiler.is_compiling():
            from fused_remat.autograd import graph_break

            return graph_break.eagerly(self._call, **given)
        return super()._call(**given)

    def _block(self, **given: Any) -> GraphCall | Reason:
        try:
            check_global_hooks()
            known = self._known(given)
        except (Unreadable, Unsupported) as reason:
            known = Reason(str(reason))
        self._last = known
        if isinstance(known, Reason):
            return known
        tensors, functions, result = known.bind(self, None, given)
        return GraphCall(known.graph, tensors, functions, self._precision(known, tensors), result)

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
        reasons = []
        for vary in SIZES:
            call = Call(given, vary)
            for free in (True, False):
                key = state_of(self, free), call.key(free)
                if key not in KNOWN:
                    with _reading:
                        if key not in KNOWN:
                            KNOWN[key] = self._read_first(call, given, free)
                known = KNOWN[key]
                if isinstance(known, Known):
                    return known
                reasons.append(known.text)
        return Reason("; ".join(dict.fromkeys(reasons)))

    def _read_first(self, call: Call, given: Mapping[str, Any], free: bool) -> Known | Reason:
        """The block of the first call of a kind, or why there is none."""
        x = leaves(given)[call.places[0]]
        try:
            with autocast_off(x):
                known = read_call(self, types.MethodType(self.stock.forward, self), call, free)
            self._check_first(known, given)
        except Unreadable as reason:
            return Reason(str(reason))
        return known

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_last"}

    def _check_first(self, known: Known, given: Mapping[str, Any]) -> None:
        """Raise Unreadable if the block and the layer differ on the real arguments."""
        x = leaves(given)[known.places[0]]
        devices = [x.device] if x.device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            with without_dropout():
                state = torch.random.get_rng_state()
                expected = self.stock.forward(self, **given)
                torch.random.set_rng_state(state)
            tensors, functions, _ = known.proved.bind(self, None, given, random=False)
            precision = self._precision(known, tensors)
            if precision is not None:  # the sums of products round differently
                return
            out = run_block(known.proved.graph, "full", tensors, functions=functions)
            mine = known.proved.bind(self, None, given, random=False)[2](out)
        pairs = zip(leaves(mine), leaves(expected), strict=True)
        for a, b in pairs:
            if isinstance(a, Tensor) and a.is_floating_point() and a.shape == x.shape:
                distance = float((a - b).norm()) / (float(b.norm()) or 1.0)
                if not distance <= _FIRST.get(x.dtype, 4e-2):
                    raise Unreadable(
                        f"the block differs by {distance:.1e} from the layer on the first batch"
                    )

    def _fall_back(self, reason: Reason, compiling: bool, given: Mapping[str, Any]) -> Any:
        """The stock forward as it is: what cannot be read is left alone."""
        if self._tensor_parallel is None and isinstance(self._last, Reason) and not reason.quiet:
            for observe in DECISIONS:
                observe(self, reason.text)
            _tell(self, reason.text)
            return self.stock.forward(self, **given)
        return super()._fall_back(reason, compiling, given)

    @staticmethod
    def _new(stock: type[nn.Module]) -> nn.Module:
        cls = read_class(stock)
        return cls.__new__(cls)


#: By the stock class.
READ: dict[type[nn.Module], type[ReadLayer]] = {}


def read_class(stock: type[nn.Module]) -> type[ReadLayer]:
    """The class that stands in for a layer class without a row, one object each."""
    return class_of(stock, ReadLayer, READ)


def would_read(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """What `convert` would make of a stock layer, for a call of it."""
    names = list(inspect.signature(type(layer).forward).parameters)[1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given = {name: value for name, value in given.items() if name not in CACHES}
    reasons = []
    for vary in SIZES:
        try:
            known = read_call(
                layer, types.MethodType(type(layer).forward, layer), Call(given, vary)
            )
        except Unreadable as reason:
            reasons.append(str(reason))
            continue
        pieces = [f"{name}, which is replayed ({why})" for name, why in known.reading.pieces]
        steps = ", ".join([node.name for node in known.graph.nodes])
        return f"convert makes it a block: {'; '.join([steps, *pieces])}"
    return f"convert leaves it as it is: {'; '.join(dict.fromkeys(reasons))}"


_told: set[tuple[type, str]] = set()


def _tell(layer: ReadLayer, text: str) -> None:
    """Warn once of each kind of layers that is left as it is."""
    from fused_remat.steps.operations import warn

    if (layer.stock, text) not in _told:
        _told.add((layer.stock, text))
        warn(f"left {layer.stock.__name__} as it is: {text}")


def state_of(layer: nn.Module, free: bool) -> tuple[Any, ...]:
    """All that a reading depends on besides the arguments: classes, flags, numbers, shapes.

    `free`: without the layer's place in the model.

    Raises: Unsupported for a submodule with hooks, which a block would not call.
    """
    found: list[Any] = []
    for path, module in layer.named_modules():
        own = module.__dict__
        if path and (
            own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
        ):
            raise Unsupported(f"{path} has hooks")
        for hook in own["_forward_hooks"].values() if path else ():
            if getattr(hook, "__module__", None) != _RECORDERS:
                raise Unsupported(f"{path} has hooks")
        kind = module.stock if isinstance(module, ConvertedLayer) else type(module)
        found.append((path, kind, own.get("forward", kind.forward), own["training"]))
        found += [
            (name, value)
            for name, value in own.items()
            if type(value) in _PLAIN and name[0] != "_" and not (free and name in INDICES)
        ]
        found += [
            (name, repr(value))
            for name, value in own.items()
            if type(value) in (tuple, dict)
            and name[0] != "_"
            and all(type(v) in _PLAIN for v in (value.values() if type(value) is dict else value))
        ]
        found += [(name, None if p is None else p.shape) for name, p in own["_parameters"].items()]
        config = own.get("config")
        found.append(getattr(config, "_attn_implementation", None))
    return tuple(found)

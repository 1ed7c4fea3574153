"""`FusedLayer`: a layer whose forward is a block, or the stock forward.

`FusedLayer._call` decides for every call of any layer which of the two runs.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fused_remat.autograd import accumulate, run_block
from fused_remat.autograd.function import BlockFailure
from fused_remat.execution.choose import check_name
from fused_remat.execution.observe import DECISIONS
from fused_remat.graph.graph import Graph
from fused_remat.graph.precision import mixed_precision
from fused_remat.layers import fallback
from fused_remat.layers.eligibility import REPLACED, Reason, parameters_of, wants_grad
from fused_remat.layers.read import BlockInputs, LayerMap, read_block
from fused_remat.layers.record import NOTES, listed, record_of, warn, warn_compiled
from fused_remat.policies import LONG_SEQUENCE, Policy, advice, kept_names
from fused_remat.steps.collective import is_dtensor

if TYPE_CHECKING:
    from fused_remat.layers.tensor_parallel import TensorParallel

Layer = TypeVar("Layer", bound="FusedLayer")

_HOOKED = Reason(f"its {REPLACED}")
TRACED = Reason("the call is exported, transformed or traced", quiet=True)


class FusedLayer(nn.Module):
    """A layer whose forward is a block. Mixed in before the class that it replaces.

    A subclass has a `forward` that passes its arguments to `_call` by name, and a `_map`.
    """

    stock: ClassVar[type[nn.Module]]  # class that it replaces
    #: Layout of the class: where it has its norms, linear layers and attentions.
    _map: ClassVar[LayerMap]
    #: Owner of the forward that runs instead of a block, in warnings.
    _owner: ClassVar[str] = "PyTorch's own"
    # Class attributes, for layers that are unpickled, or re-classed from the stock class.
    _policy: str | Policy = "full"
    _backend: str = "auto"
    _accumulate_into: str | None = None
    #: Division of the layer among ranks (`fused_remat.parallel`); None if it is not divided.
    _tensor_parallel: TensorParallel | None = None
    #: Whether a compiled call runs eagerly between two graphs, unless it is exported.
    _breaks_graphs: ClassVar[bool] = False
    #: Whether a class derived from a layer of this package has its own forward.
    _has_own_forward: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        known = [base.forward for base in cls.__mro__[1:] if issubclass(base, FusedLayer)]
        own = _base(cls) not in (None, cls) and cls.forward not in known
        forward = vars(cls).get("forward")
        super().__init_subclass__(**kwargs)
        # transformers wraps the forwards of its layers, and of their subclasses, for checkpointing.
        if forward is not None:
            cls.forward = forward
        elif "forward" in vars(cls):
            del cls.forward
        if own:
            cls._has_own_forward = True
            cls.forward = _checked(cls.forward)

    @property
    def policy(self) -> str | Policy:
        """Policy of the layer: what it keeps for backward; may change at any time."""
        return self._policy

    @policy.setter
    def policy(self, policy: str | Policy) -> None:
        kept_names(policy, self._example())
        self._policy = policy

    @property
    def backend(self) -> str:
        """Backend of the layer: "auto" or a registered name."""
        return self._backend

    @backend.setter
    def backend(self, backend: str) -> None:
        self._backend = check_name(backend)

    @property
    def accumulate_into(self) -> str | None:
        """Attribute that gets weight gradients: "grad", "main_grad"; None for autograd."""
        return self._accumulate_into

    @accumulate_into.setter
    def accumulate_into(self, target: str | None) -> None:
        self._accumulate_into = accumulate.check_target(target)

    def _set_options(self, policy: str | Policy, backend: str, accumulate_into: str | None) -> None:
        self.policy, self.backend, self.accumulate_into = policy, backend, accumulate_into

    def __setattr__(self, name: str, value: Any) -> None:
        forwards = (self.stock.forward, type(self).forward) if name == "forward" else ()
        is_own = getattr(value, "__self__", None) is self
        if is_own and getattr(value, "__func__", None) in forwards:  # a hook is removed
            for own in ("forward", "_replaced_forward"):
                vars(self).pop(own, None)
            return
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {n: value for n, value in state.items() if n not in NOTES}

    def extra_repr(self) -> str:
        shown = f"policy={self._policy!r}, backend={self._backend!r}"
        target = self._accumulate_into
        return shown if target is None else f"{shown}, accumulate_into={target!r}"

    @classmethod
    def from_layer(
        cls: type[Layer],
        layer: nn.Module,
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
    ) -> Layer:
        """Return a fused layer with the submodules of `layer`: same parameters, mode and hooks.

        Raises: TypeError if `layer` is not of the stock class, or is of a subclass (whose
            behavior would be lost).

        >>> from fused_remat import FusedRematLayer
        >>> stock = nn.TransformerEncoderLayer(64, 4)
        >>> fused = FusedRematLayer.from_layer(stock, policy="balanced")
        >>> fused.linear1.weight is stock.linear1.weight
        True
        """
        if type(layer) is not cls.stock and not isinstance(layer, cls):
            name = cls.stock.__name__
            wanted = f"an nn.{name}" if cls.stock.__module__.startswith("torch.") else f"a {name}"
            raise TypeError(f"from_layer takes {wanted}, got {type(layer).__name__}")
        new = cls.__new__(cls)
        new.__dict__ = {
            k: dict(v) if type(v) is dict else v.copy() if hasattr(v, "copy") else v
            for k, v in layer.__dict__.items()
            if k not in NOTES
        }
        new._set_options(policy, backend, accumulate_into)
        return new

    def _example(self) -> Graph:
        """Return a graph that has the kind and the names of the layer's."""
        raise NotImplementedError

    def _heads(self) -> dict[str, int]:
        """Return the numbers of heads, by description."""
        raise NotImplementedError

    def _tokens_dim(self, x: Tensor) -> int:
        """Return the dimension of the input that has the tokens of a sequence."""
        return 1

    def _call(self, **arguments: Any) -> Any:
        """Run `forward(**arguments)` as a block, or as the stock forward if no block applies."""
        compiling = torch.compiler.is_compiling()
        parallel = self._tensor_parallel
        if compiling and (parallel is not None or (self._breaks_graphs and not is_traced())):
            return self._in_eager_mode(**arguments)
        record = None if compiling else record_of(self)
        if record is not None:
            record.reached += 1
        if is_traced():
            inputs: BlockInputs | Reason = TRACED
        elif record is not None and record.last == "plain" and record.repeats:
            return self._stock_forward(**arguments)
        elif record is not None and record.failure:
            inputs = Reason(record.failure)
        elif parallel is None:
            hooked = "_replaced_forward" in self.__dict__
            inputs = _HOOKED if hooked else self._read(**arguments)
        else:
            inputs = parallel.read(self, arguments)
        if isinstance(inputs, Reason):
            if inputs.uncompiled:
                return self._in_eager_mode(**arguments)
            return self._fall_back(inputs, compiling, arguments)
        graph, tensors, policy = inputs.graph, inputs.tensors, self._policy
        if record is not None and record.stage and record.is_in_stage:
            policy = record.stage
        if inputs.precision is not None:
            streams = graph.inputs[: 1 + len(graph.side_outputs)]
            tensors = inputs.precision.cast(tensors, streams)
            if inputs.precision.compute is not None:
                graph = mixed_precision(graph, inputs.precision.compute)
        if not isinstance(policy, str) and policy.segment is not None:
            policy = self._policy_of_segment(policy, compiling)
        accumulation = None
        if self._accumulate_into is not None:
            accumulation = self._accumulation(graph, compiling)
        trains, rescue = record is not None and torch.is_grad_enabled(), None
        failed: Reason | None = None
        if trains and parallel is None and not (accumulation or graph.uses_seed):
            rescue = fallback.Rescue(self, arguments, tensors)
        try:
            out = run_block(
                graph,
                policy,
                tensors,
                backend=self._backend,
                seq_first=inputs.seq_first,
                preserve_strides=inputs.preserve_strides,
                functions=inputs.functions,
                accumulation=accumulation,
                warn_of_input=self._warn_of_kept_input,
                rescue=rescue,
            )
        except BlockFailure as failure:
            assert isinstance(failure.__cause__, Exception)
            failed = self._block_failed(failure.__cause__)
        if failed is not None:  # what the block had computed is freed by now
            return self._fall_back(failed, compiling, arguments)
        out, *sides = out if graph.side_outputs else (out,)
        if record is not None and trains and out.requires_grad:
            record.note("block")
            tokens = out.shape[0 if inputs.seq_first else 1]
            if record.advice or tokens >= LONG_SEQUENCE:
                record.advise(advice(policy, graph, tokens))
        result: Any = out.squeeze(0) if inputs.unbatched else out
        if inputs.finish is not None:
            result = inputs.finish(out, *sides)
        elif parallel is not None and parallel.joins:
            result = parallel.joined(result, self._tokens_dim(result))
        if rescue is not None:
            names = "output", *graph.side_outputs
            rescue.returned(dict(zip(names, (out, *sides), strict=True)), result)
        return result

    def _in_eager_mode(self, **arguments: Any) -> Any:
        """Run a call that is compiled in eager mode, between two graphs."""
        from fused_remat.autograd import graph_break

        return graph_break.eagerly(self._call, **arguments)

    def _block_failed(self, error: Exception) -> Reason:
        """Note, and warn, that the layer's block raised `error`: no later call runs as a block."""
        text = f"its block raised {type(error).__name__}: {error}"
        if not record_of(self).failure:
            record_of(self).failure = text
            warn(
                self,
                f"{text}; {self._owner} forward computed this call, and runs under checkpointing "
                "from now on; please report it, with the traceback that FUSED_REMAT_STRICT=1 gives",
            )
        return Reason(text)

    def why_not_fused(self, *args: Any, **kwargs: Any) -> str | None:
        """Return why this call of `forward` would not take the fused path; None if it would.

        >>> from fused_remat import FusedRematLayer
        >>> layer = FusedRematLayer(16, 2, 32)
        >>> layer.norm1 = nn.RMSNorm(16)
        >>> layer.why_not_fused(torch.zeros(5, 3, 16))
        'norm1 is torch.nn.RMSNorm; the fused path supports torch.nn.LayerNorm'
        """
        bound = inspect.signature(_base(type(self)).forward).bind(self, *args, **kwargs)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
        return self._unsupported_reason(**arguments)

    def _read(self, **arguments: Any) -> BlockInputs | Reason:
        return read_block(self, self._map, arguments)

    def _unsupported_reason(self, **arguments: Any) -> str | None:
        parallel = self._tensor_parallel
        if parallel is not None and not parallel.splits:
            x = arguments.get(self._map.input)
            if isinstance(x, Tensor):
                arguments = {**arguments, self._map.input: parallel.whole(x, self._tokens_dim(x))}
        inputs = TRACED if is_traced() else self._read(**arguments)
        inputs = _HOOKED if "_replaced_forward" in self.__dict__ else inputs
        return inputs.text if isinstance(inputs, Reason) else None

    def _fall_back(self, reason: Reason, compiling: bool, arguments: Mapping[str, Any]) -> Any:
        """Run the stock forward; with a warning, and checkpointed, if gradients are required."""
        if self._tensor_parallel is not None:
            raise RuntimeError(
                f"fused_remat: a tensor-parallel {type(self).__name__} cannot run PyTorch's own "
                f"forward, which does not know its shards: {reason.text}"
            )
        if reason is TRACED or not reason.quiet:
            self._refuse_to_accumulate(reason.text)
        wanted = not reason.quiet and (wants_grad(*arguments.values()) or self._trains())
        if compiling or reason is TRACED:
            if wanted:
                warn_compiled(type(self).__name__, reason.text)
            return self._stock(**arguments)
        self._refuse_dtensors(arguments)
        for observe in DECISIONS:
            observe(self, reason.text)
        return self._own_forward(reason, arguments) if wanted else self._stock_forward(**arguments)

    def _stock_forward(self, **arguments: Any) -> Any:
        """Run the stock forward through the submodules, in evaluation as well."""
        with fallback.without_inference_kernels():
            return self._stock(**arguments)

    def _stock(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward that the layer had before `convert`, with its hooks."""
        own = vars(self).get("_replaced_forward")
        if own is not None:
            return own(*args, **kwargs)
        return self.stock.forward(self, *args, **kwargs)

    def _own_forward(self, reason: Reason, arguments: Mapping[str, Any]) -> Any:
        """Run the stock forward of a training call: under checkpointing, unless that is worse."""
        runs, record = f"runs {self._owner} forward", record_of(self)
        kept = self._why_kept(reason, arguments)
        if kept is None:
            how, run = self._checkpointing()
            out, names = fallback.without_changes(self, self._stock_forward, run, arguments)
            if not names:
                if reason.text != record.failure:  # of which `_block_failed` has warned
                    warn(self, f"{runs} under {how}: {reason.text}")
                record.note("checkpoint", reason.text)
                return out
            kept = (
                f"a second forward would update {listed(names)} again",
                "set the modules that do so to evaluation if no update is needed",
            )
        # The first call of a layer may fill a table, and later ones run as blocks.
        quiet = record.number("plain") > 1 or (reason.once and record.last is None)
        since = 0 if quiet else fallback.next_node()
        out = self._stock_forward(**arguments)
        if not quiet:
            why, remedy = kept
            keeps = f"it keeps {fallback.kept_by(self, out, since)} for backward, since {why}"
            warn(self, f"{runs}: {reason.text}; {keeps}; {remedy}")
        record.note("plain", reason.text)
        return out

    def _why_kept(self, reason: Reason, arguments: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return why the stock forward of a training call is not checkpointed, and a remedy."""
        if reason.once:
            return "a second forward would do so again", "keep forward free of it"
        if self._policy == "none":
            return "the policy 'none' keeps all activations", "other policies checkpoint"
        return None

    def _checkpointing(self) -> tuple[str, fallback.Checkpoint]:
        """Return the name of a method of checkpointing, and a function that runs a forward so."""
        return "torch.utils.checkpoint", functools.partial(fallback.checkpointed, self)

    def _warn_of_own_forward(self, out: Any, values: tuple[Any, ...]) -> None:
        """Warn that only the forward of the layer's own class ran, if gradients are required."""
        if any(out is value for value in values):  # the layer was skipped
            return
        if wants_grad(*values) or self._trains():
            reason = f"its own forward does not call {_base(type(self)).__name__}.forward"
            self._refuse_to_accumulate(reason)
            for observe in DECISIONS:
                observe(self, reason)
            record_of(self).note("plain", reason)
            warn(
                self,
                f"saves no memory: {reason}, so its policy has no effect; call "
                "super().forward(...) there, or convert the layer: convert traces it",
            )

    def _refuse_dtensors(self, arguments: Mapping[str, Any]) -> None:
        """Raise RuntimeError if an argument is a DTensor and all parameters are plain tensors."""
        for name, value in arguments.items():
            if is_dtensor(value) and not any(map(is_dtensor, self.parameters())):
                raise RuntimeError(
                    f"fused_remat: {name} is a DTensor of shape {tuple(value.shape)}, and this "
                    f"{type(self).__name__} is not divided over ranks; use to_local() or "
                    "full_tensor(), or divide the layer with "
                    "fused_remat.parallel.tensor_parallel_plan"
                )

    def _accumulation(self, graph: Graph, compiling: bool) -> accumulate.Accumulation:
        reason = "the call is compiled" if compiling else accumulate.unsupported_engine_reason(self)
        if self._tensor_parallel is not None:
            reason = "autograd alone adds gradients that are DTensors"
        self._refuse_to_accumulate(reason)
        names = frozenset([name for name in graph.params if "." in name])  # no mask has a dot
        return accumulate.Accumulation(str(self._accumulate_into), names)

    def _refuse_to_accumulate(self, reason: str | None) -> None:
        target = self._accumulate_into
        if target is not None and reason is not None and self._trains():
            raise accumulate.refusal(target, reason)

    def _trains(self) -> bool:
        return wants_grad(*parameters_of(self).values())

    def _policy_of_segment(self, policy: Policy, compiling: bool) -> Policy:
        """Return `policy`, without its segment if layers before may be freed in backward."""
        sharded_by = None if compiling else accumulate.sharded_by(self)
        if not compiling and sharded_by is None:
            return policy
        if policy.segment == "inner" and compiling:
            reason = "segments work in eager mode only"
            warn_compiled(type(self).__name__, reason, "keeps its input")
        elif policy.segment == "inner":
            self._warn_of_kept_input(
                f"{sharded_by} manages its parameters, and frees them before the next layer's "
                "backward"
            )
        return Policy(offload=policy.offload)

    def _warn_of_kept_input(self, reason: str) -> None:
        warn(self, f"runs outside its segment, and keeps its input: {reason}")


def _base(cls: type[FusedLayer]) -> Any:
    """Return the class of this package from which `cls` derives; None if it is abstract."""
    return next((base for base in cls.__mro__ if "stock" in vars(base)), None)


def _checked(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` of a subclass: warn if it trains without reaching `_call`."""

    @functools.wraps(forward)
    def checked(self: FusedLayer, *args: Any, **kwargs: Any) -> Any:
        converted = not self._has_own_forward  # and is traced
        if converted or torch.compiler.is_compiling() or is_traced():
            return forward(self, *args, **kwargs)
        record = record_of(self)
        before = record.reached
        out = forward(self, *args, **kwargs)
        if record.reached == before:
            self._warn_of_own_forward(out, (*args, *kwargs.values()))
        return out

    return checked


def is_traced() -> bool:
    """Return whether the call is exported, transformed or traced: the stock forward runs then."""
    # The flag first: compiled by torch 2.11, torch.compiler.is_exporting() is always True.
    flag = getattr(torch.compiler, "_is_exporting_flag", None)
    return (
        bool(torch.compiler.is_exporting() if flag is None else flag)
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )
